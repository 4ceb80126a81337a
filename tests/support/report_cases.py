"""Runs of known numbers and known noise, and their report as a browser would read it."""

import itertools
from pathlib import Path

import numpy as np

from support.metrics_examples import example_metrics, save
from support.sweep_cases import write_sweep_json
from testbed.analysis.document.markdown import text
from testbed.analysis.document.model import Table, plain
from testbed.analysis.report.build import report_of
from testbed.analysis.runs.entries import Subject, subject_of
from testbed.analysis.runs.load import Run, find_runs, load_run

STEP_TIME_S = {"baseline": 0.3, "allreduce": 0.2, "ddp": 0.187, "fsdp": 0.215, "pipeline": 0.29}


PARTS = {"data_wait_s": 0.01, "forward_s": 0.27, "backward_s": 0.5, "optimizer_s": 0.06, "idle_s": 0.04}


def attribution(ranks: int, step_time_s: float, exposed: float, is_pipeline: bool) -> dict:
    """Parts that add up to the step: `exposed` of it is communication, idle takes the bubble of a pipeline."""
    shares = dict(PARTS)
    if is_pipeline:
        shares["idle_s"] = 0.24
    scale = (1 - exposed) / sum(shares.values())
    step = {name: share * scale * step_time_s for name, share in shares.items()}
    step |= {
        "step_time_s": step_time_s,
        "exposed_communication_s": exposed * step_time_s,
        "communication_s": exposed * step_time_s * 1.6,
        "compute_s": (step["forward_s"] + step["backward_s"] + step["optimizer_s"]),
        "num_collectives": 0 if ranks == 1 else 7,
        "collective_bytes": 0 if ranks == 1 else 2_529_792,
    }
    per_rank = [{"rank": rank, "steps": [step | {"step": number} for number in (11, 12, 13)]} for rank in range(ranks)]
    seconds = exposed * step_time_s * 1.6
    return {
        "source": "torch.profiler, 3 steps",
        "timeline": "host",
        "per_rank": per_rank,
        "collectives": []
        if ranks == 1
        else [
            {
                "name": "gloo:all_reduce",
                "num_per_step": 7,
                "bytes_per_step": 2_529_792,
                "bus_bytes_per_step": 2_529_792,
                "seconds_per_step": seconds,
            }
        ],
        "bound": None
        if ranks == 1
        else {
            "bus_bytes_per_step": 2_529_792,
            "bus_bandwidth_bytes_per_s": 9e8,
            "seconds_per_step": 2_529_792 / 9e8,
            "source": "measured: largest all-reduce over gloo",
        },
        "pipeline": {
            "stages": 2,
            "micro_batches": 4,
            "per_rank_bubble_fraction": [0.24, 0.27],
            "bubble_fraction": 0.255,
            "ideal_bubble_fraction": 0.2,
        }
        if is_pipeline
        else None,
    }


