"""What the ranks of one start of a calibration measure. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from testbed.io import write_text


@dataclass(frozen=True, kw_only=True)
class Work:
    """A start. `kinds` are trained at each of `settings`; no whole step begins after `seconds`.

    Attributes:
        out: file in which rank 0 leaves the answer.
        data: folder of train.bin and val.bin.
        blocks: repeats of each operation.
        sizes: of the operations, as in `Sizes`; None: none are timed.
        message_bytes: of the collectives; empty: none are timed.
        rounds, steps: of whole steps.
    """

    out: str
    data: str
    device: str
    precision: str
    seconds: float
    blocks: int
    sizes: dict[str, Any] | None = None
    message_bytes: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()
    settings: tuple[dict[str, int], ...] = ()
    rounds: int = 2
    steps: int = 6

    def write(self, path: Path) -> None:
        write_text(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Work:
        return cls(**json.loads(path.read_text(encoding="utf-8")))
