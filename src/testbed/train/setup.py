"""Set a run up: choose the device, join the other ranks, check the data, find the checkpoint, settle the settings."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from testbed.autotune.choices import decide
from testbed.autotune.device import choose_device
from testbed.autotune.memory_check import check_memory
from testbed.checkpoint import resume
from testbed.checkpoint.changed_settings import settings_to_go_on
from testbed.checkpoint.decide import Start
from testbed.checkpoint.weights import read_initial_weights
from testbed.config.run_types import STRATEGIES
from testbed.config.settings import CheckedRun, RunSettings
from testbed.data.token_file import check_token_file
from testbed.distributed import process_group
from testbed.distributed.launch import Launch
from testbed.distributed.rendezvous import patience_s
from testbed.errors import InputError, say_if_read
from testbed.profiling.collective_log import log_collectives
from testbed.train.ending import Refused, RunEnding

Weights = dict[str, torch.Tensor]


@dataclass
class Setup:
    """State of a start before the model is built."""

    checked: CheckedRun  # with settings in which nothing is left open
    launch: Launch
    device: torch.device
    backend: str | None  # of the process group; None: there is none
    start: Start
    weights: Weights | None = None  # to begin with; None: drawn from the seed, or the model has them by now
    notes: list[str] = dataclasses.field(default_factory=list)  # what to say about the settings that were left open

    @property
    def settings(self) -> RunSettings:
        return self.checked.settings


def set_up(checked: CheckedRun, launch: Launch, ending: RunEnding) -> Setup:
    """Bring this rank to where its model can be built. All ranks call it.

    Raises:
        Refused: on every rank: what was typed does not fit the device, the data, the weights or the checkpoint.
    """
    ending.signals.interrupt()
    settings, directory = checked.settings, Path(checked.settings.checkpointing.checkpoint_path)
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
    backend = process_group.start_process_group(
        device,
        launch,
        is_needed=STRATEGIES[settings.training.run_type].is_distributed,
        patience_s=patience_s(settings.training.collective_timeout),
        backend=settings.compute.backend,
    )
    ending.ranks.watch_startup()
    check_same_flags(checked.flags_sha256)
    if settings.measuring.log_collectives:
        log_collectives(directory, launch, backend)
    weights, refusal = (None, None) if settings.checkpointing.resume else initial_weights(settings)
    try:  # the last things that can be typed wrong; rank 0 alone reads whole files and touches the folder
        start = resume.begin(settings, launch, lambda: check_data(checked), refusal)
    except InputError as error:
        raise Refused(str(error)) from error
    if start.is_complete:
        return Setup(checked, launch, device, backend, start)
    ending.ranks.claim_directory(directory, is_cuda=device.type == "cuda")
    if settings.checkpointing.resume and start.checkpoint is None:
        weights, refusal = initial_weights(settings)
        if refusal is not None:
            raise Refused(refusal)
    checked.train_file.data_sha256, checked.val_file.data_sha256 = start.sha256["train"], start.sha256["val"]
    settings, notes = decide(settings_to_go_on(settings, start.checkpoint), launch, device)
    notes = [*checked.notes, *notes]
    return Setup(dataclasses.replace(checked, settings=settings), launch, device, backend, start, weights, notes)


def check_same_flags(mine: str | None) -> None:
    """Check that all ranks took the same flags from a file, which each reads by itself. None: it took none.

    Raises:
        Refused: on every rank: one took other flags.
    """
    hashes = process_group.gather_objects(mine)
    other = next((rank for rank, sha256 in enumerate(hashes) if sha256 != hashes[0]), None)
    if other is not None:
        raise Refused(
            f"rank {other} takes other flags than rank 0 from its files (SHA-256 {str(hashes[other])[:8]} and "
            f"{str(hashes[0])[:8]}): for --run_type auto their choice.json or their machines differ, copy one file to "
            "all or name the run type; for --resume all nodes must see --checkpoint_path"
        )


def check_data(checked: CheckedRun) -> dict[str, str]:
    """Read both token files once: every id is in the vocabulary, and the bytes are those that were written.

    Returns:
        The SHA-256 of each file's tokens and targets, under "train" and "val".

    Raises:
        InputError: a file is damaged, or is not the one that the --config file was recorded with.
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
        return read_initial_weights(settings.model.init_from, settings.shape), None
    except InputError as error:
        return None, str(error)
