"""The text logs of other trainers: what is read of real ones, and that a changed figure in them is found."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import strategies as st
from support.fuzz import READ, Fuzz, in_time
from support.mutations import broken_bytes, broken_words
from support.real_logs import FOLDER, LOGS

from testbed.audit.claims import FAILS, NOTE, audit, read_reported
from testbed.audit.log_lines import Figure, LogLine, Relation, disagreement
from testbed.audit.readers.printed import count, figure, in_order
from testbed.errors import InputError

# file -> what its program said: by hand from the excerpt
EXPECTED = {
    "torchtitan": {
        "form": "torchtitan log", "world_size": 8, "global_batch_size": 2560, "micro_batch_size": 160,
        "sequence_length": 128, "num_parameters": 14_768_307_200, "optimizer_steps": 10, "rate": 8 * 10_006.0,
        "rate_is_per_rank": False, "train_loss": 5.89456, "device_name": "NVIDIA B200", "peak_flops": 2.25e15,
        "mfu": 0.3747, "tflops": 843.11,
    },
    "nanochat": {
        "form": "nanochat log", "world_size": 8, "global_batch_size": 256, "micro_batch_size": 32,
        "sequence_length": 2048, "num_parameters": 560_988_160, "optimizer_steps": 20, "rate": 1_072_288.0,
        "time_s": 0.48894, "train_loss": 6.758566, "val_loss": None, "mfu": 0.4732,
    },
    "nanogpt": {
        "form": "nanoGPT log", "global_batch_size": 512, "micro_batch_size": 64, "sequence_length": 512,
        "optimizer_steps": 191, "time_s": 0.60408, "rate": None, "train_loss": 3.0341, "val_loss": 2.63,
        "mfu": 0.4608,
    },
    "modded_nanogpt_2024": {
        "form": "modded-nanogpt log", "optimizer_steps": 1490, "time_s": 213.121, "val_loss": 3.2794,
        "protocol": "time_to_loss",
    },
    "modded_nanogpt_2025": {"optimizer_steps": 1920, "time_s": 119.694, "val_loss": 3.2783},
    "llmc": {
        "form": "llm.c log", "world_size": 1, "global_batch_size": 512, "micro_batch_size": 32,
        "sequence_length": 1024, "num_parameters": 124_475_904, "optimizer_steps": 19, "device_name":
        "NVIDIA A100-PCIE-40GB", "peak_flops": 312e12, "val_loss": 4.723455,
    },
    "llmc_main": {"form": "llm.c log", "optimizer_steps": 19_560, "train_loss": 3.2217, "val_loss": 3.2722},
    "megatron": {
        "form": "Megatron-LM log", "world_size": 1, "global_batch_size": 80, "micro_batch_size": 2,
        "sequence_length": 8192, "optimizer_steps": 15, "time_s": 13.7077, "tflops": 375.5, "train_loss": 8.368311,
    },
    "megatron_deepspeed": {
        "form": "Megatron-LM log", "world_size": 64, "global_batch_size": 1024, "optimizer_steps": 9,
        "sequence_length": 1024,
    },
}  # fmt: skip


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
    assert [finding for finding in audit([FOLDER / f"{name}.txt"]) if finding.severity == FAILS] == []


# file -> the figures that the others determine: pattern with the number in its second group, change
DETERMINED = {
    "torchtitan": [(r"(tflops:\S* ?)([\d.]+)", 0.02), (r"(mfu:\S* ?)([\d.]+)", 0.02), (r"(GiB\()([\d.]+)", 0.02)],
    "nanochat": [(r"(dt: )([\d.]+)", 0.01), (r"(tok/sec: )([\d,]+)", 0.01), (r"( mfu: )([\d.]+)", 0.05)],
    "nanogpt": [(r"(time )([\d.]+)", 0.1), (r"(mfu )([\d.]+)", 0.02)],
    "modded_nanogpt_2024": [(r"(step_avg:)([\d.]+)", 0.02)],
    "modded_nanogpt_2025": [(r"(train_time:)(\d\d+)", 0.1), (r"(step_avg:)(\d\d\.\d+)", 0.02)],
    "llmc": [(r"(\| )([\d.]+)(?= ms)", 0.05), (r"(\| )([\d.]+)(?=% bf16)", 0.05), (r"(\| )(\d+)(?= tok/s)", 0.01)],
    "megatron": [(r"(TFLOP/s/GPU\): )([\d.]+)", 0.01), (r"(\(ms\): )([\d.]+)", 0.01),
                 (r"(consumed samples: +)(\d+)", 0.2)],
}  # fmt: skip


def planted(text: str, pattern: str, change: float, choose: random.Random) -> tuple[str, str]:
    """Return the text with one of the figures changed by a share, in its own digits, and the changed line."""
    found = choose.choice(list(re.finditer(pattern, text)))
    digits = len(found[2].partition(".")[2])
    value = float(found[2].replace(",", "")) * (1 + choose.choice((-1, 1)) * change * choose.uniform(1, 3))
    written = f"{value:,.{digits}f}" if "," in found[2] else f"{value:.{digits}f}"
    changed = text[: found.start(2)] + written + text[found.end(2) :]
    return changed, changed[changed.rfind("\n", 0, found.start()) + 1 :].partition("\n")[0]


@pytest.mark.parametrize("name", DETERMINED)
def test_one_changed_figure_is_found(tmp_path, name):
    """Five changes of each kind. The finding names the step, or the one behind it, into whose mean it enters."""
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    path, choose = tmp_path / "changed.log", random.Random(21)
    missed = []
    for pattern, change in DETERMINED[name]:
        for _ in range(5):
            changed, line = planted(text, pattern, change, choose)
            path.write_text(changed, encoding="utf-8")
            step = int(re.search(r"(?:step|iter(?:ation)?):?\D*?(\d+)", re.sub(r"\x1b\[\d+m", "", line))[1])
            found = [f.message for f in audit([path]) if f.rule == "figures follow from one another"]
            if not any(re.search(rf"\bsteps? (?:\d+, )*{step:,}\b", message) for message in found):
                missed.append((line, found))
    assert len(missed) <= 0.05 * 5 * len(DETERMINED[name]), missed


@pytest.mark.parametrize(
    ("name", "old", "new", "words", "corrected"),
    [
        ("torchtitan", "batch size 2560, grad", "batch size 1280, grad", "= 2,560", "2,560"),
        ("torchtitan", "Peak FLOPS used for computing MFU: 2.250e+15", "Peak FLOPS used for computing MFU: 3.120e+14",
         "mfu / tflops", "0.320513"),
        ("nanochat", "batch size 524,288", "batch size 1,048,576", "its total batch says", "1.04858e+09"),
        ("llmc", "grad_accum_steps=16", "grad_accum_steps=8", "524,288 does not follow", "262,144"),
        ("llmc", "TFlops           | 312.0", "TFlops           | 989.0", "data sheet", "of the device's peak"),
        ("megatron", "pipeline-model-parallel size: 1", "pipeline-model-parallel size: 2", "world size 1", "2"),
    ],
)  # fmt: skip
def test_a_header_that_its_lines_contradict_is_found(tmp_path, name, old, new, words, corrected):
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    assert text.count(old) == 1
    (tmp_path / "a.log").write_text(text.replace(old, new), encoding="utf-8")
    found = [f for f in audit([tmp_path / "a.log"]) if f.severity == FAILS and words in f.message]
    assert found and corrected in found[0].corrected


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


def test_another_device_makes_the_mfu_another_share(tmp_path):
    other = edited(tmp_path, "torchtitan", ("NVIDIA B200", "NVIDIA H100 80GB HBM3"))
    assert "MFU of 37.47% is of 2,250.0 TFLOP/s, the device is NVIDIA H100 80GB HBM3" in messages(other, FAILS)
    warning = "Peak flops undefined for: Card X, fallback to A100\nPeak FLOPS"
    unknown = edited(tmp_path, "torchtitan", ("Peak FLOPS", warning), ("NVIDIA B200", "Card X"))
    assert "the log itself says that it knows no peak of Card X" in messages(unknown, NOTE)
    assert "does not name the device" in messages(FOLDER / "nanogpt.txt", NOTE)


def test_the_metadata_of_wandb_name_the_device_of_a_console_log(tmp_path):
    """nanoGPT divides by an A100's peak on every device."""
    shutil.copy(FOLDER / "nanogpt.txt", tmp_path / "output.log")
    (tmp_path / "wandb-summary.json").write_text('{"iter": 10, "train/loss": 3.1}')
    (tmp_path / "wandb-metadata.json").write_text('{"gpu": "NVIDIA A40"}')
    assert "of 312.0 TFLOP/s, the device is NVIDIA A40: 149.7 TFLOP/s" in messages(tmp_path, FAILS)


