"""Begin a start on all ranks, put the parts of a run together, validate it, and finish it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from testbed import run_folder
from testbed.autotune.choices import decide_open_settings
from testbed.autotune.device import choose_device
from testbed.autotune.memory_check import check_memory
from testbed.checkpoint import resume
from testbed.checkpoint.changed_settings import settings_to_go_on
from testbed.checkpoint.decide import Start
from testbed.checkpoint.formats import read_start
from testbed.checkpoint.load import load
from testbed.checkpoint.weights import write_weights
from testbed.checkpoint.writer import CheckpointWriter
from testbed.config.flags import DATA_SHA256
from testbed.config.run_types import STRATEGIES
from testbed.config.settings import CheckedRun, RunSettings
from testbed.config.trained_run import of_the_run
from testbed.data.characters import tokenizer_json
from testbed.data.token_file import TokenFile, check_token_file
from testbed.distributed import process_group, watchdog
from testbed.distributed.flight_recorder import time_collectives
from testbed.distributed.launch import Launch
from testbed.distributed.rendezvous import patience_s
from testbed.distributed.signals import StopSignals
from testbed.errors import InputError, counted, say_if_read
from testbed.inference.after_training import benchmark_generation
from testbed.inference.questions import Question
from testbed.inference.sample import sample_text
from testbed.io import write_text
from testbed.metrics.environment import write_launcher_metadata
from testbed.metrics.facts import facts_of_run
from testbed.metrics.recorder import RunRecorder
from testbed.metrics.trackers import TrackedRun, Trackers
from testbed.metrics.world_step import gather_loss
from testbed.model.float8 import convert_to_float8_
from testbed.model.gpt2 import GPT2
from testbed.profiling.collective_log import Receiver, log_in, receive_collectives
from testbed.profiling.collective_watch import CollectiveWatch
from testbed.profiling.device_limits import begin_peak_rate, is_out_of_memory, resident_bytes
from testbed.profiling.step_clock import StepClock, named_range
from testbed.profiling.timed_collectives import times_collectives
from testbed.run_folder.run_lock import by_handle, check_held
from testbed.strategies import Strategy, build_strategy
from testbed.train.batches import TrainingBatches, ValidationBatches
from testbed.train.console import Console, launch_warnings, warnings_of_locks, what_runs
from testbed.train.ending import Refused, RunEnding
from testbed.train.multiple_choice import answer, questions_of
from testbed.train.reasons import check_validation, model_does_not_fit
from testbed.train.report import Report
from testbed.train.validated_text import bytes_per_token

Weights = dict[str, torch.Tensor]
ATTACHED = (run_folder.METRICS, run_folder.EFFECTIVE_CONFIG, run_folder.LAUNCHER)  # files that a tracker keeps


@dataclass
class TrainingRun:
    """The parts of a run that train and validate."""

    checked: CheckedRun
    settings: RunSettings
    launch: Launch
    device: torch.device
    directory: Path
    first_step: int  # optimizer steps done by earlier starts of this run
    strategy: Strategy
    batches: TrainingBatches
    validation: ValidationBatches
    clock: StepClock
    report: Report
    checkpoints: CheckpointWriter
    ending: RunEnding
    tokenizer_text: str | None  # rank 0: the file of the data's BPE
    questions: list[Question]  # of --eval_multiple_choice
    best_val_loss: float
    validations_since_best: int
    is_validated: bool  # after `first_step`
    last_step: int  # the settings', or earlier where patience ends

    @property
    def signals(self) -> StopSignals:
        return self.ending.signals

    def saves_after(self, step: int) -> bool:
        """Return whether a checkpoint follows `step`, counted from 1."""
        return _is_due(step, self.settings.checkpointing.save_every) or step == self.settings.training.stop_at_step

    @property
    def saves_at_end(self) -> bool:
        """Return whether the last state is saved, so that the run can be extended."""
        is_trained = not (self.settings.training.eval_only or self.settings.data_parallel.skip_gradient_sync)
        return is_trained and self.settings.checkpointing.save_at_end == "on"

    def validates_after(self, step: int) -> bool:
        """Return whether validation follows `step`, counted from 1."""
        training, per_epoch = self.settings.training, self.settings.plan.steps_per_epoch
        return step == self.settings.last_step or _is_due(step, training.eval_every) or _is_due(step, per_epoch)

    @property
    def is_out_of_patience(self) -> bool:
        """Return whether --early_stop_patience validations in a row brought no lower loss."""
        patience = self.settings.training.early_stop_patience
        return patience is not None and self.validations_since_best >= patience

    def stop_early(self, step: int) -> None:
        """Make `step` the last one."""
        self.last_step = step
        since = counted(self.validations_since_best, "validation")
        self.report.console.say(
            f"--early_stop_patience: training ends after step {step}, as {since} in a row brought no loss below "
            f"{self.best_val_loss:.4f}; "
            + (
                f"the weights of that are in {self.directory / run_folder.BEST}"
                if self.settings.checkpointing.keep_best
                else "--keep_best would have kept the weights of that"
            )
        )

    @property
    def owes_validation(self) -> bool:
        """Return whether an earlier start was stopped after its last save and before the validation that follows."""
        return self.first_step > 0 and self.validates_after(self.first_step) and not self.is_validated

    def export(self, state_dict: dict[str, torch.Tensor], directory: Path) -> None:
        """Write the weights so that `transformers` opens them. Only rank 0 has any, and ranks that train apart none."""
        if self.launch.rank == 0 and not self.settings.data_parallel.skip_gradient_sync:
            check_held(self.directory)
            data = self.checked.train_file
            shape, dropout = self.settings.shape, self.settings.model.dropout
            of_tokens = data.end_of_text_id, data.tokenizer, self.tokenizer_text
            write_weights(directory, state_dict, shape, dropout, *of_tokens)


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def join_ranks(
    checked: CheckedRun, launch: Launch, ending: RunEnding
) -> tuple[CheckedRun, torch.device, str | None, CollectiveWatch | None]:
    """Choose the device, check its memory, and join the other ranks. All ranks call it.

    Returns:
        The run with the type of its device, the device, the backend of the process group (None: there is none), and
        the watch of collectives (None: nothing is watched).
    """
    ending.signals.interrupt()
    settings = checked.settings
    try:
        device = choose_device(settings, launch)
        settings = settings.with_values(device=device.type)
        warning = check_memory(settings, launch, device)
    except InputError as error:
        raise Refused(str(error)) from error
    if warning is not None and launch.rank == 0:
        say_if_read(warning)
    if settings.compute.quiet_nccl_monitor:
        os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    # On CUDA the host knows neither when a collective ends nor when a phase does.
    how, watch = settings.measuring.watch_collectives, None
    if how != "off" and device.type == "cpu":
        watch = CollectiveWatch(is_limited=how == "auto")
    if times_collectives(settings, device, launch):
        time_collectives()
    with contextlib.nullcontext() if watch is None else watch.joining():
        backend = process_group.start_process_group(
            device,
            launch,
            is_needed=STRATEGIES[settings.training.run_type].is_distributed,
            patience_s=patience_s(settings.training.collective_timeout),
            backend=settings.compute.backend,
            on_all_here=ending.ranks.watch_startup,
        )
    if backend is not None:
        receive(settings, launch, backend, watch)
    check_same_flags(checked.flags_sha256)
    return dataclasses.replace(checked, settings=settings), device, backend, watch


def receive(settings: RunSettings, launch: Launch, backend: str, watch: CollectiveWatch | None) -> None:
    """Let the watch, and with --log_collectives the log, be told of the collectives from now on."""
    logs: list[Receiver] = []
    if settings.measuring.log_collectives:
        logs.append(log_in(Path(settings.checkpointing.checkpoint_path), launch, backend))
    waits_in_python = not logs and STRATEGIES[settings.training.run_type].sends != "buckets"

    def switch(is_on: bool) -> None:
        receive_collectives([*logs, watch] if is_on and watch is not None else logs, backend, waits_in_python)

    switch(is_on=True)
    if watch is not None:
        watch.switch_by(switch)
        watch.count_new_groups()


def agree_on_start(
    checked: CheckedRun, launch: Launch, ending: RunEnding, device: torch.device
) -> tuple[Start, Weights | None, list[Question]]:
    """Check the data, find the checkpoint and claim the run's folder. All ranks call it.

    Returns:
        How the run begins, as rank 0 decided; the weights of --init_from (None: none, or there is a checkpoint); the
        questions of --eval_multiple_choice.
    """
    settings = checked.settings
    check_same_data(checked)
    weights, refusal = (None, None) if settings.checkpointing.resume else initial_weights(settings)
    questions: list[Question] = []

    def check_files() -> dict[str, str]:
        questions.extend(questions_of(checked, tokenizer_of_data(checked.train_file)))
        return check_data(checked)

    try:  # the last things that can be typed wrong; rank 0 alone reads whole files and touches the folder
        start = resume.begin(settings, launch, check_files, refusal)
    except InputError as error:
        raise Refused(str(error)) from error
    if start.is_complete:
        return start, None, []
    ending.ranks.claim_directory(Path(settings.checkpointing.checkpoint_path), is_cuda=device.type == "cuda")
    if settings.checkpointing.resume and start.checkpoint is None:
        weights, refusal = initial_weights(settings)
        if refusal is not None:
            raise Refused(refusal)
    checked.train_file.data_sha256, checked.val_file.data_sha256 = start.sha256["train"], start.sha256["val"]
    return start, weights, process_group.from_rank_0(questions)


def check_same_flags(mine: str | None) -> None:
    """Check that all ranks took the same flags from a file, which each reads by itself. None: it took none."""
    hashes = process_group.gather_objects(mine)
    other = next((rank for rank, sha256 in enumerate(hashes) if sha256 != hashes[0]), None)
    if other is not None:
        raise Refused(
            f"rank {other} takes other flags than rank 0 from its files (SHA-256 {str(hashes[other])[:8]} and "
            f"{str(hashes[0])[:8]}): for --run_type auto their choice.json or their machines differ, copy one file to "
            "all or name the run type; for --resume all nodes must see --checkpoint_path"
        )


def check_same_data(checked: CheckedRun) -> None:
    """Check that all ranks see the same token files by names and sizes; rank 0 alone reads them whole. A rank whose
    folder lacks a shard would order other windows."""
    mine = [(token_file.listing, len(token_file.tokens)) for token_file in (checked.train_file, checked.val_file)]
    seen = process_group.gather_objects(mine)
    for rank, theirs in enumerate(seen):
        for flag, ours, other in zip(("--train_data_path", "--val_data_path"), seen[0], theirs, strict=True):
            if ours != other:
                shards = set(ours[0]) ^ set(other[0])
                named = f", and not the same shards ({min(shards)})" if shards else ""
                raise Refused(
                    f"{flag}: rank {rank} sees {other[1]:,} tokens and rank 0 {ours[1]:,}{named}; give all nodes the "
                    "same files"
                )


def check_data(checked: CheckedRun) -> dict[str, str]:
    """Read both token files once: every id is in the vocabulary, and the bytes are those that were written.

    Returns:
        The SHA-256 of each file's tokens and targets, under "train" and "val".
    """
    is_same_file = checked.train_file is checked.val_file  # --eval_only without a training file
    files = ({} if is_same_file else {"train": checked.train_file}) | {"val": checked.val_file}
    vocab_size, asked = checked.settings.model.vocab_size, checked.asked
    config = asked.values["config"] if "vocab_size" in asked.configured else None
    sha256 = {
        name: check_token_file(token_file, vocab_size, f"--{name}_data_path", config).data_sha256
        for name, token_file in files.items()
    }
    for name, found in sha256.items():
        flag, recorded = f"{name}_data_path", checked.asked.data_sha256.get(name, found)
        if found != recorded and flag not in checked.asked.typed:
            raise InputError(
                f"--config {checked.asked.values['config']} was recorded with other data: {files[name].path} has "
                f"SHA-256 {found[:12]}…, it says {recorded[:12]}…; make that file again, or give "
                f"--{flag} {files[name].path} to train on what it holds now"
            )
    return {"train": sha256["val"], **sha256}


def initial_weights(settings: RunSettings) -> tuple[Weights | None, str | None]:
    """Return the weights that --init_from names, or None and why they cannot be used."""
    try:
        return read_start(settings.model.init_from, settings.shape), None
    except InputError as error:
        return None, str(error)


def open_run(checked: CheckedRun, launch: Launch, ending: RunEnding) -> TrainingRun | None:
    """Join the other ranks, agree on how to begin, and build the run. All ranks call it. Raises Refused.

    Returns:
        The run before its first step; None if there is nothing left to train.
    """
    checked, device, backend, watch = join_ranks(checked, launch, ending)
    start, weights, questions = agree_on_start(checked, launch, ending, device)
    if start.is_complete:
        return None
    settings, notes = decide_open_settings(settings_to_go_on(checked.settings, start.checkpoint), launch, device)
    checked = dataclasses.replace(checked, settings=settings)  # nothing is left open
    directory, is_rank_0 = Path(settings.checkpointing.checkpoint_path), launch.rank == 0
    facts = facts_of_run(checked, start.sha256, launch, device, backend)
    recorder = ending.recorder = RunRecorder(directory, settings, facts, is_writer=is_rank_0)
    resume.record(start, recorder)  # before anything can fail: what was recorded must not be lost
    console = Console(settings, start.step, is_speaking=is_rank_0)
    for line in [*_first_lines(checked, start), *notes, *launch_warnings(settings, launch)]:
        console.say(line)
    if is_rank_0:
        _write_how_it_was_started(directory, launch, settings, start.sha256, facts["git_commit"])
    trackers = ending.trackers = _begin_trackers(settings, facts, start.step, is_rank_0, console)
    tokenizer_text = tokenizer_of_data(checked.train_file) if is_rank_0 else None
    if tokenizer_text is not None:  # now, as a run that is stopped leaves checkpoints alone
        write_text(directory / run_folder.TOKENIZER, tokenizer_text)

    rss_before_model = resident_bytes()
    try:
        strategy = build(settings, launch, device, weights)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise model_does_not_fit(settings, error) from error
    if start.checkpoint is not None:
        is_continued = load(start.checkpoint, strategy, settings, launch)
        recorder.starts.current["random_numbers"] = "continued" if is_continued else "drawn anew"
    checkpoints = ending.checkpoints = CheckpointWriter(
        strategy, settings, launch, recorder, resumed_step=start.step if start.checkpoint else None
    )
    batches = TrainingBatches(checked.train_file, settings, strategy.data_rank, device)
    validation = ValidationBatches(checked.val_file, settings, strategy.data_rank, device)
    for line in what_runs(settings, batches.windows, start.step):
        console.say(line)
    text_bytes = bytes_per_token(validation.windows, validation.num_sequences, tokenizer_text) if is_rank_0 else None
    peak = begin_peak_rate(device, settings.compute.precision)
    ending.ranks.arm_timeouts()
    return TrainingRun(
        checked=checked,
        settings=settings,
        launch=launch,
        device=device,
        directory=directory,
        first_step=start.step,
        strategy=strategy,
        batches=batches,
        validation=validation,
        clock=StepClock(device, emits_nvtx=settings.measuring.profile_mode, watch=watch),
        report=Report(settings, launch, device, recorder, console, trackers, peak, rss_before_model, watch, text_bytes),
        checkpoints=checkpoints,
        ending=ending,
        tokenizer_text=tokenizer_text,
        questions=questions,
        best_val_loss=start.best_val_loss if start.checkpoint is not None else math.inf,
        validations_since_best=start.validations_since_best,
        is_validated=start.is_validated,
        last_step=settings.last_step,
    )


def _first_lines(checked: CheckedRun, start: Start) -> list[str]:
    """Return what to know of a run before its first step, whatever its launch."""
    settings = checked.settings
    lines = [*of_the_run(settings, start.sha256), *checked.notes, *warnings_of_locks(settings.training.run_type)]
    if start.checkpoint is None and run_folder.is_converted(init_from := settings.model.init_from):
        lines.append(
            f"note: --init_from {init_from} takes the weights alone; --resume {init_from} goes on with their AdamW"
        )
    return lines


def _begin_trackers(
    settings: RunSettings, facts: Mapping[str, Any], first_step: int, is_writer: bool, console: Console
) -> Trackers:
    directory = Path(settings.checkpointing.checkpoint_path)
    tracked = TrackedRun(
        run_id=facts["run_id"],
        name=directory.resolve().name,
        curves=by_handle(directory) / run_folder.TENSORBOARD,  # the library opens it again at every flush
        folder=directory / run_folder.TRACKERS,
        first_step=first_step,
        config={**facts["settings"], **{name: facts[name] for name in ("git_commit", "env", "host", "hardware")}},
        files=tuple(directory / name for name in ATTACHED),
    )
    return Trackers(settings, tracked, is_writer=is_writer, say=console.say)


def build(settings: RunSettings, launch: Launch, device: torch.device, weights: Weights | None) -> Strategy:
    """Build the model that every rank begins with, and around it the strategy, which may keep only a part of it.

    Args:
        weights: to begin with; None: drawn from the seed. They are emptied once the model has them.
    """
    torch.manual_seed(settings.training.seed)  # every rank draws the same weights ...
    model = GPT2(settings.shape, settings.model.dropout, settings.compute.activation_checkpointing)
    if weights is not None:
        model.load_state_dict(weights)
        weights.clear()  # a rank that trains a part of the model must not keep the whole
    if settings.compute.matmul == "fp8":
        convert_to_float8_(model)
    process_group.check_identical(model.state_dict(), "initial weights")
    strategy = build_strategy(settings, model, device)
    torch.manual_seed(process_group.seed_of_rank(settings.training.seed, launch.rank))  # ... and its own dropout
    return strategy


def _write_how_it_was_started(
    directory: Path, launch: Launch, settings: RunSettings, sha256: dict[str, str], git_commit: str
) -> None:
    write_launcher_metadata(directory, launch, git_commit)
    config = settings.as_config() | {DATA_SHA256: sha256}
    write_text(directory / run_folder.EFFECTIVE_CONFIG, json.dumps(config, indent=2) + "\n")


def tokenizer_of_data(token_file: TokenFile) -> str | None:
    """Return the file of the BPE that the data was made with, or None where there is none.

    It is read before the first step: preprocess_small.py may replace it while the run trains.
    """
    file = token_file.tokenizer_file
    try:
        return None if file is None else tokenizer_json(file).decode("utf-8")
    except (OSError, ValueError):  # a run needs none
        return None


def validate(run: TrainingRun, step: int) -> int:
    """Record the validation loss after `step`. With --keep_best, export the weights if it is the best so far.

    Every rank evaluates its share. When a rank is asked to stop, all ranks stop before the next batch, and no loss is
    recorded: a later start validates again.

    Returns:
        What all ranks agreed to stop for (StopSignals.number), or 0.
    """
    if run.settings.training.max_val_steps == 0:
        return 0

    def stops() -> int:
        return run.signals.agree(process_group.agree_on_stop(run.signals.number, run.device))

    run.report.keep_timed_collectives()
    start_s = time.perf_counter()
    watchdog.enter("validation")
    loss_sum, num_tokens = torch.zeros((), dtype=torch.float64, device=run.device), 0
    for index in run.report.console.batches(len(run.validation), "validation"):
        if stop := stops():
            return stop
        with named_range("val/batch", run.clock.emits_nvtx):
            result = run.strategy.evaluate(run.validation.of_batch(index))
        loss_sum += result.loss_sum
        num_tokens += result.num_target_tokens
    loss, num_tokens = gather_loss(loss_sum, num_tokens, run.device)
    check_validation(step, loss)
    run.report.memory(step)
    answers = None
    if run.settings.training.eval_multiple_choice is not None:
        weights, rounds = run.strategy.full_state_dict(), partial(run.report.console.batches, what="multiple choice")
        answers = answer(weights, run.settings, run.questions, run.device, rounds, stops)
        if stop := stops():
            return stop
    seconds = time.perf_counter() - start_s
    run.validations_since_best += 1
    if loss < run.best_val_loss:
        run.best_val_loss, run.validations_since_best = loss, 0
        if (
            run.settings.checkpointing.keep_best
        ):  # before the row: if this fails, the start that resumes validates again
            state_dict = run.strategy.full_state_dict()
            process_group.by_rank_0(lambda: run.export(state_dict, run.directory / run_folder.BEST))
    run.report.validation(step, loss, num_tokens, run.validation.num_sequences, seconds, answers)
    return 0


def finish(run: TrainingRun) -> None:
    """Export the weights, then measure what only the whole run can tell, sample, and close the files."""
    watchdog.enter("finish")
    settings, report, train_file = run.settings, run.report, run.checked.train_file
    run.batches.close()
    report.end_training()
    report.memory(run.last_step)
    state_dict = run.strategy.full_state_dict()
    process_group.by_rank_0(lambda: run.export(state_dict, run.directory))  # before anything that only measures
    if run.saves_at_end:
        run.checkpoints.save(run.last_step)  # after the clocks of the run: it is not part of the training time
    run.checkpoints.wait()
    watchdog.enter("finish")
    report.measure_device(run.first_step)
    report.console.close()
    if settings.measuring.run_inference_benchmark:
        report.inference(*benchmark_generation(state_dict, settings, train_file, run.device))
    sampled = process_group.by_rank_0(lambda: sample_text(state_dict, settings, train_file, run.tokenizer_text))
    if sampled is not None:  # rank 0
        report.close(*sampled)
    process_group.wait_for_everyone()
    run.strategy.close()
