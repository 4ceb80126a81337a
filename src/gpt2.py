#!/usr/bin/env python3
"""Train GPT-2 under one way of spreading an optimizer step over devices, and measure it.

    python src/gpt2.py --run_type baseline
    deepspeed src/gpt2.py --run_type optimized
    torchrun --nproc-per-node 2 src/gpt2.py --run_type optimized

Read it from top to bottom: `main` sets up and cleans up, `train` is the loop, `finish` leaves the weights.
What it is made of lies in src/testbed/; the files that it writes are explained in docs/metrics_file.md.
"""

import dataclasses
import json
import math
import os
import sys
import time
import traceback
from pathlib import Path

STARTED_S = time.perf_counter()
sys.path.insert(0, str(Path(__file__).resolve().parent))  # `testbed` lies beside this file, installed or not

from testbed.settings import CheckedRun, RunSettings, start

if __name__ == "__main__":
    CHECKED, LAUNCH = start(sys.argv[1:])  # --help and what was typed wrong end here, before seconds of imports
    if LAUNCH.rank == 0:
        print("starting: loading PyTorch, checking the data ...", flush=True)

import torch

from testbed import checkpoint, distributed, run_directory
from testbed.announce import out_of_memory_advice, say_what_runs
from testbed.atomic_file import write_text
from testbed.attribution import attribution
from testbed.automatic_choices import ChoiceContradicts, as_decided_before, decide
from testbed.data import TrainingBatches, ValidationBatches
from testbed.device import choose_device
from testbed.float8 import convert_to_float8_
from testbed.flops import peak_from_table
from testbed.launch import Launch, RunStopped, refuse, stop_on_signals_and_orphanhood
from testbed.measure import PeakRate, peak_memory
from testbed.model import GPT2
from testbed.profiling import profiler_window
from testbed.progress import Progress
from testbed.recorder import RunRecorder
from testbed.run_facts import facts_of_run
from testbed.sample import sample_text
from testbed.scalars import Scalars
from testbed.schedule import learning_rate_at
from testbed.step import StepResult
from testbed.step_clock import StepClock, named_range
from testbed.strategies import STRATEGIES, Strategy, build_strategy
from testbed.token_file import check_token_file
from testbed.utilization import UtilizationSampler
from testbed.weights import WeightsUnavailable, export_weights, read_initial_weights


class TrainingDiverged(Exception):
    """The loss or the gradient is no longer a number: nothing of that step is kept."""


Weights = dict[str, torch.Tensor]


@dataclasses.dataclass
class Run:
    """What the parts of this program hand to each other."""

    checked: CheckedRun
    settings: RunSettings
    launch: Launch
    device: torch.device
    directory: Path
    recorder: RunRecorder
    progress: Progress
    weights: Weights | None  # to begin with; let go of once the strategy has taken its part
    first_step: int  # optimizer steps done by earlier starts of this run
    scalars: Scalars
    best_val_loss: float = math.inf


