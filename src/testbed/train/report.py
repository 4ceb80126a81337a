"""Pass each step to everything that records or shows it. Nothing here runs inside the step clock."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from testbed import run_folder
from testbed.config.settings import RunSettings
from testbed.distributed import process_group
from testbed.distributed.flight_recorder import MOST_TIMED, recorded
from testbed.distributed.launch import Launch
from testbed.errors import first_line
from testbed.metrics.recorder import RunRecorder
from testbed.metrics.trackers import Trackers
from testbed.metrics.world_step import WorldStep
from testbed.profiling.attribution import attribution
from testbed.profiling.collective_watch import CollectiveWatch
from testbed.profiling.device_limits import PeakRate, peak_memory
from testbed.profiling.profiler import profiler_window
from testbed.profiling.step_clock import StepClock
from testbed.profiling.timed_collectives import LEAST_STEPS, TimedCalls, calls_of, timed_collectives, times_collectives
from testbed.profiling.utilization import UtilizationSampler
from testbed.train import validated_text
from testbed.train.console import Console
from testbed.train.multiple_choice import in_words


@dataclass
class Report:
    """The metrics file, the progress lines, the trackers, the profiler and the measurements of the device.

    All ranks call it alike.
    """

    settings: RunSettings
    launch: Launch
    device: torch.device
    recorder: RunRecorder
    console: Console
    trackers: Trackers
    peak: PeakRate | None  # None where a data sheet gives the device's best rate
    rss_before_model: int  # bytes
    watch: CollectiveWatch | None  # None: nothing is watched
    bytes_of_a_token: float | None  # of the text that is validated; None: not known, or another rank than 0

    def __post_init__(self) -> None:
        self._sampler = UtilizationSampler(self.device)
        self._profile_step = lambda: None
        self._own_start_up_s = 0.0
        self._times_collectives = times_collectives(self.settings, self.device, self.launch)
        self._steps_ns: deque[tuple[int, int, int]] = deque(maxlen=MOST_TIMED)  # step, begin, end
        self._timed: TimedCalls | str = TimedCalls({})  # or why they cannot be read
        self._num_steps, self._read_at = 0, self.settings.measuring.timing_warmup_steps  # of this start
        self._kept = 0  # steps of the read that is kept
        self._traces = self.recorder.directory / run_folder.PROFILER_LOGS

    def begin_training(self, startup_s: float) -> None:
        """Start the clocks of the run. Call it right before the first step."""
        self._sampler.start()
        if self.watch is not None:
            self._own_start_up_s = self.watch.begin_steps(startup_s)
        self.recorder.begin_training(startup_s)

    @contextlib.contextmanager
    def profiled(self) -> Iterator[None]:
        """Trace the steps inside that --profile asks for."""
        with profiler_window(self.settings, self._traces, self.launch.rank) as self._profile_step:
            yield

    def step(self, step: int, world: WorldStep, learning_rate: float, clock: StepClock) -> None:
        """Record and show optimizer step `step`, counted from 1. `clock` has timed it on this rank."""
        self._sampler.add_step(clock.cpu_s, clock.step_time_s)
        self.recorder.add_step(step, world, learning_rate)
        self._num_steps += 1  # rank 0 alone keeps rows
        if self._times_collectives and self._num_steps > self.settings.measuring.timing_warmup_steps:
            self._steps_ns.append((step, clock.began_ns, clock.ended_ns))
        self.console.show_step(step, world.loss, learning_rate, world.step_time_s)
        self.trackers.add_step(step, world, learning_rate)
        self._profile_step()
        if not world.stop:  # a run that ends here is written by the checkpoint
            self.recorder.write_if_due()
            if self.peak is not None:
                self.peak.measure_if_due(world.step_time_s)

    def validation(
        self,
        step: int,
        loss: float,
        num_tokens: int,
        num_sequences: int,
        wall_time_s: float,
        answers: dict[str, Any] | None,
    ) -> None:
        """Record and show the validation after `step`. `answers`: of questions; None: none were asked."""
        self.recorder.add_evaluation(step, loss, num_tokens, num_sequences, wall_time_s, answers)
        self.trackers.add_validation(step, loss, answers)
        words = validated_text.in_words(loss, self.bytes_of_a_token)
        self.console.say(f"step {step:>5}  validation loss {loss:.4f}, {words}  ({wall_time_s:.1f} s)")
        if answers is not None:
            self.console.say(f"step {step:>5}  {in_words(answers)}")
        self.recorder.write_if_due()

    def memory(self, step: int) -> None:
        """Record every rank's peak memory up to `step`."""
        mine = {**peak_memory(self.device), "rss_before_model_bytes": self.rss_before_model}
        self.recorder.add_memory(step, process_group.gather_objects(mine))

    def end_training(self) -> None:
        """Stop the sampler of utilization and the watch, and record what they saw."""
        if self.watch is not None:
            self.watch.close()
            mine = {
                "own_start_up_s": self._own_start_up_s,
                "num_steps": self.watch.num_steps,
                "collectives": self.watch.rows(self._axes_of_group),
            }
            self.recorder.add_watched(process_group.gather_objects(mine))
        if self._times_collectives:
            self.keep_timed_collectives()
            self._record_timed_collectives()
        utilization = process_group.gather_objects(self._sampler.stop())
        if not self.settings.training.eval_only:
            self.recorder.add_utilization(utilization)

    def keep_timed_collectives(self) -> None:
        """Read the flight recorder before collectives of a validation take its room, on all ranks after the same steps:
        what is over it notes some 100 ms late, so how many steps it shows differs by rank."""
        new = self._num_steps - self._read_at
        is_due = self._times_collectives and new > max(LEAST_STEPS, self._kept // 2)  # few do not replace many
        if not is_due or isinstance(self._timed, str):
            return
        self._read_at, self._kept = self._num_steps, new
        try:
            size_of_group, world_size = process_group.size_of_group, self.launch.world_size
            self._timed = calls_of(recorded(), list(self._steps_ns), size_of_group, world_size)
        except Exception as error:  # another version's form; no run fails for it
            self._timed = first_line(error)

    def _record_timed_collectives(self) -> None:
        per_rank = process_group.gather_on_rank_0(self._timed)
        failed = [one for one in per_rank if isinstance(one, str)]
        if failed:
            self.console.say(f"note: PyTorch's flight recorder cannot be read: {failed[0]}")
        elif per_rank:
            self.recorder.add_timed_collectives(timed_collectives(per_rank))

    def _axes_of_group(self, name: str) -> str:
        return self.settings.plan.mesh.axes_of(process_group.ranks_of_group(name))

    def measure_device(self, first_step: int) -> None:
        """Record the device's best rate, and with --profile where the time of the traced steps went.

        Args:
            first_step: optimizer steps done before this start of the run.
        """
        if self.peak is not None:
            process_group.wait_for_everyone()
            self.peak.measure(repeats=2)
            rates = process_group.gather_objects(self.peak.flops_per_s())
            self.recorder.add_measured_peak(sum(rates) / len(rates), self.peak.source(len(rates)))
        if self.settings.measuring.profile:
            found = attribution(self.settings, self._traces, self.launch.rank, first_step, self.device)
            self.recorder.add_attribution(found)

    def inference(self, measured: dict | None, line: str) -> None:
        """Record and show what generation with the trained weights took."""
        self.recorder.add_inference(measured)
        self.console.say(line)

    def close(self, sample: dict | None, line: str) -> None:
        """Close the files of the run and show the summary. Only rank 0 calls it."""
        if line:
            self.console.say(line)
        marker = self.recorder.close(sample)
        self.console.say(f"{self.recorder.closing_words()}\n{marker}")  # older launchers look for the marker
