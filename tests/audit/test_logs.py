"""The text logs of other trainers: what is read of real ones, and that a damaged one is read or refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import strategies as st
from support.audit_cases import deepspeed_pair, wandb_pair
from support.fuzz import READ, Fuzz, in_time
from support.metrics_examples import example_metrics, save
from support.mutations import broken_bytes, broken_words
from support.real_logs import FOLDER, LOGS
from support.tables import saved

from testbed.audit import text as audit_text
from testbed.audit.claims import FAILS, NOTE, answered, audit
from testbed.audit.printed_setup import printed_setup
from testbed.audit.readers import read_reported, read_text_log
from testbed.audit.reported import (
    BATCH,
    COMPILED,
    DATA,
    LAYOUT,
    MODEL,
    PRECISION,
    RECOMPUTED,
    STATUS,
    STRATEGY,
)
from testbed.errors import InputError

# file -> what its program said: by hand from the excerpt
EXPECTED = {
    "torchtitan": {
        "form": "torchtitan log", "world_size": 8, "global_batch_size": 2560, "micro_batch_size": 160,
        "sequence_length": 128, "num_parameters": 14_768_307_200, "optimizer_steps": 10, "rate": 8 * 10_006.0,
        "rate_is_per_rank": False, "train_loss": 5.89456, "device_name": "NVIDIA B200",
        "mfu": 0.3747, "tflops": 843.11,
    },
    "nanochat": {
        "form": "nanochat log", "world_size": 8, "global_batch_size": 256, "micro_batch_size": 32,
        "sequence_length": 2048, "num_parameters": 560_988_160, "optimizer_steps": 20, "rate": 1_072_288.0,
        "time_s": 0.48894, "train_loss": 6.758566, "val_loss": 3.3013, "mfu": 0.4732,
    },
    "nanogpt": {
        "form": "nanoGPT log", "global_batch_size": 512, "micro_batch_size": 64, "sequence_length": 512,
        "optimizer_steps": 191, "time_s": 0.60408, "rate": None, "train_loss": 3.0341, "val_loss": 2.63,
        "peak_flops": 312e12,
    },
    "modded_nanogpt_2024": {
        "form": "modded-nanogpt log", "optimizer_steps": 1490, "time_s": 213.121, "val_loss": 3.2794,
        "protocol": "time_to_loss",
    },
    "modded_nanogpt_2025": {"optimizer_steps": 1920, "time_s": 119.694, "val_loss": 3.2783},
    "llmc": {
        "form": "llm.c log", "world_size": 1, "global_batch_size": 512, "micro_batch_size": 32,
        "sequence_length": 1024, "num_parameters": 124_475_904, "optimizer_steps": 19, "device_name":
        "NVIDIA A100-PCIE-40GB", "val_loss": 4.723455,
    },
    "megatron": {
        "form": "Megatron-LM log", "world_size": 1, "global_batch_size": 80, "micro_batch_size": 2,
        "sequence_length": 8192, "optimizer_steps": 15, "time_s": 13.7077, "tflops": 375.5, "train_loss": 8.368311,
    },
    "megatron_deepspeed": {
        "form": "Megatron-LM log", "world_size": 64, "global_batch_size": 1024, "optimizer_steps": 9,
        "sequence_length": 1024,
    },
}  # fmt: skip


def edited(tmp_path: Path, name: str, *pairs: tuple[str, str]) -> Path:
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    for pattern, by in pairs:
        text, number = re.subn(pattern, by, text)
        assert number
    path = tmp_path / f"{name}.log"
    path.write_text(text, encoding="utf-8")
    return path


def messages(path: Path, severity: str) -> str:
    return "\n".join(finding.message for finding in audit([path]) if finding.severity == severity)


def test_every_real_log_has_its_source_and_is_expected():
    told = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert {path.stem for path in LOGS} == set(EXPECTED)
    for path in LOGS:
        row = next(line for line in told.splitlines() if line.startswith(f"| {path.name} |"))
        assert re.search(r", [0-9a-f]{10} \| (MIT|BSD-3-Clause|Apache-2.0)", row)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_real_log_is_read_and_contradicts_nothing(name):
    (run,) = read_reported([FOLDER / f"{name}.txt"])
    said = {field: getattr(run, field) for field in EXPECTED[name]}
    for field, value in EXPECTED[name].items():
        assert said[field] == (pytest.approx(value) if isinstance(value, float) else value), field
    assert messages(FOLDER / f"{name}.txt", FAILS) == ""


BUILD = """total desired batch size: 524288
step     0 | loss: 10.955010 | lr 8.3916e-07 | norm: 15.3421 | dt: 23547.83ms | tok/sec: 22264.81
step     1 | loss: 10.902707 | lr 1.6783e-06 | norm: 14.8630 | dt: 410.00ms | tok/sec: 1278751.22
"""  # made up, in the format of build-nanogpt's train_gpt2.py


def test_build_nanogpt_is_read(tmp_path):
    (tmp_path / "a.out").write_text(BUILD, encoding="utf-8")
    (run,) = read_reported([tmp_path / "a.out"])
    assert (run.form, run.optimizer_steps, run.rate) == ("build-nanogpt log", 2, 1278751.22)


def test_a_loss_that_is_not_a_number_is_found_at_the_end_alone(tmp_path):
    diverged = edited(tmp_path, "llmc", (r"(step +1\d/19560 \| loss )\S+", r"\1    nan"))
    assert "in the last 10 of 19 lines, from step 10 on" in messages(diverged, FAILS)
    recovered = edited(tmp_path, "llmc", (r"(step +12/19560 \| loss )\S+", r"\1    nan"))
    assert messages(recovered, FAILS) == ""


def test_ranks_that_all_print_are_one_run_and_a_restart_takes_the_place_of_later_steps(tmp_path):
    lines = (FOLDER / "nanogpt.txt").read_text(encoding="utf-8").splitlines()
    again = [line.replace("loss 3", "loss 2") for line in lines if re.match(r"iter 1[5-9]0", line)]
    (tmp_path / "a.log").write_text("\n".join(each for line in [*lines, *again] for each in [line] * 8))
    (run,) = read_reported([tmp_path / "a.log"])
    assert len(run.losses) == 20
    assert run.train_loss == 2.0341


def test_logs_that_are_typed_are_compared_and_those_of_a_folder_are_not(tmp_path):
    """Whoever keeps logs in one folder claims nothing."""
    paths = [tmp_path / f"{name}.log" for name in ("llmc", "nanogpt")]
    for path in paths:
        path.write_text((FOLDER / f"{path.stem}.txt").read_text(encoding="utf-8"), encoding="utf-8")
    assert not [finding for finding in audit([tmp_path]) if len(finding.runs) > 1]
    assert [finding for finding in audit(paths) if len(finding.runs) > 1 and finding.severity == FAILS]


def test_logs_of_other_lengths_compare_rates_and_no_losses(tmp_path):
    shorter = edited(tmp_path, "llmc", (r"step +1[5-9]/.*\n", ""), (r"val loss 4.7\d+", "val loss 6.0"))
    found = audit([FOLDER / "llmc.txt", shorter])
    assert [finding for finding in found if finding.severity == FAILS] == []
    assert any("optimizer steps 19 against 14" in f.message and "neither losses" in f.message for f in found)
    times = audit([FOLDER / "modded_nanogpt_2024.txt", FOLDER / "modded_nanogpt_2025.txt"])
    assert [finding for finding in times if finding.severity == FAILS] == [], "times to one loss, whatever the steps"


def test_what_deepspeed_prints_of_instruments_is_compared(tmp_path):
    def log(name: str, profiler: str, breakdown: str, end: str = "") -> Path:
        steps = (f"steps: {n} loss: 7.{n:04} iter time (s): 0.5 samples/sec: 128.0\n" for n in range(10, 110, 10))
        head = f'print]   flops_profiler_config ........ {{\n    "enabled": {profiler}, \n}}\n'
        head += f"print]   wall_clock_breakdown ......... {breakdown}\n"
        (tmp_path / name).write_text(head + "".join(steps) + end)
        return tmp_path / name

    plain = log("plain.log", "false", "False")
    (run,) = read_reported([plain])
    assert (run.form, run.rate, run.rate_unit, run.time_s) == ("DeepSpeed log", 128.0, "samples/s", 0.5)
    for other, words in (
        (log("flops.log", "true", "False"), "Instrumentation none against DeepSpeed's flops profiler ran"),
        (log("whole.log", "false", "True"), "Instrumentation none against DeepSpeed's wall_clock_breakdown"),
        (log("died.log", "false", "False", "torch.OutOfMemoryError: CUDA out of memory"), "B is ended by"),
    ):
        found = answered([plain, other])
        assert found is not None and any(words in reason for reason in found.reasons), found.reasons


@pytest.mark.parametrize("words", ["step: 1 loss: ", " iteration 1/ 2 | elapsed", "CUDA capacity: a with ",
                                   "validation loss at iteration 1 | "])  # fmt: skip
def test_one_long_line_is_read_in_time(tmp_path, words):
    """Of a damaged file. A pattern without a bound tries every pair of places, which takes minutes."""
    first = "step:  1  loss: 12.4  memory: 1GiB(9%)  tps: 1,360  mfu: 5.09%\n"
    second = "iteration 1/ 2 | elapsed time per iteration (ms): 3 |\n"
    for mark in (first, second):
        (tmp_path / "a.log").write_text(mark + words * 20_000, encoding="utf-8")
        with in_time():
            audit([tmp_path / "a.log"])


def test_a_text_is_read_in_its_encoding_without_colours_and_half_a_number(tmp_path):
    text = "iter 0: loss 9.5, time 20.00ms\r\n\x1b[32miter 10: loss 9.25, time 20.00ms\x1b[0m\r\niter 20: loss 9.1"
    (tmp_path / "a.log").write_bytes(text.encode("utf-16"))
    (run,) = read_reported([tmp_path / "a.log"])
    assert (run.train_loss, run.optimizer_steps) == (9.25, 21)


def test_no_broken_log_breaks_the_audit(tmp_path):
    fuzz = Fuzz("logs of other trainers", (InputError,), tmp_path, str(tmp_path))
    whole = {path: path.read_bytes() for path in LOGS}

    def one_file(drawn: tuple[Path, bytes]) -> None:
        path = tmp_path / drawn[0].name
        path.write_bytes(drawn[1])
        fuzz.case(lambda: audit([path, drawn[0]]), drawn)
        path.unlink()

    broken = st.sampled_from(LOGS).flatmap(
        lambda path: st.tuples(st.just(path), st.one_of(broken_words(whole[path]), broken_bytes(whole[path])))
    )
    fuzz.draw(broken, 500, one_file)
    fuzz.check(READ)


def test_the_lines_of_a_real_log_are_read(tmp_path):
    one, two = (read_text_log(path)[0] for path in deepspeed_pair(tmp_path))
    assert (one.global_batch_size, one.micro_batch_size, one.world_size) == (8, 8, 1)
    assert (two.global_batch_size, two.micro_batch_size, two.world_size) == (8, 4, 2)
    settings = {"precision": "fp32", "ZeRO stage": "2", "instrumentation": "none"}
    assert two.settings == settings
    assert two.batch_is_printed
    (plain,) = read_text_log(wandb_pair(tmp_path / "plain", 2, {})[0])
    assert (plain.global_batch_size, plain.batch_is_printed, plain.settings) == (None, False, {})


def test_a_batch_stands_in_flags_and_json_too():
    said = "cmd = python -u train.py --micro-batch-size 8 --global-batch-size=32"
    found = printed_setup(said)
    assert (found["micro_batch_size"], found["global_batch_size"]) == (8, 32)
    assert printed_setup('json = {\n    "train_batch_size": 64, \n')["global_batch_size"] == 64
    spawned = "spawned with command: ['python', '--global-batch-size', '16']"
    assert printed_setup(spawned)["global_batch_size"] == 16
    assert "global_batch_size" not in printed_setup(f"{said}\npython train.py --global-batch-size 64")  # of which run?


@pytest.mark.parametrize("line", ["iter {}: loss 3.1, time 100.00ms\n", "step:{}/9 train_time:5ms\n"])
def test_blank_lines_take_no_quadratic_time(tmp_path, line):
    path = tmp_path / "run.log"
    path.write_text(line.format(0) + "\n" * 100_000 + line.format(1))
    with in_time():
        read_reported([path])


@pytest.mark.parametrize(
    ("line", "name", "setting"),
    [
        ("Overriding: compile = False", COMPILED, "off"),
        ("compiling the model... (takes a ~minute)", COMPILED, "on"),
        ("Overriding: compile = True", COMPILED, "on"),
    ],
)
def test_a_line_of_a_log_says_a_setting(tmp_path, line, name, setting):
    steps = "".join(f"iter {step}: loss 3.{step}, time 100.00ms\n" for step in range(9))
    (run,) = read_reported([saved(tmp_path, f"{line}\n{steps}", "run.log")])
    assert run.settings[name] == setting


def test_an_mfu_is_of_a_device_and_not_over_100_percent(tmp_path):
    assert "does not name the device" in messages(FOLDER / "nanogpt.txt", NOTE)
    assert "is more than the device can do" in messages(edited(tmp_path, "nanochat", (r"mfu: 4", "mfu: 14")), FAILS)


def test_a_guide_that_shows_a_line_of_a_log_is_no_run(tmp_path):
    line = "step: 20  loss: 11.83506  grad_norm:  9.6669  memory: 48.87GiB(51.44%)  tps: 4,376  tflops: 253.41"
    with pytest.raises(InputError, match="says no time"):
        read_reported([saved(tmp_path, f"# Guide\n\nIt prints\n\n```\n{line}\n```\n", "guide.md")])
    lines = "\n".join(line.replace("20", str(step)) for step in range(5))
    (run,) = read_reported([saved(tmp_path, f"# Results\n\n```\n{lines}\n```\n", "results.md")])
    assert run.form == "torchtitan log" and not messages(run.path, NOTE)


MEGATRON = """using world size: 8, context-parallel sizes: Nonetensor-model-parallel size: 4, \
encoder-tensor-model-parallel size: 0, pipeline-model-parallel size: 1, encoder-pipeline-model-parallel size: 0
using torch.bfloat16 for parameters ...
  fp8 ............................................. {fp8}
  sequence_parallel ............................... {sp}
  data_path ....................................... ['/data/pile_text_document']
