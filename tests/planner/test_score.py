"""The score on published runs: what it must reach, and that its file is up to date."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from testbed.errors import InputError
from testbed.planner import score as scoring
from testbed.planner.rows import OWN_COPY, own_rows
from testbed.planner.score import SCHEMES, HeldOut, constant_mfu, held_out, page_of, score_file, width_of
from testbed.planner.step_time import SCORE_FILE, published_constants

COMMITTED = json.loads(SCORE_FILE.read_text(encoding="utf-8"))


def test_the_score_reaches_what_was_asked():
    schemes = COMMITTED["schemes"]
    assert schemes["block"]["median_of_block_medians"] <= 8
    assert schemes["block"]["all"]["p90"] <= 25
    for name in ("block", "sub_block", "program"):
        assert 80 <= schemes[name]["all"]["covered"] <= 97
        assert schemes[name]["median_of_block_medians"] < schemes[name]["control_median_of_block_medians"]
        for which in ("median", "p90"):
            assert schemes[name]["all"][which] < schemes[name]["all"][f"control_{which}"]
    assert len(published_constants().fit.values) <= 17


@pytest.mark.slow
def test_the_score_made_again_is_the_committed_one():
    text, result = score_file(OWN_COPY)
    assert result["width"] == pytest.approx(COMMITTED["width"], abs=2e-3)
    for scheme, entry in result["schemes"].items():
        for name, value in entry["all"].items():
            assert value == pytest.approx(COMMITTED["schemes"][scheme]["all"][name], abs=0.11), (scheme, name)
    assert result["rejected"] == {} and result["memory"]["said_not_to_fit"] == []
    assert text == page_of(result)


def test_a_group_left_out_is_seen_by_neither_model(monkeypatch: pytest.MonkeyPatch):
    rows = [row for row in own_rows() if row.form.block.startswith(("simumax", "korthikanti"))]
    fitted: list[set[float]] = []

    class Spy(scoring.Fit):
        def __init__(self, seen: Any, parts: Any) -> None:
            fitted.append({one.log_time for one in seen})
            super().__init__(seen, parts)

    controls: list[set[str]] = []
    monkeypatch.setattr(scoring, "Fit", Spy)
    monkeypatch.setattr(
        scoring,
        "constant_mfu",
        lambda row, others: controls.append({row.form.block, *(other.form.block for other in others)}) or 0.0,
    )
    held_out(rows, SCHEMES["block"][1])
    times = {block: {math.log(row.step_time_s) for row in rows if row.form.block == block} for block in controls[0]}
    assert sorted(map(sorted, fitted)) == sorted(map(sorted, times.values()))
    assert all(len(found) == 2 for found in controls)  # the row's own, and the other block


def test_constant_mfu_is_the_median_of_rows_alike():
    rows = [row for row in own_rows() if row.form.block == "llm-foundry|A100-80|fsdp"]
    row, others = rows[0], rows[1:]
    ideal = [one.model_flops_per_device / 312e12 / one.step_time_s for one in others]
    middle = math.exp(statistics.median(map(math.log, ideal)))
    assert math.exp(constant_mfu(row, others)) == pytest.approx(row.model_flops_per_device / 312e12 / middle)


def test_the_width_is_the_quantile_of_scores_without_the_rows_own_block():
    rows = [row for row in own_rows() if row.is_scored and row.form.block.startswith(("llm-foundry|A100", "simumax"))]
    found = [HeldOut(row, 5.0 if row.form.block.startswith("simumax") else 0.1, 0.1, 0.0) for row in rows]
    assert width_of(found, "simumax|B200|tp") == pytest.approx(1)
    assert width_of(found) == pytest.approx(50)


def test_a_file_of_one_block_cannot_be_scored(tmp_path: Path):
    path = tmp_path / "rows.json"
    raw = json.loads(OWN_COPY.read_text(encoding="utf-8"))["rows"]
    for content in ([], {"rows": {}}, {"rows": [row for row in raw if row["block"].startswith("simumax")]}):
        path.write_text(json.dumps(content), encoding="utf-8")
        with pytest.raises(InputError, match="--score"):
            score_file(path)
    with pytest.raises(InputError, match="--score"):
        score_file(tmp_path / "missing.json")