@pytest.mark.parametrize("between", ["", "val_bpb:1.2150 "])
def test_forks_of_modded_nanogpt_print_more_and_go_on_behind_the_output_of_the_driver(tmp_path, between):
    path = tmp_path / "train.log"
    lines = "".join(f"step:{step}/40 val_loss:3.2 {between}train_time:{step * 50}ms step_avg:50.00ms\n"
                    for step in (10, 20, 40))  # fmt: skip
    path.write_text(f"import torch\n{'=' * 100}\n{lines}{'=' * 100}\nnvidia-smi\n")
    (run,) = read_reported([path])
    assert (run.time_s, run.val_loss) == (2.0, 3.2)


def test_the_end_of_a_file_of_build_nanogpt_is_read(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("19072 train 3.021431\n19073 train 3.961587\n19080 val 3.2034\n19081 train 3.191498\n")
    (run,) = read_reported([path])
    assert (run.optimizer_steps, run.val_loss) == (19082, 3.2034)


def test_the_device_of_another_maker_is_read(tmp_path):
    path = edited(tmp_path, "torchtitan", ("CUDA capacity: NVIDIA B200", "NPU capacity: Ascend910B2"))
    (run,) = read_reported([path])
    assert run.device_name == "Ascend910B2"
    assert "does not name the device" not in messages(path, NOTE)


def test_more_than_the_device_can_do_is_found(tmp_path):
    above = edited(tmp_path, "nanochat", (r"mfu: 4", "mfu: 14"))
    assert "is more than the device can do" in messages(above, FAILS)


def test_a_loss_that_is_not_a_number_is_found_at_the_end_alone(tmp_path):
    diverged = edited(tmp_path, "llmc", (r"(step +1\d/19560 \| loss )\S+", r"\1    nan"))
    assert "in the last 10 of 19 lines, from step 10 on" in messages(diverged, FAILS)
    recovered = edited(tmp_path, "llmc", (r"(step +12/19560 \| loss )\S+", r"\1    nan"))
    assert messages(recovered, FAILS) == ""


def test_iteration_times_fit_between_the_dates(tmp_path):
    longer = edited(tmp_path, "megatron", (r"\(ms\): 13", "(ms): 33"), (r" throughput per GPU[^|]*\|", ""))
    assert "the times are longer than the run" in messages(longer, FAILS)
    shorter = edited(tmp_path, "megatron", (r"\(ms\): 13", "(ms): 3"), (r" throughput per GPU[^|]*\|", ""))
    assert "73% of the time is outside them" in messages(shorter, NOTE)


def test_ranks_that_all_print_are_one_run(tmp_path):
    """Each line eight times, and a run that goes on from a checkpoint: the later lines count."""
    lines = (FOLDER / "nanogpt.txt").read_text(encoding="utf-8").splitlines()
    again = [line.replace("loss 3", "loss 2") for line in lines if re.match(r"iter 1[5-9]0", line)]
    (tmp_path / "a.log").write_text(
        "\n".join(each for line in [*lines, *again] for each in [line] * 8), encoding="utf-8"
    )
    (run,) = read_reported([tmp_path / "a.log"])
    assert len(run.lines) == 20
    assert run.train_loss == 2.0341


def test_times_to_one_loss_are_compared_whatever_the_steps():
    found = audit([FOLDER / "modded_nanogpt_2024.txt", FOLDER / "modded_nanogpt_2025.txt"])
    assert [finding for finding in found if finding.severity == FAILS] == []


def test_another_length_is_unequal_work(tmp_path):
    other = edited(tmp_path, "torchtitan", ("sequence length 128", "sequence length 256"))
    found = audit([FOLDER / "torchtitan.txt", other])
    assert [f.message for f in found if f.severity == FAILS] == ["not equal work: sequence length 128 against 256"]


BUILD = """total desired batch size: 524288
step     0 | loss: 10.955010 | lr 8.3916e-07 | norm: 15.3421 | dt: 23547.83ms | tok/sec: 22264.81
step     1 | loss: 10.902707 | lr 1.6783e-06 | norm: 14.8630 | dt: 410.00ms | tok/sec: 1278751.22
"""  # made up, in the format of build-nanogpt's train_gpt2.py
BUILD_FILE = "0 val 10.9511\n0 hella 0.2463\n0 train 10.955029\n1 train 10.9\n"


def test_build_nanogpt_is_read(tmp_path):
    (tmp_path / "a.out").write_text(BUILD, encoding="utf-8")
    (tmp_path / "log.txt").write_text(BUILD_FILE, encoding="utf-8")
    run, file = read_reported([tmp_path / "a.out", tmp_path / "log.txt"])
    assert (run.form, run.optimizer_steps, run.rate) == ("build-nanogpt log", 2, 1278751.22)
    assert (file.optimizer_steps, file.val_loss, file.train_loss) == (2, 10.9511, 10.9)
    assert messages(tmp_path / "a.out", FAILS) == ""
    (tmp_path / "a.out").write_text(BUILD.replace("1278751", "1178751"), encoding="utf-8")
    assert "dt x tok/sec" in messages(tmp_path / "a.out", FAILS)


def test_a_printed_number_is_an_interval():
    assert figure("1,360 tps") == Figure(1360.0, 0.5)
    assert figure("6.258318E+00") == Figure(6.258318, pytest.approx(5e-7))
    assert figure("83,525", is_truncated=True) == Figure(83525.0, 1.0)
    assert [figure(text) for text in ("nan", "N/A", "", "1e999", "9" * 400)] == [None] * 5
    assert [count(text) for text in ("1,280", "0", "-1", "9" * 16, "x")] == [1280, None, None, None, None]


def line(step: int, a: float, b: float) -> LogLine:
    return LogLine(step, {"a": Figure(a, 0.5), "b": Figure(b, 0.005)})


def test_only_a_few_lines_against_the_rest_are_accused():
    relation = Relation("a / b", {"a": 1, "b": -1})
    fit = [line(step, 100 * step, step) for step in range(1, 21)]
    assert disagreement(relation, fit) is None
    one = disagreement(relation, [*fit[:7], line(8, 850, 8), *fit[8:]])
    assert one is not None and [each.step for each in one.lines] == [8]
    # another setting from some step on, and a program that counts in another way
    assert disagreement(relation, [*fit, *[line(step, 200 * step, step) for step in range(21, 24)]]) is None
    assert disagreement(relation, [line(step, 100 * step**2, step) for step in range(1, 21)]) is None
    assert disagreement(relation, [line(1, 100, 1), line(2, 300, 2)]) is None
    assert disagreement(Relation("a / b", {"a": 1, "b": -1}, Figure(100.0)), [line(1, 120, 1)]) is not None


def test_more_than_a_few_or_two_that_agree_are_another_setting():
    relation = Relation("a / b", {"a": 1, "b": -1})
    fit = [line(step, 100 * step, step) for step in range(1, 21)]
    three = [line(step, step * share, step) for step, share in ((21, 150), (22, 180), (23, 220))]
    assert disagreement(relation, [*fit, *three[:2]]) is not None
    assert disagreement(relation, [*fit, *three]) is None
    assert disagreement(relation, [*fit, line(21, 150 * 21, 21), line(22, 150 * 22, 22)]) is None


def test_two_lines_are_enough_where_nothing_else_changes_the_number():
    two = [line(1, 100, 1), line(2, 300, 2)]
    assert disagreement(Relation("a / b", {"a": 1, "b": -1}), two) is None
    assert disagreement(Relation("a / b", {"a": 1, "b": -1}, is_fixed=True), two) is not None


def test_a_batch_that_grows_between_two_lines_is_no_error(tmp_path):
    grown = edited(tmp_path, "megatron", (r" throughput per GPU[^|]*\|", ""),
                   (r"(iteration +15/.*global batch size: +)80", r"\g<1>160"))  # fmt: skip
    assert messages(grown, FAILS) == ""
    wrong = edited(tmp_path, "megatron", (r" throughput per GPU[^|]*\|", ""),
                   (r"global batch size: +80", "global batch size: 160"))  # fmt: skip
    assert "consumed samples per iteration" in messages(wrong, FAILS)


def test_logs_of_other_lengths_compare_rates_and_no_losses(tmp_path):
    shorter = edited(tmp_path, "llmc", (r"step +1[5-9]/.*\n", ""), (r"val loss 4.7\d+", "val loss 6.0"))
    found = audit([FOLDER / "llmc.txt", shorter])
    assert [finding for finding in found if finding.severity == FAILS] == []
    assert any("optimizer steps 19 against 14" in f.message and "neither losses" in f.message for f in found)
    shorter = edited(tmp_path, "llmc", (r"step +1[5-9]/.*\n", ""), (r"val loss 4.7\d+", "val loss 3.0"))
    assert [f for f in audit([FOLDER / "llmc.txt", shorter]) if f.severity == FAILS] == []


def test_of_several_stages_in_one_file_the_longest_is_read(tmp_path):
    text = (FOLDER / "nanochat.txt").read_text(encoding="utf-8")
    later = "\n".join(text.splitlines()[:9]).replace("524,288 =>", "1,048,576 =>").replace("/21400", "/300")
    (tmp_path / "a.log").write_text(f"{text}Autodetected device type: cuda\n{later}\n", encoding="utf-8")
    (run,) = read_reported([tmp_path / "a.log"])
    assert (run.optimizer_steps, run.global_batch_size) == (20, 256)
    assert "1 shorter runs in the same file" in run.unread


def test_ranks_come_from_a_name_that_says_what_they_are(tmp_path):
    text = (FOLDER / "nanogpt.txt").read_text(encoding="utf-8")
    for name, ranks in (("kv_g2_1818671.out", None), ("ddp_4GPU.log", 4)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        (run,) = read_reported([tmp_path / name])
        assert run.world_size == ranks


def test_lines_are_put_in_order():
    assert [each.step for each in in_order(line(step, 1, 1) for step in (1, 1, 2, 3, 2, 4))] == [1, 2, 4]


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
    fuzz.draw(broken, 2000, one_file)
    fuzz.check(READ)


def test_logs_of_a_folder_are_not_compared_unless_they_are_typed(tmp_path):
    """Two logs that differ in everything: whoever keeps them in one folder claims nothing."""
    paths = [tmp_path / f"{name}.log" for name in ("llmc", "nanogpt")]
    for path in paths:
        path.write_text((FOLDER / f"{path.stem}.txt").read_text(encoding="utf-8"), encoding="utf-8")
    assert not [finding for finding in audit([tmp_path]) if len(finding.runs) > 1]
    assert [finding for finding in audit(paths) if len(finding.runs) > 1 and finding.severity == FAILS]


def test_a_line_without_a_figure_or_with_one_of_no_size_is_left_out():
    """Damage of real files: a figure below 0 next to a missing one, 0 or 1e-320 below the line of a fraction."""
    relation = Relation("a x b / c", {"a": 1, "b": 1, "c": -1})
    for figures in ({"a": Figure(-1.0), "c": Figure(1.0)}, {"a": Figure(1.0), "b": Figure(1.0), "c": Figure(0.0)},
                    {"a": Figure(1.0), "b": Figure(1.0), "c": Figure(1e-320)}):  # fmt: skip
        assert relation.interval(LogLine(1, figures)) is None
    assert relation.interval(LogLine(1, {"a": Figure(0.0), "b": Figure(1.0), "c": Figure(1.0)})) == (0.0, 0.0)


def test_of_a_restart_the_line_of_its_first_step_counts_too():
    lines = [line(step, rate, 1) for step, rate in ((1, 5), (1, 6), (2, 5), (1, 7), (2, 7))]
    assert [(each.step, each.value("a")) for each in in_order(lines)] == [(1, 7), (2, 7)]
