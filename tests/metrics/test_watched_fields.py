"""What a file says of watched ranks fits the ranks that it had."""

from __future__ import annotations

import copy
import json

import pytest
from support.metrics_examples import example_metrics, v20_metrics

from testbed.metrics.fields.watched import WatchedSteps
from testbed.metrics.file import check_metrics, read_metrics

NAMES = [name for name in WatchedSteps.__annotations__ if name.startswith("per_rank_")]


def watched(ranks: int) -> dict:
    rows = [{"step": 6, "num_steps": 2, **{name: [0.1] * ranks for name in NAMES}}]
    per_rank = [{"rank": rank, "own_start_up_s": 1.0, "num_steps": 2, "collectives": []} for rank in range(ranks)]
    return example_metrics(world_size=ranks) | {"watched_steps": rows, "watched": {"per_rank": per_rank}}


@pytest.mark.parametrize("name", NAMES)
def test_rows_have_an_entry_for_each_rank(name):
    metrics = watched(2)
    check_metrics(metrics)
    metrics["watched_steps"][0][name] = [0.1]
    with pytest.raises(ValueError, match=rf"watched_steps\[0\]\.{name} has 1 entries, hardware\.world_size is 2"):
        check_metrics(metrics)


def test_each_rank_stands_once_in_its_place():
    for wrong in ([0], [0, 0], [1, 0], [0, 1, 2]):
        metrics = watched(2)
        rows = metrics["watched"]["per_rank"]
        metrics["watched"]["per_rank"] = [copy.deepcopy(rows[0]) | {"rank": rank} for rank in wrong]
        with pytest.raises(ValueError, match=r"watched\.per_rank is of ranks .* and the last start had 2"):
            check_metrics(metrics)


def test_an_earlier_version_watched_nothing(tmp_path):
    file = tmp_path / "training_metrics.json"
    file.write_text(json.dumps(v20_metrics() | {"watched": [1], "watched_steps": "x"}))
    assert not {"watched", "watched_steps"} & read_metrics(file).keys()
