"""The metrics file: what the schema lets through, what it refuses in which words, and writing all or nothing."""

import json
import os
import re
from pathlib import Path
from typing import Annotated, NotRequired

import msgspec
import pytest
from support.metrics_examples import as_2_1, example_metrics, save, v1_metrics, v20_metrics
from support.settings import settings_of

from testbed.metrics import derived, fields_page, file, segments
from testbed.metrics.fields.metrics_file import TrainingMetrics
from testbed.metrics.fields.training import DeepSpeedConfig
from testbed.metrics.fields.types import Count
from testbed.metrics.file import check_metrics, metrics_version, read_metrics, write_metrics

ROOT = Path(__file__).resolve().parents[2]


def running_metrics() -> dict:
    """What a run writes before its first step is done: everything that is not known yet is null or empty."""
    metrics = example_metrics(status="running", completion=None, sample=None, epochs=[], steps=[], evaluations=[])
    metrics["memory"]["per_rank"] = []
    metrics["timing"] = dict.fromkeys(metrics["timing"]) | {"warmup_steps": 5, "num_measured_steps": 0}
    metrics["flops"] |= {
        "model_flops_per_s": None,
        "peak_flops_per_s_per_device": None,
        "peak_source": None,
        "mfu": None,
    }
    metrics["summary"] |= {"best_val_loss": None, "final_val_loss": None, "mean_tokens_per_sec_global": None}
    return metrics


def failed_metrics() -> dict:
    return example_metrics(status="failed", failure={"reason": "loss is not finite", "step": 20}, completion=None)


def test_the_types_give_a_json_schema():
    """docs/metrics_file.md says so, for readers in other languages."""
    step = msgspec.json.schema(TrainingMetrics)["$defs"]["Step"]
    assert step["properties"]["step"]["minimum"] == 1 and "per_rank_forward_s" not in step["required"]


@pytest.mark.parametrize("build", [example_metrics, running_metrics, failed_metrics])
def test_a_file_is_read_back_as_it_was_written(tmp_path, build):
    path = tmp_path / "training_metrics.json"
    write_metrics(path, build())
    assert read_metrics(path) == build()
    assert [entry.name for entry in tmp_path.iterdir()] == ["training_metrics.json"]


def test_each_step_takes_one_line(tmp_path):
    path = tmp_path / "training_metrics.json"
    write_metrics(path, example_metrics(num_steps=7))
    rows = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith('    {"step": ')]
    assert [json.loads(line.rstrip(","))["step"] for line in rows][:7] == [1, 2, 3, 4, 5, 6, 7]


FAULTS = {
    "a typing error in a name": (lambda m: m["timing"].update(warm_up=1), "timing has no field 'warm_up'"),
    "a field missing": (lambda m: m["training_config"].pop("seed"), "training_config lacks 'seed'"),
    "a row's field missing": (lambda m: m["steps"][3].pop("loss"), "steps[3] lacks 'loss'"),
    "a typing error in a row": (lambda m: m["steps"][3].update(los=1.0), "steps[3] has no field 'los'"),
    "a number as text": (lambda m: m["steps"][3].update(loss="6.1"), "steps[3].loss is '6.1'"),
    "true for a number": (lambda m: m["steps"][3].update(loss=True), "steps[3].loss is True"),
    "a count as a float": (lambda m: m["steps"][3].update(step=4.0), "steps[3].step is 4.0"),
    "a negative time": (lambda m: m["steps"][3].update(step_time_s=-0.1), "steps[3].step_time_s is -0.1"),
    "a null among ranks": (lambda m: m["steps"][3].update(per_rank_data_wait_s=[0.0, None]), "steps[3].per_rank_data"),
    "no ranks": (lambda m: m["steps"][3].update(per_rank_step_time_s=[]), "steps[3].per_rank_step_time_s is []"),
    "a rank missing": (lambda m: m["steps"][3].update(per_rank_step_time_s=[0.2]), "_step_time_s has 1"),
    "a step twice": (lambda m: m["steps"][3].update(step=3), "steps[3].step is 3 after 3"),
    "rows that are not rows": (lambda m: m["steps"].append(7), "steps[20] is 7"),
    "an unknown precision": (lambda m: m["training_config"].update(precision="fp8"), "config.precision is 'fp8'"),
    "failed without a reason": (lambda m: m.update(status="failed"), "failure is None"),
    "a reason without failure": (lambda m: m.update(failure={"reason": "x", "step": None}), "failure is {"),
    "another version": (lambda m: m.update(schema_version="2.3"), "schema_version is '2.3'"),
    "NaN": (lambda m: m["summary"].update(best_val_loss=float("nan")), "summary.best_val_loss is nan"),
    "infinity in a row": (lambda m: m["steps"][3].update(grad_norm=float("inf")), "steps[3].grad_norm is inf"),
    "NaN of a rank": (lambda m: m["steps"][3].update(per_rank_step_time_s=[1.0, float("nan")]), "time_s[1] is nan"),
    "NaN in free settings": (lambda m: m["settings"].update(lr=float("nan")), "settings.lr is nan"),
}  # fmt: skip


