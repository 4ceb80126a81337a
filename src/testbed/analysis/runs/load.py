"""Load training_metrics.json files of every version as one kind of `Run`.

Nothing is filled in: what a file does not record is None, and a quantity that versions measure differently travels with
the words that say what it is (`*_meaning`), so that a chart never puts two meanings on one axis.
"""

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from testbed.analysis.statistics import all_known
from testbed.config.flag import Kind
from testbed.config.run_types import STRATEGIES
from testbed.config.table import FLAGS, upgrade_settings
from testbed.errors import one_line
from testbed.metrics.file import metrics_version, read_metrics
from testbed.run_folder import CHECKPOINTS

METRICS_FILE = "training_metrics.json"
_STEP_FOLDER = re.compile(r"\.?step_\d+")
DIFFERENT_PEAKS = 0.05  # measurements of one machine's peak that differ by more are named
# --skip_gradient_sync: ranks that train apart in all or half of their steps
UNSYNCHRONISED = {"all": "without synchronisation", "alternate": "synchronised in every other step"}

_SINCE_21 = frozenset(("timing", "attribution", "utilization", "flops", "memory"))

# The fields of docs/measuring.md, rule 1: two runs did equal work when all of these are recorded and agree.
_WORK = {name: flag for name, flag in FLAGS.items() if flag.kind is Kind.WORK}
_COMPARED = [flag for flag in _WORK.values() if flag.compared_as is None]
# what several flags come to, and where they meet
_COME_TO = ("total_steps", "math_changes", "train_data_sha256", "optimizer_steps", "tokens")
WORK_FIELDS = (*(flag.in_config or flag.name for flag in _COMPARED), *_COME_TO)
VALIDATION_FIELDS = ("val_data_sha256", "val_tokens")
# What a time to loss must have in common. Batch, schedule, optimizer and steps may be what is being compared.
TASK_FIELDS = tuple(flag.compared_as or flag.in_config or name for name, flag in FLAGS.items() if flag.is_task)
if _lost := {flag.compared_as for flag in _WORK.values() if flag.compared_as} - {*WORK_FIELDS, *VALIDATION_FIELDS}:
    raise AssertionError(
        f"compared_as names {', '.join(sorted(_lost))} in the table of flags, and no run has such a field"
    )


@dataclass(frozen=True)
class Point:
    """A loss at a moment of the run. `step` None: the file does not say. Times in seconds of training (see Run).

    `elapsed_s` is wall time since the first step began, evaluation and saving included; files before 2.1 lack it.
    """

    step: int | None
    train_time_s: float | None
    loss: float
    elapsed_s: float | None = None


