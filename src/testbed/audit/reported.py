"""Hold what the files of a run say about it, whatever their format, and the two sides of a claim.

Nothing is filled in: what a format does not record is None or empty.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from testbed.analysis.runs.arms import hardware_of, rank_count
from testbed.analysis.runs.comparability import cores_of
from testbed.analysis.runs.load import Run, breaks_down_wall_clock
from testbed.audit.finding import Audited
from testbed.config.environment_variables import instruments_in
from testbed.io import read_json
from testbed.run_folder import LAUNCHER

# names of what `Reported.settings` may hold
STRATEGY, MODEL, PRECISION, COMPILED, RECOMPUTED = "strategy", "model", "precision", "compiled", "recomputation"
ZERO, DATA, PASS, STATUS = "ZeRO stage", "data", "kind of pass", "status"
INSTRUMENTS, WARM_UP, RESOLUTION = "instrumentation", "warm-up", "resolution"
SIZES = "layers and width"
LAYOUT = "layout"  # the ranks of each kind of parallelism, beside which a log's name may say what was tried
QUALITY = "quality"  # of what was trained, where it is no loss: its heading and its figure
DEVICE, BATCH = "device", "batch size"  # a batch of which nothing says whether one device has it, or all
# the fields of our own `training_config` that say them
SETTINGS = {STRATEGY: "run_type", MODEL: "model_name", PRECISION: "precision", COMPILED: "compile", ZERO: "zero_stage",
            RECOMPUTED: "activation_checkpointing", DATA: "dataset_name"}  # fmt: skip
ROW, TABLE = "row of a table", "table"  # the forms of one side that is a row, and of a file of tables
SPEED_UP = "speed-up"  # the unit of a rate of which a table prints the ratio alone
OF_EPOCH = "time of one epoch"  # a meaning of a time
SAYS_NOTHING = "says no time, throughput or loss of a run"
BREAKDOWN = "DeepSpeed's wall_clock_breakdown synchronises after each part of the step"
ANY = ()  # rules that read files of every form
# Next to a run these say that a profiler ran with it.
PROFILER_FILES = ("*.nsys-rep", "nsys_stats*.txt", "profile_summary.json")


@dataclass(frozen=True, eq=False)
class Reported(Audited):
    """One run as its files tell it. Times in seconds; per-rank tuples in the order of the ranks."""

    path: Path
    name: str  # the path, and the place in it where one file holds several runs
    form: str  # "2.2", "2.0", "v1", "timing log", "rank JSON", "wandb log", "CSV of curves", ...
    run: Run | None = None  # of a training_metrics.json
    world_size: int | None = None  # devices that compute: of dp, all that its one process drives
    global_batch_size: int | None = None
    batch_is_printed: bool = False  # it is a setting that a log printed; the loader may have fed other batches
    settings: dict[str, str] = field(default_factory=dict)  # what a log or a row says of its set-up, by these names
    optimizer_steps: int | None = None
    time_s: float | None = None  # the time that the source quotes
    time_meaning: str = "training time"
    rate: float | None = None  # the throughput that the source quotes, of all ranks or of one
    rate_unit: str = "tokens/s"
    rate_is_per_rank: bool = False
    rank_times_s: tuple[float, ...] = ()
    rank_rates: tuple[float, ...] = ()
    rank_train_losses: tuple[float, ...] = ()  # of one step, before any averaging
    train_loss: float | None = None
    val_loss: float | None = None
    instruments: tuple[str, ...] = ()  # what ran beside the training and slowed it, with its evidence
    is_data_parallel_module: bool = False  # torch.nn.DataParallel: one process, one batch split over the devices
    micro_batch_size: int | None = None  # sequences per data rank and pass
    accumulation: int | None = None  # passes per optimizer step
    data_ranks: int | None = None  # ranks that read other data
    sequence_length: int | None = None  # tokens
    num_parameters: int | None = None  # of the whole model
    device_name: str | None = None  # as the driver reports it
    peak_flops: float | None = None  # FLOP/s of one device, by which the source divides for its MFU
    mfu: float | None = None  # 0..1, that the source quotes
    tflops: float | None = None  # 1e12 FLOP/s of one device, that the source quotes
    protocol: str | None = None  # by which such logs are compared, where it is not equal work: "time_to_loss"
    losses: tuple[tuple[int, float], ...] = ()  # (step, training loss) as a log or a curve has them; NaN: no number
    is_claim: bool = True  # False: one of many in a folder, and nothing says that they are compared
    details: dict[str, Any] = field(default_factory=dict)  # what one rule of one format reads

    @property
    def metrics(self) -> Run:
        """Return the run of a training_metrics.json; only for rules that take no other form."""
        assert self.run is not None
        return self.run

    @property
    def config(self) -> dict[str, Any]:
        """Return `training_config`; empty where the file has none."""
        return self.run.section("training_config") if self.run else {}

    @property
    def is_of_iteration(self) -> bool:
        """Return whether the quoted time is that of one step."""
        return self.time_meaning.endswith("iteration")

    @property
    def has_figures(self) -> bool:
        """Return whether the source says a time, a rate or a loss."""
        return any(value is not None for value in (self.time_s, self.rate, self.train_loss, self.val_loss))

    @property
    def has_own_rate(self) -> bool:
        """Return whether the source says a throughput, and no ratio of two alone."""
        return self.rate is not None and self.rate_unit != SPEED_UP

    @property
    def work_per_iteration(self) -> float | None:
        """Return what the source says that one rank does in an iteration, its rate times its time."""
        is_known = self.rate_is_per_rank and self.is_of_iteration and self.rate and self.time_s
        return self.rate * self.time_s if is_known else None  # type: ignore[operator]

    @property
    def is_our_own(self) -> bool:
        """Return whether a file of 2.1 or later tells it: it has every step of every rank, on a synchronised clock."""
        return self.form == "2.2"


@dataclass(frozen=True, eq=False)
class Side(Audited):
    """One arm of a comparison: its name in a finding and its runs, at least one."""

    name: str
    runs: tuple[Reported, ...]

    @property
    def first(self) -> Reported:
        return self.runs[0]

    def middle(self, quantity: str) -> float | None:
        """Return the median of a number over the runs; None when one of them does not have it."""
        values = [getattr(run, quantity) for run in self.runs]
        return None if None in values else median(values)


@dataclass(frozen=True)
class Claim(Audited):
    """Hold the runs that are compared, and the protocol: strong, weak, time_to_loss, or None if no plan says."""

    baseline: Side
    other: Side
    protocol: str | None = None

    @property
    def names(self) -> tuple[str, str]:
        return (self.baseline.name, self.other.name)

    @property
    def sides(self) -> tuple[Side, Side]:
        return (self.baseline, self.other)

    @property
    def firsts(self) -> tuple[Reported, Reported]:
        return (self.baseline.first, self.other.first)

    @property
    def turned(self) -> Claim:
        return Claim(self.other, self.baseline, self.protocol)

    @property
    def measured_runs(self) -> tuple[list[Run], list[Run]]:
        """Return the runs of both sides that come from a training_metrics.json."""
        one, other = ([item.run for item in side.runs if item.run] for side in self.sides)
        return one, other

    @property
    def cores(self) -> tuple[int | None, int | None]:
        """Return the CPU cores that each side computes on; None on GPUs, and where a file or a repeat does not say."""
        one, other = ({cores_of(run) for run in runs} for runs in self.measured_runs)
        return one.pop() if len(one) == 1 else None, other.pop() if len(other) == 1 else None


def from_run(run: Run) -> Reported:
    """Return what a training_metrics.json of any version says, and the files next to it about instruments."""
    form = "v1" if run.version == "1" else run.version
    config = run.section("training_config")
    return Reported(
        path=run.path,
        name=str(run.path),
        form=form,
        run=run,
        world_size=rank_count(run),
        global_batch_size=config.get("global_batch_size"),
        micro_batch_size=config.get("micro_batch_size_per_gpu"),
        accumulation=config.get("grad_accum_steps"),
        data_ranks=config.get("data_world_size") if form == "2.2" else rank_count(run),
        sequence_length=config.get("seq_len"),
        num_parameters=config.get("num_parameters"),
        device_name=hardware_of(run, "gpu_name") or hardware_of(run, "cpu_name"),
        settings={name: value for name, field in SETTINGS.items() if (value := _flag(config.get(field))) is not None},
        optimizer_steps=run.work.get("optimizer_steps"),
        time_s=run.training_time_s,
        rate=run.tokens_per_s,
        rate_is_per_rank=form == "v1",
        train_loss=run.final_train_loss,
        val_loss=run.final_validation_loss,
        instruments=tuple(_instruments(run)),
    )


def _flag(value: object) -> str | None:
    if value is None:
        return None
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def _instruments(run: Run) -> list[str]:
    found = []
    command = (run.command_line or "") if run.version != "2.2" else ""  # later files say it themselves
    if breaks_down_wall_clock(run.record):
        found.append(BREAKDOWN)
    if (run.record.get("settings") or {}).get("skip_gradient_sync"):
        found.append("gradients were not synchronised (--skip_gradient_sync)")
    if re.search(r"--profile_mode\b", command):
        found.append("ranges for a profiler were marked (--profile_mode in the command)")
    if run.instrumented and not found:
        which = f" ({', '.join(run.instruments)})" if run.instruments else ""
        found.append(f"the file marks the run as instrumented{which}")
    if re.search(r"--profile\b", command):
        found.append("a profiler ran (--profile in the command)")
    folder = run.path.absolute().parent
    launcher = folder / LAUNCHER
    said = read_json(launcher) if launcher.is_file() else {}
    environment = said.get("nccl_env") if isinstance(said, dict) else None
    for instrument in instruments_in(environment if isinstance(environment, dict) else {}):
        logs = " logs collectives" if instrument.startswith("NCCL_DEBUG=") else ""
        found.append(f"{instrument}{logs} ({LAUNCHER})")
    traces = (path for where in ("", "profiles/") for each in PROFILER_FILES for path in folder.glob(where + each))
    if first := next(traces, None):
        found.append(f"a profiler ran with it ({first.relative_to(folder)} beside it)")
    return found
