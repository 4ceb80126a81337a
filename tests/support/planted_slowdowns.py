"""Be one rank of src/gpt2.py with a pause planted in one part of the step, or a cause of planted_causes.py.

Not a test: test_attribution.py asks in which row of the attribution the pause turns up, test_diagnosis.py which rank
and cause are named.
"""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path

from support import planted_causes, program_worker


def with_a_slow_first_collective(synchronise, pause_s: float):
    """One long pause: of many short ones each would take a little longer than asked for on a busy machine."""
    import torch.distributed as dist

    @functools.wraps(synchronise)
    def slow(strategy):
        all_reduce = dist.all_reduce

        def first(*args, **kwargs):
            dist.all_reduce = all_reduce
            time.sleep(pause_s)
            return all_reduce(*args, **kwargs)

        dist.all_reduce = first
        synchronise(strategy)

    return slow


def plant(place: str, pause_s: float) -> None:
    from testbed.metrics.recorder import RunRecorder
    from testbed.strategies import pipeline
    from testbed.strategies.allreduce import AllReduce
    from testbed.strategies.baseline import Baseline
    from testbed.train.batches import TrainingBatches

    parts = {
        "loader": [(TrainingBatches, "of_step")],
        "optimizer": [(Baseline, "update")],
        "forward": [(Baseline, "loss_sum")],
        "collective": [(AllReduce, "synchronise_gradients")],
        "writing": [(RunRecorder, "write_if_due")],  # between the steps
        # forward and backward of every stage take the same time, far more than they compute
        "stages": [(pipeline._StageModule, "forward"), (pipeline.PipelineStage, "backward_one_chunk")],
    }
    for owner, name in parts[place]:
        function = getattr(owner, name)
        if place == "collective":
            setattr(owner, name, with_a_slow_first_collective(function, pause_s))
        else:
            setattr(owner, name, planted_causes.before(function, lambda: time.sleep(pause_s)))


def time_as_nccl_does() -> None:
    """Let gloo's recorder have times: on rank 0, which waits for rank 1, each collective takes 30 ms longer."""
    from testbed.train import report

    recorded, duration_ms = report.recorded, 50.0 - 30.0 * int(os.environ["RANK"])
    report.recorded = lambda: [{**entry, "duration_ms": duration_ms} for entry in recorded()]
    report.times_collectives = lambda *_: True


def main(folder: Path) -> None:
    """Run gpt2.py as the task in the folder says: `plant` is a place, a pause in s and the rank (None: each), and of a
    cause its style. With "timed" last, all ranks time their collectives."""
    place, pause_s, rank, *style = json.loads((folder / "tasks.json").read_text())["plant"]
    if "timed" in style:
        style.remove("timed")
        time_as_nccl_does()
    is_here = place != "nowhere" and rank in (None, int(os.environ["RANK"]))
    if is_here and style:
        {**planted_causes.CAUSES, "unwatched": planted_causes.unwatched}[place](pause_s, *style)
    elif is_here:
        plant(place, pause_s)
    program_worker.main(folder)