@dataclass(frozen=True, eq=False)  # a run is itself; arrays have no single truth to compare
class Run:
    """One file of any version. Times in seconds, memory in bytes, throughput in tokens/s; None is unknown."""

    path: Path
    version: str
    label: str
    status: str
    instrumented: bool | None
    world_size: int | None
    training_time_s: float | None
    training_time_meaning: str
    tokens_per_s: float | None
    tokens_per_s_meaning: str
    # The file itself, for what is shown or traced but not compared. Of 2.1 and 2.2 without the rows of its steps, of
    # which the arrays below are kept: a row is a dictionary of twenty entries, and an analysis holds thousands of them
    # in hundreds of runs. The settings are in the terms of today's flags.
    record: dict[str, Any] = field(repr=False)

    num_repeats: int = 1  # above 1: a picture shows this run, the one of median throughput, for so many repeats
    work: dict[str, Any] = field(default_factory=dict)  # WORK_FIELDS; a field that is missing or None is unknown
    validation: dict[str, Any] = field(default_factory=dict)

    memory_bytes_per_rank: tuple[int, ...] = ()  # v2.0 records the maximum alone: one entry
    memory_meaning: str = "not recorded"
    mfu: float | None = None
    inference_latency_s: float | None = None
    inference_tokens_per_s: float | None = None
    inference_meaning: str = "not recorded"
    inference_repeats_tokens_per_s: tuple[float, ...] = ()  # of the same request in one process; v1 has none

    # Measured steps, warm-up left out, the slowest rank's; empty: the file has no rows.
    step_times_s: np.ndarray = field(default_factory=lambda: np.array([]))
    num_warmup_steps: int | None = None
    # Every step, warm-up too: whether it is, its time as the file states it, and the largest of the ranks' own times.
    is_warmup: np.ndarray = field(default_factory=lambda: np.array([], dtype=bool))
    all_step_times_s: np.ndarray = field(default_factory=lambda: np.array([]))
    slowest_rank_times_s: np.ndarray = field(default_factory=lambda: np.array([]))
    # Mean over measured steps and ranks of every per_rank_*_s that each of these rows has: {"forward": seconds, ...}.
    mean_phases_s: dict[str, float] = field(default_factory=dict)

    # Every step, warm-up too: its number, the seconds of training at its end, its loss.
    train_steps: np.ndarray = field(default_factory=lambda: np.array([], dtype=int))
    train_times_s: np.ndarray = field(default_factory=lambda: np.array([]))
    train_losses: np.ndarray = field(default_factory=lambda: np.array([]))
    grad_norms: np.ndarray = field(default_factory=lambda: np.array([]))  # before clipping; NaN where fp16 overflowed
    learning_rates: np.ndarray = field(default_factory=lambda: np.array([]))
    train_tokens: np.ndarray = field(default_factory=lambda: np.array([], dtype=int))  # so far
    epoch_losses: tuple[Point, ...] = ()  # means over an epoch, at its end: all that v1 and 2.0 record
    validation_losses: tuple[Point, ...] = ()

    @property
    def full_label(self) -> str:
        """Return the label with what a reader must not overlook."""
        marks = [self.status.upper()] if self.status != "complete" else []
        marks += ["INSTRUMENTED"] if self.instrumented else []
        marks += [self.synchronisation.upper()] if self.synchronisation else []
        return self.label + (f" [{', '.join(marks)}]" if marks else "")

    @property
    def synchronisation(self) -> str:
        """Return how --skip_gradient_sync ran, to follow the strategy's name; empty: every step synchronised."""
        return UNSYNCHRONISED.get(str(self.section("settings").get("skip_gradient_sync")), "")

    def section(self, name: str) -> dict[str, Any]:
        """Return a part of the file that is an object; empty where it is none, as an old file may hold anything."""
        found = self.record.get(name)
        return found if isinstance(found, dict) else {}

    @property
    def steps(self) -> Any:
        """Return every optimizer step as a row of a pandas.DataFrame; without pandas as a dict of arrays.

        Columns: step; tokens so far; loss; grad_norm before clipping; learning_rate; step_time_s of the slowest rank;
        train_time_s, the seconds of training at its end; is_warmup. Files before 2.1 lack some.
        """
        columns = {
            "step": self.train_steps,
            "tokens": self.train_tokens,
            "loss": self.train_losses,
            "grad_norm": self.grad_norms,
            "learning_rate": self.learning_rates,
            "step_time_s": self.all_step_times_s,
            "train_time_s": self.train_times_s,
            "is_warmup": self.is_warmup,
        }
        known = {name: values for name, values in columns.items() if len(values) == len(self.train_steps)}
        try:
            import pandas
        except ModuleNotFoundError:
            return known
        return pandas.DataFrame(known)

    @property
    def run_id(self) -> str | None:
        return self.record.get("run_id")

    @property
    def instruments(self) -> tuple[str, ...]:
        """Return what slowed the run down, as its file names it; empty in files from before they did."""
        found = self.record.get("instruments") if self.version in ("2.0", "2.2") else None
        return tuple(found or ())

    @property
    def git_commit(self) -> str | None:
        return self.record.get("git_commit")

    @property
    def command_line(self) -> str | None:
        return self.record.get("command_line")

    @property
    def run_type(self) -> str | None:
        return self.section("training_config").get("run_type")

    @property
    def step_time_median_s(self) -> float | None:
        return float(np.median(self.step_times_s)) if len(self.step_times_s) else None

    @property
    def step_time_p95_s(self) -> float | None:
        return float(np.percentile(self.step_times_s, 95)) if len(self.step_times_s) else None

    @property
    def final_train_loss(self) -> float | None:
        if len(self.train_losses):
            return float(self.train_losses[-1])
        return self.epoch_losses[-1].loss if self.epoch_losses else None

    @property
    def final_validation_loss(self) -> float | None:
        return self.validation_losses[-1].loss if self.validation_losses else None

    @property
    def peak_memory_bytes(self) -> int | None:
        return max(self.memory_bytes_per_rank, default=None)


