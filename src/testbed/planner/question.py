"""Read the question of a plan (model, batch, devices, the whole run). No torch."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from testbed.planner.candidates import always_shares_sequences, possible
from testbed.planner.machines import MOST_DEVICES, check_whole_nodes
from testbed.planner.plan import Budget, PlannedRun, name_of, plan
from testbed.planner.step_time import Constants

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
DAYS = {"d": 1.0, "h": 1 / 24, "m": 1 / 1440}
DIMENSIONS = {"num_layers": "layers", "num_heads": "heads", "embedding_size": "hidden", "vocab_size": "vocab"}


@dataclass(frozen=True, kw_only=True)
class Question:
    """A plan to be made.

    Attributes:
        work: words of the flags that all commands share; None where no command of src/gpt2.py trains the model.
        given: flags of src/gpt2.py that all candidates have.
        answers: to this question and those near it, which share them.
        data: the training file that the vocabulary is of; None: it was typed, or there is none.
        other: a model that src/gpt2.py does not train; its strategies are planned for it. None: the GPT-2 of `shape`.
        name: of `other`, as it was typed.
        is_quick: as in `possible`.
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
    is_quick: bool = False
    answers: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def vocabulary(self) -> str:
        """The vocabulary, and where it comes from."""
        source = "as given" if self.work and "--vocab_size" in self.work else "GPT-2's, for no data is here"
        source = "the model's" if self.other is not None else f"of {self.data}" if self.data is not None else source
        return f"vocabulary {self.shape.vocab_size:,} ({source})"

    @property
    def model_name(self) -> str:
        """The size's name, or the dimensions."""
        name = self.name or ("custom" if self.other is not None else size_name(self.shape))
        return self.shape.describe() if name == "custom" else name

    @property
    def devices_in_words(self) -> str:
        """Number and kind of the devices, such as `8 x h100-sxm`."""
        return f"{self.machine.devices} x {self.machine.device.name}"

    def on(self, devices: int) -> Question:
        """Return the same question for another number of devices. InputError: they are not whole nodes."""
        check_whole_nodes(devices, self.machine.per_node, f"--sweep gpus={devices}")
        return dataclasses.replace(self, machine=dataclasses.replace(self.machine, devices=devices))

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells questions near each other apart: devices, batch and flags."""
        return self.machine.devices, self.global_batch, frozenset(self.given.items())

    @property
    def runs(self) -> tuple[list[PlannedRun], dict[str, InputError]]:
        """All candidates with their estimates, and why run types have none."""
        key = (*self.key, self.is_quick)
        if key not in self.answers:
            self.answers[key] = self._planned()
        found: tuple[list[PlannedRun], dict[str, InputError]] = self.answers[key]
        return found

    def _planned(self) -> tuple[list[PlannedRun], dict[str, InputError]]:
        shares = always_shares_sequences(self.seq_length, self.global_batch, self.machine, self.given)
        jobs, refused = self.jobs(shares)
        runs = plan(jobs, self.machine, self.constants, self.answers)
        if shares or (runs and runs[0].fits and not runs[0].is_near_full):
            return runs, refused
        jobs, still_refused = self.jobs(True)
        return (plan(jobs, self.machine, self.constants, self.answers), still_refused) if jobs else (runs, refused)

    def jobs(self, shares_sequences: bool = False) -> tuple[list[Job], dict[str, InputError]]:
        """Return what `possible` finds."""
        there, asked = self.machine, (self.shape, self.seq_length, self.global_batch)
        return possible(
            *asked, there, self.given, self.other, shares_sequences=shares_sequences, is_quick=self.is_quick
        )

    def best(self) -> PlannedRun | str:
        """Return the best run, or why there is none."""
        runs, refused = self.runs
        if not runs:
            return self.reason(refused)
        return runs[0] if runs[0].fits else f"does not fit: {self.lack(runs[0])}"

    def fitting(self) -> PlannedRun | None:
        """Return the best run; None where there is none."""
        runs, _ = self.runs
        return runs[0] if runs and runs[0].fits else None

    @property
    def rate(self) -> float:
        """Tokens per second of the best run; 0 where there is none."""
        best = self.fitting()
        return best.tokens_per_s if best else 0.0

    @property
    def days(self) -> float:
        """Wall time of the whole run; infinite where nothing fits, or it is not known how long the run is."""
        best = self.fitting()
        days = None if best is None else self.budget.days(best)
        return math.inf if days is None else days

    @property
    def cost(self) -> float | None:
        """Cost of the whole run, where that is known."""
        best = self.fitting()
        return None if best is None else self.budget.cost(best)

    def asked(self, global_batch: int | None = None, /, **given: Any) -> Question:
        """Return the same question with another batch, or with more flags."""
        return dataclasses.replace(self, global_batch=global_batch or self.global_batch, given={**self.given, **given})

    def without(self, *names: str) -> Question:
        """Return the same question without some of its flags; without a run type, without that one's too."""
        own = STRATEGIES[self.given.get("run_type", REFERENCE)].options if "run_type" in names else ()
        given = {name: value for name, value in self.given.items() if name not in (*names, *own)}
        return dataclasses.replace(self, given=given)

    def reason(self, refused: Mapping[str, InputError]) -> str:
        """Return why there is no candidate: of the run types that have the typed flags, of the plain ones first."""
        typed = {name for name in self.given if any(name in entry.options for entry in STRATEGIES.values())}
        having = {name: why for name, why in refused.items() if typed <= {*STRATEGIES[name].options}}
        told = having or refused  # a run type without a typed flag has no other reason than that
        plain = told.get(REFERENCE) or told.get(PLAIN)  # others have rules of their own on top
        reason = plain or next(iter(told.values()), InputError("no run type runs on them"))
        return reason.rule  # its way out is a batch that may not fit: `advice` looks for one that does

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
        base = {name: getattr(other, attribute) for name, attribute in DIMENSIONS.items()}
        base |= {"max_position_embeddings": other.seq_length}
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
    sizes = OTHER_MODELS.get(values["model"])
    if sizes is None and not any(typed.get(name) for name in OF_OTHERS):
        return None
    if sizes is None:
        size = MODEL_SIZES[values["model"]]
        sizes = {attribute: getattr(size, name) for name, attribute in DIMENSIONS.items()}
    names = {**DIMENSIONS, **OF_OTHERS, "seq_length": "seq_length"}
    given = {attribute: name != "untied" and typed[name] for name, attribute in names.items() if typed.get(name)}
    model = DenseModel(**{"seq_length": values["seq_length"], **sizes, **given})
    if model.hidden % model.heads:
        raise InputError(f"--num_heads {model.heads} does not divide --embedding_size {model.hidden}")
    if model.heads % model.kv_heads:
        raise InputError(f"--kv_heads {model.kv_heads} does not divide the {model.heads} heads that share them")
    return model


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


