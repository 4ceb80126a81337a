"""Pairs of equal runs as scripts/more/certify_machine.py leaves them, with noise that is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from support.metrics_examples import example_metrics, save
from testbed.analysis.certificate import CERTIFICATE_FILE, certificate_of, save_certificate

COMMAND = "python scripts/more/certify_machine.py"


def write_pairs(
    folder: Path, noise: float = 0.01, pairs: int = 20, name: str = "baseline_1rank_batch8", seed: int = 0, **changes
) -> Path:
    """Runs of one command whose logarithms scatter by `noise`. Side a begins the odd pairs, and b the even ones."""
    generator = np.random.default_rng(seed)
    for number in range(1, pairs + 1):
        for place, side in enumerate("ab" if number % 2 else "ba"):
            minute = 2 * number + place
            metrics = example_metrics(
                num_steps=6, warmup_steps=1, world_size=1, step_time_s=0.2 * float(np.exp(generator.normal(0, noise))),
                run_id=f"{folder.name}-{name}-{side}{number}",
                timestamp_utc=f"2026-01-01T{12 + minute // 60}:{minute % 60:02}:00Z",
                **changes,
            )  # fmt: skip
            save(folder / f"{name}_{side}" / f"run_{number}", metrics)
    return folder


def write_certificate(folder: Path, **of_pairs) -> Path:
    """The certificate alone, as a sweep has it in its folder."""
    made = write_pairs(folder.parent / f"{folder.name}-pairs", **of_pairs)
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / CERTIFICATE_FILE
    save_certificate(path, certificate_of(made, COMMAND))
    return path