def load_run(path: Path) -> Run:
    """Load the run of a training_metrics.json, or of the directory that holds one. InputError names file and fault."""
    path = Path(path).expanduser()  # a notebook has no shell that does
    if path.is_dir():
        path = path / METRICS_FILE
    metrics = read_metrics(path)
    return {"1": _from_v1, "2.0": _from_v20, "2.2": _from_v22}[metrics_version(metrics)](path, metrics)


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Load each run, with labels that differ."""
    return with_distinct_labels([load_run(path) for path in paths])


def with_distinct_labels(runs: Sequence[Run]) -> list[Run]:
    """Return the same runs. Those with the same label get the folder's name, or else a number, added."""
    runs = list(runs)
    for suffix in (lambda run, _: f" ({run.path.absolute().parent.name})", lambda _, index: f" #{index}"):
        labels = [run.label for run in runs]
        runs = [
            replace(run, label=one_line(run.label + suffix(run, index))) if labels.count(run.label) > 1 else run
            for index, run in enumerate(runs, start=1)
        ]
    return runs


def find_runs(directory: Path) -> list[Path]:
    """Find every training_metrics.json of a run under `directory`, sorted by path."""
    return files_of_runs(directory, METRICS_FILE)


def files_of_runs(directory: Path, name: str = "*") -> list[Path]:
    """Find what is called `name` at any depth under `directory`, sorted by path, but for what lies in checkpoints.

    A checkpoint keeps copies of the run's files as they were at its step: no run of its own, and no repeat.
    """
    return sorted(path for path in Path(directory).rglob(name) if not _is_in_checkpoint(path))


def _is_in_checkpoint(path: Path) -> bool:
    """Return whether it lies in RUN/checkpoints/step_N, whole, damaged or half written. A folder of runs may be called
    checkpoints too, and what is in it counts."""
    folders = path.absolute().parts[:-1]
    return any(above == CHECKPOINTS and _STEP_FOLDER.match(folder) for above, folder in itertools.pairwise(folders))