def run_metrics(run_type: str, ranks: int, repeat: int, *, is_profiled: bool = False, noise: float = 0.01) -> dict:
    """A run of a sweep with known noise: the repeats of one configuration differ as a quiet machine's do."""
    number = sorted(STEP_TIME_S).index(run_type)
    draws = np.random.default_rng([number, ranks, repeat, is_profiled]).normal(size=4)
    step_time_s = STEP_TIME_S[run_type] * (1 + noise * float(draws[0])) * (1.3 if is_profiled else 1)
    if ranks == 1 and run_type != "baseline":
        step_time_s *= 1.62
    metrics = example_metrics(
        num_steps=40,
        world_size=ranks,
        step_time_s=step_time_s,
        run_id=f"20260101T12{number:02}{ranks:02}Z-{repeat:04x}{int(is_profiled):04x}",
        git_commit="2524a8e0c3a1f00dfeedbeefcafe0123456789ab",
        command_line=f"python src/gpt2.py --run_type {run_type} --seed {repeat} --max_train_steps 40",
        training_config={"run_type": run_type, "seed": repeat},
        settings={"run_type": run_type, "seed": repeat, "profile": is_profiled},
        instrumented=is_profiled,
        attribution=attribution(ranks, step_time_s, 0.0 if ranks == 1 else 0.08, run_type == "pipeline")
        if is_profiled
        else None,
    )
    shift = 0.0008 * float(draws[1])
    for row in metrics["steps"]:
        row["loss"] += shift
        share = {"forward": 0.28, "backward": 0.58, "synchronise": 0.06 if ranks > 1 else 0.0, "optimizer": 0.06}
        for name, part in share.items():
            row[f"per_rank_{name}_s"] = [part * time for time in row["per_rank_step_time_s"]]
    times = np.cumsum([row["step_time_s"] for row in metrics["steps"]])
    metrics["evaluations"] = [
        metrics["evaluations"][0]
        | {
            "step": step,
            "val_loss": 9.1 - 3.0 * step / (step + 10) + shift,
            "train_time_s": float(times[step - 1]),
            "elapsed_s": float(times[step - 1]) + 0.04 * step,
        }
        for step in range(5, 41, 5)
    ]
    for rank, row in enumerate(metrics["memory"]["per_rank"]):
        row["peak_rss_bytes"] = int((660 + 30 * number - 40 * rank + 2 * draws[2]) * 2**20)
    metrics["timing"]["step_time_p95_above_median"] = 0.03
    return metrics


def write_sweep(folder: Path, run_types=tuple(STEP_TIME_S), ranks=(1, 2), repeats=5, is_profiled=True) -> Path:
    """A finished sweep as run_scaling_benchmarks.py leaves it, one profiled run of each configuration beside it."""
    cells = []
    for run_type, count in itertools.product(run_types, ranks):
        if (run_type == "baseline" and count > 1) or (run_type == "pipeline" and count == 1):
            continue
        name = f"{run_type}_{count}"
        for repeat in range(1, repeats + 1):
            save(folder / name / f"run_{repeat}", run_metrics(run_type, count, repeat))
            cells.append({"name": name, "run_type": run_type, "ranks": count, "folder": f"{name}/run_{repeat}"})
        if is_profiled:
            save(folder / "profiled" / name, run_metrics(run_type, count, 1, is_profiled=True))
    write_sweep_json(folder, cells)
    return folder


def load(folder: Path) -> list[Run]:
    return [load_run(path) for path in find_runs(folder)]


def arms(tmp_path: Path, **arms_of_metrics: list[dict]) -> Subject:
    for name, files in arms_of_metrics.items():
        for number, metrics in enumerate(files):
            save(tmp_path / name / f"run_{number}", metrics)
    return subject_of(load(tmp_path))


def repeats(run_type: str, step_time_s: float, count: int = 5, loss: float = 0.0, **overrides) -> list[dict]:
    """Runs whose step times differ by up to 1 %, with `loss` added to every validation loss."""
    files = []
    for number in range(count):
        metrics = example_metrics(
            num_steps=12,
            step_time_s=step_time_s * (1 + 0.0025 * (number - 2)),
            run_id=f"{run_type}-{number}-{step_time_s}",
            **{
                **overrides,
                "training_config": {"run_type": run_type, **overrides.get("training_config", {})},
                "settings": {"run_type": run_type, **overrides.get("settings", {})},
            },
        )
        for row in metrics["evaluations"]:
            row["val_loss"] += loss
        files.append(metrics)
    return files


def table(subject: Subject, folder: Path, title: str) -> list[list[str]]:
    """The rows of the first table whose title begins with `title`, names as text."""
    parts = [part for section in report_of(subject.runs, folder).sections for part in section.blocks]
    found = next(part for part in parts if isinstance(part, Table) and part.title.startswith(title))
    return [list(map(plain, row)) for row in found.rows]


def markdown(
    runs: list[Run], folder: Path = Path(), pictures: str | None = None, target_val_loss: float | None = None
) -> str:
    return text(report_of(runs, folder, target_val_loss), pictures) + "\n"
