"""The fields in which two runs must agree to have done equal work, and what a file says of them. No torch."""

from typing import Any

from testbed.config.flag import Kind
from testbed.config.table import FLAGS

# The fields of docs/measuring.md, rule 1: two runs did equal work when all of these are recorded and agree.
_WORK = {name: flag for name, flag in FLAGS.items() if flag.kind is Kind.WORK}
_COMPARED = [flag for flag in _WORK.values() if flag.compared_as is None]
# what several flags come to, and where they meet
_COME_TO = ("total_steps", "math_changes", "train_data_sha256", "optimizer_steps", "tokens")
WORK_FIELDS = (*(flag.in_config or flag.name for flag in _COMPARED), *_COME_TO)
VALIDATION_FIELDS = ("val_data_sha256", "val_tokens")
# What a time to loss must have in common. Batch, schedule, optimizer and steps may be what is being compared.
TASK_FIELDS = tuple(flag.compared_as or flag.in_config or name for name, flag in FLAGS.items() if flag.is_task)
if _lost := {flag.compared_as for flag in _WORK.values() if flag.compared_as} - {*WORK_FIELDS, *VALIDATION_FIELDS}:
    raise AssertionError(
        f"compared_as names {', '.join(sorted(_lost))} in the table of flags, and no run has such a field"
    )


def recorded_work(config: dict, settings: dict) -> dict[str, Any]:
    """Return what a file says of each flag that is work; None where it says nothing.

    Args:
        config: `training_config` of a file.
        settings: `settings` of the same file, in the terms of today's flags; empty where it has none (version 2.0).
            Null there means that a flag was not set.
    """
    work: dict[str, Any] = {"total_steps": config.get("total_steps")}
    for flag in _COMPARED:
        field = flag.in_config or flag.name
        if flag.in_config in config:
            work[field] = config[flag.in_config]
        else:
            # an option of some run types that a file does not name did not exist yet, so the run did not have it
            is_known = flag.name in settings or flag.is_option
            work[field] = _set_or_not(settings.get(flag.name)) if is_known else None
    if settings:
        work["optimizer"] += _muon_in_words(config)
        work["lr_schedule"] += f", decay share {config['decay_share']:g}" if config.get("decay_share") else ""
        work["lr_schedule"] += ", log warm-up" if config.get("warmup_shape") == "log" else ""
        work["math_changes"] = ", ".join(config.get("math_changes", [])) or "none"  # files from before this field
    return work


def _set_or_not(value: Any) -> Any:
    return "not set" if value is None else value


def _muon_in_words(config: dict) -> str:
    """Return Muon's own two numbers, which are part of its work as AdamW's are."""
    rate, momentum = config.get("muon_learning_rate"), config.get("muon_momentum")
    return "" if rate is None else f" (learning rate {rate:g}, momentum {momentum:g})"
