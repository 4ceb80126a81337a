"""Read the set-up that a program printed into its log: DeepSpeed's configuration, or the flags of its command line.

DeepSpeed prints every setting as `print]   train_batch_size ............. 8` (deepspeed/runtime/config.py, `print`),
with a space alone where the name is long. A batch that is printed is a setting: with a data loader of its own, a
program may have trained on other batches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from testbed.audit.reported import OFFLOADED, PRECISION, ZERO


@dataclass(frozen=True)
class PrintedSetup:
    """Set-up as a log prints it. None or empty: it does not print it."""

    world_size: int | None = None
    global_batch_size: int | None = None  # sequences per optimizer step, all ranks
    micro_batch_size: int | None = None  # sequences per rank and micro step
    settings: dict[str, str] = field(default_factory=dict)
    instruments: tuple[str, ...] = ()


def printed_setup(text: str) -> PrintedSetup:
    """Return what DeepSpeed's lines say; of the batch else what flags in the log say, or a JSON of settings."""
    return PrintedSetup(
        world_size=_count(_setting("world_size", text)),
        global_batch_size=_count(
            _setting("train_batch_size", text) or _flag("global[-_]batch[-_]size|train[-_]batch[-_]size", text)
        ),
        micro_batch_size=_count(
            _setting("train_micro_batch_size_per_gpu", text)
            or _flag("micro[-_]batch[-_]size|train_micro_batch_size_per_gpu", text)
        ),
        settings={
            name: value
            for name, value in (
                (OFFLOADED, _offloaded(text)),
                (PRECISION, _precision(text)),
                (ZERO, _setting("zero_optimization_stage", text)),
            )
            if value
        },
        instruments=(
            ("DeepSpeed's wall_clock_breakdown synchronises after each part of the step",)
            if _setting("wall_clock_breakdown", text) == "True"
            else ()
        ),
    )


def _setting(name: str, text: str) -> str | None:
    """Return the value of one of DeepSpeed's lines, the last where a program made several engines."""
    found = re.findall(rf"(?m)(?:print\]|^worker-\d+:)\s+{name}(?: \.+)? +(\S+)\s*$", text)
    return found[-1] if found else None


def _flag(names: str, text: str) -> str | None:
    """Return the value of a flag of a command line, or of a name in JSON, if the log has one value for it alone."""
    found = set(re.findall(rf"""(?:--|")(?:{names})["']?(?:=|[:,]?\s+)["']?(\d+)\b""", text))
    return found.pop() if len(found) == 1 else None


def _count(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[1-9]\d{0,8}", text) else None


def _offloaded(text: str) -> str | None:
    """Return what DeepSpeed keeps off the device, and where: "optimizer on the cpu"."""
    config = re.findall(r"(?m)print\]\s+zero_config[ .]+(.*)$", text)
    found = re.findall(r"offload_(param|optimizer)=\w+\(device=[^,)]*?\b(cpu|nvme)\b", config[-1]) if config else []
    if not found and re.search(r"(?m)\bCPU Offload: True\s*$", text):
        found = [("optimizer", "cpu")]
    return ", ".join(f"{what} on the {place}" for what, place in found) or None


def plain_precision(text: str) -> str:
    """Return the name of a precision in one spelling: torch.bfloat16, BF16 and bfloat16 are bf16."""
    if found := set(
        re.findall(r"(?:bf|fp|tf)(?:8|16|32|64)\b", text.lower().replace("bfloat", "bf").replace("float", "fp"))
    ):
        return "/".join(sorted(found))
    name = text.strip().lower().removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    return "fp32" if name in ("fp", "single") else name


def _precision(text: str) -> str | None:
    enabled = {name: _setting(f"{name}_enabled", text) for name in ("fp16", "bfloat16")}
    if None in enabled.values():
        return None
    return plain_precision(next((name for name, value in enabled.items() if value == "True"), "fp32"))
