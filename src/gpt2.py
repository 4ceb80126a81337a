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
from pathlib import Path
from typing import NoReturn

STARTED_S = time.perf_counter()
sys.path.insert(0, str(Path(__file__).resolve().parent))  # `testbed` lies beside this file, installed or not

from testbed.config.check import start
from testbed.config.settings import CheckedRun, RunSettings

if __name__ == "__main__":
    CHECKED, LAUNCH = start(sys.argv[1:])  # --help and what was typed wrong end here, before seconds of imports
    if LAUNCH.rank == 0:
        print("starting: loading PyTorch, checking the data ...", flush=True)

import torch

from testbed import run_files
from testbed.autotune.choices import decide
from testbed.autotune.device import choose_device
from testbed.checkpoint import resume, writer
from testbed.checkpoint.changed_settings import settings_to_go_on
from testbed.checkpoint.weights import export_weights, read_initial_weights
from testbed.config.run_types import STRATEGIES
from testbed.config.trained_run import of_the_run
from testbed.data.token_file import TokenFile, check_token_file
from testbed.distributed import process_group, watchdog
from testbed.distributed.launch import Launch, refuse
from testbed.distributed.signals import RunStopped, StopSignals
from testbed.inference.after_training import benchmark_generation
from testbed.inference.sample import sample_text
from testbed.io import write_text
from testbed.metrics import run_directory, world_step
from testbed.metrics.facts import facts_of_run
from testbed.metrics.recorder import RunRecorder
from testbed.metrics.tensorboard import Scalars
from testbed.model.float8 import convert_to_float8_
from testbed.model.gpt2 import GPT2
from testbed.optim.lr_schedule import learning_rate_at
from testbed.profiling.attribution import attribution
from testbed.profiling.collective_log import log_collectives
from testbed.profiling.device_limits import PeakRate, begin_peak_rate, peak_memory
from testbed.profiling.profiler import profiler_window
from testbed.profiling.step_clock import StepClock, named_range
from testbed.profiling.utilization import UtilizationSampler
from testbed.run_lock import by_handle, check_held
from testbed.step import StepResult
from testbed.strategies import Strategy, build_strategy
from testbed.strategies.deepspeed_build_locks import warnings_of_locks
from testbed.train.batches import TrainingBatches, ValidationBatches
from testbed.train.ending import RunEnding, RunPreempted, TrainingDiverged
from testbed.train.progress import Progress, notes_of_place, say_what_runs

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
    ending: RunEnding
    tokenizer_text: str | None  # rank 0: the BPE of the data, read before the first step (`tokenizer_of_data`)
    best_val_loss: float = math.inf

    @property
    def signals(self) -> StopSignals:
        """What may have asked the run to stop."""
        return self.ending.signals


def main(checked: CheckedRun, launch: Launch) -> int:
    """Set up, train, and leave every file whole however it ends. Returns the exit code."""
    settings, directory = checked.settings, Path(checked.settings.checkpointing.checkpoint_path)
    ending = RunEnding(settings, launch)
    try:
        ending.signals.interrupt()
        try:
            device = choose_device(settings, launch)
        except ValueError as error:
            return refuse(launch, str(error))
        settings = settings.with_values(device=device.type)
        if settings.compute.quiet_nccl_monitor:
            os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
        ending.meets()
        backend = process_group.start_process_group(
            device, launch, is_needed=STRATEGIES[settings.training.run_type].is_distributed
        )
        if settings.measuring.log_collectives:
            log_collectives(directory, launch, backend)
        weights, refusal = (None, None) if settings.checkpointing.resume else initial_weights(settings)
        try:  # the last things that can be typed wrong; rank 0 alone reads whole files and touches the folder
            begun = resume.begin(settings, launch, lambda: check_data(checked), refusal)
        except ValueError as error:
            return ending.refuse(str(error))
        if begun.is_complete:
            return ending.leave(0)
        ending.owns(directory)
        checked.train_file.data_sha256, checked.val_file.data_sha256 = begun.sha256["train"], begun.sha256["val"]
        if settings.checkpointing.resume and begun.checkpoint is None:
            weights, refusal = initial_weights(settings)
            if refusal is not None:
                return ending.refuse(refusal)
        settings = settings_to_go_on(settings, begun.checkpoint)
        settings, choices = decide(settings, launch, device)
        facts = facts_of_run(dataclasses.replace(checked, settings=settings), begun.sha256, launch, device, backend)
        recorder = ending.recorder = RunRecorder(directory, settings, facts, is_writer=launch.rank == 0)
        resume.record(begun, recorder)  # before anything can fail: what was recorded must not be lost
        progress = Progress(settings, begun.step, is_speaking=launch.rank == 0)
        notes = (*of_the_run(settings, begun.sha256), *choices, *warnings_of_locks(settings.training.run_type))
        for line in (*notes, *notes_of_place(settings, launch)):
            progress.say(line)
        if launch.rank == 0:
            run_directory.write_launcher_metadata(directory, launch, facts["git_commit"])
            write_text(directory / run_files.EFFECTIVE_CONFIG, as_json(settings.as_config()))
        curves = by_handle(directory) / run_files.TENSORBOARD  # the library opens it again at every flush
        scalars = Scalars(settings, curves, begun.step, is_writer=launch.rank == 0)
        run = Run(
            *(checked, settings, launch, device, directory, recorder, progress, weights, begun.step, scalars),
            *(ending, tokenizer_of_data(checked.train_file) if launch.rank == 0 else None),
        )
        weights = None  # a rank that holds a part of the model must not keep the whole beside it
        train(run, begun)
    except (Exception, RunStopped) as error:
        return ending.after(error)
    return ending.leave(0)


