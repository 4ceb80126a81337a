"""Leave one telling of a run where several files of a folder tell it, and tell which runs are no comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from testbed.audit.readers import event_files, lightning, mlflow_folder, trainer_state, wandb_folder
from testbed.audit.reported import Reported

TRACKED = (event_files.FORM, lightning.FORM, mlflow_folder.FORM, trainer_state.FORM, wandb_folder.FORM)
LOGS = ("torchtitan", "Megatron-LM", "nanochat", "modded-nanogpt", "llm.c", "nanoGPT", "build-nanogpt")
KEPT = (*TRACKED, *(f"{name} log" for name in LOGS))
DEEPEST = 4  # RUN/runs/DATE/SECONDS/FILE


def without_comparisons(found: Sequence[Reported], folders: Sequence[Path]) -> list[Reported]:
    """Return the runs, those of a tracker or of logs marked as no claim where a folder that was typed holds several.

    Such a folder keeps whatever a project ever ran. To compare two of its runs, type both.
    """
    kept = list(found)
    for folder in folders:
        tracked = [item.form in KEPT or item.path.name == wandb_folder.CONSOLE for item in kept]
        many = [number for number, item in enumerate(kept) if tracked[number] and item.path.is_relative_to(folder)]
        for number in many if len(many) > 1 else ():
            kept[number] = replace(kept[number], is_claim=False)
    return kept


def one_per_run(found: Sequence[Reported]) -> list[Reported]:
    """Return the runs without those that another file tells better.

    A state of transformers' Trainer is saved with every checkpoint, and holds the whole run until then. Its event
    files lie below the same folder, and W&B may keep its figures too. Lightning can write a table and event files.
    """
    best: dict[Path, Reported] = {}
    for item in found:
        if item.form == trainer_state.FORM:
            home = _home(item.path)
            other = best.get(home)
            if other is None or _progress(item) > _progress(other):
                best[home] = item
    tables = {item.path.parent for item in found if item.form == lightning.FORM}
    ends = {_end(item) for item in best.values()}
    kept: list[Reported] = []
    for item in found:
        if item.form == trainer_state.FORM:
            is_repeat = best[_home(item.path)] is not item
        elif "tfevents" in item.path.name or item.form == event_files.FORM:
            is_repeat = bool(best.keys() & {*item.path.parents[:DEEPEST]}) or bool(
                tables & {item.path, item.path.parent}
            )
        else:
            is_repeat = False
        is_repeat |= item.form != trainer_state.FORM and _end(item) is not None and _end(item) in ends
        if not is_repeat:
            kept.append(item)
            ends.add(_end(item))
    return kept


def _home(path: Path) -> Path:
    """Return the folder of the run that a state belongs to; a state under another name is a copy, and its own run."""
    folder = path.parent if path.name == trainer_state.NAME else path
    return folder.parent if folder.name.startswith("checkpoint-") or folder.name == "last-checkpoint" else folder


def _progress(item: Reported) -> tuple[int, int]:
    """Return what orders the states of a run: its steps, and of two at the end the one in the run's own folder."""
    return item.optimizer_steps or 0, -len(item.path.parts)


def _end(item: Reported) -> tuple | None:
    """Return what only one run has: its time and mean loss, to digits of float32, or when it was last logged."""
    final = item.details.get("final") or {}
    if "train_runtime" in final and "train_loss" in final:
        return f"{final['train_runtime']:.5g}", f"{final['train_loss']:.5g}"
    if "_timestamp" in final:
        return (final["_timestamp"],)
    return None
