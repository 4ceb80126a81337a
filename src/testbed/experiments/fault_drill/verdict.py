"""Judge whether a drilled run lost anything, by its files and its starts against the reference run."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.metrics.file import read_metrics
from testbed.run_files import COMPLETE, FAILED, METRICS, PREEMPTED, WEIGHTS


@dataclass(frozen=True)
class Reference:
    """The reference run of a run type."""

    weights_sha256: str
    losses: list[float]
    timeline: dict[str, float]  # when each event was seen, seconds since the start; and its end
    needed_bytes: int  # that its folder took at most, roughly
    seconds: float


def weights_sha256(path: Path) -> str:
    """Hash the tensors of a safetensors file: names, types, shapes and bytes, in the order of the names.

    Raises:
        OSError, safetensors.SafetensorError: it cannot be read.
    """
    from safetensors.numpy import load_file

    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        digest.update(tensor.tobytes())
    return digest.hexdigest()


def mark_of(directory: Path) -> str | None:
    """Return what the run's folder says of how it ended."""
    marks = {COMPLETE: "complete", PREEMPTED: "preempted", FAILED: "failed"}
    found = [word for name, word in marks.items() if (directory / name).exists()]
    return " and ".join(found) or None


def problems_of_files(directory: Path, reference: Reference, extensions: Path) -> list[str]:
    """Return what is wrong with the files of a run that says that it is complete."""
    found = []
    try:
        sha256 = weights_sha256(directory / WEIGHTS[0])
        if sha256 != reference.weights_sha256:
            found.append(f"other weights than the reference run: {sha256[:12]}, not {reference.weights_sha256[:12]}")
    except Exception as error:
        found.append(f"{WEIGHTS[0]} cannot be read ({error})")
    if mark_of(directory) != "complete":
        found.append(f"its folder says {mark_of(directory)}, not complete")
    found += _problems_of_metrics(directory / METRICS, reference)
    names = sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))
    if half_written := [name for name in names if name.endswith(".tmp")]:
        found.append(f"half-written files are left: {', '.join(half_written)}")
    if locks := sorted(str(path.relative_to(extensions)) for path in extensions.rglob("*lock")):
        found.append(f"locks are left in TORCH_EXTENSIONS_DIR: {', '.join(locks)}")
    return found


def _problems_of_metrics(path: Path, reference: Reference) -> list[str]:
    try:
        metrics = read_metrics(path)
    except ValueError as error:
        return [f"the metrics are not whole: {error}"]
    found = []
    if metrics["status"] != "complete":
        found.append(f"the metrics say {metrics['status']}, not complete")
    steps = [row["step"] for row in metrics["steps"]]
    if steps != list(range(1, len(reference.losses) + 1)):
        found.append(f"the metrics hold the steps {steps}, not 1 to {len(reference.losses)} once each")
    elif [row["loss"] for row in metrics["steps"]] != reference.losses:
        found.append("the metrics hold other losses than the reference run's")
    return found


def problems_of_resuming(starts: list[dict[str, Any]], segments: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong with how the last start resumed: it must go on from the newest whole checkpoint. A run that
    began at step 1, or resumed from an older or a damaged one, may end with the same weights.

    Args:
        starts: rows of fault_drill.json; `newest_whole` of each is what could be gone on from after it.
    """
    last, began = starts[-1], segments[-1]["first_step"] - 1 if segments else 0
    found = []
    if len(starts) == 1:
        # torchrun started it again within: what was saved when it was struck must not be lost. A signal that came
        # with the last step, when there was nothing left to stop, started nothing again
        least = (last["struck"] or {}).get("newest_saved") or 0
        if last["begun"] > 1 and began < least:
            found.append(f"its last start went on after step {began}, though step {least} was saved")
    elif starts[-2]["mark"] != "complete":
        wanted = starts[-2]["newest_whole"] or 0
        if began != wanted:
            found.append(f"its last start went on after step {began}, not after {wanted}, the newest whole checkpoint")
        if again := [step for step in last["saves"] if step <= wanted]:
            found.append(f"its last start saved the steps {again} again, though the checkpoint of {wanted} was whole")
    return found


def segments_of(directory: Path) -> list[dict[str, Any]]:
    """Return the starts as the metrics list them; none where they cannot be read."""
    try:
        return read_metrics(directory / METRICS).get("segments") or []
    except ValueError:
        return []
