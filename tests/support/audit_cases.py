"""One erroneous set of files for each thing that the audit finds, and its sound twin."""

from __future__ import annotations

import json
from pathlib import Path

from support import foreign_examples as foreign
from support.deepspeed_log import deepspeed_lines
from support.metrics_examples import merge, save, v1_metrics, v20_metrics
from support.real_logs import FOLDER

TOKENS = 29_171_712  # one epoch of seed 000's and 004's data: 56,976 sequences of 512


def v20(
    folder: Path,
    *,
    world: int = 1,
    batch: int = 16,
    accumulation: int = 1,
    wall_s: float = 1000.0,
    step_s: float | None = None,
    val_loss: float = 5.6,
    steps: int | None = None,
    **overrides,
) -> Path:
    """A 2.0 file whose counters agree with one another; `step_s` is its sampled micro step, all of the time if None."""
    steps = steps or TOKENS // (batch * 512)
    micro, tokens = steps * accumulation, steps * batch * 512
    step_s = wall_s / micro if step_s is None else step_s
    metrics = v20_metrics(world)
    rate = tokens / wall_s
    metrics["training_config"] |= {
        "micro_batch_size_per_gpu": batch // accumulation // world, "grad_accum_steps": accumulation,
        "global_batch_size": batch,
    }  # fmt: skip
    metrics["epochs"][0] |= {
        "epoch_wall_time_sec": wall_s, "steps": micro, "micro_steps": micro, "optimizer_steps": steps,
        "tokens_processed_global": tokens, "tokens_per_sec_global": rate, "val_loss_avg_global": val_loss,
        "step_time_mean_sec": step_s, "step_time_p50_sec": step_s, "step_time_p95_sec": step_s,
    }  # fmt: skip
    metrics["summary"] |= {"mean_tokens_per_sec_global": rate, "best_val_loss": val_loss}
    return save(folder, merge(metrics, overrides)).parent


def edited(paths: list[Path], edit) -> list[Path]:
    """The files in `paths` with `edit(metrics)` done to each."""
    for path in paths:
        metrics = json.loads((path / "training_metrics.json").read_text(encoding="utf-8"))
        edit(metrics)
        save(path, metrics)
    return paths


def scale_rows(metrics: dict, rows: slice, factor: float) -> None:
    for row in metrics["steps"][rows]:
        row["step_time_s"] *= factor
        row["per_rank_step_time_s"] = [time * factor for time in row["per_rank_step_time_s"]]


def slow_first_steps(metrics: dict) -> None:
    """No warm-up rows: the first two steps, four times as long, count."""
    for row in metrics["steps"]:
        row["is_warmup"] = False
    scale_rows(metrics, slice(0, 5), 0.5)  # the example's own warm-up steps
    scale_rows(metrics, slice(0, 2), 4.0)
    metrics["timing"]["warmup_steps"] = 0
    foreign.agreeing(metrics)


def ours(tmp: Path, second: dict | None = None, edit=None, **both) -> list[Path]:
    """Two arms of five repeats each, of which the second is faster; it gets other overrides or edits."""
    first = foreign.arm(tmp / "first", **both)
    ddp = {"step_time_s": 0.19, "training_config": {"run_type": "ddp"}}
    other = foreign.arm(tmp / "other", **merge(merge(ddp, dict(both)), second or {}))
    return first + (edited(other, edit) if edit else other)


def logs(tmp: Path, *times: tuple[float, ...], communication=None, losses=None) -> list[Path]:
    """One timing log per run, one time per rank."""
    losses = losses or [1.5] * len(times)
    communication = communication or [(0.0,) * len(run) if len(run) == 1 else (20.0,) * len(run) for run in times]
    return [foreign.timing_log(tmp, 128, run, comm, loss)
            for run, comm, loss in zip(times, communication, losses, strict=True)]  # fmt: skip


