"""The request for a sweep: variants, work of each run, machine. No torch."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from testbed.config.flags import parse_command_line
from testbed.config.run_types import STRATEGIES
from testbed.distributed.launch import read_launch, usable_cores
from testbed.distributed.mesh import MeshSizes
from testbed.errors import InputError
from testbed.io import SOURCE

Protocol = Literal["strong", "weak", "time_to_loss"]
PROTOCOLS = get_args(Protocol)
# Default flags of gpt2.py. No learning rate: each optimizer has its own default.
DEFAULT_WORK = {
    "cpu": {"model": "nano", "seq_length": "128", "precision": "fp32"},
    "cuda": {"model": "gpt2", "seq_length": "1024"},
}
DEFAULT_STEPS = {"strong": {"cpu": 30, "cuda": 100}, "weak": {"cpu": 30, "cuda": 100}}
DEFAULT_STEPS["time_to_loss"] = {"cpu": 120, "cuda": 1000}
DEFAULT_BATCH_SIZE = {"strong": 32, "weak": 16, "time_to_loss": 32}  # weak: per rank
# enough to compare losses, without costing more than training
VALIDATION = {"strong": {"max_val_steps": "4"}, "weak": {"max_val_steps": "4"}}
VALIDATION["time_to_loss"] = {"max_val_steps": "16", "eval_every": "10"}
OF_EVERY_RUN = ("steps", "epochs", "seq_length", "dataset_mode", "deepspeed_config")  # the sweep's own flags
DATASETS = {"small": ("train_small.bin", "val_small.bin"), "full": ("train.bin", "val.bin")}

# flags of gpt2.py that the sweep gives itself, and what to do instead
SET_BY_SWEEP = {
    "run_type": "use --run_types",
    "checkpoint_path": "use --out_dir",
    "global_batch_size": "use --batch_sizes",
    "grad_accum_steps": "it follows from --batch_sizes",
    "max_train_steps": "use --steps",
    "seed": "use --seed",
    "overwrite": "a run that is not finished is made again by itself",
    "resume": "a run that is not finished is made again by itself",
    "allow_setting_change": "a run that is not finished is made again by itself",
    "eval_only": "a sweep trains",
}


@dataclass(frozen=True)
class Variant:
    """A run type, with flags of its own: `optimized:zero_stage=3+offload=optimizer`."""

    text: str
    run_type: str
    arguments: tuple[str, ...]

    @property
    def is_one_process(self) -> bool:
        return not STRATEGIES[self.run_type].is_distributed

    @property
    def threads_per_rank(self) -> int | None:
        """CPU threads that the variant itself asks for; None: it does not."""
        return parse_command_line(list(self.arguments)).values["threads_per_rank"]

    @property
    def mesh_ranks(self) -> int:
        """Ranks of the axes whose sizes the variant's own flags fix; it runs on a multiple of them."""
        values = parse_command_line(list(self.arguments)).values
        sizes = {name: values[name] or 1 for name in MeshSizes().flags()}
        shards_or_context = max(sizes.pop("shard_size"), sizes.pop("context_parallel_size"))  # shards lie on both
        return shards_or_context * math.prod(sizes.values())


