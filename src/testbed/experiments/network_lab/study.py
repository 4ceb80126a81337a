"""Plan the network study: which strategy on how many hosts over which links. No torch.

Every run is one call of src/gpt2.py on the hosts of a lab of its own, made by scripts/lab/network.py; sweep/runner.py
carries the plan out, as it does any sweep. The strategies are told apart at 2 hosts; on 4, which share the cores of
this machine, only those that differ in how their traffic grows with the number of hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from testbed.experiments.network_lab.links import Link, parse_rate
from testbed.sweep.plan import Cell, order_of_round

VOCABULARY, SEQUENCE, GLOBAL_BATCH = 8192, 128, 8
LINKS = {
    "unlimited": Link(),
    "1gbit": Link(parse_rate("1gbit")),
    "100mbit": Link(parse_rate("100mbit")),
    "switch0ms": Link(delay_s=0.0),
    "switch5ms": Link(delay_s=0.005),
}
REFERENCE_OF = {"switch5ms": "switch0ms"}  # all others are compared to the first link
STRATEGIES_STUDIED = {
    "allreduce": ("allreduce", ()),
    "ddp": ("ddp", ()),
    "fsdp": ("fsdp", ()),
    "zero1": ("optimized", ("--zero_stage", "1")),
    "zero2": ("optimized", ("--zero_stage", "2")),
    "zero3": ("optimized", ("--zero_stage", "3")),
    "pipeline": ("pipeline", ()),
}
TITLES = {"zero1": "ZeRO 1", "zero2": "ZeRO 2", "zero3": "ZeRO 3"}
ON_FOUR_HOSTS = {"strategies": ("ddp", "fsdp", "zero1"), "links": ("unlimited", "100mbit")}
LEVER_HOSTS = 2


@dataclass(frozen=True)
class Lever:
    """Something to turn on one strategy. `accumulation`: how many times the usual global batch a step takes."""

    strategy: str
    flags: tuple[str, ...]
    accumulation: int = 1


LEVERS = {
    "buckets of 200 MiB": Lever("ddp", ("--bucket_cap_mb", "200")),
    "buckets of 1 MiB": Lever("ddp", ("--bucket_cap_mb", "1")),
    "gradients in bf16": Lever("ddp", ("--gradient_compression", "bf16")),
    "4 micro batches per step": Lever("ddp", (), accumulation=4),
    "buckets of 5e8 elements": Lever(
        "zero1", ("--reduce_bucket_size", "500000000", "--allgather_bucket_size", "500000000")
    ),
    "buckets of 2e5 elements": Lever("zero1", ("--reduce_bucket_size", "200000", "--allgather_bucket_size", "200000")),
}
# Overlap is seen best where communication takes about as long as the backward pass that can cover it.
LEVERS_ON = {"100mbit": tuple(LEVERS), "1gbit": tuple(name for name in LEVERS if name.startswith("buckets"))}
PARTS = ("strategies", "levers")
SECONDS_PER_RUN = 12  # a guess before any was made; most of it is loading PyTorch


@dataclass(frozen=True)
class StudyArm:
    """One configuration of the study."""

    part: str
    strategy: str
    hosts: int
    link: str
    lever: str | None = None

    @property
    def name(self) -> str:
        """Also its folder."""
        lever = "" if self.lever is None else "_" + self.lever.replace(" ", "_")
        return f"{self.strategy}{lever}_{self.hosts}hosts_{self.link}"

    @property
    def title(self) -> str:
        strategy = TITLES.get(self.strategy, self.strategy)
        return strategy if self.lever is None else f"{strategy}, {self.lever}"

    @property
    def flags(self) -> tuple[str, ...]:
        return (*STRATEGIES_STUDIED[self.strategy][1], *(LEVERS[self.lever].flags if self.lever else ()))

    @property
    def global_batch(self) -> int:
        return GLOBAL_BATCH * (LEVERS[self.lever].accumulation if self.lever else 1)

    @property
    def changes_work(self) -> bool:
        """Return whether its steps compute something else than those of the others."""
        return self.lever is not None and (self.global_batch != GLOBAL_BATCH or "bf16" in self.lever)

    def as_record(self) -> dict[str, Any]:
        return {**asdict(self), "name": self.name, "title": self.title, "changes_work": self.changes_work}


@dataclass(frozen=True)
class Asked:
    """The request for a study. `folder`: --out_dir, and `data`: of the token files, relative to where it started."""

    parts: tuple[str, ...]
    strategies: tuple[str, ...]
    hosts: tuple[int, ...]
    links: tuple[str, ...]
    repeats: int
    profile_runs: int
    steps: int
    warmup_steps: int
    folder: str
    data: str
    program: str
    network: str
    is_whole: bool = False  # every strategy at every number of hosts and link that was named, not only the default ones


def arms_of(asked: Asked) -> list[StudyArm]:
    """Return every configuration once."""
    arms = []
    if "strategies" in asked.parts:
        for hosts in asked.hosts:
            for link in asked.links:
                for strategy in asked.strategies:
                    is_left_out = hosts > 2 and not (
                        strategy in ON_FOUR_HOSTS["strategies"] and link in ON_FOUR_HOSTS["links"]
                    )
                    if asked.is_whole or not is_left_out:
                        arms.append(StudyArm("strategies", strategy, hosts, link))
    if "levers" in asked.parts:
        for link, known in LEVERS_ON.items():
            levers = [lever for lever in known if LEVERS[lever].strategy in asked.strategies]
            if link not in asked.links or LEVER_HOSTS not in asked.hosts:
                continue
            for strategy in dict.fromkeys(LEVERS[lever].strategy for lever in levers):
                plain = StudyArm("strategies", strategy, LEVER_HOSTS, link)
                arms += [] if plain in arms else [plain]
            arms += [StudyArm("levers", LEVERS[lever].strategy, LEVER_HOSTS, link, lever) for lever in levers]
    return arms


def cells_of(asked: Asked) -> list[Cell]:
    """Return every run in its order: round 1 with each arm once, then round 2; the k-th profiled runs end round k."""
    arms = arms_of(asked)
    return [
        _cell(asked, arms[index], repeat, is_profiled)
        for repeat in range(1, max(asked.repeats, asked.profile_runs) + 1)
        for is_profiled, last in ((False, asked.repeats), (True, asked.profile_runs))
        if repeat <= last
        for index in order_of_round(len(arms), repeat)
    ]


def _cell(asked: Asked, arm: StudyArm, repeat: int, is_profiled: bool) -> Cell:
    folder = f"{arm.name}/{'profiled' if is_profiled else 'run'}_{repeat}"
    run_type = STRATEGIES_STUDIED[arm.strategy][0]
    command = [
        *("env", "OMP_NUM_THREADS=1", "python", asked.network, "run", "--hosts", str(arm.hosts), *_flags_of(arm.link)),
        *("--seconds", "600", "--", "python", asked.program),
        *("--run_type", run_type, "--global_batch_size", str(arm.global_batch), "--seed", "42", *_work(asked)),
        *(
            *arm.flags,
            *(["--profile", "--profile_steps", str(asked.steps - asked.warmup_steps)] if is_profiled else []),
        ),
        *("--checkpoint_path", str(Path(asked.folder) / folder), "--overwrite"),
    ]
    return Cell(
        name=arm.name,
        variant=f"{arm.title}, {LINKS[arm.link]}",
        run_type=run_type,
        ranks=arm.hosts,
        batch_size=arm.global_batch,
        repeat=repeat,
        seed=42,
        folder=folder,
        command=command,
        oversubscribed=False,  # said of 4 hosts on the page: they are compared among themselves
        profiled=is_profiled,
    )


def _flags_of(link: str) -> tuple[str, ...]:
    rate, delay_s = LINKS[link].rate_bit_per_s, LINKS[link].delay_s
    flags = () if rate is None else ("--rate", link)
    return flags if delay_s is None else (*flags, "--delay_ms", f"{1000 * delay_s:g}")


def _work(asked: Asked) -> tuple[str, ...]:
    """Return the flags of the work: a short sequence, so that a step waits for the network; no validation and no
    sample."""
    return (
        *("--model", "nano", "--seq_length", str(SEQUENCE), "--max_position_embeddings", str(SEQUENCE)),
        *("--precision", "fp32", "--device", "cpu", "--threads_per_rank", "1"),
        *("--max_train_steps", str(asked.steps), "--timing_warmup_steps", str(asked.warmup_steps)),
        *("--max_val_steps", "0", "--sample_tokens", "0", "--collective_timeout", "60"),
        *("--train_data_path", f"{asked.data}/train.bin", "--val_data_path", f"{asked.data}/val.bin"),
    )


def links_as_records(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the links as they stand in network_study.json; `reference`: the one that each is compared to."""
    first = names[0] if "unlimited" not in names else "unlimited"
    return [
        {
            **asdict(LINKS[name]),
            "name": name,
            "title": str(LINKS[name]),
            "reference": None if name in (first, *REFERENCE_OF.values()) else REFERENCE_OF.get(name, first),
        }
        for name in names
    ]