def main(checked: CheckedRun, launch: Launch) -> int:
    """Set up, train, and leave every file whole however it ends. Returns the exit code."""
    settings, directory = checked.settings, Path(checked.settings.checkpoint_path)
    owned, backend, recorder = None, None, None  # owned: the folder, once this rank may leave its mark in it
    failure: tuple[str, int] | None = None  # reason and exit code
    ignore_signals = stop_on_signals_and_orphanhood(
        on_stuck=lambda stop: leave_failed(owned, launch, recorder, stop.reason)
    )
    try:
        try:  # the last things that can be typed wrong; rank 0 alone reads whole files and touches the folder
            device = choose_device(settings, launch)
            sha256 = check_data(checked) if launch.rank == 0 else {}
            settings = dataclasses.replace(settings, device=device.type)
            resumed = checkpoint.find_for_resume(settings, launch) if settings.resume else None
            if resumed is not None:
                settings = as_decided_before(settings, resumed.settings)
            if resumed is not None and launch.rank == 0:
                check_same_data(resumed, sha256)
            weights = None if resumed else read_initial_weights(settings.init_from, settings.shape)
            if launch.rank == 0:
                run_directory.claim(directory, settings.overwrite, settings.resume)
                owned = directory
        except ValueError as error:
            return refuse(launch, str(error))
        if settings.quiet_nccl_monitor:
            os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
        backend = distributed.start_process_group(
            device, launch, is_needed=STRATEGIES[settings.run_type].is_distributed
        )
        distributed.wait_for_everyone()
        owned = directory  # rank 0 has claimed it, or nobody would have come this far
        settings, choices = decide(settings, launch, device)
        facts = facts_of_run(dataclasses.replace(checked, settings=settings), sha256, launch, device, backend)
        recorder = RunRecorder(directory, settings, facts, is_writer=launch.rank == 0)
        if resumed is not None:  # before anything can fail: what was recorded must not be lost
            recorder.restore(resumed.metrics, resumed.step, resumed.elapsed_s)
        progress = Progress(settings, resumed.step if resumed else 0, is_speaking=launch.rank == 0)
        for line in choices:
            progress.say(line)
        if launch.rank == 0:
            write_text(directory / run_directory.EFFECTIVE_CONFIG, as_json(settings.as_config()))
            run_directory.write_launcher_metadata(directory, launch, facts["git_commit"])
        first_step = resumed.step if resumed else 0
        scalars = Scalars(settings, directory / run_directory.TENSORBOARD, first_step, is_writer=launch.rank == 0)
        run = Run(checked, settings, launch, device, directory, recorder, progress, weights, first_step, scalars)
        weights = None  # a rank that holds a part of the model must not keep the whole beside it
        train(run, resumed)
    except RunStopped as stop:
        failure = stop.reason, stop.exit_code
    except (TrainingDiverged, WeightsUnavailable, distributed.RanksDiffer, checkpoint.CheckpointFailed) as error:
        failure = str(error), 1
    except ChoiceContradicts as error:
        failure = str(error), 2
    except torch.OutOfMemoryError as error:
        failure = out_of_memory_advice(settings, error), 1
    except Exception as error:
        traceback.print_exc()
        failure = reason_of(error), 1
    ignore_signals()  # from here on nothing interrupts closing down
    exit_code = leave_failed(owned, launch, recorder, *failure) if failure else 0
    return leave(exit_code, recorder, has_process_group=backend is not None)


def check_data(checked: CheckedRun) -> dict[str, str]:
    """Read both token files once: every id is in the vocabulary, and the bytes are those that were written."""
    settings = checked.settings
    return {
        name: check_token_file(token_file, settings.vocab_size, f"--{name}_data_path").sha256
        for name, token_file in (("train", checked.train_file), ("val", checked.val_file))
    }


def check_same_data(resumed: checkpoint.Checkpoint, sha256: dict[str, str]) -> None:
    """A run goes on with the data it began with."""
    if resumed.metrics["training_config"]["dataset_sha256"] != sha256:
        raise ValueError(
            "--resume: --train_data_path or --val_data_path holds other bytes than when the run began; restore the "
            "files, or start a new run"
        )


def build(run: Run) -> Strategy:
    """The model that every rank begins with, and around it the strategy, which may keep only a part."""
    settings = run.settings
    torch.manual_seed(settings.seed)  # every rank draws the same weights ...
    model = GPT2(settings.shape, settings.dropout, settings.attention, settings.activation_checkpointing)
    if run.weights is not None:
        model.load_state_dict(run.weights)
        run.weights = None
    if settings.matmul == "fp8":
        convert_to_float8_(model)
    distributed.check_identical(model.state_dict(), "initial weights")
    strategy = build_strategy(settings, model, run.device)
    torch.manual_seed(distributed.seed_of_rank(settings.seed, run.launch.rank))  # ... and its own dropout
    return strategy