"""
# of each: what a log prints first, the line of a step, and what is read of both
SAID = {
    "the launcher's flags, the device and the losses of a program that uses DeepSpeed": (
        "cmd = python3 -u -m deepspeed.launcher.launch train.py --model_name_or_path facebook/opt-1.3b "
        "--max_seq_len 2048 --eval_batch_size 3\ntorch.cuda.get_device_name(0) = NVIDIA A100-SXM4-80GB\n",
        "global_step={n}, RunningAvgSamplesPerSec=36.6, CurrSamplesPerSec=36.5, Mem=9\nstep {n} | loss 2.{n}\n",
        {"sequence_length": 2048, "device_name": "NVIDIA A100-SXM4-80GB", "train_loss": 2.9, "rate": 36.5,
         MODEL: "opt-1.3b"},
    ),
    "the source that modded-nanogpt prints": (
        "====\n    input_bin : str = 'data/fineweb_train_*.bin'\n    batch_size : int = 8*64 # in sequences\n"
        "    device_batch_size : int = 64\n    sequence_length : int = 1024\nassert world_size == 8 # H100\n"
        f"{'=' * 100}\n|   0  NVIDIA H100 80GB HBM3          Off |   00000000:18:00.0 Off |    0 |\n{'=' * 100}\n",
        "step:{n}/9 train_loss:4.{n} train_time:{n}00ms\nstep:{n}/9 val_loss:3.{n} train_time:{n}05ms\n",
        {"global_batch_size": 512, "sequence_length": 1024, "world_size": 8, "device_name": "NVIDIA H100 80GB HBM3",
         "train_loss": 4.9, "val_loss": 3.9, "time_s": 0.9, DATA: "fineweb_train_*.bin"},
    ),
    "a batch in tokens of modded-nanogpt": (
        "    train_batch_size: int = 2048 * 16 * 8\n    train_max_seq_len: int = 128 * 16\n",
        "step:{n}/9 train_time:{n}00ms\n",
        {"global_batch_size": 128, "sequence_length": 2048},
    ),
    "nanoGPT's launcher": (
        "+ torchrun --nnodes=2 \\\n  --nproc_per_node=8 train.py --data.seq_len=512 --eval.seq_len=64\n",
        "iter {n}: loss 3.{n}, time 100.00ms, mfu 30.00%\n",
        {"world_size": 16, "sequence_length": 512},
    ),
    "a batch before that in the name of the log": (
        "batch_size = 8\n",
        "iter {n}: loss 3.{n}, time 100.00ms, mfu 30.00%\n",
        {"micro_batch_size": 8, BATCH: None},
        "run_bs64",
    ),
    "a log that is called by the identity of its run": (
        "", "step:{n}/9 train_time:{n}00ms\n", {"device_name": None, MODEL: None},
        "47029c45-997b-a100-8c49-0ea1a0bd4d21",
    ),
    "a usage in a comment": (
        "# torchrun --nproc_per_node=4 train.py\n",
        "iter {n}: loss 3.{n}, time 100.00ms, mfu 30.00%\n",
        {"world_size": None},
    ),
    "nodes that are not said": (
        "+ torchrun --nnodes=$N --nproc_per_node=8 train.py\n",
        "iter {n}: loss 3.{n}, time 100.00ms, mfu 30.00%\n",
        {"world_size": None},
    ),
    "nanochat's precision": (
        "COMPUTE_DTYPE: torch.bfloat16 (auto-detected)\nFP8 training enabled (tensorwise scaling) - 60/66\n",
        "step 0000{n}/00009 (1.00%) | loss: 4.{n} | dt: 500.00ms | tok/sec: 1,000 |\n",
        {PRECISION: "fp8 tensorwise"},
    ),
    "Megatron's layout": (
        MEGATRON.format(fp8="None", sp="True"),
        " iteration  {n}/ 9 | elapsed time per iteration (ms): 20.0 | global batch size:  8 | lm loss: 3.{n} |\n",
        {LAYOUT: "tensor 4, pipeline 1, sequence parallel", PRECISION: "bf16", DATA: "pile_text_document"},
    ),
    "Megatron's fp8": (
        MEGATRON.format(fp8="hybrid", sp="False"),
        " iteration  {n}/ 9 | elapsed time per iteration (ms): 20.0 | global batch size:  8 | lm loss: 3.{n} |\n",
        {LAYOUT: "tensor 4, pipeline 1", PRECISION: "fp8 hybrid"},
    ),
    "a dry run of torchtitan": (
        "+ COMM_MODE=fake_backend\n",
        "step:  {n}  loss:  4.{n}  memory: 50GiB(65%)  tps: 5,000  mfu: 30.00%\n",
        {STATUS: "a dry run that does not communicate"},
    ),
    "a simulation": (
        "[sim] loading trace\n",
        "[sim] iter {n}: predicted step time 7900.0 ms (compute 6559.6) predicted throughput 129.5 samples/s\n",
        {STATUS: "predicted or simulated", "time_s": 7.9, "rate": 129.5, "train_loss": None},
    ),
    "a program whose lines begin as llm.c's": (
        "world_size=2 global_batch_size=64 seq_len=1024 param_dtype=torch.bfloat16\n",
        "step  {n}/9 | loss 4.{n} | lr 3e-4 | 64.0 ms/step | 1,024,000 tok/s\neval @ step {n}: val_loss 3.{n}\n",
        {"time_s": 0.064, "rate_unit": "tokens/s", "rate_is_per_rank": False, "val_loss": 3.9, "optimizer_steps": 9,
         PRECISION: "bf16"},
    ),
    "a rate of one rank in samples": (
        "world_size=2 global_batch_size=64\n",
        "iter {n}: step time 500.0 ms, throughput 64.0 samples/s, lm loss 4.{n}\n",
        {"rate": 64.0, "rate_unit": "samples/s", "rate_is_per_rank": True, "train_loss": 4.9},
    ),
    "the command of a printed Trainer": (
        "+ torchrun --nproc_per_node=4 run_clm.py --block_size 1024 --bf16 True --gradient_checkpointing\n",
        "{{'loss': 1.{n}, 'learning_rate': 1e-05, 'epoch': 0.0{n}}}\n",
        {"sequence_length": 1024, "world_size": 4, PRECISION: "bf16", RECOMPUTED: "on"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SAID)
def test_what_a_log_says_is_read(tmp_path, what):
    head, line, expected, *name = SAID[what]
    steps = "".join(line.format(n=step) for step in range(1, 10))
    (run,) = read_reported([saved(tmp_path, head + steps, f"{''.join(name) or 'a'}.log")])
    assert {name: run.settings.get(name, getattr(run, name, None)) for name in expected} == expected


def test_twice_the_ranks_and_sequence_parallelism_are_no_speed_up(tmp_path):
    """Of two logs whose names say nothing: the layout that Megatron prints is their strategy."""
    line = SAID["Megatron's layout"][1]
    paths = []
    for name, sp, ranks, ms in (("tp4.out", "False", 8, 20.0), ("tp4_sp.out", "True", 16, 10.0)):
        head = MEGATRON.format(fp8="None", sp=sp).replace("size: 8", f"size: {ranks}")
        steps = "".join(line.format(n=step).replace("20.0", str(ms)) for step in range(1, 10))
        paths.append(saved(tmp_path, head + steps, name))
    found = answered(paths, 2.0)
    assert found is not None and any(reason.startswith("Ranks 8 against 16") for reason in found.reasons)


def test_a_loss_from_the_middle_of_a_run_is_called_one_at_equal_tokens(tmp_path):
    """With twice the batch the same tokens are seen after half the steps; the run goes on to a lower loss."""
    paths = []
    for batch in (8, 16):
        head = f"batch_size = {batch}\nblock_size = 64\ntokens per iteration will be: {batch * 64}\n"
        steps = "".join(f"iter {step}: loss {4 - step / 10:.1f}, time {batch}.00ms\n" for step in range(20))
        paths.append(saved(tmp_path, head + steps, f"{'a' * (batch // 8)}.log"))
    found = answered(paths)
    assert found is not None
    told = {each.name: (each.a, each.b) for each in found.conditions if each.name.startswith("loss")}
    assert told == {"loss at equal tokens": (2.3, pytest.approx(3.3, abs=0.11))}


def test_two_logs_in_a_page_are_two_runs_of_which_nothing_is_claimed(tmp_path):
    log = "```\nbatch_size = {batch}\n{steps}```\n"
    steps = "".join(f"iter {step}: loss 3.{step}, time 100.00ms\n" for step in range(9))
    page = "# Logs\n\n" + "\n".join(log.format(batch=batch, steps=steps) for batch in (8, 16))
    path = saved(tmp_path, page, "page.md")
    runs = read_reported([path])
    assert [(run.name, run.micro_batch_size) for run in runs] == [(f"{path}:3", 8), (f"{path}:16", 16)]
    assert not [finding for finding in audit([path]) if len(finding.runs) > 1]


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("Epoch: [{e}]  [{n:4}/20]  eta: 0:04:31  lr: 0.1  img/s: 160.0  loss: 6.5 (6.9)  acc1: 0.0 (0.2)  time: 0.2  "
         "data: 0.03  max mem: 3524", (0.2, 160.0)),
        ("Epoch: [{e}][{n:4}/20]\tTime  0.200 (  0.45)\tData  0.000 (  0.1)\tLoss 6.5e+00 (6.9e+00)\tAcc@1   0.39",
         (0.2, None)),
        ("Train: {e} [{n:4}/20 ( 10%)]  Loss: 6.5 (6.9)  Time: 0.200s,  640.0/s  (0.193s,  660.1/s)  LR: 1e-5  "
         "Data: 0.01", (0.2, 640.0)),
    ],
)  # fmt: skip
def test_steps_that_are_counted_within_an_epoch_are_read(tmp_path, line, read):
    """The rate of torchvision is of one rank, that of timm of all: 32 images a rank on 4 ranks."""
    said = "Namespace(arch='vit_s', batch_size=32, amp=True, world_size=4, data_path='/d')\n"
    said += "".join(f"{line.format(e=epoch, n=step)}\n" for epoch in range(2) for step in range(0, 20, 5))
    folder = tmp_path / "wandb" / "run-20250117_101500-m2x8n0qa" / "files"
    folder.mkdir(parents=True)
    saved(folder, "global_batch_size:\n  desc: null\n  value: 128\ndist_strategy:\n  value: ddp\n", "config.yaml")
    (run,) = read_reported([saved(folder, said, "output.log")])
    time_s, rate = read
    assert (run.time_s, run.rate, run.rate_is_per_rank) == (time_s, rate, rate == 160)
    assert (run.optimizer_steps, run.train_loss, run.world_size) == (36, 6.5, 4)
    assert run.settings == {MODEL: "vit_s", PRECISION: "amp", STRATEGY: "ddp"} and run.rate_unit == "images/s"
    found = answered([run.path, saved(tmp_path, said.replace("ddp", "fsdp"), "b.log")])
    assert found is not None and "sequence length" not in found.ask
    two = [saved(tmp_path, said.replace("world_size=4", f"world_size={ranks}"), f"{ranks}.log") for ranks in (2, 8)]
    found = answered(two)
    assert found is not None
    assert [each.ratio for each in found.measures if each.name.startswith("throughput of all")] == (
        [1.0] if rate == 640 else []
    )


def test_the_ranks_of_timm_are_those_that_it_prints_and_a_step_of_unknown_batches_refutes_nothing(tmp_path):
    """All ranks' rate is printed; a step takes as long on 8 ranks as on 1."""
    line = "Train: 0 [{n:4}/200 (  4%)]  Loss: 6.88 (6.88)  Time: 0.400s, {rate}/s  (0.4s, {rate}/s)  LR: 1e-06\n"
    paths = []
    for ranks, rate in ((1, 320), (8, 2_432)):
        head = f"Training in distributed mode, 1 device per process.Process 0, total {ranks}, device cuda:0.\n"
        steps = "".join(line.format(n=step, rate=rate) for step in range(0, 200, 10))
        paths.append(saved(tmp_path, head + steps, f"{ranks}.log"))
    found = answered(paths, 7.6)
    assert found is not None and found.in_question is not None and found.in_question.ratio == pytest.approx(7.6)
    told = "".join(f"Epoch: [0][{step:4}/20]\tTime  0.200 (  0.45)\tData  0.000 (  0.1)\tLoss 6.5 (6.9)\n"
                   for step in range(20))  # fmt: skip
    paths = [saved(tmp_path, f"Namespace(world_size={ranks})\n{told}", f"{ranks}.txt") for ranks in (1, 4)]
    found = answered(paths, 3.9)
    assert found is not None and found.in_question is None


