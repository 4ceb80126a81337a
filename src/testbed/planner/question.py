"""Read the question of a plan (model, batch, devices, the whole run). No torch."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from testbed.config.initial_shape import check_shape, positions_of_new_model
from testbed.config.run_types import PLAIN, REFERENCE, STRATEGIES
from testbed.config.table import FLAGS
from testbed.data.token_file import open_token_file
from testbed.errors import InputError
from testbed.memory_model.job import DenseModel, Job, Machine
from testbed.memory_model.memory import START
from testbed.model.shape import MODEL_SIZES, ModelShape, size_name
from testbed.planner.candidates import NEAREST, always_shares_sequences, possible
from testbed.planner.constants import Constants
from testbed.planner.machines import check_whole_nodes
from testbed.planner.plan import Budget, PlannedRun, name_of, plan

# On a GPU as GPT-2 was trained (Radford et al. 2019: 512 sequences of 1,024 tokens), on a CPU as the sweep trains.
DEFAULT_WORK = {
    "cuda": {"model": "gpt2", "seq_length": 1024, "global_batch_size": 512},
    "cpu": {"model": "nano", "seq_length": 128, "global_batch_size": 32},
}
WORK = (
    *("model", "num_layers", "num_heads", "embedding_size", "vocab_size", "max_position_embeddings", "seq_length"),
    *("global_batch_size", "dropout", "optimizer", "attention"),
)
NOT_FIXED = (*dataclasses.asdict(MODEL_SIZES["gpt2"]), "model", "seq_length", "global_batch_size")  # ask
OTHER_MODELS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "models.json").read_bytes())["models"]
# flags of a plan -> what they change in a model
OF_OTHERS = {"ffn": "ffn", "kv_heads": "kv_heads", "gated": "gated", "untied": "tied"}
DIMENSIONS = {"num_layers": "layers", "num_heads": "heads", "embedding_size": "hidden", "vocab_size": "vocab"}


@dataclass(frozen=True, kw_only=True)
class Question:
    """A plan to be made.

    Attributes:
        work: words of the flags that all commands share; None where no command of src/gpt2.py trains the model.
        given: flags of src/gpt2.py that all candidates have.
        data: the training file that the vocabulary is of; None: it was typed, or there is none.
        other: a model that src/gpt2.py does not train; its strategies are planned for it. None: the GPT-2 of `shape`.
        name: of `other`, as it was typed.
    """

    shape: ModelShape
    seq_length: int
    global_batch: int
    machine: Machine
    constants: Constants
    budget: Budget = field(default_factory=Budget)
    work: tuple[str, ...] | None = ()
    given: Mapping[str, Any] = field(default_factory=dict)
    data: Path | None = None
    other: DenseModel | None = None
    name: str = ""

    @property
    def vocabulary(self) -> str:
        """The vocabulary, and where it comes from."""
        if self.other is not None:
            source = "the model's"
        elif self.data is not None:
            source = f"of {self.data}"
        else:
            source = "as given" if self.work and "--vocab_size" in self.work else "GPT-2's, for no data is here"
        return f"vocabulary {self.shape.vocab_size:,} ({source})"

    @property
    def model_name(self) -> str:
        """The size's name, or the dimensions."""
        name = self.name or size_name(self.shape)
        return self.shape.describe() if name == "custom" else name

    @property
    def devices_in_words(self) -> str:
        """Number and kind of the devices, such as `8 x h100-sxm`."""
        return f"{self.machine.devices} x {self.machine.device.name}"

    def on(self, devices: int) -> Question:
        """Return the same question for another number of devices. InputError: they are not whole nodes."""
        check_whole_nodes(devices, self.machine.per_node, f"--sweep gpus={devices}")
        return dataclasses.replace(self, machine=dataclasses.replace(self.machine, devices=devices))

    @cached_property
    def runs(self) -> tuple[list[PlannedRun], dict[str, str]]:
        """All candidates with their estimates, and why run types have none."""
        shares = always_shares_sequences(self.seq_length, self.global_batch, self.machine, self.given)
        runs, refused = self._planned(shares)
        if not shares and (not runs or not runs[0].fits or runs[0].is_tight):
            more, still_refused = self._planned(True)
            return (more, still_refused) if more else (runs, refused)
        return runs, refused

    def _planned(self, shares_sequences: bool) -> tuple[list[PlannedRun], dict[str, str]]:
        jobs, refused = self.jobs(shares_sequences)
        return plan(jobs, self.machine, self.constants, all_that_do_not_fit=False), refused

    def jobs(self, shares_sequences: bool = False) -> tuple[list[Job], dict[str, str]]:
        """Return what `possible` finds."""
        return possible(
            self.shape,
            self.seq_length,
            self.global_batch,
            self.machine,
            self.given,
            self.other,
            shares_sequences=shares_sequences,
        )

    def best(self) -> PlannedRun | str:
        """Return the best run, or why there is none."""
        runs, refused = self.runs
        if not runs:
            return self.reason(refused)
        return runs[0] if runs[0].fits else f"does not fit: {self.lack(runs[0])}"

    def fitting(self) -> PlannedRun | None:
        """Return the best run; None where there is none."""
        run = self.best()
        return None if isinstance(run, str) else run

    def asked(self, global_batch: int | None = None, /, **given: Any) -> Question:
        """Return the same question with another batch, or with more flags."""
        return dataclasses.replace(self, global_batch=global_batch or self.global_batch, given={**self.given, **given})

    def without(self, *names: str) -> Question:
        """Return the same question without some of its flags; without a run type, without that one's too."""
        own = STRATEGIES[self.given.get("run_type", REFERENCE)].options if "run_type" in names else ()
        given = {name: value for name, value in self.given.items() if name not in (*names, *own)}
        return dataclasses.replace(self, given=given)

    def reason(self, refused: Mapping[str, str]) -> str:
        """Return why there is no candidate: of the run types that have the typed flags, of the plain ones first."""
        typed = {name for name in self.given if any(name in entry.options for entry in STRATEGIES.values())}
        having = {name: why for name, why in refused.items() if typed <= {*STRATEGIES[name].options}}
        told = having or refused  # a run type without a typed flag has no other reason than that
        plain = told.get(REFERENCE) or told.get(PLAIN)  # others have rules of their own on top
        words = plain or next(iter(told.values()), "no run type runs on them")
        return NEAREST.sub("", words)  # a batch that may not fit: `advice` looks for one that does

    def lack(self, run: PlannedRun) -> str:
        """Return what the most frugal run needs, which does not fit."""
        gib, has = run.needs_bytes / 2**30, self.machine.device.memory_bytes / 2**30
        is_at_start = run.memory.peak_moment == START
        whole = ", for DeepSpeed puts the whole model on each device before it cuts it" if is_at_start else ""
        return f"the least, {name_of(run.job)}, needs {gib:.1f} GiB of {has:.1f}{whole}"


