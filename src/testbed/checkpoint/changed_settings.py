"""Decide which settings a resumed run may change.

Some settings change nothing, some only spread the same work in another way, and the rest is other work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testbed.autotune.choices import as_decided_before
from testbed.checkpoint.folders import Checkpoint
from testbed.config.compatibility import math_changes
from testbed.config.flag import Resume
from testbed.config.run_types import ALL_OPTIONS
from testbed.config.settings import RunSettings
from testbed.config.table import flags_where, upgrade_settings
from testbed.distributed.launch import Launch
from testbed.errors import InputError, value_text

FREE_TO_CHANGE = flags_where(lambda flag: flag.resume is Resume.FREE)
SETTING_THE_MATHEMATICS = flags_where(lambda flag: flag.resume is Resume.MATHEMATICS)
WAYS_OF_SPREADING = flags_where(lambda flag: flag.resume is Resume.ROUNDING) | SETTING_THE_MATHEMATICS
NEVER_TO_CHANGE = flags_where(lambda flag: flag.resume is Resume.NEVER)
OTHER_MATHEMATICS = "math_changes"


def changes_of_work(changes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the changes that do more than spread the same work in another way."""
    is_other_mathematics = any(change["name"] == OTHER_MATHEMATICS for change in changes)
    harmless = WAYS_OF_SPREADING - (SETTING_THE_MATHEMATICS if is_other_mathematics else frozenset())
    return [change for change in changes if change["name"] not in harmless]


def check_changes(of_work: list[dict[str, Any]], settings: RunSettings, folder: Path) -> None:
    """Refuse changes of the work: those that no flag allows, and without --allow-setting-change all.

    Raises:
        InputError: names each of them that was typed, as the others follow from those; all if none was.
    """
    typed = settings.origin.typed

    def those(changes: list[dict[str, Any]]) -> str:
        return in_words([change for change in changes if change["name"] in typed] or changes)

    impossible = [change for change in of_work if change["name"] in NEVER_TO_CHANGE]
    data = [change for change in of_work if change["name"] in ("train_data_path", "val_data_path")]
    if data and [change["name"] for change in impossible] == ["vocab_size"]:  # which follows from the data
        raise InputError(
            f"--resume: {folder} was trained on data of another tokenizer: {in_words(data + impossible)}; name its "
            f"own files with {' and '.join('--' + change['name'] for change in data)}, or start a new run"
        )
    if impossible:
        raise InputError(
            f"--resume: {folder} holds another model or optimizer: {those(impossible)}; give the same values, or "
            "start a new run"
        )
    if of_work and not settings.checkpointing.allow_setting_change:
        raise InputError(
            f"--resume: {folder} was trained with other settings: {those(of_work)}; give the same, or "
            "--allow-setting-change to go on with these, which training_metrics.json then says"
        )


def in_words(changes: Sequence[dict[str, Any]]) -> str:
    """Name all of them in one part of a sentence, each by its flag."""
    words = []
    for change in changes:
        name = "the mathematics" if change["name"] == OTHER_MATHEMATICS else f"--{change['name']}"
        now, before = (
            value_text(value) if isinstance(value, float) else repr(value)
            for value in (change["now"], change["before"])
        )
        words.append(f"{name} is {now}, was {before}")
    return ", ".join(words)


def settings_to_go_on(settings: RunSettings, checkpoint: Checkpoint | None) -> RunSettings:
    """Return the settings with what an earlier start decided where this one leaves it open.

    What depends on the ranks is left open on other ranks: the micro batch that fits, and what is compiled.
    """
    if checkpoint is None:
        return settings
    decided = checkpoint.settings
    if not _is_same_mesh(checkpoint, settings):
        decided = upgrade_settings(decided) | {"compile": None, "micro_batch_size_per_gpu": None}
    return as_decided_before(settings, decided)


def differences(settings: RunSettings, checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Return the settings in which this start is not what was saved, but for those that change nothing."""
    settings = settings_to_go_on(settings, checkpoint)
    now, before = settings.as_dict(), upgrade_settings(checkpoint.settings)
    now = {name: value for name, value in now.items() if value or name in before}  # a flag that came later
    left_open = {"compile"} if settings.compute.compile is None else set()
    left_open |= {"micro_batch_size_per_gpu"} if settings.finds_micro_batch else set()
    if checkpoint.run_type != settings.training.run_type:  # what only one of them has
        left_open |= {name for name in ALL_OPTIONS if None in (now.get(name), before.get(name))}
        left_open -= SETTING_THE_MATHEMATICS
    found = [
        {"name": name, "before": before.get(name), "now": now.get(name)}
        for name in sorted((now.keys() | before.keys()) - FREE_TO_CHANGE - left_open)
        if now.get(name) != before.get(name)
    ]
    mathematics = [list(math_changes({**settings.as_dict(), **values})) for values in (before, now)]
    if mathematics[0] != mathematics[1]:
        found.append({"name": OTHER_MATHEMATICS, "before": mathematics[0], "now": mathematics[1]})
    return found


def changes_of_data(metrics: dict, sha256: dict[str, str]) -> list[dict[str, Any]]:
    """Return the data flags whose files hold other bytes than when the run began."""
    began_with = metrics["training_config"]["dataset_sha256"]
    return [
        {"name": f"{name}_data_path", "before": f"SHA-256 {began_with[name]}", "now": f"SHA-256 {sha256[name]}"}
        for name in ("train", "val")
        if began_with[name] != sha256[name]
    ]


def _is_same_mesh(checkpoint: Checkpoint, settings: RunSettings) -> bool:
    before = {"context": 1, **checkpoint.mesh}  # earlier versions cut no sequence
    now = dataclasses.asdict(settings.plan.mesh)
    return (checkpoint.run_type, before) == (settings.training.run_type, now)


def is_same_form(checkpoint: Checkpoint, settings: RunSettings, launch: Launch) -> bool:
    """Return whether what lies on each rank is cut as it was saved, so that it can go on bit for bit."""
    before, now = upgrade_settings(checkpoint.settings), settings.as_dict()
    is_cut_alike = all(before.get(name) == now.get(name) for name in ALL_OPTIONS)
    return is_cut_alike and checkpoint.world_size == launch.world_size and _is_same_mesh(checkpoint, settings)