def test_a_log_of_no_known_program_is_read_by_its_steps_losses_and_units(tmp_path):
    line = "[rank0] step {step} loss 3.{step:02d} lr 0.001 throughput {rate} tok/s step_time {ms}ms\n"
    paths = []
    for name, ranks, rate, ms in (("a.log", 4, 1000, 800), ("b.log", 8, 3600, 400)):
        head = f"world_size={ranks} global_batch_size=64 seq_len=1024 dtype=bf16\n"
        steps = "".join(line.format(step=step, rate=rate, ms=ms) for step in range(20))
        paths.append(saved(tmp_path, head + steps, name))
    run = read_reported(paths[:1])[0]
    assert (run.form, run.world_size, run.global_batch_size, run.time_s) == ("training log", 4, 64, 0.8)
    assert (run.sequence_length, run.train_loss, run.optimizer_steps) == (1024, 3.19, 20)
    found = answered(paths)
    assert found is not None and not any("throughput" in each.name for each in found.measures), "of one rank or of all"
    assert found.in_question is not None and found.in_question.ratio == 2


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("step {n} loss 2.93 tokens/s: 1000.0", (2.93, 1000.0, None)),
        ("step {n} loss 2.81, tokens/s 2000", (2.81, 2000.0, None)),
        ("step {n} | loss 2.5 | 1,900 tok/s | dt 20.0ms", (2.5, 1900.0, 0.02)),
        ("step {n} aux loss: 0.01 loss: 2.9 step_time 2.5s", (2.9, None, 2.5)),
        ("step {n} loss scale 65536 loss 2.9 step time 300 ms, data time 5 ms", (2.9, None, 0.3)),
        ("step {n} loss 2.9 elapsed time: 12.0 s throughput: 300 MB/s", (2.9, None, None)),
        ("step {n} loss 2.9 1.5 M tok/s 20 ms", (2.9, None, None)),
        ("step {n} loss 2.9 12,000 tok/s/gpu 20 ms", (2.9, None, None)),
        ("[{n:>5}/1200] loss 2.9 lr 0.001 5.883 s/step", (2.9, None, 5.883)),
        ("it {n:>5} loss 2.9 dt 20ms 1,900 tok/s", (2.9, 1900.0, 0.02)),
        ("[3/90] iter {n} loss 2.9 dt 20ms 1,900 tok/s", (2.9, 1900.0, 0.02)),
        ("step {n} loss 2.9 dt 20ms 1,900 tok/s it 3", (2.9, 1900.0, 0.02)),
    ],
)
def test_a_figure_of_an_unknown_log_is_read_with_its_own_unit(tmp_path, line, read):
    text = "".join(f"{line.format(n=step)}\n" for step in range(20))
    (run,) = read_reported([saved(tmp_path, text, "a.log")])
    assert (run.train_loss, run.rate, run.time_s) == read
    with pytest.raises(InputError, match="says no time"):
        read_reported([saved(tmp_path, "".join(text.splitlines(True)[:4]), "letter.txt")])


def test_of_a_large_log_the_ends_and_parts_between_are_read(tmp_path, monkeypatch):
    for name, size in (("READ_WHOLE", 4000), ("AT_AN_END", 1000), ("BETWEEN", 300)):
        monkeypatch.setattr(audit_text, name, size)
    steps = "".join(f"iter {step}: loss 3.{step:04d}, time 100.00ms, mfu 30.00%\n" for step in range(2000))
    path = saved(tmp_path, f"batch_size = 12\n{steps}", "run.log")
    (run,) = read_reported([path])
    assert (run.micro_batch_size, run.optimizer_steps, run.time_s, run.train_loss) == (12, 2000, 0.1, 3.1999)
    assert 20 < len(run.losses) < 200
    assert "its beginning, its end and parts between were read" in messages(path, NOTE)
    path.write_text(steps, encoding="utf-16")
    with pytest.raises(InputError, match="save it as UTF-8"):
        read_reported([path])


def test_a_large_file_of_our_own_is_read_whole_and_nothing_else_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(audit_text, "READ_WHOLE", 100)
    assert "parts between" not in messages(save(tmp_path, example_metrics()), NOTE)
