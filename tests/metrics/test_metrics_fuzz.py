"""Break metrics files of every version, and what the audit reads with them.

Each is read whole or refused in one sentence that names it, never with a traceback. A file is made from a valid one by
up to three mutations of its values and up to one of its text.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from hypothesis import strategies as st
from support import foreign_examples as foreign
from support.fuzz import READ, REFUSED, Fuzz, Refused, run_in_process
from support.metrics_examples import example_metrics, inference_fields, v1_metrics, v20_metrics
from support.mutations import ODD_VALUES, broken_json, broken_words
from support.programs import REPOSITORY

from testbed.analysis.charts.training import comparison_table
from testbed.analysis.runs.arms import group_into_arms
from testbed.analysis.runs.comparability import speed_ups, warnings
from testbed.analysis.runs.load import Run, load_run
from testbed.audit.claims import audit
from testbed.errors import InputError

VALID = {
    "v1": [v1_metrics(4), {**v1_metrics(4), "host": {"hostname": "a"}, "env": {"torch_version": "2.1"}, "timing": {}}],
    "2.0": [
        v20_metrics(deepspeed_config={"selected": {"wall_clock_breakdown": True, "zero_stage": 1}}),
        v20_metrics(world_size=2, deepspeed_config=None, summary={"best_val_loss": None}),
    ],
    "2.2": [
        example_metrics(num_steps=3, warmup_steps=1),
        example_metrics(num_steps=2, warmup_steps=0, world_size=1, status="failed", evaluations=[],
                        failure={"reason": "loss is not finite", "step": 2}, completion=None),
        example_metrics(
            num_steps=3, warmup_steps=0, instrumented=True,
            settings={"pipeline_schedule": "1f1b", "attention": "flash", "compile": True, "skip_gradient_sync": "all"},
            training_config={"mesh": {"data": 1, "pipeline": 2, "tensor": 1, "shard": 1}, "math_changes": [],
                             "automatic_choices": {"compile": True}, "attention": "sdpa flash"},
            utilization={"interval_s": 0.5, "per_rank": []}, **inference_fields([1.0, 1.1, 0.9]),
        ),
    ],
}  # fmt: skip
for optional in ("per_rank_forward_s", "per_rank_backward_s", "per_rank_synchronise_s", "per_rank_optimizer_s"):
    for row in VALID["2.2"][2]["steps"][1:]:  # not in every row
        row[optional] = [0.01, 0.02]
REFERENCE = v1_metrics(1)
broken_files = st.sampled_from(sorted(VALID)).flatmap(lambda name: st.sampled_from(VALID[name])).flatmap(broken_json)


def read_everything(run: Run) -> None:
    """Every property and every table that a reader of runs makes of one."""
    properties = [name for name, value in vars(Run).items() if isinstance(value, property)]
    assert len(properties) >= 8
    for name in properties:
        getattr(run, name)


def use_run(path: Path, reference: Path) -> None:
    """Do what the charts, the comparison and the audit do with a run; the audit refuses what cannot be loaded."""
    try:
        run = load_run(path)
    except ValueError:
        with pytest.raises(ValueError, match="training_metrics"):
            audit([path])
        raise
    read_everything(run)
    other = load_run(reference)
    for runs in ([run], [run, other], [other, run], [run, load_run(path)]):
        comparison_table(runs).encode("utf-8")
        "".join(warnings(runs)).encode("utf-8")
        speed_ups(runs)
        for arm in group_into_arms(runs):
            assert len(arm.tokens_per_s) == len(arm.measured_runs)
    use_audit([path], [reference, path])


def use_audit(*searched: list[Path]) -> None:
    for paths in searched:
        for finding in audit(paths):
            f"{finding.message}{finding.corrected}".encode()


def test_no_file_breaks_the_readers(tmp_path):
    path, reference = tmp_path / "broken" / "training_metrics.json", tmp_path / "reference" / "training_metrics.json"
    path.parent.mkdir()
    reference.parent.mkdir()
    reference.write_text(json.dumps(REFERENCE), encoding="utf-8")
    fuzz = Fuzz("training_metrics.json", (InputError,), tmp_path, str(path))

    def one_file(text: bytes) -> None:
        path.write_bytes(text)
        fuzz.case(lambda: use_run(path, reference), text)

    fuzz.draw(broken_files, 1000, one_file)
    fuzz.check(READ, REFUSED)


def foreign_files(folder: Path) -> list[Path]:
    """One of each format that the audit reads beside the metrics file."""
    return [
        foreign.timing_log(folder, 128, (706.41, 418.27), (22.29, 21.0), 1.5556),
        foreign.timing_log(folder, 64, (2233.5,), (50.93,), 1.6),
        foreign.wandb_log(folder, "ddp_2GPU.out", 2, 0.86756, 8.0681, [2.3204553, 2.3204553], 2.283445405960083),
        foreign.metrics_export(folder / "loss.csv", "loss", {"ddp 1GPU": [9.0, 2.3], "ddp 2GPU": [9.0, 2.4]}),
        foreign.rank_files(folder, (100,), (3000,), (4.5,)) / "rank0_results_epoch0.json",
    ]


def test_no_file_of_another_program_breaks_the_audit(tmp_path):
    (tmp_path / "valid").mkdir()
    (tmp_path / "broken").mkdir()
    files = foreign_files(tmp_path / "valid")
    fuzz = Fuzz("files of other programs", (InputError,), tmp_path, str(tmp_path / "broken"))

    def one_file(drawn: tuple[Path, bytes]) -> None:
        path = tmp_path / "broken" / drawn[0].name
        path.write_bytes(drawn[1])
        fuzz.case(lambda: use_audit([path], [files[1], path]), drawn)
        path.unlink()

    valid = {path: path.read_bytes() for path in files}
    broken = st.sampled_from(files).flatmap(lambda path: st.tuples(st.just(path), broken_words(valid[path])))
    fuzz.draw(broken, 150, one_file)
    fuzz.check(READ)


def in_place(metrics: dict, path: str, value: object) -> dict:
    """`metrics` with `value` at a dotted path."""
    metrics, keys = copy.deepcopy(metrics), path.split(".")
    inner = metrics
    for key in keys[:-1]:
        inner = inner[int(key) if key.isdigit() else key]
    inner[keys[-1]] = value
    return metrics


# What the fuzz has found so far, kept by name: the draws of another version of hypothesis are others.
FOUND = {
    "a count beyond 64 bits in a row": (in_place(VALID["2.2"][0], "steps.2.step", 2**63), "no count is that large"),
    "a count beyond every float": (in_place(VALID["2.2"][0], "hardware.gpu_count_visible", 10**400), "is that large"),
    "a count beyond every float in a row": (in_place(VALID["2.2"][0], "steps.1.loss", 10**400), "is that large"),
    "settings as deep as the stack": (in_place(VALID["2.2"][0], "settings.a", ODD_VALUES[-1]), "nested more than 100"),
    "a line break in a key": (in_place(VALID["2.2"][0], "settings.a\nb", float("nan")), "settings.'a\\nb' is nan"),
    "half of a surrogate pair": (in_place(VALID["2.2"][0], "run_id", "\ud800"), "half of a surrogate pair"),
    "v1 with settings of text": ({**v1_metrics(1), "settings": "all"}, "settings is 'all', it must be an object"),
    "v1 without hardware": ({**v1_metrics(1), "hardware": None}, "hardware is None, it must be an object"),
    "v1 with a command of numbers": ({**v1_metrics(1), "command_line": 5}, "command_line is 5, it must be text"),
    "2.0 with selected of text": (in_place(VALID["2.0"][0], "deepspeed_config.selected", "x"), "selected is 'x'"),
}  # fmt: skip


@pytest.mark.parametrize(("metrics", "words"), FOUND.values(), ids=FOUND)
def test_what_once_broke_a_reader_is_refused(tmp_path, metrics, words):
    path = tmp_path / "training_metrics.json"
    path.write_text(json.dumps(metrics), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        load_run(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_rows_that_differ_in_optional_fields_are_read(tmp_path):
    """A field of the cheap phase times in some rows and not in others; a list of the wrong length is still refused."""
    path = tmp_path / "training_metrics.json"
    path.write_text(json.dumps(VALID["2.2"][2]), encoding="utf-8")
    assert load_run(path).version == "2.2"
    path.write_text(json.dumps(in_place(VALID["2.2"][2], "steps.1.per_rank_forward_s", [0.01])), encoding="utf-8")
    with pytest.raises(ValueError, match="per_rank_forward_s has 1 entries"):
        load_run(path)


SCRIPT_FILES = {
    "not_json": b"{",
    "not_utf_8": b'{"train_time_per_epoch": "\xff"}',
    "nested": b"[" * 100_000,
    "huge_number": json.dumps(REFERENCE).replace("2258.76", "9" * 5000).encode(),
    "wrong_type": json.dumps({**REFERENCE, "train_time_per_epoch": "long"}).encode(),
    "null_everywhere": json.dumps(dict.fromkeys(example_metrics())).encode(),
}


@pytest.mark.parametrize("name", SCRIPT_FILES)
@pytest.mark.parametrize("program", ["scripts/audit_runs.py", "generate_charts.py"])
def test_the_programs_refuse_in_one_line(tmp_path, program, name):
    path = tmp_path / f"{name}.json"
    path.write_bytes(SCRIPT_FILES[name])
    arguments = [path] if "audit" in program else ["--runs", path, "--output-dir", tmp_path / "charts"]
    with pytest.raises(Refused, match=re.escape(str(path))):
        run_in_process(REPOSITORY / program, *arguments)
