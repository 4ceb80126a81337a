"""Files as other programs leave them, built in code, with the figures that the five earlier systems published."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from support.metrics_examples import example_metrics, merge, save
from support.sweep_cases import write_sweep_json


def timing_log(
    folder: Path, batch: int, times_s: Sequence[float], communication_s: Sequence[float], val_loss: float
) -> Path:
    """Seed 001: an epoch's breakdown for each rank, the average that it put into its table, and the losses."""
    ranks = len(times_s)

    def part(total_s: float, communication_s: float, title: str, prefix: str) -> str:
        return (
            f"2024-12-11 15:00:12,837 - {prefix}\n{title}:\n    Total epoch time: {total_s:.2f} seconds\n"
            f"    Data loading time: 3.58 seconds\n    Data movement time: 0.96 seconds\n"
            f"    Training compute time: {total_s - communication_s - 4.54:.2f} seconds\n"
            f"    Training communication time: {communication_s:.2f} seconds\n"
        )

    text = f"2024-12-11 14:47:00,100 - Starting training process\nTotal batches per epoch: {1_003_598 // batch}\n"
    if ranks == 1:
        text += part(times_s[0], communication_s[0], "Epoch 0 timing breakdown", "")
    else:
        mean = sum(times_s) / ranks, sum(communication_s) / ranks
        text += part(*mean, "Average metrics", "")
        for rank in range(ranks):
            title = f"Rank {rank} Epoch 0 timing breakdown"
            text += part(times_s[rank], communication_s[rank], title, f"Rank {rank} -")
    text += f"2024-12-11 15:00:28,525 - Epoch 0: train loss 0.8129, val loss {val_loss:.4f}\n"
    return _write(folder / f"training_b{batch}_g{ranks}_20241211.log", text)


def rank_files(folder: Path, times_s: Sequence[float], rates: Sequence[float], losses: Sequence[float]) -> Path:
    """Seed 002: one small JSON per rank and epoch; here one epoch. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, (time_s, rate, loss) in enumerate(zip(times_s, rates, losses, strict=True)):
        values = {"validation_loss": loss, "bleu": 0.2, "training_time": time_s, "tokens_per_sec": rate}
        (folder / f"rank{rank}_results_epoch0.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def pipeline_files(folder: Path, loss: float = 4.5) -> Path:
    """Seed 002's pipeline: a loss and a score, no time. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"validation_loss": loss, "bleu": 0.2}
    (folder / "eval_results_epoch1.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def wandb_log(
    folder: Path,
    name: str,
    ranks: int,
    iteration_s: float,
    tflops_per_s: float,
    losses: Sequence[float],
    val_loss: float,
    *,
    has_profiler: bool = True,
    module: str = "DistributedDataParallel",
    seconds_at: tuple[int, int] = (15, 40),
    printed: str = "",
) -> Path:
    """Seed 003: what its trainer printed at steps 15 and 30, and wandb's summary of each process.

    `losses` are those of step 30, one per process; `seconds_at` is where the progress bar stood at the two steps;
    `printed` is what the log begins with.
    """
    lines = [*printed.splitlines(), *[f"World Size:  {ranks}"] * len(losses)]
    for step, clock_s, time_s in ((15, seconds_at[0], 1.9 * iteration_s), (30, seconds_at[1], iteration_s)):
        lines.append(f"Training:  48%|####  | {step}/31 [00:{clock_s:02d}<00:16,  1.28s/it]")
        for loss in losses:
            lines.append(f"Step {step}: loss {loss!r}" if step == 30 else f"Step {step}: loss {loss + 0.2!r}")
            lines.append(f"elapsed_time_per_iteration: {time_s!r} s")
            lines.append(f"Throughput (TFLOPS) at step {step}: {tflops_per_s!r}")
        lines.append(
            "| 0  | NVIDIA L4 |  100.0%  |      3656.0      |     18939.0      |      23034.0      |      73.0°C      |"
        )
        lines.append("Validation: 100%|####| 10/10 [00:04<00:00,  2.53it/s]")
    if has_profiler:
        lines.append("          ProfilerStep*   0.00%   0.000us   0.00%   25.000s   15")
    lines.append(f"          {module}.forward   0.00%   0.000us   0.00%   7.597s   20")
    for loss in losses:
        lines.append(f"Final Validation loss: {val_loss!r}, Perplexity: 9.81")
        lines += ["wandb: Run summary:", f"wandb:  iteration-time {iteration_s:.5f}", f"wandb:  loss {loss:.5f}"]
        lines += [f"wandb:  throughput {tflops_per_s:.5f}", f"wandb:  validation_loss {val_loss:.5f}", "wandb: "]
    return _write(folder / name, "\n".join(lines) + "\n")


