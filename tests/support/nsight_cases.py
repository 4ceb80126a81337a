"""Folders of runs with what Nsight leaves in them."""

from __future__ import annotations

import json
from pathlib import Path

from support import nsys_examples as example
from support.metrics_examples import save

DIFF = "scripts/profiling/diff_profiles.py"


def text_file(folder: Path, text: str, name: str = "nsys_stats_node0.txt") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(text.encode())
    return path


def run_folder(folder: Path, *, text: str | None = None, metrics: dict | None = None) -> Path:
    text_file(folder / "profiles", example.stats_text("indian") if text is None else text)
    if metrics is not None:
        save(folder, metrics)
    return folder


def chrome_trace(folder: Path, rank: int = 0, **changes) -> Path:
    """Two steps of 1 ms; in each a linear of 400 us that calls an addmm of 300 us, and on the device a kernel."""
    events = []
    for start in (1000.5, 3000.5):
        span = {"ph": "X", "pid": 1, "tid": 1}
        events += [
            {**span, "cat": "user_annotation", "name": "train/step", "ts": start, "dur": 1000.0},
            {**span, "cat": "cpu_op", "name": "aten::linear", "ts": start + 100, "dur": 400.125},
            {**span, "cat": "cpu_op", "name": "aten::addmm", "ts": start + 150, "dur": 300.0},
            {**span, "cat": "cpu_op", "name": "aten::linear", "ts": start + 1200, "dur": 50.0},  # outside
            {**span, "cat": "kernel", "name": "gemm", "ts": start + 200, "dur": 80.0, "pid": 0, "tid": 7},
        ]
    path = folder / "profiler_logs" / f"rank{rank}.pt.trace.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, **changes}), encoding="utf-8")
    return path
