"""What tells of a log beside its lines: stored settings, printed arguments, names of files, rows of a table."""

from __future__ import annotations

import pytest
from support.tables import saved, table

from testbed.audit.claims import FAILS, answered, audit
from testbed.audit.conditions import strategy_of
from testbed.audit.printed_setup import printed_setup
from testbed.audit.readers import read_reported
from testbed.audit.reported import (
    BATCH,
    DATA,
    MODEL,
    PRECISION,
    RESOLUTION,
    STATUS,
    STRATEGY,
    ZERO,
    Side,
)


@pytest.mark.parametrize("indent", ["  ", "    "])
def test_the_configuration_that_wandb_stored_beside_a_log_is_read(tmp_path, indent):
    steps = "".join(f"iter {step}: loss 3.{step}, time 100.00ms\n" for step in range(9))
    told = {"world_size": 4, "block_size": 1024, "grad_accum": 8, "precision": "bf16-mixed", "model": "gpt2-medium",
            "gpu": "NVIDIA A100-SXM4-40GB", "mode": "simulate", "n_params": 1000, "zero_stage": 1}  # fmt: skip
    said = "".join(f"{name}:\n{indent}desc: null\n{indent}value: {value}\n" for name, value in told.items())
    saved(tmp_path, said, "config.yaml")
    saved(tmp_path, '{"gpu": "A100", "gpu_count"', "wandb-metadata.json")  # damaged: the log is read without it
    (run,) = read_reported([saved(tmp_path, steps, "output.log")])
    assert (run.world_size, run.sequence_length, run.accumulation, run.num_parameters) == (4, 1024, 8, 1000)
    assert run.device_name == "NVIDIA A100-SXM4-40GB"
    assert run.settings == {PRECISION: "bf16", MODEL: "gpt2-medium", STATUS: "of the mode simulate", ZERO: "1"}


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ("devices: 4\nnum_nodes: 2\nbatch_size: 16\naccumulate_grad_batches: 2\nprecision: 16-mixed\nstrategy: ddp",
         (8, 16, 2, {PRECISION: "fp16", STRATEGY: "ddp"})),
        ("devices: 1\nstrategy: auto\naccelerator: gpu", (1, None, None, {STRATEGY: "single device"})),
        ("devices: -1\nstrategy: auto", (2, None, None, {})),
    ],
)  # fmt: skip
def test_what_lightning_stored_beside_its_metrics_is_read_before_the_name_of_its_folder(tmp_path, said, read):
    (tmp_path / "run_2gpu").mkdir()
    saved(tmp_path / "run_2gpu", f"{said}\n", "hparams.yaml")
    (run,) = read_reported([saved(tmp_path / "run_2gpu", "step,train_loss\n1,3.0\n2,2.9\n", "metrics.csv")])
    assert (run.world_size, run.micro_batch_size, run.accumulation, run.settings) == read


@pytest.mark.parametrize(
    ("log", "beside", "said", "read"),
    [
        ("summary.csv", "args.yaml", "world_size: 4\nbatch_size: 32\namp: true\n", (4, None, {PRECISION: "amp"})),
        ("train.csv", "meta.json", '{"run": {"world_size": 16}, "note": ["a"]}', (16, None, {})),
        ("zero3.csv", "zero3.json", '{"train_micro_batch_size_per_gpu": 24, "bf16": {"enabled": true}, '
         '"zero_optimization": {"stage": 3}}', (None, 24, {PRECISION: "bf16", ZERO: "3"})),
        ("zero3.csv", "zero1.json", '{"world_size": 16}', (None, None, {})),
        ("zero3.csv", "config.json", '{"world_size": 16}', (None, None, {})),
        ("train.csv", "meta.json", '{"world_size": 16', (None, None, {})),
        ("train.csv", "config.json", '{"model_type": "gpt2", "max_length": 50, "world_size": 16}', (None, None, {})),
        (f"{'a' * 251}.csv", "meta.json", '{"world_size": 16}', (None, None, {})),
    ],
)  # fmt: skip
def test_settings_are_read_that_lie_beside_curves_of_their_name_or_of_a_programs(tmp_path, log, beside, said, read):
    saved(tmp_path, said, beside)
    (run,) = read_reported([saved(tmp_path, "step,train_loss\n1,3.0\n2,2.9\n", log)])
    assert (
        run.world_size,
        run.micro_batch_size,
        {name: told for name, told in run.settings.items() if name != BATCH},
    ) == read


@pytest.mark.parametrize(
    ("names", "called", "is_reason"),
    [
        (("bf16.log", "fp16.log"), ("bf16", "fp16"), False),
        (("runs/bf16/train.log", "runs/fp8/train.log"), ("bf16", "fp8"), False),
        (("no_overlap.log", "overlap.log"), ("no overlap", "overlap"), True),
        (("ddp_bf16.log", "fsdp_fp8.log"), ("ddp", "fsdp"), True),
    ],
)
def test_logs_that_are_named_by_their_precision_compare_it(tmp_path, names, called, is_reason):
    paths = []
    for name, precision in zip(names, ("bf16", "fp8"), strict=True):
        head = f"world_size=8 global_batch_size=64 seq_len=1024 dtype={precision}\n"
        steps = "".join(
            f"step {step} loss 3.{step:02d} step_time {8 if precision == 'fp8' else 9}ms\n" for step in range(20)
        )
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        paths.append(saved((tmp_path / name).parent, head + steps, (tmp_path / name).name))
    assert tuple(strategy_of(Side(run.name, (run,))) for run in read_reported(paths)) == called
    found = answered(paths)
    assert found is not None and any("Precision" in reason for reason in found.reasons) == is_reason