def wandb_pair(tmp: Path, ranks: int, second: dict, **first) -> list[Path]:
    one = {"iteration_s": 0.8287, "tflops_per_s": 8.4467, "losses": [2.3204553], "val_loss": 2.283445405960083}
    two = {"iteration_s": 0.8676, "tflops_per_s": 8.0681, "losses": [2.3204553] * ranks} | {"val_loss": one["val_loss"]}
    plain = {"has_profiler": False, "seconds_at": (15, 28)}
    return [foreign.wandb_log(tmp, "ddp_1GPU.out", 1, **(one | plain | first)),
            foreign.wandb_log(tmp, f"ddp_{ranks}GPU.out", ranks, **(two | plain | second))]  # fmt: skip


def beside(paths: list[Path], name: str, content: dict) -> list[Path]:
    for path in paths:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(json.dumps(content), encoding="utf-8")
    return paths


def real_log(tmp: Path, name: str, old: str = "", new: str = "") -> Path:
    """One of tests/support/real_logs, with one figure changed."""
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    tmp.mkdir(parents=True, exist_ok=True)
    (tmp / f"{name}.log").write_text(text.replace(old, new) if old else text, encoding="utf-8")
    return tmp / f"{name}.log"


NCCL = {"nccl_env": {"NCCL_DEBUG": "INFO"}}
QUIET = {"nccl_env": {"NCCL_DEBUG": "WARN"}}
BREAKDOWN = {"selected": {"wall_clock_breakdown": True}}
DIFFERENT = [2.31, 2.33]


def deepspeed_pair(tmp: Path, **second) -> list[Path]:
    """One rank and two with a printed global batch of 8; the second did half the first's work per rank."""
    half = {"iteration_s": 0.45, "tflops_per_s": 7.78, "losses": DIFFERENT, "val_loss": 2.25, "seconds_at": (15, 23)}
    return wandb_pair(tmp, 2, half | {"printed": deepspeed_lines(2)} | second, printed=deepspeed_lines(1))