def metrics_export(path: Path, metric: str, runs: dict[str, Sequence[float]]) -> Path:
    """A wandb chart saved as CSV: one metric of several runs, three columns each."""
    columns = [f'"{run} - {metric}{suffix}"' for run in runs for suffix in ("", "__MIN", "__MAX")]
    rows = [",".join(['"Step"', *columns])]
    for step in range(max(map(len, runs.values()))):
        cells = [f'"{values[step]!r}"' if step < len(values) else '""' for values in runs.values() for _ in range(3)]
        rows.append(",".join([f'"{step}"', *cells]))
    return _write(path, "\n".join(rows) + "\n")


def arm(folder: Path, repeats: int = 5, *, step_time_s: float = 0.2, **overrides) -> list[Path]:
    """Repeats of one configuration with other seeds and 1 % of noise; returns their folders."""
    noise, found = random.Random(folder.name), []
    for repeat in range(repeats):
        metrics = agreeing(example_metrics(step_time_s=step_time_s * noise.uniform(0.99, 1.01), **overrides))
        settings = {"checkpoint_path": f"run_{repeat}", "run_type": metrics["training_config"]["run_type"]}
        merge(metrics, {"training_config": {"seed": 1337 + repeat}, "settings": settings})
        found.append(save(folder / f"run_{repeat}", metrics).parent)
    return found


def agreeing(metrics: dict) -> dict:
    """The same file with micro batch and throughput as its global batch and its rows give them."""
    config = metrics["training_config"]
    config["micro_batch_size_per_gpu"] = config["global_batch_size"] // config["data_world_size"]
    measured = [row["step_time_s"] for row in metrics["steps"] if not row["is_warmup"]]
    rate = config["global_batch_size"] * config["seq_len"] * len(measured) / sum(measured)
    metrics["summary"]["mean_tokens_per_sec_global"] = rate
    return metrics


STRATEGIES = ("baseline", "allreduce", "ddp", "fsdp", "optimized")
FEW = ("baseline", "ddp")


def sweep(folder: Path, protocol: str = "strong", run_types: Sequence[str] = STRATEGIES, repeats: int = 5) -> Path:
    """Strategies x 1 and 2 ranks x two batch sizes, as scripts/run_scaling_benchmarks.py leaves them."""
    cells = []
    for run_type in run_types:
        for ranks in (1, 2):
            for batch_size in (8, 16):
                if run_type == "baseline" and ranks > 1:
                    continue
                global_batch = batch_size * (ranks if protocol == "weak" else 1)
                metrics = _cell_metrics(run_type, ranks, global_batch)
                name = f"{run_type}_{ranks}r_b{batch_size}"
                for number, path in enumerate(arm(folder / name, repeats, **metrics), start=1):
                    cells.append(
                        {"name": f"{name}_{number}", "run_type": run_type, "ranks": ranks, "batch_size": batch_size,
                         "folder": str(path.relative_to(folder))}
                    )  # fmt: skip
    write_sweep_json(folder, cells, protocol=protocol)
    _write(folder / "scaling_report.json", json.dumps({"status": "mismatch_allowed", "runs": {}}))
    return folder


def _cell_metrics(run_type: str, ranks: int, global_batch: int) -> dict:
    """Overrides of an example run: its time in proportion to its work, its loss better with a larger batch."""
    steps_s = 0.2 * global_batch / 8 / ranks * 1.05
    metrics = example_metrics(world_size=ranks, step_time_s=steps_s)
    return {
        "world_size": ranks,
        "step_time_s": steps_s,
        "training_config": {
            "run_type": run_type,
            "global_batch_size": global_batch,
            "deepspeed_enabled": run_type == "optimized",
            "zero_stage": 1 if run_type == "optimized" else None,
        },
        "evaluations": [{**row, "val_loss": row["val_loss"] - 1e-3 * global_batch} for row in metrics["evaluations"]],
    }


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
