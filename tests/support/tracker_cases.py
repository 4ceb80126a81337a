"""One erroneous set of files of a tracker for each thing that the audit finds in them, and its sound twin."""

from __future__ import annotations

import json
import math
from pathlib import Path

from support import tracker_files as files
from support.real_logs import FOLDER

LOSSES = [4.0, 3.5, 3.2, 3.0, 2.9, 2.8, 2.7, 2.65]
RATES = [1000.0, 1010.0, 990.0, 1005.0, 1001.0, 998.0, 1003.0, 1002.0]


def curves(folder: Path, at: int = 5, **others: float) -> list[Path]:
    """Write torchtitan's curves. `others` are factors of the value at one step, by the letters of a curve's name."""
    scalars = {
        "loss_metrics/global_avg_loss": LOSSES, "throughput(tps)": RATES, "tflops": [rate * 0.035 for rate in RATES],
        "mfu(%)": [rate * 0.0112 for rate in RATES], "memory/max_reserved(GiB)": [20.0 + step for step in range(8)],
        "memory/max_reserved(%)": [(20.0 + step) / 0.8 for step in range(8)],
    }  # fmt: skip
    changed = {
        name: [value * others.get(name, 1.0) if step == at else value for step, value in enumerate(values)]
        for name, values in scalars.items()
    }
    return [files.event_file(folder, changed)]


def megatron(folder: Path, factor: float = 1.0) -> list[Path]:
    times = [2.0, 1.9, 1.95, 2.05, 1.98, 1.97]
    rates = [100 * 2.0 / time for time in times]
    rates[3] *= factor
    return [files.event_file(folder, {"lm loss": LOSSES[:6], "iteration-time": times, "throughput": rates})]


def summary(folder: Path, rate: str = "1089236") -> list[Path]:
    return [files.wandb_folder(folder, files.NANOCHAT_SUMMARY.replace("1089236", rate))]


def transformers_summary(folder: Path, **changes: float) -> list[Path]:
    """Write a W&B summary of transformers' Trainer: 1,000 steps of 8 samples in 100 s."""
    end = {"train_runtime": 100.0, "train_loss": 2.0, "train_steps_per_second": 10.0, "train_samples_per_second": 80.0}
    content = {"train/global_step": 1000} | {f"train/{name}": value for name, value in (end | changes).items()}
    return [files.wandb_folder(folder, json.dumps(content))]


def mlflow(folder: Path, micro: int = 8) -> Path:
    curve = "".join(f"{1_700_000_000_000 + 1000 * step} {loss} {step}\n" for step, loss in enumerate(LOSSES))
    params = {"world_size": "4", "per_device_train_batch_size": str(micro), "gradient_accumulation_steps": "2"}
    return files.mlflow_run(folder, {"train/loss": curve}, params)


def lightning(folder: Path, column: str = "", factor: float = 1.0) -> list[Path]:
    """Write a table with the rates of one device and of four, the loss and its perplexity."""
    folder.mkdir(parents=True)
    lines = ["step,epoch,device/items_per_sec,items_per_sec,device/mfu,train_loss_step,train_perplexity_step"]
    for step, (loss, rate) in enumerate(zip(LOSSES, RATES, strict=True)):
        row = [rate, 4 * rate, rate / 2500, loss, math.exp(loss)]
        at = lines[0].split(",").index(column) - 2 if column else None
        if at is not None and (step == 4 or column == "device/mfu"):
            row[at] *= factor
        lines.append(",".join(map(repr, [step, 0, *row])))
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [folder / "metrics.csv"]


def state(folder: Path, at: int | None = None, **changes: float) -> list[Path]:
    """Write the real state, with other figures in itself, or in one entry of its log."""
    content = json.loads((FOLDER / "trainer_state.json").read_text(encoding="utf-8"))
    (content if at is None else content["log_history"][at]).update(changes)
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps(content), encoding="utf-8")
    return [folder / "trainer_state.json"]


FOLLOWS = "figures follow from one another"
# as in audit_cases.CASES
TRACKER_CASES = {
    "event file: TFLOP/s": (FOLLOWS, "the line of step 5: tflops / throughput(tps) is 0.042", "= 0.035",
        lambda t: curves(t, tflops=1.2), curves),
    "event file: MFU": (FOLLOWS, "the line of step 5: mfu(%) / tflops", None,
        lambda t: curves(t, **{"mfu(%)": 0.5}), curves),
    "event file: memory": (FOLLOWS, "the line of step 5: memory/max_reserved(GiB) / memory/max_reserved(%) is 0.88",
        "= 0.8", lambda t: curves(t, **{"memory/max_reserved(GiB)": 1.1}), curves),
    "event file: a loss that is no number": (
        "a faster run that learns worse is not faster", "not a number in the last 1 of 8 lines", None,
        lambda t: curves(t, at=7, **{"loss_metrics/global_avg_loss": math.nan}), curves),
    "event file: Megatron-LM's rate": (FOLLOWS, "the line of step 3: throughput x ms", None,
        lambda t: megatron(t, 1.05), megatron),
    "W&B: a rate against the settings": (FOLLOWS, "total_batch_size says 524,288", None,
        lambda t: summary(t, "1189236"), summary),
    "W&B: a rate that counts the schedule": ("throughput is global", "40 steps/s x 100.00 s = 4,000 steps", "at most",
        lambda t: transformers_summary(t, train_steps_per_second=40.0, train_samples_per_second=320.0),
        transformers_summary),
    "MLflow: two batches": ("equal work", "global batch size 64 against 32", None,
        lambda t: [mlflow(t / "a"), mlflow(t / "b", micro=4)], lambda t: [mlflow(t / "a"), mlflow(t / "b")]),
    "Lightning: the rate of all devices": (FOLLOWS, "the line of step 4: items_per_sec / device/items_per_sec", "= 4",
        lambda t: lightning(t, "items_per_sec", 1.1), lightning),
    "Lightning: a perplexity": (FOLLOWS, "the line of step 4: train_perplexity_step / exp(train_loss_step) is 1.1",
        "= 1", lambda t: lightning(t, "train_perplexity_step", 1.1), lightning),
    "Lightning: over 100 %": (FOLLOWS, "an MFU of 120% is more than the device can do", None,
        lambda t: lightning(t, "device/mfu", 3.0), lightning),
    "state: the seconds of an evaluation": (FOLLOWS, "the line of step 802: eval_g0_runtime x eval_g0_samples_per_sec",
        "= 401", lambda t: state(t, 4, eval_g0_runtime=5.86), state),
    "state: an epoch": (FOLLOWS, "the line of step 1,604: step / epoch", "= 401",
        lambda t: state(t, 7, epoch=4.6), state),
    "state: the end of a schedule": (FOLLOWS, "max_steps 21,030 are 52.44 epochs", None,
        lambda t: state(t, max_steps=21_030), state),
}  # fmt: skip
