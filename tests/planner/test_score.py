"""The score on published runs: what it must reach, that its file is up to date, and rows predicted without values."""

from __future__ import annotations

import copy
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from testbed.errors import InputError
from testbed.planner import hold_out
from testbed.planner.constants import SCORE_FILE
from testbed.planner.hold_out import LEFT_OUT, UNKNOWN, HeldOut, constant_mfu, held_out, width_of
from testbed.planner.predict import predict_file
from testbed.planner.published import OWN_COPY, as_unknown, own_rows
from testbed.planner.score import score_file, text_of

RAW: list[dict[str, Any]] = json.loads(OWN_COPY.read_text(encoding="utf-8"))["rows"]
COMMITTED = json.loads(SCORE_FILE.read_text(encoding="utf-8"))
WITHOUT = ("checks", "measured", "kind", "flags", "grade")


def bare(row: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a row as it is asked for: without what was measured."""
    return {**copy.deepcopy({key: value for key, value in row.items() if key not in WITHOUT}), **changes}


def test_the_score_reaches_what_was_asked():
    of_blocks, of_sub_blocks = (COMMITTED["schemes"][scheme] for scheme in ("block", "sub_block"))
    assert of_sub_blocks["median_of_block_medians"] <= 8
    assert of_sub_blocks["all"]["p90"] <= 25
    for block, errors in of_sub_blocks["blocks"].items():
        assert errors["rows"] < 10 or errors["median"] <= errors["control_median"] + 2, block
    for which in ("median", "p90"):
        assert of_blocks["all"][which] < of_blocks["all"][f"control_{which}"]
    for scheme in (of_blocks, of_sub_blocks):
        assert 80 <= scheme["all"]["covered"] <= 97


@pytest.mark.slow
def test_the_score_made_again_is_the_committed_one():
    text, result = score_file(OWN_COPY)
    assert result["width"] == pytest.approx(COMMITTED["width"], abs=2e-3)
    for scheme, entry in result["schemes"].items():
        for name, value in entry["all"].items():
            assert value == pytest.approx(COMMITTED["schemes"][scheme]["all"][name], abs=0.11), (scheme, name)
    assert result["rejected"] == {}
    assert "constant MFU wins" in text


def test_some_blocks_predicted_again_are_as_committed():
    """A fit without a block, and one without a sub_block, next to the committed medians: the file is up to date."""
    rows = own_rows()
    for scheme, block in (("block", "llm-foundry|A100-80|fsdp"), ("block", "simumax|B200|tp")):
        kept = [row for row in rows if row.block == block]

        def group(row: Any, block: str = block) -> bool:
            return row.block == block

        errors = sorted(100 * one.error for one in held_out(rows, group) if one.row in kept and one.row.is_scored)
        middle = (errors[(len(errors) - 1) // 2] + errors[len(errors) // 2]) / 2
        assert middle == pytest.approx(COMMITTED["schemes"][scheme]["blocks"][block]["median"], abs=0.11)


def test_a_group_left_out_is_seen_by_neither_model(monkeypatch: pytest.MonkeyPatch):
    rows = [row for row in own_rows() if row.block.startswith(("simumax", "korthikanti"))]
    fitted: list[set[float]] = []

    class Spy(hold_out.Fit):
        def __init__(self, seen: Any) -> None:
            fitted.append({one.log_time for one in seen})
            super().__init__(seen)

    controls: list[set[str]] = []
    monkeypatch.setattr(hold_out, "Fit", Spy)
    monkeypatch.setattr(
        hold_out, "constant_mfu", lambda row, others: controls.append({row.block, *(o.block for o in others)}) or 0.0
    )
    held_out(rows, LEFT_OUT["block"])
    times = {block: {math.log(row.step_time_s) for row in rows if row.block == block} for block in controls[0]}
    assert sorted(map(sorted, fitted)) == sorted(map(sorted, times.values()))
    assert all(len(found) == 2 for found in controls)  # the row's own, and the other block


def test_constant_mfu_is_the_median_of_rows_alike():
    rows = [row for row in own_rows() if row.block == "llm-foundry|A100-80|fsdp"]
    row, others = rows[0], rows[1:]
    ideal = [one.model_flops_per_device / 312e12 / one.step_time_s for one in others]
    middle = math.exp(statistics.median(map(math.log, ideal)))
    assert math.exp(constant_mfu(row, others)) == pytest.approx(row.model_flops_per_device / 312e12 / middle)


def test_the_width_is_the_quantile_of_scores_without_the_rows_own_block():
    rows = [row for row in own_rows() if row.is_scored and row.block.startswith(("llm-foundry|A100", "simumax"))]
    found = [HeldOut(row, 5.0 if row.block.startswith("simumax") else 0.1, 0.1, 0.0) for row in rows]
    assert width_of(found, "simumax|B200|tp") == pytest.approx(1)
    assert width_of(found) == pytest.approx(50)


def test_a_file_of_one_block_cannot_be_scored(tmp_path: Path):
    path = tmp_path / "rows.json"
    for content in ([], {"rows": {}}, {"rows": [row for row in RAW if row["block"].startswith("simumax")]}):
        path.write_text(json.dumps(content), encoding="utf-8")
        with pytest.raises(InputError, match="--score"):
            score_file(path)
    with pytest.raises(InputError, match="--score"):
        score_file(tmp_path / "missing.json")


def test_the_text_puts_constant_mfu_next_to_every_error():
    text = text_of(COMMITTED)
    entry = COMMITTED["schemes"]["sub_block"]["blocks"]["llm-foundry|H100-80|fsdp"]
    (line,) = [
        line
        for line in text.partition("(b) without its sub_block      rows")[2].splitlines()
        if line.startswith("llm-foundry|H100-80|fsdp")
    ]
    numbers = [float(word) for word in line.replace("|", " ").split()[3:]]
    assert numbers == [entry[key] for key in ("rows", "median", "p90", "control_median", "control_p90", "covered")]


@pytest.fixture(scope="module")
def predictions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("rows")
    rows = [
        *(bare(row) for row in RAW),
        bare(RAW[0], id="impossible", claimed_step_time_s=0.2),
        bare(RAW[0], id="unknown kind", hardware={"gpu": "Quux", "gpus": 256}),
        bare(RAW[0], id="huge", batch={"micro_batch": 1e300, "grad_accumulation": 1e300}),
        None,
        17,
        {"id": "empty"},
    ]
    (folder / "rows.json").write_text(json.dumps({"rows": rows, "reference_rows": [bare(RAW[1], id="r")]}))
    predict_file(folder / "rows.json", folder / "out.json")
    return dict(json.loads((folder / "out.json").read_text(encoding="utf-8")))


def test_every_row_has_a_prediction_or_a_reason(predictions: dict[str, Any]):
    assert set(predictions) >= {row["id"] for row in RAW} | {"impossible", "unknown kind", "empty", "r", "huge"}
    for id, found in predictions.items():
        if "rejected" in found:
            assert isinstance(found["rejected"], str), id
            continue
        assert 0 < found["low"] < found["step_time_s"] < found["high"], id
        assert found["peak_memory_gib"] > 0 and found["steady_memory_gib"] > 0, id
        assert isinstance(found["fits"], bool), id
    rejected = {id for id, found in predictions.items() if "rejected" in found}
    assert {"impossible", "empty"} <= rejected and not rejected & {row["id"] for row in RAW}
    assert predictions["r"] == predictions[RAW[1]["id"]]


def test_rows_that_the_fit_has_seen_are_predicted_closely(predictions: dict[str, Any]):
    errors = sorted(
        abs(predictions[row.id]["step_time_s"] / row.step_time_s - 1)
        for row in own_rows()
        if row.is_scored and row.step_time_s
    )
    assert errors[len(errors) // 2] < 0.03


def test_an_unknown_device_is_scored_without_its_data_sheet():
    """Its width comes from rows that are predicted as if devices.json had not their kind."""
    row = own_rows()[0]
    unknown = as_unknown(row)
    assert not unknown.device_is_known and unknown.machine.device.name != row.machine.device.name
    assert unknown.machine.device.memory_bytes == row.machine.device.memory_bytes
    assert COMMITTED["width_of_unknown_device"] >= COMMITTED["width"]
    assert COMMITTED["schemes"][UNKNOWN]["all"]["median"] > COMMITTED["schemes"]["GPU kind"]["all"]["median"]


def test_an_unknown_device_has_the_wider_interval(predictions: dict[str, Any]):
    known, unknown = (predictions[id] for id in (RAW[0]["id"], "unknown kind"))
    assert unknown["high"] / unknown["low"] > 2 * known["high"] / known["low"]


def test_a_reference_row_with_a_time_teaches_its_program(tmp_path: Path):
    """Rows of a program that was never seen run twice as long; one of them, given as reference, says so."""
    other = {"source": {"repo": "somebody/else"}, "block": "else"}
    slow = {
        **copy.deepcopy(RAW[2]),
        **other,
        "id": "slow",
        "measured": {"step_time_s": 1.6 * RAW[2]["measured"]["step_time_s"]},
    }
    found = []
    for references in ([], [slow]):
        path = tmp_path / "rows.json"
        path.write_text(json.dumps({"rows": [bare(RAW[3], id="asked", **other)], "reference_rows": references}))
        found.append(predict_file(path, tmp_path / "out.json")["asked"])
    assert found[1]["step_time_s"] > 1.25 * found[0]["step_time_s"]
    assert found[1]["high"] / found[1]["low"] < found[0]["high"] / found[0]["low"]
