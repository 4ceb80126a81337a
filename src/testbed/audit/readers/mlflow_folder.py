"""Read a run in MLflow's file store: mlruns/EXPERIMENT/RUN with meta.yaml, metrics/, params/.

Format: mlflow/store/tracking/file_store.py. A line of metrics/NAME is `milliseconds value step`; before 1.0 it had no
step, and versions of 3 add columns.
"""

from __future__ import annotations

from pathlib import Path

from testbed.audit.readers.curves import Point, number
from testbed.audit.readers.settings import read_settings
from testbed.audit.readers.text import text_of
from testbed.audit.readers.tracked import reported_of
from testbed.audit.reported import Reported
from testbed.errors import InputError

FORM = "MLflow folder"


def read_mlflow_run(path: Path, is_typed: bool) -> list[Reported]:
    """Read the run of a meta.yaml. In a folder, one of an experiment or of anything else is passed over.

    Raises:
        InputError: it was typed and is not of a run.
    """
    meta = read_settings(text_of(path))
    if not ({"run_id", "run_uuid"} & meta.keys() and (path.parent / "metrics").is_dir()):
        if is_typed:
            raise InputError(f"{path} is of no MLflow run: it needs a run_id in it and a folder 'metrics' next to it")
        return []
    curves = {name: _points(text) for name, text in _texts(path.parent / "metrics").items()}
    if is_ordered := any(point.step for points in curves.values() for point in points):
        curves = {name: sorted(points, key=lambda point: point.step or 0) for name, points in curves.items()}
    settings = {name: text.strip() for name, text in _texts(path.parent / "params").items()}
    unread = [] if is_ordered or not curves else ["steps (the program logged none)"]
    run = reported_of(
        path.parent, FORM, {name: points for name, points in curves.items() if points}, settings, unread,
    )  # fmt: skip
    return [run] if is_typed or run.has_figures else []


def _texts(folder: Path) -> dict[str, str]:
    """Return the text of each file below a folder by its path there: a name of MLflow may hold slashes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): text_of(path) for path in files}


def _points(text: str) -> list[Point]:
    points = []
    for line in text.splitlines():
        cells = [number(cell) for cell in line.split()[:3]]
        if len(cells) >= 2 and cells[0] is not None and cells[1] is not None:
            step = cells[2] if len(cells) > 2 else None
            points.append(Point(int(step) if step is not None else None, cells[1], cells[0] / 1e3))
    return points