def deadline_of(text: str) -> float:
    """Return the days in `3d`, `36h` or `90m`. InputError names --deadline."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([dhm])", text.strip().lower())
    days = float(match[1]) * DAYS[match[2]] if match else 0.0
    if not days:
        raise InputError(f"--deadline {text}: it is not a time above 0; write 3d, 36h or 90m")
    return days


def numbers_of_sweep(text: str) -> list[int]:
    """Return the numbers in `gpus=8,16,24`, or `gpus=8,16,...,256`, whose dots go on by the factor of the two before.

    Raises:
        InputError: names --sweep.
    """
    words = re.sub(r"\s", "", text)
    match = re.fullmatch(r"gpus=([1-9][0-9]{0,8}(?:,[1-9][0-9]{0,8})*?)(,\.\.\.,([1-9][0-9]{0,8}))?", words)
    numbers = [int(word) for word in match[1].split(",")] if match else []
    is_list = match is not None
    if match and match[3]:
        factor, rest = divmod(numbers[-1], numbers[-2]) if len(numbers) > 1 else (1, 0)
        while factor > 1 and numbers[-1] < int(match[3]):
            numbers.append(numbers[-1] * factor)
        is_list = factor > 1 and not rest and numbers[-1] == int(match[3])
    if not is_list or numbers != sorted(set(numbers)):
        raise InputError(f"--sweep {text}: it is not a list of devices; write gpus=8,16,24 or gpus=8,16,...,4096")
    if numbers[-1] > MOST_DEVICES:
        raise InputError(f"--sweep {text}: a plan has at most {MOST_DEVICES:,} devices")
    return numbers