def test_the_number_that_wandb_gives_a_run_is_no_strategy(tmp_path):
    for name in ("run-20250117_101500-m2x8n0qa", "offline-run-20250117_101500-u91kd7bf"):
        (tmp_path / name / "files").mkdir(parents=True)
        steps = "".join(f"iter {step}: loss 3.{step}, time 100.00ms\n" for step in range(9))
        (run,) = read_reported([saved(tmp_path / name / "files", steps, "output.log")])
        assert strategy_of(Side(run.name, (run,))) is None


@pytest.mark.parametrize(
    ("rates", "is_linked"),
    [
        ((20.1, 40.9), True),
        ((5.03, 5.12), True),
        ((20.1, 38.0), False),
        ((20.1, 20.2, 40.9), False),  # two rows have the figure of one log
    ],
)
def test_logs_in_a_page_are_those_of_the_rows_that_have_their_figures(tmp_path, rates, is_linked):
    """The rows say nothing of the devices, and the logs do; the second table gives rates of one device."""
    head = "[INFO] dist_world_size={ranks}\n"
    line = "global_step={step}, RunningAvgSamplesPerSec=9.9, CurrSamplesPerSec={rate}\n"
    page = ["# Hooks\n\n| run | samples/s | gain |\n|---|---|---|\n"]
    page += [f"| hook {number} | {rate} | {rate / rates[0]:.2f}x |\n" for number, rate in enumerate(rates)]
    for ranks, rate in ((4, 20.1), (8, 40.9)):
        steps = "".join(line.format(step=step, rate=rate + step / 100) for step in range(-5, 6))
        page += [f"\n```\n{head.format(ranks=ranks)}{steps}```\n".replace("=-", "=")]
    found = [finding for finding in audit([saved(tmp_path, "".join(page), "page.md")]) if finding.severity == FAILS]
    told = [finding.message for finding in found]
    assert any("ranks 4 against 8" in message for message in told) == is_linked, told


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (("eager | 5,000", "compile | 48,000"), "5,000 is of one device of"),
        (("eager | 40,000", "compile | 48,000"), ""),
        (("eager | 5,000", "compile | 6,000"), ""),
    ],
)
def test_a_row_of_one_device_is_not_compared_with_one_of_all(tmp_path, rows, said):
    """Two logs of 8 ranks with the rates of all, which their names link to the rows."""
    for name, rate in (("eager.txt", 40_000), ("compile.txt", 48_000)):
        head = "world_size=8 global_batch_size=64 seq_len=1024 dtype=bf16\n"
        ms = 64 * 1024 / rate * 1000
        steps = "".join(
            f"step {step} loss 3.{step:02d} throughput {rate} tok/s step_time {ms}ms\n" for step in range(20)
        )
        saved(tmp_path, head + steps, name)
    saved(tmp_path, table("stack | tokens/s", *rows), "README.md")
    found = [finding.message for finding in audit([tmp_path]) if "of one device" in finding.message]
    assert len(found) == bool(said) and all(said in each for each in found), found


@pytest.mark.parametrize(
    ("heading", "rows"),
    [
        ("GPUs | tokens/s/GPU", ("1 | 8,000", "8 | 7,800")),  # one device is all of one
        ("GPUs | tokens/s", ("1 | 7,800", "1 | 8,000")),  # no row has the 8 ranks of that log
    ],
)
def test_a_row_that_contradicts_a_log_has_not_its_figures(tmp_path, heading, rows):
    for ranks, rate in ((1, 8_000), (8, 62_400)):
        head = f"world_size={ranks} global_batch_size=64 seq_len=1024 dtype=bf16\n"
        ms = 64 * 1024 / rate * 1000
        steps = "".join(
            f"step {step} loss 3.{step:02d} throughput {rate} tok/s step_time {ms}ms\n" for step in range(20)
        )
        saved(tmp_path, head + steps, f"{'ab'[ranks > 1]}.txt")
    saved(tmp_path, table(heading, *rows), "README.md")
    assert not [finding.message for finding in audit([tmp_path]) if "of one device" in finding.message]


def test_the_figures_of_a_row_name_no_log(tmp_path):
    """The 1 of zero1.log is not matched by the figure 1.45."""
    for name, ranks in (("zero1.log", 4), ("zero3.log", 8)):
        steps = "".join(f"step {step} loss 3.{step:02d} throughput 10.0 samples/s\n" for step in range(20))
        saved(tmp_path, f"world_size={ranks}\n{steps}", name)
    saved(
        tmp_path,
        table("config | samples/s | speed-up", "zero1.json | 74.4 | 1.00", "zero3.json | 107.9 | 1.45"),
        "a.md",
    )
    assert any("ranks 4 against 8" in finding.message for finding in audit([tmp_path]))


@pytest.mark.parametrize(
    ("printed", "precision", "resolution"),
    [
        ("amp=True", "amp", None),
        ("amp=True, dtype='bf16'", "bf16", None),
        ("amp=True, param_dtype='float32'", "amp", None),
        ("amp=False, crop=True", None, None),
        ("precision='fp16', image_size=224", "fp16", "224"),
    ],
)
def test_printed_arguments_say_a_precision_and_a_resolution(printed, precision, resolution):
    settings = printed_setup(f"Namespace({printed})\n")["settings"]
    assert (settings.get(PRECISION), settings.get(RESOLUTION)) == (precision, resolution)


def test_a_printed_argument_is_whole():
    assert printed_setup("Namespace(dataset='open web text', lr=0.1)\n")["settings"][DATA] == "open web text"
