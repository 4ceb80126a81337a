"""Say a diagnosis in sentences: the rank, the cause, what it costs, how sure that is, and what to try."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from testbed.analysis.diagnosis.diagnose import ELSEWHERE, OF_DEVICES, Diagnosis, Finding
from testbed.analysis.diagnosis.shifts import CONFIDENCE
from testbed.config.run_types import run_types_that_work_with, run_types_with
from testbed.errors import as_lines

NOTHING = "nothing stands out"
SHOWN = (  # docs/results/diagnosis/cases.jsonl; a test compares them
    "of 100 planted slow-downs on two ranks it named 96 rightly, and of 50 undisturbed runs it blamed 1, with every "
    "step watched (docs/diagnosis.md)"
)
Fits = Callable[[Mapping[str, Any]], bool]


def _is_of(run_types: tuple[str, ...]) -> Fits:
    return lambda settings: settings.get("run_type") in run_types


def _can_write_in_background(settings: Mapping[str, Any]) -> bool:
    return settings.get("async_mode") != "async" and _is_of(run_types_that_work_with("async_mode async"))(settings)


WHOLE = run_types_with(keeps="whole", devices="per_rank")
TRY: dict[str, tuple[str | tuple[str, Fits], ...]] = {  # with a condition on the run's flags: where it can take that
    "data": (
        ("--num_workers 2 reads ahead", lambda settings: not settings.get("num_workers")),
        "is the file on a slow disk of that host?",
    ),
    "forward": ("look for what only this rank does in forward: --profile shows its operators",),
    "backward": ("look for what only this rank does in backward: --profile shows its operators",),
    "optimizer": ("--profile shows its operators", ("--run_type fsdp shards the optimizer's work", _is_of(WHOLE))),
    "collective": ("--log_collectives shows each call of it; see docs/evidence.md",),
    "link": (
        ("--gradient_compression bf16", lambda settings: settings.get("gradient_compression") == "none"),
        ("more --grad_accum_steps", _is_of(WHOLE)),
        "a faster network (docs/network.md)",
    ),
    "late": (
        "nvidia-smi -q -d PERFORMANCE on its host shows whether its GPU is throttled",
        "--profile shows its operators, and merge_traces.py all ranks on one clock",
    ),
    "core": (
        "move the other work",
        ("--bind_cores", lambda settings: not settings.get("bind_cores")),
        "fewer --threads_per_rank if ranks have more threads than cores",
    ),
    "garbage collection": ("something makes many objects in each step: gc.freeze() after the start, or fewer objects",),
    "writing": (
        "a larger --steps_per_print",
        ("fewer --track", lambda settings: bool(settings.get("track"))),
        "a faster disk for --checkpoint_path",
    ),
    "checkpoints": ("a larger --save_every", ("--async_mode async", _can_write_in_background)),
    "validation": ("a larger --eval_every", "a smaller --max_val_steps"),
    "start-up": ("its disk or imports are slow: a local copy of the environment and of the data",),
}


def sentence(finding: Finding) -> str:
    """Return one sentence on a finding, without what to try."""
    words = f"{_who(finding)}{_what(finding)}"
    if finding.share is None:
        return f"{words}: {finding.shift.seconds:.1f} s once"
    cost = f"{_time(finding.shift.seconds)} per step, {finding.share:.1%} of it"
    if not math.isfinite(finding.shift.score):
        return f"{words}: {cost}"
    interval = f"{CONFIDENCE:.0%} interval {_time(finding.shift.low)} to {_time(finding.shift.high)}"
    return f"{words}: {cost} ({interval})"


def way_out(finding: Finding) -> str:
    """Return what to try, of what the run can take and has not taken."""
    advice = [(one, None) if isinstance(one, str) else one for one in TRY[finding.details.get("what", finding.cause)]]
    return "; ".join(words for words, fits in advice if fits is None or fits(finding.settings))


def verdict(diagnosis: Diagnosis) -> str:
    """Return one line: the costliest finding, that nothing stands out, or why nothing can be said."""
    if diagnosis.unknown is not None:
        return f"not known: {diagnosis.unknown}"
    if not diagnosis.findings:
        return NOTHING
    more = len(diagnosis.findings) - 1
    return sentence(diagnosis.findings[0]) + (f"; and {more} more" if more else "")


def text_of(diagnosis: Diagnosis) -> str:
    """Return all that a terminal shows of a diagnosis."""
    if diagnosis.unknown is not None or not diagnosis.findings:
        lines = [verdict(diagnosis)]
    else:
        lines = [line for one in diagnosis.findings for line in (sentence(one), f"  try: {way_out(one)}")]
    notes = diagnosis.notes
    if diagnosis.unknown is None and OF_DEVICES not in notes:
        notes = (*notes, SHOWN)
    return as_lines([*lines, *(f"note: {note}" for note in notes)])


def json_of(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis for a program."""
    return {
        "unknown": diagnosis.unknown,
        "findings": [
            {
                "cause": one.cause,
                "rank": one.rank,
                "seconds": one.shift.seconds,
                "low": one.shift.low,
                "high": one.shift.high,
                "share_of_step": one.share,
                "details": dict(one.details),
                "sentence": sentence(one),
                "try": way_out(one),
            }
            for one in diagnosis.findings
        ],
        "notes": list(diagnosis.notes),
    }


def _who(finding: Finding) -> str:
    return "all ranks: " if finding.rank is None else f"rank {finding.rank} "


def _what(finding: Finding) -> str:
    details, is_one = finding.details, finding.rank is not None
    if finding.cause == "core":
        is_waiting = details["is_waiting"]
        reason = "it waits for its core, which something else uses" if is_waiting else "it computes all more slowly"
        return f"has a slow core ({reason})"
    if finding.cause == "link":
        return (
            f"a slow link; all collectives of a step ({details['bytes'] / 1e6:.3g} MB of inputs and outputs; the "
            f"longest is {details['collective']} in {details['phase']}) take longer than as many small ones"
        )
    if finding.cause == "collective" and details.get("is_all"):
        where = "outside the step's phases" if details["phase"] == ELSEWHERE else f"in {details['phase']}"
        most = f"{details['collective']} {where}, {_time(details['call_s'])} by the mean"
        return f"is slow in its calls of collectives, before the transfers begin (most in {most})"
    if finding.cause == "collective":
        which = f"in {details['collective']}" if "collective" in details else "between its collectives"
        where = "outside the step's phases" if details["phase"] == ELSEWHERE else f"of {details['phase']}"
        return f"is slow {which} {where}, before the transfer begins"
    if finding.cause == "late":
        longer = "" if details["phase"] is None else f" (its {details['phase'].replace('_', ' ')} takes longer)"
        return f"comes last to collectives{longer}, and in one of them the other GPUs wait for it so long"
    if finding.cause == "writing":
        return "is busy between the steps: rows, printing, writing" if is_one else f"{details['what']} take time"
    if finding.cause == "start-up":
        return "starts later than the others"
    if finding.cause == "data":
        return "waits longer for its data" if is_one else "wait for data"
    if finding.cause == "garbage collection":
        return "collects more garbage" if is_one else "collect garbage"
    return f"is slow in {finding.cause}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if abs(seconds) < 1 else f"{seconds:.3g} s"