def question(
    typed: Mapping[str, Any],
    machine: Machine,
    budget: Budget,
    constants: Constants,
    devices: Sequence[int] = (1,),
) -> Question:
    """Return the question that flags ask.

    Args:
        typed: flags of src/gpt2.py that were given.
        devices: numbers of them that are asked about; a default batch divides among each.

    Raises:
        InputError: the model's dimensions do not fit together, or the data here cannot be used.
    """
    default: dict[str, Any] = DEFAULT_WORK[machine.device.kind]
    values = {**default, "global_batch_size": rounded(default["global_batch_size"], devices), **typed}
    other = _other_model(values, typed)
    if other is not None:
        values["seq_length"] = other.seq_length
        shape = {name: getattr(other, attribute) for name, attribute in DIMENSIONS.items()}
        base = {**shape, "max_position_embeddings": other.seq_length}
    else:
        size = MODEL_SIZES[values["model"]]
        base = dataclasses.asdict(size) | {"max_position_embeddings": positions_of_new_model(values, size)}
    data = None if typed.get("vocab_size") or other is not None else _data_here()
    if data is not None:  # as src/gpt2.py takes it
        base["vocab_size"] = open_token_file(data, "--vocab_size of the data:").vocab_size
    shape = {name: values.get(name) or number for name, number in base.items()}
    check_shape(shape, values["seq_length"])
    work = [word for name in WORK if values.get(name) is not None for word in (f"--{name}", str(values[name]))]
    return Question(
        shape=ModelShape(**shape),
        seq_length=values["seq_length"],
        global_batch=values["global_batch_size"],
        machine=machine,
        constants=constants,
        budget=budget,
        work=tuple(work) if other is None else None,
        given={name: value for name, value in typed.items() if name not in (*NOT_FIXED, *OF_OTHERS)},
        data=data,
        other=other,
        name=values["model"] if values["model"] in OTHER_MODELS else "",
    )


def _other_model(values: Mapping[str, Any], typed: Mapping[str, Any]) -> DenseModel | None:
    """Return the model that src/gpt2.py does not train; None where the flags ask for a GPT-2.

    Raises:
        InputError: its heads cannot share the width, or the heads of keys and values.
    """
    known = OTHER_MODELS.get(values["model"])
    if known is None and not any(typed.get(name) for name in OF_OTHERS):
        return None
    if known is None:
        size = MODEL_SIZES[values["model"]]
        known = {attribute: getattr(size, name) for name, attribute in DIMENSIONS.items()}
    sizes = {"seq_length": values["seq_length"], **known}
    for name, attribute in {**DIMENSIONS, **OF_OTHERS, "seq_length": "seq_length"}.items():
        if typed.get(name):
            sizes[attribute] = False if name == "untied" else typed[name]
    heads, kv_heads = sizes["heads"], sizes.get("kv_heads") or sizes["heads"]
    if sizes["hidden"] % heads:
        raise InputError(f"--num_heads {heads} does not divide --embedding_size {sizes['hidden']}")
    if heads % kv_heads:
        raise InputError(f"--kv_heads {kv_heads} does not divide the {heads} heads that share them")
    return DenseModel.of_sizes(**sizes)


def rounded(batch: int, devices: Sequence[int]) -> int:
    """Return a batch near `batch` that divides among each number of devices, or among the most of them.

    Of those within an eighth, the one whose share of a device can be halved most often, so that micro batches can be
    chosen: 448 for 7 devices, not 511.
    """
    divisor = math.lcm(*devices)
    if divisor > 4 * batch:
        divisor = max(devices)
    shares = range(max(1, math.ceil(7 / 8 * batch / divisor)), math.floor(9 / 8 * batch / divisor) + 1)
    nearest = max(1, round(batch / divisor))
    return divisor * max(shares or [nearest], key=lambda share: (share & -share, -abs(share * divisor - batch)))


def _data_here() -> Path | None:
    """Return the training file that the printed commands would read here, if it is there."""
    path = Path(FLAGS["train_data_path"].default)
    return path if path.is_file() else None
