"""Print what rank 0 warns of, and its progress: a bar on a terminal, a line now and then elsewhere. Programs read the
JSON instead."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
from tqdm import tqdm

from testbed.config.run_types import STRATEGIES
from testbed.config.settings import RunSettings
from testbed.data.windows import Windows, longest_pair
from testbed.distributed.launch import Launch, launcher, usable_cores
from testbed.errors import counted, printable
from testbed.memory_model.stages import balanced_stages
from testbed.model.shape import size_name

RECENT_STEPS = 50  # whose median says how long the others take
LINE_EVERY_S = 30.0  # of validation, where there is no terminal


def what_runs(settings: RunSettings, windows: Windows, first_step: int) -> list[str]:
    """Return a line each for the mesh, the stages, the model with its batch and steps, and the pairs.

    Args:
        windows: of the training file.
        first_step: optimizer steps done by earlier starts.
    """
    mesh, batch, shape, seq_length = settings.plan.mesh, settings.batch, settings.shape, settings.data.seq_length
    lines = [str(mesh)]
    if mesh.pipeline > 1:
        stages = balanced_stages(shape, seq_length, mesh.pipeline * (settings.model_parallel.stages_per_rank or 1))
        lines.append("stages: " + "; ".join(f"{number} = {stage}" for number, stage in enumerate(stages)))
    skipped = settings.data_parallel.skip_gradient_sync
    if skipped:
        lines.append(
            f"--skip_gradient_sync {skipped}: the ranks train apart. This measures steps without communication: "
            "it is not training"
        )
    steps = "validation only" if settings.training.eval_only else f"steps {first_step + 1} to {settings.last_step}"
    compiled = ", compiled blocks" if settings.compute.compile else ""
    lines.append(
        f"{settings.training.run_type}: {size_name(shape)}, {shape.num_parameters:,} parameters, "
        f"{settings.compute.precision}{compiled} on {mesh.num_ranks} x {settings.compute.device}; global batch "
        f"{batch.global_batch_size} = {batch.micro_batch_size_per_gpu} x {batch.grad_accum_steps} x "
        f"{counted(settings.plan.data_world_size, 'data rank')} of {seq_length} tokens; {steps}; "
        f"files in {settings.checkpointing.checkpoint_path}"
    )
    trains = not (skipped or settings.training.eval_only)
    if trains and settings.checkpointing.save_every is None:
        lines.append(
            f"note: no --save_every: a crash before step {settings.last_step} loses all steps; SIGTERM and Ctrl-C save "
            "a checkpoint first"
        )
    if windows.token_file.targets is not None:
        lines.append(_pairs_in_words(windows))
    return lines


def _pairs_in_words(windows: Windows) -> str:
    """Return how many pairs fit, and which share of the tokens are targets."""
    num_pairs, longest = windows.token_file.num_documents, longest_pair(windows.token_file)
    fitting = "all" if len(windows) == num_pairs else f"{len(windows):,} of"
    share = windows.num_target_tokens() / max(1, len(windows) * windows.seq_length)
    return (
        f"pairs: {fitting} {num_pairs:,} fit whole into --seq_length {windows.seq_length}; the longest needs {longest}"
        f". {share:.1%} of tokens are targets; the rest are prompts and padding"
    )


def launch_warnings(settings: RunSettings, launch: Launch) -> list[str]:
    """Return warnings about too few ranks or too many threads."""
    notes, cores, run_type = [], usable_cores(), settings.training.run_type
    if STRATEGIES[run_type].is_distributed and launch.world_size == 1:
        alone = f"{run_type} with one rank has nothing to distribute"
        if launcher() == "python":
            notes.append(
                f"note: one rank, because plain python starts one: {alone}; torchrun --nproc-per-node {max(2, cores)} "
                "src/gpt2.py ... starts more"
            )
        elif launcher() == "deepspeed" and settings.compute.device == "cpu":
            notes.append(
                f"note: one rank, because the deepspeed command counts no cores: {alone}; deepspeed --num_gpus "
                f"{max(2, cores)} src/gpt2.py ... starts more, on a CPU too"
            )
    ranks, threads = launch.local_world_size, settings.compute.threads_per_rank
    if settings.compute.device == "cpu" and ranks * threads > cores:
        notes.append(
            f"note: {counted(ranks, 'rank')} x {counted(threads, 'thread')} on {counted(cores, 'usable core')}: they "
            f"take turns, so steps are slow and scatter; for a measurement give at most {cores} together (fewer ranks, "
            "--threads_per_rank)"
        )
    return notes


class Console:
    """Progress over optimizer steps. Silent on every rank but 0."""

    def __init__(self, settings: RunSettings, first_step: int, is_speaking: bool):
        self.settings = settings
        self.is_speaking = is_speaking
        self.bar = None
        self._recent_s: deque[float] = deque(maxlen=RECENT_STEPS)  # step times; the first one warms up
        self._began_s, self._in_steps_s, self._steps = 0.0, 0.0, 0  # since the end of the first step
        if is_speaking and sys.stderr.isatty() and not settings.measuring.profile_mode:
            self.bar = tqdm(
                total=settings.last_step,
                initial=first_step,
                desc=settings.training.run_type,
                unit="step",
                dynamic_ncols=True,
            )

    def say(self, message: str) -> None:
        """Print a line, above the bar where there is one. A closed terminal or pipe ends no run."""
        if self.is_speaking:
            with contextlib.suppress(OSError):
                tqdm.write(printable(message, kept="\n\t"), file=sys.stdout)
                sys.stdout.flush()

    def show_step(self, step: int, loss: float, learning_rate: float, step_time_s: float) -> None:
        left = self._time_left(step, step_time_s)
        tokens_per_s = self.settings.tokens_per_step / step_time_s
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
            self.bar.update()
        if step == 1 or step % self.settings.measuring.steps_per_print == 0 or step == self.settings.last_step:
            self.say(
                f"step {step:>5}/{self.settings.last_step}  {step * self.settings.tokens_per_step:,} tokens  "
                f"loss {loss:.4f}  lr {learning_rate:.2e}  "
                f"{step_time_s:.3f} s  {tokens_per_s:,.0f} tokens/s{left}"
            )

    def _time_left(self, step: int, step_time_s: float) -> str:
        """Return the end of a line: the median of recent steps, and what came between steps so far (validation,
        checkpoints), for the steps that are left."""
        now_s = time.perf_counter()
        if not self._began_s:
            self._began_s = now_s
            return ""
        self._recent_s.append(step_time_s)
        self._in_steps_s += step_time_s
        self._steps += 1
        between_s = max(0.0, now_s - self._began_s - self._in_steps_s) / self._steps
        seconds = (self.settings.last_step - step) * (statistics.median(self._recent_s) + between_s)
        return f"  {timedelta(seconds=round(seconds))} left" if seconds else ""

    def batches(self, number: int, what: str) -> Iterator[int]:
        """Yield the numbers of batches, with a bar that leaves nothing behind, or a line now and then."""
        if self.bar is not None:
            yield from tqdm(range(number), desc=what, unit="batch", leave=False)
            return
        began_s = said_s = time.perf_counter()
        for done in range(number):
            now_s = time.perf_counter()
            if now_s - said_s >= LINE_EVERY_S:
                left = timedelta(seconds=round((now_s - began_s) / done * (number - done)))
                self.say(f"{what}: {done}/{number} batches  {left} left")
                said_s = now_s
            yield done

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def abandoned_locks() -> list[Path]:
    """Return the locks in PyTorch's cache of extensions that no process of this machine has open. Only root sees the
    processes of other users."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache)
    held = set()
    if locks := sorted({*cache.glob("*/lock"), *cache.glob("*/*/lock")}):  # deeper where PyTorch names the version
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # gone meanwhile, or another user's
                held |= {file.path for file in process.open_files()}
    return [lock for lock in locks if str(lock.resolve()) not in held]


def warnings_of_locks(run_type: str) -> list[str]:
    """Return a sentence for each abandoned lock that may make this run wait for ever."""
    return [
        f"warning: {lock} is left over from a build that was killed: no process of this machine has it open, and "
        f"DeepSpeed would wait for it for ever if it needs that part; if no other machine is building there: rm {lock}"
        for lock in (abandoned_locks() if STRATEGIES[run_type].engine == "deepspeed" else ())
    ]
