"""Record a run: a row for every optimizer step, and training_metrics.json during the run.

All ranks call the recorder; rank 0 keeps rows and writes. Nothing here runs inside the step clock.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.config.settings import RunSettings
from testbed.errors import counted
from testbed.io import now_utc
from testbed.metrics.busy_machine import signs_of_other_work
from testbed.metrics.derived import epoch_figures, speed, summary, timing, tokens_per_s
from testbed.metrics.file import write_metrics
from testbed.metrics.segments import Starts, larger_peaks, take_over_facts
from testbed.metrics.watched_steps import WatchedSteps
from testbed.profiling import utilization
from testbed.profiling.attribution import words_on_attribution
from testbed.run_folder import COMPLETE, METRICS, run_lock
from testbed.run_folder.marks import mark_complete

if TYPE_CHECKING:
    from testbed.metrics.world_step import WorldStep

WRITE_EVERY_S = 5.0
SHARE_OF_TIME_FOR_WRITING = 0.01


class RunRecorder:
    """Rows of a run, and its training_metrics.json.

    Attributes:
        metrics: content of the file; rows are added when it is written.
        starts: this start of the run and the earlier ones.
    """

    def __init__(self, directory: Path, settings: RunSettings, facts: dict[str, Any], is_writer: bool):
        self.directory = directory
        self.settings = settings
        self.metrics = facts
        self.is_writer = is_writer
        self.steps: list[dict] = []
        self.evaluations: list[dict] = []
        self.epoch_memory: dict[int, list[dict]] = {}
        self.startup_s: float | None = None
        self.checkpoints: list[dict] = []
        self._earlier_epochs: dict[int, dict] = {}
        self._earlier_peaks: list[dict] | None = None
        self.starts = Starts(facts)
        self._watched = WatchedSteps()
        self.first_step_s: float | None = None  # wall moment at which this start's first step began
        self.step_end_s: list[float] = []  # wall moments, for the throughput that hides nothing between clocks
        self._epoch_wall_s: dict[int, float] = {}
        self._epoch_mark_s = 0.0
        self._next_write_s = 0.0
        self._turn = threading.Lock()
        self._has_failed = False

    def begin_training(self, startup_s: float) -> None:
        """Call right before the first step of this start; `startup_s` is what came before it."""
        self.startup_s = startup_s
        self.first_step_s = self._epoch_mark_s = time.perf_counter()

    @property
    def last_step(self) -> int:
        """Optimizer steps done."""
        return self.steps[-1]["step"] if self.steps else 0

    @property
    def elapsed_s(self) -> float:
        """Wall seconds since the first step began, over all starts of the run."""
        now = time.perf_counter()
        return self.starts.elapsed_before_s + (now - self.first_step_s if self.first_step_s is not None else 0.0)

    @property
    def train_time_s(self) -> float:
        return sum(row["step_time_s"] for row in self.steps)

    def add_step(self, step: int, world: WorldStep, learning_rate: float) -> None:
        """Add the row of optimizer step `step`, counted from 1."""
        if not self.is_writer:
            return
        assert world.grad_norm is not None
        epoch, is_skipped = self._epoch_of(step), not math.isfinite(world.grad_norm)  # fp16 skipped the update
        self.steps.append(
            {
                "step": step,
                "epoch": epoch,
                "is_warmup": step <= self.starts.resumed_step + self.settings.measuring.timing_warmup_steps,
                "is_skipped": is_skipped,
                "loss": world.loss,
                "grad_norm": None if is_skipped else world.grad_norm,
                "lr": learning_rate,
                "step_time_s": world.step_time_s,
                "data_wait_s": max(world.per_rank_phase_s["data_wait"]),
                "per_rank_step_time_s": world.per_rank_step_time_s,
                **{f"per_rank_{name}_s": seconds for name, seconds in world.per_rank_phase_s.items()},
            }
        )
        if world.per_rank_watched and not self.steps[-1]["is_warmup"]:
            self._watched.add(step, world.per_rank_watched)
        now = time.perf_counter()
        self.step_end_s.append(now)
        self._epoch_wall_s[epoch] = self._epoch_wall_s.get(epoch, 0.0) + now - self._epoch_mark_s
        self._epoch_mark_s = now

    def _epoch_of(self, step: int) -> int:
        return max(0, step - 1) // max(1, self.settings.plan.steps_per_epoch) + 1

    def add_memory(self, step: int, per_rank: list[dict]) -> None:
        """Add every rank's peaks so far, read at the end of an epoch or of the run."""
        self.epoch_memory[self._epoch_of(step)] = per_rank
        ranks = [{"rank": rank, **peaks} for rank, peaks in enumerate(per_rank)]
        if self._earlier_peaks:
            ranks = larger_peaks(self._earlier_peaks, ranks)
        self.metrics["memory"] = {"per_rank": ranks}

    def add_evaluation(
        self,
        step: int,
        loss: float,
        num_tokens: int,
        num_sequences: int,
        wall_time_s: float,
        answers: dict[str, Any] | None = None,
    ) -> None:
        """Add the row of the validation after `step`, with the `multiple_choice` field if questions were answered."""
        self.evaluations.append(
            {
                "step": step,
                "epoch": self._epoch_of(step),
                "val_loss": loss,
                "num_target_tokens": num_tokens,
                "num_sequences": num_sequences,
                "wall_time_s": wall_time_s,
                "train_time_s": self.train_time_s,
                "elapsed_s": self.elapsed_s,
            }
            | ({} if answers is None else {"multiple_choice": answers})
        )
        self._epoch_mark_s = time.perf_counter()  # an epoch's wall time leaves validation out

    def restore(
        self, earlier: dict[str, Any], step: int, steps_done: int, elapsed_s: float, useful_wall_s: float
    ) -> None:
        """Keep the rows of the run's file up to `step`. Later steps are lost and trained again.

        Args:
            earlier: the run's training_metrics.json.
            step: of the checkpoint from which this start continues.
            steps_done: optimizer steps done by the start before, whether or not their rows were written.
            elapsed_s, useful_wall_s: seconds, of the recorder when the checkpoint was saved.
        """
        self.starts.resume(earlier, step, steps_done, elapsed_s, useful_wall_s)
        take_over_facts(self.metrics, earlier)
        self.checkpoints = earlier.get("checkpoints", [])
        self.evaluations = [row for row in earlier["evaluations"] if row["step"] <= step]
        self.steps = [row for row in earlier["steps"] if row["step"] <= step]
        if self.starts.is_as_before(earlier, self.metrics):
            self._earlier_peaks = earlier["memory"]["per_rank"]
            self.metrics.setdefault("attribution", earlier.get("attribution"))  # this start may look at none
        else:  # the headline is of this start's code, machine, ranks and settings
            self.steps = [row | {"is_warmup": True} for row in self.steps]
        self._earlier_epochs = {row["epoch_idx"]: row for row in earlier["epochs"]}
        for row in self.steps:  # how long the lost remainder of the epoch took is not known; its steps are
            self._epoch_wall_s[row["epoch"]] = self._epoch_wall_s.get(row["epoch"], 0.0) + row["step_time_s"]

    def note_other_mathematics(self, words: str) -> None:
        """Note that an earlier part of this run did other work than the settings say."""
        self.metrics["training_config"]["math_changes"].append(words)

    def add_checkpoint(self, row: dict[str, Any]) -> None:
        """Add the costs of a checkpoint. A save in the background completes the row later."""
        self.checkpoints.append(row)

    def add_measured_peak(self, flops_per_s: float, source: str) -> None:
        """Add the best measured rate of a device without a data sheet."""
        self.metrics["flops"].update(peak_flops_per_s_per_device=flops_per_s, peak_source=source)

    def add_utilization(self, per_rank: list[dict]) -> None:
        """Add CPU and device use of every rank."""
        ranks = [{"rank": rank, **figures} for rank, figures in enumerate(per_rank)]
        self.metrics["utilization"] = {"interval_s": utilization.INTERVAL_S, "per_rank": ranks}

    def add_watched(self, per_rank: list[dict]) -> None:
        """Add what every rank watched over the whole start."""
        self.metrics["watched"] = {"per_rank": [{"rank": rank, **row} for rank, row in enumerate(per_rank)]}

    def add_timed_collectives(self, timed: dict) -> None:
        """Add how long collectives took on each rank's device."""
        self.metrics["timed_collectives"] = timed

    def add_attribution(self, attribution: dict | None) -> None:
        """Add the attribution of the profiled steps."""
        self.metrics["attribution"] = attribution

    def add_inference(self, measured: dict | None) -> None:
        """Add the inference benchmark, and its median under the names of v1."""
        latency_s = statistics.median(measured["latency_s"]) if measured else None
        self.metrics.update(inference=measured, inference_latency=latency_s)
        self.metrics["inference_throughput"] = measured["new_tokens"] / latency_s if measured else None

    def close(self, sample: dict | None) -> str:
        """Write the closed file and RUN_COMPLETE.txt. Returns the line of RUN_COMPLETE.txt."""
        self.metrics["sample"] = sample
        completion = {"run_complete_file": COMPLETE, "printed_marker": True, "timestamp_utc": now_utc()}
        self.write("complete", completion=completion)
        summary = self.metrics["summary"]
        rate, seconds = summary["mean_tokens_per_sec_global"], summary["total_wall_time_sec"]
        return mark_complete(self.directory, self.metrics["hardware"]["world_size"], rate, seconds)

    def note_process_group_ended(self) -> None:
        """Note in the closed file that the process group was destroyed."""
        self.metrics["shutdown"]["destroy_process_group_called"] = True
        if self.is_writer:
            with run_lock.writing_in(self.directory) as place:
                write_metrics(place / METRICS, self.metrics)

    def closing_words(self) -> str:
        """Return the summary for the terminal."""
        timing, summary = self.metrics["timing"], self.metrics["summary"]
        words = []
        if timing["step_time_p50_sec"] is not None:
            words.append(
                f"{counted(self.last_step, 'step')}: median step {timing['step_time_p50_sec']:.3f} s (p95 "
                f"{timing['step_time_p95_sec']:.3f} s, n={timing['num_measured_steps']} after warm-up), "
                f"{summary['mean_tokens_per_sec_global']:,.0f} tokens/s"
            )
        if skipped := sum(row["is_skipped"] for row in self.steps):
            words.append(f"{skipped:,} of {counted(len(self.steps), 'step')} changed no weight: overflows in fp16")
        words += signs_of_other_work(self.metrics)
        if summary["final_val_loss"] is not None:
            words.append(f"validation loss {summary['final_val_loss']:.4f}")
        found = self.metrics.get("attribution")
        if found and self.settings.measuring.profile:  # else it is of an earlier start
            words.append(words_on_attribution(found, self.directory))
        return "\n".join([*words, f"metrics: {self.directory / METRICS}"])

    def write_if_due(self) -> None:
        """Write often enough to lose few rows in a kill, and seldom enough to cost under 1 % of the time."""
        if self.is_writer and time.perf_counter() >= self._next_write_s:
            self.write("running")

    def write(self, status: str, failure: dict | None = None, completion: dict | None = None) -> None:
        """Check and write the file. A failed run stays failed, whichever thread writes last.

        Raises:
            OSError: it cannot be written; the last file stays.
            FolderGone: the run's folder was renamed or deleted.
        """
        if not self.is_writer:
            return
        if not self._turn.acquire(timeout=WRITE_EVERY_S):
            raise OSError("an earlier write has not come to an end")
        try:
            if not self._has_failed or status == "failed":
                self._has_failed = status == "failed"
                self._write(status, failure, completion)
        finally:
            self._turn.release()

    def _write(self, status: str, failure: dict | None, completion: dict | None) -> None:
        start_s = time.perf_counter()
        self.metrics.update(
            status=status,
            failure=failure,
            completion=completion,
            steps=self.steps,
            evaluations=self.evaluations,
            segments=self.starts.as_recorded(self._ended(status), self.last_step),
            checkpoints=self.checkpoints,
            epochs=[self._epoch(number) for number in sorted({row["epoch"] for row in self.steps})],
            timing=timing(self.steps, self.step_end_s, self.startup_s, self.settings),
        )
        if watched := self._watched.rows():
            self.metrics["watched_steps"] = watched
        rate = tokens_per_s(self.steps, self.settings)
        self.metrics["flops"].update(speed(rate, self.metrics["flops"], self.metrics["hardware"]["num_devices"]))
        self.metrics["summary"] = summary(self.evaluations, rate, self.starts.wall_s)
        with run_lock.writing_in(self.directory) as place:
            write_metrics(place / METRICS, self.metrics)
        now = time.perf_counter()
        self._next_write_s = now + max(WRITE_EVERY_S, (now - start_s) / SHARE_OF_TIME_FOR_WRITING)

    def _ended(self, status: str) -> str | None:
        """Return how this start ended, by the status of the file; None: it is running."""
        done = max(self.last_step, self.starts.resumed_step)
        if status == "complete" and done < self.settings.plan.total_steps and not self.settings.training.eval_only:
            return "stopped"
        return None if status == "running" else status

    def _epoch(self, number: int) -> dict:
        return epoch_figures(
            number,
            [row for row in self.steps if row["epoch"] == number],
            self.evaluations,
            self._epoch_wall_s.get(number, 0.0),
            self.epoch_memory.get(number),
            self._earlier_epochs.get(number, {}),
            self.settings,
        )