def _from_v22(path: Path, metrics: dict) -> Run:
    config, hardware = metrics["training_config"], metrics["hardware"]
    rows, world_size = metrics["steps"], hardware["world_size"]
    times = np.array([row["step_time_s"] for row in rows], dtype=float)
    is_warmup = np.array([row["is_warmup"] for row in rows], dtype=bool)
    on_cuda = hardware["device_type"] == "cuda"
    memory_field = "peak_allocated_bytes" if on_cuda else "peak_rss_bytes"
    settings = upgrade_settings(metrics["settings"])
    work = recorded_work(config, settings)
    work["train_data_sha256"] = config["dataset_sha256"]["train"]
    work["optimizer_steps"] = len(rows)
    tokens_per_step = config["global_batch_size"] * config["seq_len"]
    work["tokens"] = len(rows) * tokens_per_step
    steps = np.array([row["step"] for row in rows], dtype=int)
    evaluations = metrics["evaluations"]
    threads, devices = hardware["cpu_threads_per_rank"], hardware.get("num_devices", world_size)
    device = (hardware["gpu_name"] or "CUDA device") if on_cuda else f"CPU ({threads} thread{'s' * (threads > 1)})"
    zero = f" ZeRO-{config['zero_stage']}" if config["deepspeed_enabled"] and config["zero_stage"] is not None else ""
    optimizer = "" if config["optimizer"] == "AdamW" else f" {config['optimizer']}"
    strategy = f"{config['run_type']}{zero}{_spread(metrics)}{optimizer}"
    return Run(
        path=path,
        version="2.2",
        label=one_line(f"{strategy}, {devices} x {device}, {config['precision']}"),
        record={name: value for name, value in metrics.items() if name != "steps"} | {"settings": settings},
        status=metrics["status"],
        instrumented=metrics["instrumented"],
        world_size=world_size,
        work=work,
        validation={
            "val_data_sha256": config["dataset_sha256"]["val"],
            "val_tokens": evaluations[-1]["num_target_tokens"] if evaluations else None,
        },
        training_time_s=float(times.sum()) if rows else None,
        training_time_meaning="sum of all optimizer steps, slowest rank; evaluation, logging and start-up excluded",
        tokens_per_s=metrics["summary"]["mean_tokens_per_sec_global"],
        tokens_per_s_meaning="all ranks together, tokens / time of the measured steps; warm-up excluded",
        step_times_s=times[~is_warmup],
        num_warmup_steps=int(is_warmup.sum()),
        is_warmup=is_warmup,
        all_step_times_s=times,
        slowest_rank_times_s=np.array([max(row["per_rank_step_time_s"]) for row in rows], dtype=float),
        mean_phases_s=_mean_phases(rows),
        train_steps=steps,
        train_tokens=steps * tokens_per_step,
        train_times_s=times.cumsum(),
        train_losses=np.array([row["loss"] for row in rows], dtype=float),
        grad_norms=np.array([row["grad_norm"] for row in rows], dtype=float),
        learning_rates=np.array([row["lr"] for row in rows], dtype=float),
        validation_losses=tuple(
            Point(row["step"], row["train_time_s"], row["val_loss"], row["elapsed_s"]) for row in evaluations
        ),
        **_inference(metrics),
        memory_bytes_per_rank=tuple(
            row[memory_field] for row in metrics["memory"]["per_rank"] if row[memory_field] is not None
        ),
        memory_meaning="peak allocated CUDA memory per rank" if on_cuda else "peak resident memory (RSS) per rank",
        mfu=metrics["flops"]["mfu"],
    )


def breaks_down_wall_clock(metrics: dict) -> bool:
    """Return whether DeepSpeed synchronised after every part of a step.

    A file of DeepSpeed's settings that was named in the command says nothing of a run without DeepSpeed.
    """
    config, file = metrics.get("training_config") or {}, metrics.get("deepspeed_config") or {}
    selected = file.get("selected")
    is_used = config.get("deepspeed_enabled")
    if is_used is None:  # early files of 2.0: their baseline is plain PyTorch
        is_used = not re.search(r"--run_type[= ]baseline\b", metrics.get("command_line") or "")
    return bool(is_used and isinstance(selected, dict) and selected.get("wall_clock_breakdown"))


def _of_earlier_version(metrics: dict) -> dict[str, Any]:
    """Leave out what only 2.1 and later define: an earlier file may hold anything under these names."""
    return {name: value for name, value in metrics.items() if name not in _SINCE_21}


def _mean_phases(rows: Sequence[dict]) -> dict[str, float]:
    measured = [row for row in rows if not row["is_warmup"]]
    names = [name for name in (measured[0] if measured else ()) if re.fullmatch(r"per_rank_\w+_s", name)]
    means = {}
    for name in names:
        values = all_known(row.get(name) for row in measured)
        if values is not None:
            total_s = math.fsum(itertools.chain.from_iterable(values))
            means[name.removeprefix("per_rank_").removesuffix("_s")] = total_s / sum(map(len, values))
    return means