def train(run: Run, resumed: checkpoint.Checkpoint | None) -> None:
    """Optimizer step after optimizer step."""
    settings, device, recorder = run.settings, run.device, run.recorder
    strategy = build(run)
    if resumed is not None:
        checkpoint.load(resumed, strategy, run.launch)
        earlier = [row["val_loss"] for row in resumed.metrics["evaluations"] if row["step"] <= run.first_step]
        run.best_val_loss = min(earlier, default=math.inf)
    batches = TrainingBatches(run.checked.train_file, settings, strategy.data_rank, device)
    validation = ValidationBatches(run.checked.val_file, settings, strategy.data_rank, device)
    say_what_runs(run.progress, settings, run.launch.world_size, device.type, run.first_step, run.directory)
    peak = peak_rate(run)
    sampler = UtilizationSampler(device)

    clock = StepClock(device, emits_nvtx=settings.profile_mode)
    sampler.start()
    recorder.begin_training(startup_s=time.perf_counter() - STARTED_S)
    with profiler_window(settings, run.directory / run_directory.PROFILER_LOGS, run.launch.rank) as profile_step:
        for step in range(run.first_step, settings.last_step):
            learning_rate = learning_rate_at(step, settings)
            distributed.wait_for_everyone()  # what rank 0 alone wrote or exported must not count as the others' step
            with clock:  # the wait for data is inside, as a phase of its own
                micro_batches = clock.data_wait(batches.of_step, step)
                result = strategy.train_step(micro_batches, learning_rate)
            world = distributed.gather_step(result, clock, device)  # a collective, so outside the clock
            grad_norm = checked_grad_norm(step + 1, world.loss, float(result.grad_norm), settings)
            recorder.add_step(step + 1, world, grad_norm, learning_rate)
            run.progress.show_step(step + 1, world.loss, learning_rate, world.step_time_s)
            run.scalars.add_step(step + 1, world.loss, grad_norm, learning_rate, world.step_time_s)
            profile_step()
            is_last = step + 1 == settings.last_step
            if is_last or is_due(step + 1, settings.eval_every) or is_due(step + 1, settings.steps_per_epoch):
                validate(run, strategy, validation, step + 1)
            if is_due(step + 1, settings.save_every) or step + 1 == settings.stop_at_step:
                recorder.write("running")  # a checkpoint without the rows up to it could not be resumed from
                checkpoint.save(strategy, settings, run.launch, step + 1, recorder.elapsed_s)
            recorder.write_if_due()
            if peak is not None:
                peak.measure_if_due(world.step_time_s)
    batches.close()
    utilization = distributed.gather_objects(sampler.stop())
    if not settings.eval_only:
        recorder.add_utilization(utilization)
    if settings.eval_only:
        validate(run, strategy, validation, 0)
    finish(run, strategy, peak)


def is_due(step: int, every: int | None) -> bool:
    """Whether what happens every so many steps happens after `step`, counted from 1."""
    return every is not None and step % every == 0


def checked_grad_norm(step: int, loss: float, grad_norm: float, settings: RunSettings) -> float | None:
    """The gradient norm; None where fp16 overflowed and the update was skipped.

    Raises:
        TrainingDiverged: the loss or the gradient is not finite.
    """
    if not math.isfinite(loss):
        raise TrainingDiverged(f"the loss of step {step} is {loss}; lower --learning_rate or lengthen --warmup_steps")
    if math.isfinite(grad_norm):
        return grad_norm
    if settings.precision != "fp16":
        raise TrainingDiverged(f"the gradient norm of step {step} is {grad_norm}; lower --learning_rate")
    return None


def validate(run: Run, strategy: Strategy, batches: ValidationBatches, step: int) -> None:
    """Loss over the validation windows; every rank reads its share. Keeps the best weights with --keep_best."""
    if run.settings.max_val_steps == 0:
        return
    start_s = time.perf_counter()
    loss_sum, num_tokens = torch.zeros((), dtype=torch.float64, device=run.device), 0
    for index in run.progress.batches(len(batches), "validation"):
        with named_range("val/batch", run.settings.profile_mode):
            result = strategy.evaluate(batches.of_batch(index))
        loss_sum += result.loss_sum
        num_tokens += result.num_target_tokens
    world = distributed.gather_step(StepResult(loss_sum, num_tokens, None), StepClock(run.device), run.device)
    run.recorder.add_memory(step, distributed.gather_objects(peak_memory(run.device)))
    seconds = time.perf_counter() - start_s
    run.recorder.add_evaluation(step, world.loss, world.num_target_tokens, batches.num_sequences, seconds)
    run.scalars.add_validation(step, world.loss)
    run.progress.say(f"step {step:>5}  validation loss {world.loss:.4f}  ({seconds:.1f} s)")
    if world.loss < run.best_val_loss:
        run.best_val_loss = world.loss
        if run.settings.keep_best:
            export(run, strategy.full_state_dict(), run.directory / run_directory.BEST)


def peak_rate(run: Run) -> PeakRate | None:
    """Begin to measure what a device can do at best; None where the data sheet says it."""
    name = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else None
    is_known = peak_from_table(name, run.settings.precision) is not None
    if all(distributed.gather_objects(is_known)):  # decided together: devices of one run may differ
        return None
    peak = PeakRate(run.device, run.settings.precision)
    peak.size = min(distributed.gather_objects(peak.size))
    distributed.wait_for_everyone()
    peak.measure(repeats=2)
    if run.device.type == "cuda":  # its matrices are not the run's memory
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(run.device)
    return peak


