"""The audit's rules about the conditions of a comparison: one code, equal devices."""

from __future__ import annotations

from collections.abc import Iterator

from testbed.analysis.audit.finding import DEVICES, FAILS, NOTE, TRACEABLE, Finding
from testbed.analysis.audit.sides import Claim
from testbed.analysis.comparison.confounders import CHANGED_FILES, COMMIT, DEVICE, Confounder, confounders
from testbed.analysis.runs.arms import hardware_of

_THREADS = "cpu threads per rank"
# of the runs of one side that say it
_DIRTY: dict[tuple[str, ...], str] = {("True",): "in every run", ("False",): "in no run"}


def code_is_the_same(claim: Claim) -> Iterator[Finding]:
    """Two commits are one change, and may be what is compared; with other settings too, they are two at once."""
    found = {item.kind: item for item in confounders(*claim.measured_runs) if item.a != item.b}
    if commit := found.get(COMMIT):
        one, other = (" / ".join(each[:10] for each in side) for side in (commit.a, commit.b))
        message = f"commit {one} against {other}"
    elif changed := found.get(CHANGED_FILES):
        one, other = (_DIRTY.get(values, "in some runs") for values in (changed.a, changed.b))
        message = f"files that differ from the commit: {claim.names[0]} {one}, {claim.names[1]} {other}"
    else:
        return
    records = ((side.first.run.record if side.first.run else {}) for side in (claim.baseline, claim.other))
    is_two_changes = _configuration(next(records)) != _configuration(next(records))
    if is_two_changes:
        message += ", and other settings: two changes at once, so neither explains the difference"
    yield claim.finds(TRACEABLE, FAILS if is_two_changes else NOTE, message)


def _configuration(record: dict) -> dict:
    """What was set, apart from where it ran: settings (since 2.1), or the few that 2.0 records."""
    ignored = {"checkpoint_path", "seed", "threads_per_rank", "train_data_path", "val_data_path"}
    settings = {name: value for name, value in (record.get("settings") or {}).items() if name not in ignored}
    config = record.get("training_config") or {}
    names = ("run_type", "precision", "micro_batch_size_per_gpu", "grad_accum_steps", "global_batch_size", "zero_stage")
    hashed = (record.get("deepspeed_config") or {}).get("sha256")
    ranks = (record.get("hardware") or {}).get("world_size")
    return {"settings": settings, "config": {name: config.get(name) for name in names}, "file": hashed, "ranks": ranks}


def devices_are_the_same(claim: Claim) -> Iterator[Finding]:
    """Other devices refute a claim; another machine of the same devices, or other software, is only pointed out."""
    for item in confounders(*claim.measured_runs):
        if item.kind == DEVICE and item.a != item.b:
            if item.what != _THREADS:
                yield claim.fails(DEVICES, f"{item.what} {item.against}")
            elif not _cores_are_equal(claim):
                yield _other_threads(claim, item)
        elif item.kind not in (COMMIT, CHANGED_FILES):
            said = f"{item.what} {item.against}: it may explain the difference"
            yield claim.notes(DEVICES, said)


def _cores_are_equal(claim: Claim) -> bool:
    """Return whether both arms compute on the same number of cores, however many ranks share them."""
    cores = [
        {
            hardware_of(run, "cpu_threads_per_rank") * run.world_size
            if run.world_size and hardware_of(run, "cpu_threads_per_rank")
            else None
            for run in runs
        }
        for runs in claim.measured_runs
    ]
    return len(cores[0]) == 1 and cores[0] == cores[1] and None not in cores[0]


def _other_threads(claim: Claim, item: Confounder) -> Finding:
    """Return a note where the number of threads is all that differs, so that it is what is compared."""
    configurations = [_configuration(runs[0].record) for runs in claim.measured_runs]
    message = f"{item.what} {item.against}"
    if configurations[0] == configurations[1]:
        return claim.notes(DEVICES, f"{message}: a ratio of the two is what more cores do")
    return claim.fails(DEVICES, message)