def check_data(checked: CheckedRun) -> dict[str, str]:
    """Read both token files once: every id is in the vocabulary, and the bytes are those that were written.

    Returns:
        The sha256 of what each of them teaches, by name.
    """
    is_one = checked.train_file is checked.val_file  # --eval_only without a training file
    files = ({} if is_one else {"train": checked.train_file}) | {"val": checked.val_file}
    found = {
        name: check_token_file(token_file, checked.settings.model.vocab_size, f"--{name}_data_path").data_sha256
        for name, token_file in files.items()
    }
    return {"train": found["val"], **found}


def tokenizer_of_data(token_file: TokenFile) -> str | None:
    """The file of the BPE that the data was made with; None where there is none. Another preprocess_small.py may put
    another corpus's in its place while the run trains, so it is read before."""
    file = token_file.tokenizer_file
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # a run needs none
        return None


def initial_weights(settings: RunSettings) -> tuple[Weights | None, str | None]:
    """What --init_from names, or why it cannot be used."""
    try:
        return read_initial_weights(settings.model.init_from, settings.shape), None
    except ValueError as error:
        return None, str(error)


def build(run: Run) -> Strategy:
    """The model that every rank begins with, and around it the strategy, which may keep only a part."""
    settings = run.settings
    torch.manual_seed(settings.training.seed)  # every rank draws the same weights ...
    model = GPT2(
        settings.shape, settings.model.dropout, settings.model.attention, settings.compute.activation_checkpointing
    )
    if run.weights is not None:
        model.load_state_dict(run.weights)
        run.weights = None
    if settings.compute.matmul == "fp8":
        convert_to_float8_(model)
    process_group.check_identical(model.state_dict(), "initial weights")
    strategy = build_strategy(settings, model, run.device)
    torch.manual_seed(process_group.seed_of_rank(settings.training.seed, run.launch.rank))  # ... and its own dropout
    return strategy


