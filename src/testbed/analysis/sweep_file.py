"""sweep.json as analysis reads it: the plan and state of a sweep, which scripts/run_scaling_benchmarks.py writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SWEEP_FILE = "sweep.json"
PROTOCOLS = ("strong", "weak", "time_to_loss")


def read_sweep(out_dir: Path) -> dict[str, Any]:
    """The sweep.json in `out_dir`; empty where there is none. ValueError when it is not what a sweep writes."""
    path = Path(out_dir) / SWEEP_FILE
    if not path.exists():
        return {}
    try:
        sweep = json.loads(path.read_text(encoding="utf-8"))
        needed = ("name", "variant", "ranks", "batch_size", "folder", "status")
        missing = {name for cell in sweep["cells"] for name in needed if name not in cell}
        if missing or sweep["protocol"] not in PROTOCOLS:
            raise ValueError(f"lacks {', '.join(sorted(missing))}" if missing else f"protocol {sweep['protocol']!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the plan of a sweep: {error}") from None
    return sweep