def _spread(metrics: dict) -> str:
    """Return the pipeline's schedule, and how a mesh with several axes lies over the ranks, to follow the run type."""
    axes, schedule = metrics["training_config"].get("mesh", {}), metrics["settings"].get("pipeline_schedule")
    sizes = {axis: axes.get(axis, 1) for axis in ("pipeline", "tensor", "context", "data")}
    entry = STRATEGIES.get(metrics["training_config"]["run_type"])
    is_mesh = entry is not None and entry.keeps == "axes"
    if is_mesh:
        shard = axes.get("shard", 1)
        sizes |= {"data": 1, "shard": shard, "copies": axes.get("data", 1) // shard}
    several = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    is_named = len(several) > 1 or is_mesh
    words = f" {schedule}" if schedule and (sizes["pipeline"] > 1 or not is_mesh) else ""
    return words + (f" ({' x '.join(several)})" if is_named and several else "")


def _from_v20(path: Path, metrics: dict) -> Run:
    config, hardware, epochs = metrics["training_config"], metrics["hardware"], metrics["epochs"]
    world_size = hardware.get("world_size")
    # 2.0 has no field for the run type; the flag stands in the recorded command.
    flag = re.search(r"--run_type[= ](\w+)", metrics.get("command_line") or "")
    run_type = flag[1] if flag else path.absolute().parent.name
    precision = config.get("precision") or "precision unknown"
    device = hardware.get("gpu_name") or "device unknown"
    work = recorded_work(config, {})
    dimensions = dict(re.findall(r"(n_layer|n_head|n_embd)\s*=\s*(\d+)", config.get("model_size") or ""))
    for name, key in (("num_layers", "n_layer"), ("num_heads", "n_head"), ("embedding_size", "n_embd")):
        work[name] = int(dimensions[key]) if key in dimensions else None
    steps = _running_sum(epoch.get("optimizer_steps") for epoch in epochs)
    times = _running_sum(epoch.get("epoch_wall_time_sec") for epoch in epochs)
    tokens = _running_sum(epoch.get("tokens_processed_global") for epoch in epochs)
    work["optimizer_steps"] = steps[-1] if steps else None
    work["tokens"] = tokens[-1] if tokens else None
    # Without --max_val_steps 0 a loss of exactly 0.0 cannot happen: 2.0 writes it where nothing was validated.
    validated = [(epoch.get("val_loss_avg_global") or None) for epoch in epochs]
    peaks = [
        epoch.get("max_cuda_mem_allocated_bytes_global") or epoch.get("max_cuda_mem_allocated_bytes_rank0")
        for epoch in epochs
    ]
    is_global = all(epoch.get("max_cuda_mem_allocated_bytes_global") for epoch in epochs)
    instruments = ["DeepSpeed's wall_clock_breakdown"] * breaks_down_wall_clock(metrics)
    instruments += ["--profile_mode"] * _has_profile_mode(metrics)
    return Run(
        path=path,
        version="2.0",
        record={**_of_earlier_version(metrics), "instruments": instruments},
        label=one_line(f"{run_type}, {world_size or 'unknown'} x {device}, {precision} (v2.0)"),
        status="complete",  # 2.0 is written only at the end
        # A breakdown that synchronises after every part, or ranges for a profiler; the profiler is not in the file.
        instrumented=True if instruments else None,
        world_size=world_size,
        work=work,
        training_time_s=times[-1] if times else None,
        training_time_meaning="v2.0: wall time of the training loops on rank 0; warm-up and logging included",
        tokens_per_s=(metrics.get("summary") or {}).get("mean_tokens_per_sec_global"),
        tokens_per_s_meaning="v2.0: all ranks together, mean over epochs; warm-up included",
        # No step times: the file's percentiles are of sampled micro steps that can miss the communication.
        epoch_losses=_points(steps, times, [epoch.get("train_loss_avg_global") for epoch in epochs]),
        validation_losses=_points(steps, times, validated),
        memory_bytes_per_rank=(max(peaks),) if peaks and all(peaks) else (),
        memory_meaning="v2.0: peak allocated CUDA memory, " + ("largest rank" if is_global else "rank 0"),
    )


def _has_profile_mode(metrics: dict) -> bool:
    return "--profile_mode" in str(metrics.get("command_line")).split()


def _from_v1(path: Path, metrics: dict) -> Run:
    times = _running_sum(metrics["train_time_per_epoch"])
    rates = metrics.get("train_throughput") or []
    return Run(
        path=path,
        version="1",
        record=_of_earlier_version(metrics),
        label=one_line(
            f"{path.absolute().parent.name if path.name == METRICS_FILE else path.stem}, devices unknown (v1)"
        ),
        status="complete",  # v1 is written only at the end
        instrumented=None,
        world_size=None,
        training_time_s=times[-1] if times else None,
        training_time_meaning="v1: wall time of the training loops on rank 0; warm-up and printing included",
        tokens_per_s=sum(rates) / len(rates) if rates else None,
        # The program read the world size as 1 on every rank, and the file does not carry it: no way to the global rate.
        tokens_per_s_meaning="v1: PER RANK as recorded, mean over epochs; the number of ranks is not in the file",
        epoch_losses=_points([], times, metrics["train_loss_per_epoch"]),
        validation_losses=_points([], times, metrics.get("val_loss_per_epoch") or []),
        inference_latency_s=metrics.get("inference_latency"),
        inference_tokens_per_s=metrics.get("inference_throughput"),
        inference_meaning="v1: 100 greedy tokens, batch 1, no key-value cache, no warm-up, measured once",
    )


def _inference(metrics: dict) -> dict[str, Any]:
    """Return the fields of a Run that --run_inference_benchmark gives; none without it, or where it failed."""
    found = metrics.get("inference")
    if found is None:
        return {}
    repeats = tuple(found["new_tokens"] / latency_s for latency_s in found["latency_s"])
    cache = "key-value cache" if found["uses_cache"] else "no key-value cache"
    threads, where = found.get("threads"), ""
    if threads is not None and metrics["hardware"]["device_type"] == "cpu":
        where = f", {threads} thread{'s' * (threads > 1)}"
    return {
        "inference_latency_s": metrics.get("inference_latency"),
        "inference_tokens_per_s": metrics.get("inference_throughput"),
        "inference_meaning": f"{found['new_tokens']} greedy tokens after {len(found['prompt_ids'])}, batch "
        f"{found['batch_size']}, {cache}, {found['precision']}, {found['module']} module{where}: median of "
        f"{len(repeats)} after warm-up",
        "inference_repeats_tokens_per_s": repeats,
    }


def _running_sum(values: Iterable[Any]) -> list:
    """Return the cumulative sums; none where one of the values is not recorded."""
    return list(itertools.accumulate(all_known(values) or ()))


def _points(steps: list, times: list, losses: list) -> tuple[Point, ...]:
    moments = itertools.zip_longest(steps[: len(losses)], times[: len(losses)], losses)
    return tuple(Point(step, time_s, loss) for step, time_s, loss in moments if loss is not None)


def recorded_work(config: dict, settings: dict) -> dict[str, Any]:
    """Return what a file says of each flag that is work; None where it says nothing.

    Args:
        config: `training_config` of a file.
        settings: `settings` of the same file, in the terms of today's flags; empty where it has none (version 2.0).
            Null there means that a flag was not set.
    """
    work: dict[str, Any] = {"total_steps": config.get("total_steps")}
    for flag in _COMPARED:
        field = flag.in_config or flag.name
        if flag.in_config in config:
            work[field] = config[flag.in_config]
        else:
            # an option of some run types that a file does not name did not exist yet, so the run did not have it
            is_known = flag.name in settings or flag.is_option
            work[field] = _set_or_not(settings.get(flag.name)) if is_known else None
    if settings:
        work["optimizer"] += _muon_in_words(config)
        work["lr_schedule"] += f", decay share {config['decay_share']:g}" if config.get("decay_share") else ""
        work["lr_schedule"] += ", log warm-up" if config.get("warmup_shape") == "log" else ""
        work["math_changes"] = ", ".join(config.get("math_changes", [])) or "none"  # files from before this field
    return work


def _set_or_not(value: Any) -> Any:
    return "not set" if value is None else value


def _muon_in_words(config: dict) -> str:
    """Return Muon's own two numbers, which are part of its work as AdamW's are."""
    rate, momentum = config.get("muon_learning_rate"), config.get("muon_momentum")
    return "" if rate is None else f" (learning rate {rate:g}, momentum {momentum:g})"


def attribution_of(metrics: dict[str, Any]) -> dict[str, Any] | None:
    """Return `attribution` of a metrics file with one meaning of communication; None where no step was attributed.

    Communication is the time in which a rank takes part in a collective or in the synchronisation after backward,
    packing of gradients included. A file's `communication_s` lacks the packing, and its `exposed_communication_s`, the
    part that no computation covers, has it: the larger of the two is the whole, or the least that it can be. One device
    alone communicates with none: what its collectives cost is the program's own time, and counts as idle.
    """
    found = metrics.get("attribution")
    if not found:
        return None
    hardware = metrics.get("hardware") or {}
    devices = hardware.get("num_devices") or hardware.get("world_size")

    def with_one_meaning(step: dict[str, Any]) -> dict[str, Any]:
        exposed_s = step["exposed_communication_s"]
        if devices == 1:
            nothing = {"exposed_communication_s": 0.0, "communication_s": 0.0}
            return {**step, **nothing, "idle_s": step["idle_s"] + exposed_s}
        return {**step, "communication_s": max(step["communication_s"], exposed_s)}

    return {
        **found,
        "per_rank": [{**rank, "steps": list(map(with_one_meaning, rank["steps"]))} for rank in found["per_rank"]],
    }


def on_one_peak(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return the runs with MFU against one peak for each kind of device and precision, and notes.

    A device without a data sheet has its peak measured by each run, and two measurements differ by several percent. The
    largest counts for all: a peak is what a device can reach. On CPUs it counts for each thread. MFU from a data sheet
    stays.

    Returns:
        The runs in their order, and a sentence for each kind of device whose measured peaks differ by over 5 %.
    """
    peaks: dict[tuple, list[float]] = {}
    for run in runs:
        if (share := _measured_share(run)) is not None:
            peaks.setdefault(_kind(run), []).append(share)
    notes = [
        f"MFU: {len(found)} runs measured peaks of {min(found) / 1e9:,.1f} to {max(found) / 1e9:,.1f} GFLOP/s per "
        f"{'thread' if kind[0] == 'cpu' else 'device'} in {kind[2]}; the largest counts for all."
        for kind, found in peaks.items()
        if max(found) > (1 + DIFFERENT_PEAKS) * min(found)
    ]
    return [_with_peak(run, max(peaks[_kind(run)])) if _kind(run) in peaks else run for run in runs], notes


def _kind(run: Run) -> tuple[Any, Any, Any]:
    hardware = run.section("hardware")
    name = hardware.get("gpu_name") or hardware.get("cpu_name")
    return hardware.get("device_type"), name, run.section("training_config").get("precision")


def _threads(run: Run) -> int:
    """Return on how many threads a peak was measured; 1 on a GPU."""
    hardware = run.section("hardware")
    return hardware.get("cpu_threads_per_rank") or 1 if hardware.get("device_type") == "cpu" else 1


def _measured_share(run: Run) -> float | None:
    """Return the measured peak of a GPU or of one thread in FLOP/s; None where the run has none, or a data sheet's."""
    flops = run.section("flops")
    peak = flops.get("peak_flops_per_s_per_device")
    if not run.mfu or not peak or not str(flops.get("peak_source")).startswith("measured"):
        return None
    return peak / _threads(run)


def _with_peak(run: Run, share: float) -> Run:
    own = _measured_share(run)
    if own is None or run.mfu is None or own == share:
        return run
    section = run.section("flops") | {"peak_flops_per_s_per_device": share * _threads(run)}
    return replace(run, mfu=run.mfu * own / share, record=run.record | {"flops": section})
