"""The run whose weights --eval_only validates, and the settings taken from it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testbed.data.shards import is_at_hand
from testbed.io import read_json
from testbed.run_folder import METRICS

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings

_COUNTS = ("global_batch_size", "max_val_steps")  # together: how many windows the run validates on
_SAY_THE_BATCH = ("global_batch_size", "grad_accum_steps", "enforce_global_batch_size")


@dataclass(frozen=True)
class TrainedRun:
    """Length and data that a run's losses belong to, from its record."""

    flags: dict[str, Any] = field(default_factory=dict)  # empty: the folder is not a run's
    val_sha256: str | None = None
    val_windows: int | None = None  # of that file, at that length

    @property
    def seq_length(self) -> int | None:
        return self.flags.get("seq_length")


def trained_with(folder: Path) -> TrainedRun:
    """Return how the run in a folder was trained, as far as recorded. The run of best/ is the folder above."""
    for file in (folder / METRICS, folder.resolve().parent / METRICS):
        try:
            record = read_json(file)
            config, settings = record["training_config"], record.get("settings")
            length, hashes = config["seq_len"], config.get("dataset_sha256")
        except (ValueError, LookupError, TypeError, AttributeError):
            continue
        if not _is_count(length):
            continue
        settings = settings if isinstance(settings, dict) else {}
        paths = {name: settings.get(name) for name in ("train_data_path", "val_data_path")}
        flags = {name: path for name, path in paths.items() if path and isinstance(path, str)}
        flags |= {name: settings[name] for name in _COUNTS if _is_count(settings.get(name))}
        windows = _val(config.get("dataset_subset_sizes"), int)
        return TrainedRun({"seq_length": length} | flags, _val(hashes, str), windows)
    return TrainedRun()


def as_trained(values: Mapping[str, Any], explicit: frozenset[str]) -> dict[str, Any]:
    """Return the flags that --eval_only takes from the run, so that the loss is the one that it recorded: length, data,
    windows.

    Paths that no longer exist are not taken. No step reads the training file; if the run's is gone, or only the
    validation file was given, that one stands in.
    """
    if not values["eval_only"]:
        return {}
    folder = Path(values["init_from"])
    trained = trained_with(folder).flags if folder.is_dir() else {}
    taken = {name: value for name, value in trained.items() if name not in explicit}
    if explicit.intersection(_SAY_THE_BATCH):
        taken.pop("global_batch_size", None)
    for name in ("train_data_path", "val_data_path"):
        if name in taken and not is_at_hand(Path(taken[name])):
            del taken[name]
    is_gone = "train_data_path" in trained and "train_data_path" not in taken
    if "train_data_path" not in explicit and ("val_data_path" in explicit or is_gone):
        taken["train_data_path"] = taken.get("val_data_path", values["val_data_path"])
    return taken


def of_the_run(settings: RunSettings, sha256: dict[str, str]) -> list[str]:
    """Return lines for the screen: what --eval_only took from the run, and warnings of other data, windows or
    positions.

    Args:
        sha256: of the token files, under "train" and "val".
    """
    if not settings.training.eval_only:
        return []
    run = trained_with(Path(settings.model.init_from))
    if not run.flags:
        return []
    is_other = run.val_sha256 is not None and sha256["val"] != run.val_sha256
    taken = [
        f"--{name} {value}"
        for name, value in run.flags.items()
        if name not in settings.origin.given
        and settings.value(name) == value
        and not (is_other and name.endswith("_path"))
    ]
    lines = [f"as {settings.model.init_from} was trained: {' '.join(taken)}"] if taken else []
    path = Path(settings.data.val_data_path).absolute()
    if is_other:
        lines.append(
            f"warning: {path} is validated, which is not the run's data (sha256 {sha256['val'][:12]}…, the run's is "
            f"{str(run.val_sha256)[:12]}…): the loss is not the run's; give its file with --val_data_path"
        )
    elif run.val_sha256 is None:
        lines.append(f"warning: {path} is validated; the run recorded no sha256, so it may be other data")
    batches, batch = run.flags.get("max_val_steps"), run.flags.get("global_batch_size")
    own_batches = settings.training.max_val_steps
    if batches is not None and batch is not None and own_batches is not None:
        ours, theirs = own_batches * settings.batch.global_batch_size, batches * batch
        if ours not in (0, theirs) and min(ours, theirs) < (run.val_windows or theirs):
            lines.append(
                f"warning: --max_val_steps {own_batches} x --global_batch_size {settings.batch.global_batch_size} "
                f"validates on the first {ours:,} sequences, the run on the first {theirs:,}: another loss"
            )
    return lines + untrained_positions(
        f"--seq_length {settings.data.seq_length} validates on", settings.data.seq_length, run.seq_length
    )


def untrained_positions(what: str, tokens: int, trained: int | None) -> list[str]:
    """Return a warning if `tokens` reach untrained positions; `what` begins the sentence."""
    if trained is None or tokens <= trained:
        return []
    return [
        f"warning: {what} {tokens} tokens, but the weights were trained on sequences of {trained}: positions from "
        f"{trained + 1} on were never trained, and a loss or a text there says little of the model"
    ]


def _val(both: Any, kind: type) -> Any:
    """Return the entry of the validation file; None if it is missing or not of this type."""
    value = both.get("val") if isinstance(both, dict) else None
    return value if type(value) is kind else None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1