@dataclass(frozen=True)
class Machine:
    """Devices of the machine. On the CPU a rank gets one core, or as many as it has threads."""

    num_cores: int
    cuda_devices: tuple[str, ...] = ()  # names for CUDA_VISIBLE_DEVICES; empty: the sweep runs on the CPU
    threads_per_rank: int | None = None  # None: not given

    @property
    def kind(self) -> str:
        return "cuda" if self.cuda_devices else "cpu"

    @property
    def most_ranks(self) -> int:
        """Ranks that have a device, or cores for all their threads."""
        return len(self.cuda_devices) or max(1, self.num_cores // (self.threads_per_rank or 1))

    def is_oversubscribed(self, ranks: int, of_variant: int | None = None) -> bool:
        """Return whether the ranks together have more threads than there are cores. `of_variant`: as in `threads`."""
        return self.kind == "cpu" and ranks * self.threads(ranks, of_variant) > self.num_cores

    def threads(self, ranks: int, of_variant: int | None = None) -> int:
        """Return OMP_NUM_THREADS of a rank: 1 on the CPU, an even share of the cores on CUDA, unless flags say
        otherwise.

        Args:
            of_variant: threads per rank that the variant asks for.
        """
        asked = of_variant or self.threads_per_rank
        if asked:
            return asked
        return 1 if self.kind == "cpu" else max(1, self.num_cores // ranks)


@dataclass(frozen=True)
class Request:
    """The request. `shared`: flags of gpt2.py that every run gets."""

    protocol: Protocol
    variants: tuple[Variant, ...]
    ranks: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    repeats: int
    seed: int
    shared: tuple[str, ...]
    machine: Machine
    folder: str  # --out_dir, relative to the folder that the sweep was started in
    program: str  # gpt2.py, likewise
    target_val_loss: float | None = None
    profile_runs: int = 0  # of each cell, one in each round: they say where the time goes, never how much it is


def request_for(arguments: argparse.Namespace, machine: Machine, **fields: Any) -> Request:
    """Return the request of a program's flags.

    Args:
        arguments: of `config.sweep_flags`; a flag that the program does not have counts as not given.
        fields: of the request, in place of those that follow from the flags.

    Raises:
        InputError: a flag, or one after --, cannot be used.
    """
    given = {name: getattr(arguments, name, None) for name in OF_EVERY_RUN}
    if given["deepspeed_config"]:
        given["deepspeed_config"] = os.path.relpath(given["deepspeed_config"])  # a record should not name a home folder
    protocol = fields.pop("protocol", "strong")
    return Request(
        protocol=protocol,
        variants=parse_variants(fields.pop("run_types", arguments.run_types)),
        batch_sizes=fields.pop("batch_sizes", None) or (arguments.batch_size,),
        repeats=fields.pop("repeats", 1),
        seed=arguments.seed,
        shared=shared_arguments(protocol, machine.kind, given, arguments.passed_on),
        machine=machine,
        folder=str(arguments.out_dir),
        program=os.path.relpath(SOURCE / "gpt2.py"),
        **fields,
    )


def parse_variants(text: str) -> tuple[Variant, ...]:
    """Return the variants in `ddp,optimized:zero_stage=3+offload=optimizer,ddp:compile`.

    Raises:
        InputError: a run type or a flag does not exist, or the sweep sets it.
    """
    variants = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        run_type, _, rest = word.partition(":")
        if run_type not in STRATEGIES:
            raise InputError(f"--run_types {word}: {run_type!r} is not one of {', '.join(STRATEGIES)}")
        arguments = []
        for setting in filter(None, rest.split("+")):
            name, has_value, value = setting.partition("=")
            arguments += [f"--{name}", value] if has_value else [f"--{name}"]
        _check_arguments(arguments, f"--run_types {word}")
        variants.append(Variant(word, run_type, tuple(arguments)))
    if not variants:
        raise InputError("--run_types names no run type; for example: --run_types baseline,ddp")
    _check_no_doubles([variant.text for variant in variants], "--run_types")
    _check_no_doubles([folder_name(variant.text) for variant in variants], "--run_types, as folders,")
    return tuple(variants)


def parse_numbers(text: str, flag: str) -> tuple[int, ...]:
    """Return the positive whole numbers in `1,2,4`. InputError names the flag."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(re.fullmatch("0*[1-9][0-9]{0,8}", word) for word in words):
        raise InputError(f"{flag} {text!r} is not a list of positive whole numbers such as 1,2,4")
    numbers = tuple(int(word) for word in words)
    _check_no_doubles(numbers, flag)
    return numbers


def parse_names(text: str, known: Iterable[str], flag: str) -> tuple[str, ...]:
    """Return the names in `ddp,fsdp`, each once, in the order given. InputError names the flag."""
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    known = tuple(known)
    if not names:
        raise InputError(f"{flag} names nothing; known: {', '.join(known)}")
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"{flag} {text}: {unknown[0]!r} is not one of {', '.join(known)}")
    return names


def shared_arguments(protocol: str, kind: str, given: dict[str, Any], passed_on: Sequence[str]) -> tuple[str, ...]:
    """Return the flags of gpt2.py that every run of the sweep gets.

    Args:
        kind: "cpu" or "cuda", which have different defaults.
        given: the flags of OF_EVERY_RUN; None if not given.
        passed_on: words after `--`, passed on unchanged.

    Raises:
        InputError: a flag does not exist, is given twice, or the sweep sets it.
    """
    set_there = _check_arguments(passed_on, "after --")
    steps = given["steps"]
    if (
        steps is None and given["epochs"] is None and not {"max_train_steps", "max_tokens"} & set_there
    ):  # a --config file may say it
        steps = DEFAULT_STEPS[protocol][kind]
    train_file, val_file = DATASETS[given["dataset_mode"] or "small"]
    asked = {
        "seq_length": given["seq_length"],
        "epochs": given["epochs"],
        "deepspeed_config": given["deepspeed_config"],
        "train_data_path": train_file if given["dataset_mode"] else None,
        "val_data_path": val_file if given["dataset_mode"] else None,
    }
    for name, value in asked.items():
        if value is not None and name in set_there:
            raise InputError(f"--{name} stands after -- too, or follows from a flag before it; give it once")
    defaults = {
        **DEFAULT_WORK[kind],
        **VALIDATION[protocol],
        "save_at_end": "off",  # many runs, and none is extended
        "warmup_steps": steps // 4 if steps is not None and kind == "cpu" else None,  # as in the quickstart
        "sample_tokens": 0,
        "train_data_path": train_file,
        "val_data_path": val_file,
    }
    values = {name: value for name, value in defaults.items() if name not in set_there}
    values |= {name: value for name, value in asked.items() if value is not None}
    values["max_train_steps"] = steps
    words = [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]
    return (*words, *passed_on)


def _check_arguments(arguments: Sequence[str], place: str) -> frozenset[str]:
    """Return the given flags of gpt2.py. Raises InputError if gpt2.py would refuse them or the sweep sets them."""
    try:
        command_line = parse_command_line(list(arguments))
    except SystemExit:  # --help
        raise InputError(f"{place}: --help is for python src/gpt2.py --help") from None
    except ValueError as error:
        raise InputError(f"{place}: gpt2.py says: {error}") from None
    for name, instead in SET_BY_SWEEP.items():
        if name in command_line.typed:
            raise InputError(f"{place}: --{name} is set by the sweep itself; {instead}")
    return command_line.explicit


def _check_no_doubles(values: Sequence, flag: str) -> None:
    doubles = [value for value in values if list(values).count(value) > 1]
    if doubles:
        raise InputError(f"{flag} names {doubles[0]} twice; repeats are made with --repeats")


def folder_name(variant: str) -> str:
    """Return the variant's text in characters for a folder."""
    return re.sub(r"[^A-Za-z0-9_.=-]", "-", variant)


def facts_of_machine() -> dict:
    """Return CUDA devices and commit, from a process of its own, so that PyTorch does not stay in memory during the
    runs."""
    code = (
        "import json, torch; from testbed.metrics.environment import commit; "
        "print(json.dumps({'devices': torch.cuda.device_count(), **dict(zip(('commit', 'is_dirty'), commit()))}))"
    )
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    said = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if said.returncode:
        raise InputError(f"PyTorch cannot be loaded here: {said.stderr.strip().splitlines()[-1]}")
    return json.loads(said.stdout.strip().splitlines()[-1])


def machine_for(num_cuda_devices: int, passed_on: Sequence[str]) -> Machine:
    """Return the machine that runs with these flags of gpt2.py use.

    Raises:
        InputError: this program is one of several ranks, or the flags ask for devices that are not there.
    """
    if read_launch().is_distributed:
        raise InputError("it was started as several ranks; start it once, with python: it starts the ranks of each run")
    _check_arguments(passed_on, "after --")
    values = parse_command_line(list(passed_on)).values
    devices = () if values["device"] == "cpu" else visible_devices(num_cuda_devices)
    if values["device"] == "cuda" and not devices:
        raise InputError("--device cuda, but PyTorch finds no CUDA device here; use --device cpu or leave it out")
    return Machine(usable_cores(), devices, values["threads_per_rank"])


def visible_devices(number: int) -> tuple[str, ...]:
    """Return the names of the CUDA devices for CUDA_VISIBLE_DEVICES."""
    named = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    return tuple(named[:number]) if len(named) >= number else tuple(map(str, range(number)))