# name -> (rule, words of the message, words of the corrected figure or None, the erroneous files, their sound twin)
CASES = {
    "unequal batch and steps": (
        "equal work", "global batch size 16 against 64 (4 times); optimizer steps 3,561 against 890 (0.25 times)",
        None,
        lambda t: [v20(t / "a", wall_s=2258.76), v20(t / "b", world=4, batch=64, wall_s=650.37)],
        lambda t: [v20(t / "a", wall_s=2258.76), v20(t / "b", world=4, wall_s=650.37)]),
    "another seed": ("equal work", "seed 1337 against 7", None,
        lambda t: ours(t, edit=lambda m: m["training_config"].update(seed=7)), ours),
    "another precision": ("equal work", "precision fp32 against bf16", None,
        lambda t: ours(t, {"training_config": {"precision": "bf16"}}), ours),
    "other data": ("equal work", "train data sha256 aaaaaaaa against cccccccc", None,
        lambda t: ours(t, {"training_config": {"dataset_sha256": {"train": "c" * 64}}}), ours),
    "a repeat that stopped early": ("equal work", "repeats of one arm did 19 / 20 optimizer steps", None,
        lambda t: edited((runs := ours(t))[:1], lambda m: m["steps"].pop() and None) and runs, ours),
    "counters: batch": ("equal work", "global batch 32 does not follow from micro batch 16", "16, or one",
        lambda t: [v20(t / "a", training_config={"global_batch_size": 32})], lambda t: [v20(t / "a")]),
    "a faster run learns worse": (
        "a faster run that learns worse is not faster", "validation loss 6.181 against 5.634: worse by 0.547",
        "no speed-up",
        lambda t: [v20(t / "a", val_loss=5.634), v20(t / "b", world=4, wall_s=300, val_loss=6.181)],
        lambda t: [v20(t / "a", val_loss=5.634), v20(t / "b", world=4, wall_s=300, val_loss=5.634)]),
    "ours learns worse": (
        "a faster run that learns worse is not faster", "worse by 0.010", "no speed-up",
        lambda t: ours(t, edit=lambda m: m["evaluations"][-1].update(val_loss=m["evaluations"][-1]["val_loss"] + 0.01)),
        ours),
    "a single run learns a little worse": (
        "a faster run that learns worse is not faster", "worse by 0.008. One run of a side does not tell", None,
        lambda t: [v20(t / "a", val_loss=5.6), v20(t / "b", world=4, wall_s=300, val_loss=5.608)],
        lambda t: [v20(t / "a", val_loss=5.6), v20(t / "b", world=4, wall_s=300, val_loss=5.603)]),
    "slower on more devices": (
        "more devices are faster", "more devices were slower: 0.87x (throughput of all devices) on 4 devices against 1",
        "22% efficiency: 4 devices do the work of 0.87",
        lambda t: [v20(t / "a"), v20(t / "b", world=4, wall_s=1150)],
        lambda t: [v20(t / "a"), v20(t / "b", world=4, wall_s=300)]),
    "DataParallel slower on more devices": (
        "more devices are faster", "0.95x (time of the one batch that DataParallel splits) on 4 devices", "24%",
        lambda t: wandb_pair(t, 4, {"iteration_s": 0.87, "tflops_per_s": 8.0453, "losses": DIFFERENT, "val_loss": 2.25,
                                    "module": "DataParallel"}),
        lambda t: wandb_pair(t, 4, {"losses": DIFFERENT, "val_loss": 2.25})),
    "a log slower on more devices": (
        "more devices are faster", "more devices were slower: 0.84x (time) on 2 devices against 1", "42% efficiency",
        lambda t: logs(t, (1000.0,), (1200.0, 1190.0)), lambda t: logs(t, (1000.0,), (520.0, 519.0))),
    "efficiency under half": (
        "more devices are faster", "efficiency is under 50 %: 1.67x (throughput of all devices) on 4 devices", "42%",
        lambda t: [v20(t / "a"), v20(t / "b", world=4, wall_s=600)],
        lambda t: [v20(t / "a"), v20(t / "b", world=4, wall_s=480)]),
    "another printed precision": (
        "equal work", "not equal work: precision fp32 against fp16", None,
        lambda t: deepspeed_pair(t, printed=deepspeed_lines(2, fp16=True)), deepspeed_pair),
    "a printed wall_clock_breakdown": (
        "instrumented runs", "wall_clock_breakdown synchronises", None,
        lambda t: deepspeed_pair(t, printed=deepspeed_lines(2, breakdown=True)), deepspeed_pair),
    "v1: a rate of one rank": (
        "throughput is global", "1/4 per epoch, so over the same data the second ran on 4 times as many ranks",
        "4 x 11,213.5 = 44,854 tokens/s over all ranks, 3.47x the first instead of 0.87x",
        lambda t: [save(t / "a", v1_metrics(1)).parent, save(t / "b", v1_metrics(4)).parent],
        lambda t: [save(t / "a", v1_metrics(1)).parent, save(t / "b", v1_metrics(1)).parent]),
    "rank JSON: a rate of one rank": ("throughput is global", "is of one rank (3,000.0, 2,900.0)", "5,900.0 tokens/s",
        lambda t: [foreign.rank_files(t, (100, 101), (3000, 2900), (4.5, 4.5))],
        lambda t: [foreign.rank_files(t, (100,), (3000,), (4.5,))]),
    "a rate multiplied by the devices": (
        "throughput is global", "is 4 times that: it was multiplied by the number of devices", "= 29,171.7 tokens/s",
        lambda t: [v20(t / "a", world=4, summary={"mean_tokens_per_sec_global": 4 * TOKENS / 1000})],
        lambda t: [v20(t / "a", world=4)]),
    "2.0: a rate of one rank": ("throughput is global", "is 1/4 of that: it is of one rank", "= 29,171.7 tokens/s",
        lambda t: [v20(t / "a", world=4, summary={"mean_tokens_per_sec_global": TOKENS / 4000})],
        lambda t: [v20(t / "a", world=4)]),
    "2.1: a rate that its rows contradict": ("throughput is global", "is 1.3 times that", "tokens/s",
        lambda t: ours(t, edit=lambda m: m["summary"].update(
            mean_tokens_per_sec_global=1.3 * m["summary"]["mean_tokens_per_sec_global"])), ours),
    "DataParallel counts its batch for each device": (
        "throughput is global", "DataParallel splits one batch over 4 devices",
        "9.95 TFLOP/s over all devices, 1.19x = 0.8362 s / 0.7035 s instead of 4.75x",
        lambda t: wandb_pair(t, 4, {"iteration_s": 0.7035, "tflops_per_s": 9.9498, "losses": [2.3373356],
                                    "val_loss": 2.283846414089203, "module": "DataParallel"},
                             iteration_s=0.8362, tflops_per_s=8.3710),
        lambda t: wandb_pair(t, 4, {"iteration_s": 0.7035, "tflops_per_s": 9.9498 / 4, "losses": [2.3373356],
                                    "val_loss": 2.283846414089203, "module": "DataParallel"},
                             iteration_s=0.8362, tflops_per_s=8.3710)),
    "rows of every second step": ("every step is timed", "10 rows for 20 optimizer steps", None,
        lambda t: ours(t, edit=lambda m: m.update(steps=m["steps"][1::2])), ours),
    "start-up in the window": ("warm-up is left out", "the first 2 measured steps take 4.0 times the median",
        "without them", lambda t: ours(t, edit=slow_first_steps), ours),
    "one run": ("one run proves nothing", "have n = 1, fewer than 5 repeats", None,
        lambda t: foreign.arm(t / "a", 1) + foreign.arm(t / "b", 1, world_size=1), ours),
    "all of one arm first": ("one run proves nothing", "all repeats of one arm ran before", None,
        lambda t: ours(t, {"timestamp_utc": "2026-01-02T12:00:00Z"}), ours),
    "wall_clock_breakdown": ("instrumented runs", "wall_clock_breakdown synchronises", None,
        lambda t: [v20(t / "a"), v20(t / "b", world=2, deepspeed_config=BREAKDOWN)],
        lambda t: [v20(t / "a"), v20(t / "b", world=2, deepspeed_config={"selected": {}})]),
    "NCCL logs": ("instrumented runs", "NCCL_DEBUG=INFO logs collectives", None,
        lambda t: beside([v20(t / "a"), v20(t / "b", world=2)], "launcher_metadata.json", NCCL),
        lambda t: beside([v20(t / "a"), v20(t / "b", world=2)], "launcher_metadata.json", QUIET)),
    "Nsight beside it": ("instrumented runs", "a profiler ran with it", None,
        lambda t: [v20(t / "a"), *beside([v20(t / "b", world=2)], "profiles/profile_summary.json", {})],
        lambda t: [v20(t / "a"), v20(t / "b", world=2)]),
    "ours with a profiler": ("instrumented runs", "the file marks the run as instrumented", None,
        lambda t: ours(t, {"instrumented": True}), ours),
    "gradients that were not synchronised": ("instrumented runs", "not synchronised", None,
        lambda t: ours(t, edit=lambda m: m["settings"].update(skip_gradient_sync=True)), ours),
    "a log with a profiler": ("instrumented runs", "a profiler ran", None,
        lambda t: wandb_pair(t, 2, {"losses": DIFFERENT, "val_loss": 2.25, "has_profiler": True}),
        lambda t: wandb_pair(t, 2, {"losses": DIFFERENT, "val_loss": 2.25})),
    "ranges for a profiler": ("instrumented runs", "ranges for a profiler were marked", None,
        lambda t: [v20(t / "a"), v20(t / "b", world=2, command_line="src/gpt2.py --profile_mode")],
        lambda t: [v20(t / "a"), v20(t / "b", world=2)]),
    "two commits and other settings": ("each figure can be traced", "commit 0000000000 against 1111111111, and other",
        None, lambda t: ours(t, {"git_commit": "1" * 40}), ours),
    "one of two trees is dirty": ("each figure can be traced", "differ from the commit: ", None,
        lambda t: ours(t, {"git_dirty": True}), ours),
    "other devices": ("equal devices", "cpu threads per rank 1 against 2", None,
        lambda t: ours(t, {"hardware": {"cpu_threads_per_rank": 2}}), ours),
    "identical batches on both ranks": (
        "equal work", "the same val loss 2.283445405960083 on 1 and on 2 ranks at the same batch per rank",
        "counted once, 8.068 TFLOP/s are useful: 0.96x the first instead of 1.91x",
        lambda t: wandb_pair(t, 2, {}), lambda t: wandb_pair(t, 2, {"losses": DIFFERENT, "val_loss": 2.25})),
    "identical batches in 2.0": ("equal work", "the same val loss 5.6123456789 on 1 and on 2 ranks", "useful: 0.95x",
        lambda t: [v20(t / "a", val_loss=5.6123456789, steps=100),
                   v20(t / "b", world=2, batch=32, wall_s=1050, val_loss=5.6123456789, steps=100)],
        lambda t: [v20(t / "a", val_loss=5.6123456789, steps=100),
                   v20(t / "b", world=2, wall_s=1050, val_loss=5.6123456789, steps=100)]),
    "ranks print one loss": ("equal work", "2 ranks report the same training loss 2.3204553", None,
        lambda t: wandb_pair(t, 2, {"val_loss": 2.25}),
        lambda t: wandb_pair(t, 2, {"losses": DIFFERENT, "val_loss": 2.25})),
    "ranks of one epoch with other times": (
        "step clock", "report 706.41, 418.27, 415.71, 418.10 s",
        "706.41 s, the slowest rank, instead of the mean 489.62 s",
        lambda t: logs(t, (706.41, 418.27, 415.71, 418.10)), lambda t: logs(t, (706.41, 700.0, 702.0, 705.0))),
    "more than linear": (
        "step clock", "4.25x (time) on 4 times the ranks is more than linear",
        "2.95x = 2,082.29 s / 706.41 s by the slowest rank, instead of 4.25x",
        lambda t: logs(t, (2082.29,), (706.41, 418.27, 415.71, 418.10)),
        lambda t: logs(t, (2082.29,), (706.41, 706.41, 706.41, 706.41))),
    "more than linear in 2.0": ("step clock", "2.13x (throughput of all devices) on 2 times the ranks", None,
        lambda t: [v20(t / "a"), v20(t / "b", world=2, wall_s=470)],
        lambda t: [v20(t / "a"), v20(t / "b", world=2, wall_s=520)]),
    "a mean over ranks as a step's time": ("step clock", "a step is done when its slowest rank is", "by the slowest",
        lambda t: ours(t, edit=lambda m: [row.update(per_rank_step_time_s=[1.2 * row["step_time_s"], 0.1])
                                          for row in m["steps"]] and None), ours),
    "a header that does not multiply": (
        "equal work", "1,280 does not follow from micro batch 160 x accumulation 2 x data ranks 8", "2,560",
        lambda t: [real_log(t, "torchtitan", "batch size 2560, grad", "batch size 1280, grad")],
        lambda t: [real_log(t, "torchtitan")]),
    "a loss of zero": ("unknown is null", "exactly 0.0", "unknown",
        lambda t: [v20(t / "a", val_loss=0.0)], lambda t: [v20(t / "a", val_loss=5.6)]),
}  # fmt: skip
ONLY_NOTES = {
    "one run", "all of one arm first", "rank JSON: a rate of one rank",
    "ranks print one loss", "a single run learns a little worse",
    "efficiency under half", "DataParallel slower on more devices",
}  # fmt: skip
