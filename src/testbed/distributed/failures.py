"""Raise on every rank when one rank failed, so that no rank waits for one that has left."""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException

from testbed.distributed.process_group import gather_objects
from testbed.errors import InputError


def raise_on_any_rank(
    error: Exception | None,
    cause: BaseException | None = None,
    first: type[Exception] | tuple[type[Exception], ...] = (),
) -> None:
    """Raise the error of the lowest rank that has one, on every rank. All ranks call it.

    Args:
        error: this rank's error, with one sentence that every rank can show; None: this rank has done its part. It is
            pickled.
        cause: what went wrong on this rank, for its own traceback.
        first: errors of this type go before those of lower ranks.
    """
    errors = [other for other in gather_objects(error) if other is not None]
    if errors:
        raise min(errors, key=lambda other: not isinstance(other, first)) from cause


def root_cause(error: BaseException) -> str:
    """Return the first line of an error, and its kind where the words are not ours.

    PyTorch's distributed checkpoint wraps each rank's.
    """
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    words = next(iter(str(error).splitlines()), "")
    if isinstance(error, InputError):
        return words  # a sentence of ours
    if "inline_container" in words:  # PyTorch's own writer tells how far it came, not what the system said
        words = f"the disk took only a part of a file ({words})"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
