"""Make states as transformers' Trainer does: its arithmetic of batches, epochs, schedules and rates, for any settings.

As in trainer.py and trainer_utils.py of 4.2 to 5; the losses and the seconds are made up.
"""

from __future__ import annotations

import math
import random
from typing import Any


def simulated_state(choose: random.Random) -> dict[str, Any]:
    """Return the state of a run with settings drawn from what people use."""
    batch, ranks = choose.choice([1, 2, 4, 8, 16, 32]), choose.choice([1, 1, 2, 8])
    examples = choose.randint(40, 500 * batch * ranks)
    accumulation, is_new = choose.choice([1, 1, 2, 4, 8, 16]), choose.random() < 0.5
    passes = examples / (batch * ranks)
    per_epoch = max(1, math.ceil(passes) if choose.random() < 0.8 else math.floor(passes))  # drop_last
    updates = max(1, math.ceil(per_epoch / accumulation) if is_new else per_epoch // accumulation)
    if choose.random() < 0.5:
        wanted: float = choose.choice([1, 2, 3, 3, 5, 10, 2.5, 0.7])
        max_steps, epochs = math.ceil(wanted * updates), math.ceil(wanted)
        samples = examples * wanted
    else:
        max_steps = choose.choice([10, 60, 100, 500, 1000])
        epochs = max_steps // updates + (max_steps % updates > 0)
        samples = max_steps * batch * ranks * accumulation
    rows: list[dict[str, Any]] = []
    done, logged_loss, since = 0, 0.0, 0
    state: dict[str, Any] = {"global_step": 0, "epoch": 0.0}
    every = choose.choice([1, 5, 10, 25, 100, 500])
    evaluate_every = choose.choice([0, 0, every, 50, updates])
    warmup, peak = choose.choice([0, 0, 10, max_steps // 10]), choose.choice([1e-5, 5e-5, 2e-4])
    size, eval_batch = choose.randint(10, 5000), choose.choice([1, 4, 8, 16, 64])
    losses: list[float] = []
    for epoch in range(epochs):
        for index in range(per_epoch):
            is_last = index + 1 == per_epoch
            if not ((index + 1) % accumulation == 0 or (is_last and (is_new or per_epoch <= accumulation))):
                continue
            done += 1
            loss = 1.0 + 2.0 * math.exp(-done / 200) + choose.gauss(0, 0.05)
            losses.append(loss)
            logged_loss, since = logged_loss + loss, since + 1
            at = epoch + (index + 1) / per_epoch
            shown = at if is_new else round(at, 2)
            state = {"global_step": done, "epoch": at}
            if done % every == 0:
                rate = peak * min(done / max(1, warmup), max(0.0, (max_steps - done) / max(1, max_steps - warmup)))
                rows.append(
                    {"epoch": shown, "learning_rate": rate, "loss": round(logged_loss / since, 4), "step": done}
                )
                logged_loss, since = 0.0, 0
            if evaluate_every and done % evaluate_every == 0:
                rows.append(_evaluation(choose, size, eval_batch * ranks) | {"epoch": shown, "step": done})
            if done == max_steps:
                break
        if done == max_steps:
            break
    seconds = done * choose.uniform(0.05, 5)
    if choose.random() < 0.7:
        rows.append({
            "epoch": state["epoch"] if is_new else round(state["epoch"], 2), "step": done,
            "total_flos": 1e15, "train_loss": sum(losses) / len(losses), "train_runtime": round(seconds, 4),
            "train_samples_per_second": round(samples / seconds, 3),
            "train_steps_per_second": round(max_steps / seconds, 3),
        })  # fmt: skip
        if choose.random() < 0.3:  # of another set
            other = _evaluation(choose, choose.randint(10, 5000), eval_batch * ranks)
            rows.append(other | {"epoch": rows[-1]["epoch"], "step": done})
    return state | {
        "max_steps": max_steps, "num_train_epochs": epochs, "train_batch_size": batch, "total_flos": 1e15,
        "log_history": rows,
    }  # fmt: skip


def _evaluation(choose: random.Random, size: int, batch: int) -> dict[str, float]:
    seconds = size * choose.uniform(0.001, 0.3)
    return {
        "eval_loss": choose.uniform(1, 2), "eval_runtime": round(seconds, 4),
        "eval_samples_per_second": round(size / seconds, 3),
        "eval_steps_per_second": round(math.ceil(size / batch) / seconds, 3),
    }  # fmt: skip