@pytest.mark.parametrize(("break_it", "message"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_refused_in_one_sentence_that_names_the_place(tmp_path, break_it, message):
    metrics = example_metrics()
    break_it(metrics)
    path = tmp_path / "training_metrics.json"
    path.write_text("the earlier file", encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        write_metrics(path, metrics)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250
    assert path.read_text(encoding="utf-8") == "the earlier file"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_is_not_finite_in_a_row_is_refused_on_reading(tmp_path, value):
    """Python's json reads what JSON does not have; a file written by another program may hold it."""
    path = save(tmp_path, example_metrics())
    text = path.read_text(encoding="utf-8")
    assert text.count('"grad_norm": 1.5') == 20
    path.write_text(text.replace('"grad_norm": 1.5', f'"grad_norm": {value}', 1), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape("steps[0].grad_norm is ")) as caught:
        read_metrics(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("broken", ["fsync", "rename"])
@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["disk", "ctrl-c"])
def test_a_write_that_fails_leaves_the_earlier_file_whole(tmp_path, monkeypatch, broken, fault):
    path = tmp_path / "training_metrics.json"
    write_metrics(path, example_metrics(num_steps=3))

    def fail(*_):
        raise fault

    monkeypatch.setattr(*((os, "fsync") if broken == "fsync" else (Path, "replace")), fail)
    with pytest.raises(type(fault)):
        write_metrics(path, example_metrics(num_steps=9))
    assert len(read_metrics(path)["steps"]) == 3
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("metrics", "version"),
    [
        (v1_metrics(1), "1"),
        (v1_metrics(4), "1"),
        (v20_metrics(), "2.0"),
        ({"schema_version": "2.0", "hardware": {}, "training_config": {}, "epochs": []}, "2.0"),
        (example_metrics(), "2.2"),
        (as_2_1(example_metrics()), "2.2"),
    ],
    ids=["v1", "v1_4", "2.0", "2.0_bare", "2.2", "2.1"],
)
def test_every_version_is_read(tmp_path, metrics, version):
    assert metrics_version(read_metrics(save(tmp_path, metrics))) == version


def test_a_file_of_2_1_is_read_with_the_names_of_2_2(tmp_path):
    """A figure has one name in a file: 2.1 had two for the median of a step, and for the throughput."""
    metrics = example_metrics()
    metrics["timing"]["tokens_per_sec_global"] = metrics["summary"]["mean_tokens_per_sec_global"]
    check_metrics(metrics)  # files of 2.2 from before 2026-11-23 have both, too
    assert read_metrics(save(tmp_path, as_2_1(metrics))) == metrics
    with pytest.raises(ValueError, match=r"schema_version is '2\.1'"):
        write_metrics(tmp_path / "other.json", as_2_1(metrics))


def test_a_damaged_file_of_2_1_is_refused_in_a_sentence(tmp_path):
    for name, value in (("timing", None), ("steps", {"a": 1}), ("steps", [7])):
        with pytest.raises(ValueError, match=name):
            read_metrics(save(tmp_path, as_2_1(example_metrics()) | {name: value}))


UNREADABLE = {
    "not JSON": ('{"a": ', "is not JSON"),
    "not text": (b"\xff\xfe\x00", "is not JSON"),
    "a list": ("[1, 2]", "not a training_metrics.json"),
    "other JSON": ('{"a": 1}', "not a training_metrics.json"),
    "a later version": ('{"schema_version": "3.0"}', "schema_version is '3.0', known are 2.0, 2.1 and 2.2"),
    "v1 of text": ('{"train_time_per_epoch": ["x"], "train_loss_per_epoch": []}', "train_time_per_epoch[0] is 'x'"),
    "2.0 without epochs": ('{"schema_version": "2.0", "hardware": {}, "training_config": {}}', "lacks 'epochs'"),
    "NaN": ('{"train_time_per_epoch": [NaN], "train_loss_per_epoch": []}', "train_time_per_epoch[0] is nan"),
    "nested without end": ("[" * 100_000, "nested too deeply"),
}


@pytest.mark.parametrize(("content", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_is_named_with_its_fault(tmp_path, content, message):
    path = tmp_path / "metrics.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_metrics(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        read_metrics(tmp_path / "none.json")
    with pytest.raises(ValueError, match="is a folder, not a file"):
        read_metrics(tmp_path)


def test_every_field_of_2_0_is_still_there():
    """2.2 keeps each name of 2.0; what 2.0 files in the wild carry was listed from their program."""

    def names(metrics: dict, prefix: str = "") -> set[str]:
        found = set()
        for key, value in metrics.items():
            found.add(prefix + key)
            if isinstance(value, list) and value and isinstance(value[0], dict):
                value = value[0]
            if isinstance(value, dict):
                found |= names(value, f"{prefix}{key}.")
        return found

    assert names(v20_metrics()) - names(example_metrics()) <= {
        "deepspeed_config.path",  # inside an object that the example has as null; the schema has both
        "deepspeed_config.sha256",
    }
    assert {"path", "sha256", "selected"} <= set(DeepSpeedConfig.__annotations__)


def test_the_page_is_made_of_the_fields():
    """Else: python scripts/maintain/update_docs.py"""
    assert fields_page.sections() in (ROOT / "docs/metrics_file.md").read_text(encoding="utf-8")


def test_a_field_is_one_line(monkeypatch):
    class NextMetrics(TrainingMetrics):
        altitude_m: Annotated[Count | None, "of the machine above the sea"]
        latitude: NotRequired[float]

    monkeypatch.setattr(file, "_TYPES", {"2.2": NextMetrics})
    monkeypatch.setattr(fields_page, "TrainingMetrics", NextMetrics)
    assert "| `altitude_m`, `latitude`† | of the machine above the sea |" in fields_page.sections()
    check_metrics(example_metrics() | {"altitude_m": None})
    for fields, fault in (({}, "lacks 'altitude_m'"), ({"altitude_m": -1}, "is -1"), ({"altitude": 1}, "no field")):
        with pytest.raises(ValueError, match=fault):
            check_metrics(example_metrics() | {"altitude_m": 3} | fields if fields else example_metrics())


def test_an_example_that_breaks_nothing_is_not_refused_for_its_size():
    check_metrics(example_metrics(num_steps=3000, world_size=4))


def test_the_wall_clock_runs_from_the_begin_of_the_first_measured_step_to_the_end_of_the_last(token_files):
    """After 9 s of warm-up steps of 1, 2 and 4 s, with a second of validation before the last one: 8 s."""
    settings = settings_of(token_files, "--timing_warmup_steps", "1")
    rows = [
        {"is_warmup": seconds == 9.0, "step_time_s": seconds, "data_wait_s": 0.0} for seconds in (9.0, 1.0, 2.0, 4.0)
    ]
    found = derived.timing(rows, [9.0, 10.0, 12.0, 17.0], None, settings)
    assert found["wall_clock_tokens_per_sec_global"] == 3 * settings.tokens_per_step / 8


def test_a_start_on_other_ranks_has_its_own_number_from_its_first_row_on():
    before, now = (example_metrics(num_steps=4, world_size=ranks) for ranks in (1, 2))
    start = segments.new_segment(now)
    now["segments"] = [
        start | {"world_size": 1, "last_step": 2, "ended": "preempted"},
        start | {"first_step": 3, "last_step": 4, "ended": "complete"},
    ]
    now["steps"][:2] = before["steps"][:2]
    check_metrics(now)
    now["steps"][2] = before["steps"][2]
    with pytest.raises(ValueError, match=r"steps\[2\]\.per_rank_step_time_s has 1 entries, hardware\.world_size is 2"):
        check_metrics(now)
