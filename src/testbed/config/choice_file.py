"""choice.json: what scripts/find_fastest.py found to be the fastest, for which work, device and ranks. No torch.

`--run_type auto` takes it where all of that is the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.config.device_name import device_name, gpu_names, torch_version
from testbed.config.flags import checked_like_a_flag
from testbed.config.run_types import ALL_OPTIONS, STRATEGIES
from testbed.config.settings import RunSettings
from testbed.config.table import FLAGS
from testbed.errors import InputError, one_line, value_text
from testbed.io import holding_together, read_json

SCHEMA = 1
LONGEST_VERDICT = 400  # characters that a start prints of it
DEFAULT_CHOICE = "checkpoint/fastest/choice.json"
# What a run is about and what a step computes: of other values the race says nothing. Learning rates, lengths and data
# change no step's time.
WORK = (
    *("num_layers", "num_heads", "embedding_size", "vocab_size", "max_position_embeddings", "seq_length"),
    *("global_batch_size", "optimizer", "precision", "matmul", "dropout", "attention"),
)
# What a choice may set: how the work is spread and carried out. The run type stands beside them.
SETS = frozenset(ALL_OPTIONS - {"skip_gradient_sync"}) | {
    *("micro_batch_size_per_gpu", "compile", "activation_checkpointing", "threads_per_rank"),
}


@dataclass(frozen=True)
class Choice:
    """A choice, checked. `flags`: values by flag, of `SETS`."""

    path: Path
    sha256: str  # of the file's bytes as JSON, which all ranks compare
    run_type: str
    flags: Mapping[str, Any]
    ranks: int
    work: Mapping[str, Any]
    device: str
    torch: str
    commit: str
    verdict: str = ""  # the race's sentence where it did not find one configuration to be the fastest

    @property
    def name(self) -> str:
        """The run type with its flags, as --run_types of a sweep has it."""
        return spelled(self.run_type, self.flags)


def spelled(run_type: str, flags: Mapping[str, Any]) -> str:
    """Return `optimized:zero_stage=2+compile=off`."""
    words = [f"{name}={'on' if value is True else 'off' if value is False else value}" for name, value in flags.items()]
    return run_type + (":" + "+".join(words) if words else "")


def work_of(settings: RunSettings) -> dict[str, Any]:
    """Return the values of `WORK` of a run."""
    return {name: settings.value(name) for name in WORK}


def hash_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_choice(path: Path) -> Choice:
    """Return the choice in a file. InputError, one sentence, if it cannot be used anywhere."""
    content = read_json(path)
    with holding_together(path):
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise InputError(f"it is not a choice of find_fastest.py with schema {SCHEMA}")
        chosen = content["choice"]
        texts = [content[name] for name in ("device", "torch", "commit", "work_sha256")]
        run_type, flags, work, ranks = chosen["run_type"], chosen["flags"], content["work"], content["ranks"]
        if not all(isinstance(text, str) for text in (*texts, run_type)) or type(ranks) is not int or ranks < 1:
            raise InputError("device, torch, commit and run_type are texts, and ranks a number above 0")
        if run_type not in STRATEGIES:
            raise InputError(f"{value_text(run_type)[:40]!r} is no run type; known are {', '.join(STRATEGIES)}")
        if not isinstance(work, dict) or work.keys() != set(WORK):
            raise InputError(f"its work does not name {', '.join(WORK)}")
        if hash_of(work) != texts[3]:
            raise InputError("its work is not what its work_sha256 says, so it was changed by hand")
        return Choice(
            path=path,
            sha256=hash_of(content),
            run_type=run_type,
            flags=_checked(flags, run_type),
            ranks=ranks,
            work=work,
            device=texts[0],
            torch=texts[1],
            commit=texts[2],
            verdict=_open_verdict(content.get("verdict")),
        )


def _open_verdict(verdict: Any) -> str:
    """Return the sentence of a race that several configurations could have won; empty if one did."""
    if not isinstance(verdict, dict) or verdict.get("kind") == "fastest":
        return ""
    return one_line(str(verdict.get("sentence") or ""), LONGEST_VERDICT)


def _checked(flags: Any, run_type: str) -> dict[str, Any]:
    """Return the flags of a choice, each checked like its flag."""
    if not isinstance(flags, dict):
        raise InputError("its flags are no object")
    own = STRATEGIES[run_type].options
    for name in flags:
        if name not in SETS or (name in ALL_OPTIONS and name not in own):
            raise InputError(f"it sets {name[:40]!r}, which is not for a choice of {run_type}")
    return {name: checked_like_a_flag(FLAGS[name], value, name) for name, value in flags.items() if value is not None}


def content_of(
    run_type: str, flags: Mapping[str, Any], ranks: int, settings: RunSettings, commit: str
) -> dict[str, Any]:
    """Return what a choice.json must hold; the program that measured adds how."""
    work = work_of(settings)
    return {
        "schema": SCHEMA,
        "device": device_name(settings.compute.device),
        "torch": torch_version(),
        "commit": commit,
        "ranks": ranks,
        "work": work,
        "work_sha256": hash_of(work),
        "choice": {"run_type": run_type, "flags": dict(flags)},
    }


def misfit(choice: Choice, settings: RunSettings, world_size: int) -> str | None:
    """Return why the saved choice does not apply to a start; None if it does."""
    pairs = [
        ("ranks", choice.ranks, devices_of(settings, world_size)),
        ("the device", choice.device, device_name(settings.compute.device)),
        ("PyTorch", choice.torch, torch_version()),
        *((f"--{name}", choice.work[name], value) for name, value in work_of(settings).items()),
    ]
    for name, theirs, ours in pairs:
        if theirs != ours:
            return f"it is for {name} {value_text(theirs)[:80]}, not {value_text(ours)}"
    return None


def devices_of(settings: RunSettings, world_size: int) -> int:
    """Return the number of devices that compute: the ranks, or those that the one process of dp sees."""
    if STRATEGIES[settings.training.run_type].devices != "all":
        return world_size
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(gpu_names()) if seen is None else len([word for word in seen.split(",") if word.strip()])