def finish(run: Run, strategy: Strategy, peak: PeakRate | None) -> None:
    """Leave the weights, a sample, where the time went, the closed metrics file and RUN_COMPLETE.txt."""
    settings, recorder = run.settings, run.recorder
    recorder.add_memory(settings.last_step, distributed.gather_objects(peak_memory(run.device)))
    state_dict = strategy.full_state_dict()
    export(run, state_dict, run.directory)  # before anything that only measures
    if peak is not None:
        distributed.wait_for_everyone()
        peak.measure(repeats=2)
        rates = distributed.gather_objects(peak.flops_per_s())
        recorder.add_measured_peak(sum(rates) / len(rates), peak.source(len(rates)))
    if settings.profile:
        traces = run.directory / run_directory.PROFILER_LOGS
        recorder.add_attribution(attribution(settings, traces, run.launch.rank, run.first_step, run.device))
    if run.launch.rank == 0:
        run.progress.close()
        sample, line = sample_text(state_dict, settings, run.checked.train_file)
        if line:
            run.progress.say(line)
        run.scalars.close()
        recorder.close(sample)
        run.progress.say(recorder.closing_words())
    distributed.wait_for_everyone()
    strategy.close()


def export(run: Run, state_dict: dict[str, torch.Tensor], directory: Path) -> None:
    """Write the weights so that `transformers` opens them. Only rank 0 has any, and ranks that trained apart none."""
    if run.launch.rank == 0 and not run.settings.skip_gradient_sync:
        token_file = run.checked.train_file
        export_weights(directory, state_dict, run.settings, token_file.end_of_text_id, token_file.tokenizer)


def reason_of(error: Exception) -> str:
    """One sentence for an exception that nobody expected. A collective that breaks means that another rank is gone."""
    is_collective = isinstance(error, torch.distributed.DistError) or "gloo" in str(error)
    lead = "another rank is gone, so a collective failed: " if is_collective else ""
    return f"{lead}{type(error).__name__}: {error}"


def leave_failed(
    owned: Path | None, launch: Launch, recorder: RunRecorder | None, reason: str, exit_code: int = 1
) -> int:
    """Mark the run as failed, keep its rows, say where the last good checkpoint is. Returns the exit code."""
    reason = f"{reason.splitlines()[0]}; {last_checkpoint(owned)}"
    print(f"rank {launch.rank} failed: {reason}", file=sys.stderr, flush=True)
    standing_reason = mark_failed(owned, launch, reason)
    try:
        if launch.rank == 0 and owned:
            (owned / run_directory.COMPLETE).unlink(missing_ok=True)  # closed, and then something went wrong after all
        if recorder is not None:
            recorder.write("failed", failure={"reason": standing_reason, "step": recorder.last_step or None})
    except (OSError, ValueError) as error:  # a full disk, say: the file of the last write stays as it is
        print(f"rank {launch.rank}: the metrics could not be updated: {error}", file=sys.stderr, flush=True)
    return exit_code


def last_checkpoint(owned: Path | None) -> str:
    """Where to resume from, in words."""
    try:
        newest = checkpoint.newest(owned) if owned else None
    except (OSError, ValueError) as error:
        return f"the checkpoints cannot be read ({error})"
    return f"last checkpoint: {newest.directory}" if newest else "no checkpoint was saved"


def mark_failed(owned: Path | None, launch: Launch, reason: str) -> str:
    """RUN_FAILED.txt in the run's folder, if it is this run's yet. Returns the reason of the first rank that failed."""
    return run_directory.mark_failed(owned, launch.rank, reason) if owned else reason


def leave(exit_code: int, recorder: RunRecorder | None, has_process_group: bool) -> int:
    """End the process group after a success; after a failure the other ranks may be gone, so do not wait for them."""
    if has_process_group:
        if exit_code == 0:
            distributed.wait_for_everyone()
            distributed.stop_process_group()
            recorder.note_process_group_ended()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)  # gloo's threads sometimes abort the interpreter's own way out
    return exit_code


def as_json(content: dict) -> str:
    return json.dumps(content, indent=2) + "\n"


if __name__ == "__main__":
    sys.exit(main(CHECKED, LAUNCH))
