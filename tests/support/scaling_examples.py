"""Runs of known throughput and known losses, and what a scaling report says of them."""

from __future__ import annotations

import itertools
from pathlib import Path

from support.metrics_examples import example_metrics, save
from testbed.analysis.runs.load import load_run
from testbed.analysis.scaling.report import scaling_report
from testbed.sweep.plan import Cell

NUMBERS = itertools.count()
NOISE = (0.0, 0.011, -0.009, 0.004, -0.006)  # of five repeats


def metrics_of(run_type: str, ranks: int, tokens_per_s: float = 1000.0, batch: int = 8, seed: int = 1, **more) -> dict:
    """A finished run of its own, whose throughput is exactly what is asked for."""
    more.setdefault("run_id", f"run-{next(NUMBERS)}")
    settings = {"run_type": run_type, "global_batch_size": batch, "seed": seed, "checkpoint_path": "anywhere"}
    settings |= more.pop("settings", {})
    config = {"run_type": run_type, "global_batch_size": batch, "seed": seed} | more.pop("training_config", {})
    # 64 tokens per sequence, 15 measured steps of which one is 25 % slower: only the rate below is compared here
    metrics = example_metrics(world_size=ranks, settings=settings, training_config=config, **more)
    metrics["summary"]["mean_tokens_per_sec_global"] = tokens_per_s
    return metrics


def write_arm(root: Path, run_type: str, ranks: int, tokens_per_s: float, *, n: int = 5, **more) -> list[Path]:
    rates = [tokens_per_s * (1 + NOISE[number % 5]) for number in range(n)]
    name = f"{more.pop('name', run_type)}_{ranks}"
    return [
        save(root / name / f"run_{number}", metrics_of(run_type, ranks, rate, **more))
        for number, rate in enumerate(rates, start=1)
    ]


def rows_of_plan(root: Path) -> list[dict]:
    """A row for each run below a folder of arms, as a sweep.json would have it."""
    folders = [path.parent for path in sorted(root.rglob("training_metrics.json"))]
    return [
        {"name": folder.parent.name, "run_type": folder.parent.name.partition("_")[0],
         "ranks": int(folder.parent.name[-1]), "folder": str(folder.relative_to(root))}
        for folder in folders
    ]  # fmt: skip


def cell(variant: str) -> Cell:
    """A cell of batch size 8, of which a report asks for nothing but its variant."""
    return Cell(variant, variant, variant.partition(":")[0], 2, 8, 1, 1, "anywhere", [], False)


def report_of(root: Path, protocol: str = "strong", **more) -> dict:
    return scaling_report([load_run(path) for path in sorted(root.rglob("training_metrics.json"))], protocol, **more)


def arm_of(report: dict, strategy: str, ranks: int, batch: int | None = None) -> dict:
    found = [
        arm
        for arm in report["arms"]
        if (arm["strategy"], arm["ranks"]) == (strategy, ranks) and batch in (None, arm["batch_size"])
    ]
    assert len(found) == 1, [(arm["strategy"], arm["ranks"], arm["batch_size"]) for arm in report["arms"]]
    return found[0]


def run_with_losses(root: Path, losses: list[float], step_time_s: float = 0.2, **more) -> Path:
    """Validations every 10 steps, each 1 s of wall time that is not training."""
    rows = [
        {"step": 10 * k, "epoch": 1, "val_loss": loss, "num_target_tokens": 6400, "num_sequences": 100,
         "wall_time_s": 1.0, "train_time_s": 10 * k * step_time_s, "elapsed_s": 10 * k * step_time_s + k}
        for k, loss in enumerate(losses, start=1)
    ]  # fmt: skip
    metrics = metrics_of(more.pop("run_type", "ddp"), 2, num_steps=10 * len(losses), evaluations=rows, **more)
    own = example_metrics(num_steps=10 * len(losses))["summary"]["mean_tokens_per_sec_global"]  # the rate of its steps
    metrics["summary"]["mean_tokens_per_sec_global"] = own
    return save(root, metrics)