def train(run: Run, begun: resume.Start) -> None:
    """Optimizer step after optimizer step."""
    settings, device, recorder = run.settings, run.device, run.recorder
    strategy = build(run)
    if begun.checkpoint is not None:
        is_continued = resume.load(begun, strategy, settings, run.launch)
        recorder.segment["random_numbers"] = "continued" if is_continued else "drawn anew"
        run.best_val_loss = begun.best_val_loss
    checkpoints = writer.CheckpointWriter(
        *(strategy, settings, run.launch, recorder), begun.step if begun.checkpoint else None
    )
    run.ending.checkpoints = checkpoints
    batches = TrainingBatches(run.checked.train_file, settings, strategy.data_rank, device)
    validation = ValidationBatches(run.checked.val_file, settings, strategy.data_rank, device)
    say_what_runs(
        *(run.progress, settings, batches.windows, run.launch.world_size, device.type, run.first_step, run.directory)
    )
    peak = begin_peak_rate(device, settings.compute.precision)
    run.ending.trains()
    sampler = UtilizationSampler(device)

    clock = StepClock(device, emits_nvtx=settings.measuring.profile_mode)
    sampler.start()
    recorder.begin_training(startup_s=time.perf_counter() - STARTED_S)
    run.signals.defer()  # from here on a stop waits for the end of the step
    if run.first_step and is_validated(run.first_step, settings) and not begun.is_validated:  # stopped before it
        validate(run, strategy, validation, run.first_step)
        if run.signals.agreed:
            stop_here(run, checkpoints, run.first_step)
    with profiler_window(settings, run.directory / run_files.PROFILER_LOGS, run.launch.rank) as profile_step:
        for step in range(run.first_step, settings.last_step):
            learning_rate = learning_rate_at(step, settings)
            watchdog.enter("barrier", step + 1)
            process_group.wait_for_everyone()  # what rank 0 alone wrote or exported must not count as the others' step
            with clock:  # the wait for data is inside, as a phase of its own
                micro_batches = clock.data_wait(batches.of_step, step)
                result = strategy.train_step(micro_batches, learning_rate)
            watchdog.enter("exchange")
            world = world_step.gather_step(result, clock, device, run.signals.number)  # outside the clock
            run.signals.agreed = world.stop
            grad_norm = checked_grad_norm(step + 1, world.loss, float(result.grad_norm), settings)
            recorder.add_step(step + 1, world, grad_norm, learning_rate)
            run.progress.show_step(step + 1, world.loss, learning_rate, world.step_time_s)
            run.scalars.add_step(step + 1, world.loss, grad_norm, learning_rate, world.step_time_s)
            profile_step()
            if not run.signals.agreed and (
                is_due(step + 1, settings.checkpointing.save_every) or step + 1 == settings.training.stop_at_step
            ):
                watchdog.enter("checkpoint")
                checkpoints.save(step + 1)  # before validation, beside which the last one too can be written
            if not run.signals.agreed and is_validated(step + 1, settings):
                validate(run, strategy, validation, step + 1)
            if run.signals.agreed:
                stop_here(run, checkpoints, step + 1)
            recorder.write_if_due()
            if peak is not None:
                peak.measure_if_due(world.step_time_s)
    batches.close()
    utilization = process_group.gather_objects(sampler.stop())
    if not settings.training.eval_only:
        recorder.add_utilization(utilization)
    if settings.training.eval_only:
        validate(run, strategy, validation, 0)
        if run.signals.agreed:
            raise run.signals.as_exception()
    finish(run, strategy, peak, checkpoints)


def is_due(step: int, every: int | None) -> bool:
    """Whether what happens every so many steps happens after `step`, counted from 1."""
    return every is not None and step % every == 0


def is_validated(step: int, settings: RunSettings) -> bool:
    """Whether validation follows `step`, counted from 1."""
    return (
        step == settings.last_step
        or is_due(step, settings.training.eval_every)
        or is_due(step, settings.plan.steps_per_epoch)
    )


def stop_here(run: Run, checkpoints: writer.CheckpointWriter, step: int) -> NoReturn:
    """End the run after `step`, as all ranks agreed, with everything on disk to go on from.

    Raises:
        RunPreempted: always, but for ranks that train apart, whose work is kept by nobody (RunStopped).
    """
    if run.settings.data_parallel.skip_gradient_sync:
        raise run.signals.as_exception()
    watchdog.enter("checkpoint")
    checkpoints.save(step)
    checkpoints.wait()
    raise RunPreempted


def checked_grad_norm(step: int, loss: float, grad_norm: float, settings: RunSettings) -> float | None:
    """The gradient norm; None where fp16 overflowed and the update was skipped.

    Raises:
        TrainingDiverged: the loss or the gradient is not finite.
    """
    if not math.isfinite(loss):
        raise TrainingDiverged(f"the loss of step {step} is {loss}; lower --learning_rate or lengthen --warmup_steps")
    if math.isfinite(grad_norm):
        return grad_norm
    if settings.compute.precision != "fp16":
        raise TrainingDiverged(f"the gradient norm of step {step} is {grad_norm}; lower --learning_rate")
    return None


def validate(run: Run, strategy: Strategy, batches: ValidationBatches, step: int) -> None:
    """Loss over the validation windows; every rank reads its share. Keeps the best weights with --keep_best.

    When a rank is asked to stop it ends early on all of them, and leaves no row: a later start validates again.
    """
    if run.settings.training.max_val_steps == 0:
        return
    start_s = time.perf_counter()
    watchdog.enter("validation")
    loss_sum, num_tokens = torch.zeros((), dtype=torch.float64, device=run.device), 0
    for index in run.progress.batches(len(batches), "validation"):
        run.signals.agreed = process_group.agree_on_stop(run.signals.number, run.device)
        if run.signals.agreed:
            return
        with named_range("val/batch", run.settings.measuring.profile_mode):
            result = strategy.evaluate(batches.of_batch(index))
        loss_sum += result.loss_sum
        num_tokens += result.num_target_tokens
    world = world_step.gather_step(StepResult(loss_sum, num_tokens, None), StepClock(run.device), run.device)
    if not math.isfinite(world.loss):
        raise TrainingDiverged(f"the validation loss after step {step} is {world.loss}; lower --learning_rate")
    run.recorder.add_memory(step, process_group.gather_objects(peak_memory(run.device)))
    seconds = time.perf_counter() - start_s
    if world.loss < run.best_val_loss:
        run.best_val_loss = world.loss
        if (
            run.settings.checkpointing.keep_best
        ):  # before the row: if this fails, the start that resumes validates again
            state_dict = strategy.full_state_dict()
            process_group.by_rank_0(lambda: export(run, state_dict, run.directory / run_files.BEST))
    run.recorder.add_evaluation(step, world.loss, world.num_target_tokens, batches.num_sequences, seconds)
    run.scalars.add_validation(step, world.loss)
    run.progress.say(f"step {step:>5}  validation loss {world.loss:.4f}  ({seconds:.1f} s)")


def finish(run: Run, strategy: Strategy, peak: PeakRate | None, checkpoints: writer.CheckpointWriter) -> None:
    """Leave the weights, a sample, where the time went, what generation takes, the closed metrics file and the mark."""
    settings, recorder = run.settings, run.recorder
    watchdog.enter("finish")
    recorder.add_memory(settings.last_step, process_group.gather_objects(peak_memory(run.device)))
    state_dict = strategy.full_state_dict()
    process_group.by_rank_0(lambda: export(run, state_dict, run.directory))  # before anything that only measures
    checkpoints.wait()
    if peak is not None:
        process_group.wait_for_everyone()
        peak.measure(repeats=2)
        rates = process_group.gather_objects(peak.flops_per_s())
        recorder.add_measured_peak(sum(rates) / len(rates), peak.source(len(rates)))
    if settings.measuring.profile:
        traces = run.directory / run_files.PROFILER_LOGS
        recorder.add_attribution(attribution(settings, traces, run.launch.rank, run.first_step, run.device))
    run.progress.close()
    if settings.measuring.run_inference_benchmark:
        measured, line = benchmark_generation(state_dict, settings, run.checked.train_file, run.device)
        recorder.add_inference(measured)
        run.progress.say(line)
    found = process_group.by_rank_0(
        lambda: sample_text(state_dict, settings, run.checked.train_file, run.tokenizer_text)
    )
    if found is not None:
        sample, line = found
        if line:
            run.progress.say(line)
        run.scalars.close()
        recorder.close(sample)
        run.progress.say(recorder.closing_words())
    process_group.wait_for_everyone()
    strategy.close()


def export(run: Run, state_dict: dict[str, torch.Tensor], directory: Path) -> None:
    """Write the weights so that `transformers` opens them. Only rank 0 has any, and ranks that trained apart none."""
    if run.launch.rank == 0 and not run.settings.data_parallel.skip_gradient_sync:
        check_held(run.directory)
        token_file = run.checked.train_file
        tokenizer = (token_file.end_of_text_id, token_file.tokenizer, run.tokenizer_text)
        export_weights(directory, state_dict, run.settings, *tokenizer)


def as_json(content: dict) -> str:
    return json.dumps(content, indent=2) + "\n"


if __name__ == "__main__":
    sys.exit(main(CHECKED, LAUNCH))
