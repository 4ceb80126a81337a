"""Read the question of a plan (model, batch, devices, the whole run), and answer it. No torch."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from testbed.config.initial_shape import check_shape, positions_of_new_model
from testbed.config.run_types import PLAIN, REFERENCE, STRATEGIES
from testbed.config.table import FLAGS
from testbed.data.token_file import open_token_file
from testbed.errors import InputError
from testbed.memory_model.devices import Device, devices
from testbed.memory_model.job import DenseModel, Job, Machine
from testbed.memory_model.memory import START, smallest_number_of_devices
from testbed.model.shape import MODEL_SIZES, ModelShape, size_name
from testbed.planner.calibration import read_calibration
from testbed.planner.candidates import possible, precision_of
from testbed.planner.constants import Constants
from testbed.planner.machines import check_whole_nodes, machine_here, machine_named
from testbed.planner.plan import WORTH_A_TRY, Budget, PlannedRun, name_of, plan, settings_of, three
from testbed.planner.step_time import BETWEEN, WITHIN

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
# Dense models of others, which src/gpt2.py does not train: Touvron et al. 2023 (arXiv:2307.09288), Jiang et al. 2023
# (arXiv:2310.06825), Grattafiori et al. 2024 (arXiv:2407.21783).
_LLAMA_3 = {"kv_heads": 8, "vocab": 128256, "gated": True, "seq_length": 8192}
_LLAMA_2 = {"vocab": 32000, "gated": True, "seq_length": 4096}
OTHER_MODELS: dict[str, dict[str, Any]] = {
    "llama2-7b": {**_LLAMA_2, "layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008},
    "llama2-13b": {**_LLAMA_2, "layers": 40, "hidden": 5120, "heads": 40, "ffn": 13824},
    "llama2-70b": {**_LLAMA_2, "layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672, "kv_heads": 8},
    "mistral-7b": {**_LLAMA_2, "layers": 32, "hidden": 4096, "heads": 32, "ffn": 14336, "kv_heads": 8},
    "llama3-8b": {**_LLAMA_3, "layers": 32, "hidden": 4096, "heads": 32, "ffn": 14336},
    "llama3-70b": {**_LLAMA_3, "layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672},
    "llama3-405b": {**_LLAMA_3, "layers": 126, "hidden": 16384, "heads": 128, "ffn": 53248},
}
# flags of a plan -> what they change in a model
OF_OTHERS = {"ffn": "ffn", "kv_heads": "kv_heads", "gated": "gated", "untied": "tied"}
DIMENSIONS = {"num_layers": "layers", "num_heads": "heads", "embedding_size": "hidden", "vocab_size": "vocab"}
WORTH_SAYING = 1.2  # times as fast
MUCH = 0.3  # of a step
GAIN = 1.05  # times as fast, from where on another number of devices or another batch is named
LACKS = "does not fit"
STAYS = ("optimizer", "dropout")  # flags of the mathematics, which nobody leaves out for speed
MOST_LEFT_IDLE = 128  # times as many devices as a batch divides among, above which those few are no advice
MOST_TRIED = 4096  # devices, above which other plans take too long to be made for a hint


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

    def on(self, devices: int) -> Question:
        """Return the same question for another number of devices. InputError: they are not whole nodes."""
        check_whole_nodes(devices, self.machine.per_node)
        return dataclasses.replace(self, machine=dataclasses.replace(self.machine, devices=devices))

    @cached_property
    def runs(self) -> tuple[list[PlannedRun], dict[str, str]]:
        """All candidates with their estimates, and why run types have none."""
        jobs, refused = self._possible(self.machine, self.given)
        return plan(jobs, self.machine, self.constants), refused

    def _possible(self, machine: Machine, given: Mapping[str, Any]) -> tuple[list[Job], dict[str, str]]:
        return possible(self.shape, self.seq_length, self.global_batch, machine, given, self.other)

    def answered(self) -> tuple[list[PlannedRun], dict[str, str]]:
        """Return what `runs` does.

        Raises:
            InputError: the program refuses every candidate, or none fits into the memory.
        """
        runs, refused = self.runs
        if not runs:
            raise self.nothing_possible(refused)
        if not runs[0].fits:
            words = f"{self.model_name} does not fit on {self.devices_in_words}: {self._least(runs[0])}"
            ways = [way for way in (self._with_offload(runs[0]), self.with_room()) if way]
            if not ways:
                typed = {*self.given} - {"run_type"}
                left_out = [why for why in refused.values() if any(f"--{name}" in why for name in typed)]
                ways = [f"Left out was: {why}" for why in left_out[:1]]
            raise InputError(". ".join([words, *ways]))
        return runs, refused

    def hints(self, best: PlannedRun) -> list[str]:
        """Return what else to ask for, where it promises more."""
        found = [self._asked_otherwise(best), self._batch_that_divides(best), self._fewer_devices(best)]
        found += [self._with_offload(best), self.with_room()] if best.is_tight else []
        found += [self._unused(best)]
        return [hint for hint in found if hint]

    def _asked(self, global_batch: int | None = None, /, **given: Any) -> Question:
        """Return the same question with another batch, or with more flags."""
        return dataclasses.replace(self, global_batch=global_batch or self.global_batch, given={**self.given, **given})

    def _without(self, *names: str) -> Question:
        """Return the same question without some of its flags; without a run type, without that one's too."""
        own = STRATEGIES[self.given.get("run_type", REFERENCE)].options if "run_type" in names else ()
        given = {name: value for name, value in self.given.items() if name not in (*names, *own)}
        return dataclasses.replace(self, given=given)

    def _left_out(self, other: Question) -> str:
        """Return the flags that another question is without."""
        return " and ".join(_typed(name, value) for name, value in self.given.items() if name not in other.given)

    def _asked_otherwise(self, best: PlannedRun) -> str | None:
        """Return which change of the flags is much faster, and which further one on top of that: fp16 where bf16 is
        emulated, and leaving a typed flag out."""
        words, asked, fastest = "", self, best
        narrow = self._in_fp16()
        if narrow is not None and narrow[2].tokens_per_s >= WORTH_SAYING * best.tokens_per_s:
            words, asked, fastest = narrow
        while self.machine.devices <= MOST_TRIED:
            others = [(f"leaving {asked._left_out(other)} out", other) for other in asked._with_fewer_flags()]
            if asked.given.get("matmul") == "fp8" and not asked.given.get("compile"):
                others.append(("--compile on", asked._asked(compile=True)))
            found = [(run, *each) for each in others if (run := each[1].fitting()) and run.is_tight <= fastest.is_tight]
            best_first = sorted(found, key=lambda each: (-each[0].tokens_per_s, -len(each[2].given)))
            run, more, other = best_first[0] if best_first else (fastest, "", asked)
            if run.tokens_per_s < WORTH_SAYING * fastest.tokens_per_s:
                break
            words, asked, fastest = f"{words} and {more}" if words else more, other, run
        if not words:
            return None
        words += f" would be {three(fastest.tokens_per_s / best.tokens_per_s)} times as fast"
        words += f" ({name_of(fastest.job)}{', tight' * fastest.is_tight})"
        offloaded = asked._with_offload(fastest) if fastest.is_tight else None
        return words + (f"; with it {offloaded}" if offloaded else "")

    def _with_fewer_flags(self) -> Iterator[Question]:
        """Yield the question without each flag that may slow it down; what changes the mathematics stays."""
        for name, value in self.given.items():
            if name not in STAYS and (name != "precision" or value != precision_of("auto", self.machine.device)):
                yield self._without(name)

    def _in_fp16(self) -> tuple[str, Question, PlannedRun] | None:
        """Return the question with --precision fp16 on a device without native bf16, in words, and its answer: without
        what excludes it, which is native bf16, a run type that has no fp16, a batch that does not divide. None if
        nothing fits."""
        peaks = self.machine.device.peak_flops
        if self.given.get("precision") == "fp16" or "fp16" not in peaks or "bf16" in peaks:
            return None
        asked, words = self._asked(precision="fp16"), "--precision fp16"
        for name in ("mixed_precision", "run_type"):
            if name in asked.given and asked.fitting() is None:
                other = asked._without(name)
                words += f" without {asked._left_out(other)}"
                asked = other
        divided = asked._dividing() if asked.fitting() is None else None
        if divided is not None:
            words, asked = f"{words} with --global_batch_size {divided.global_batch}", divided
        run = asked.fitting()
        return None if run is None else (words, asked, run)

    def _dividing(self) -> Question | None:
        """Return the same question with a batch that divides among all devices; None where this one does."""
        devices = self.machine.devices
        if devices > self.global_batch or not self.global_batch % devices or devices > MOST_TRIED:
            return None
        return self._asked(_rounded(self.global_batch, [devices * (self.given.get("micro_batch_size_per_gpu") or 1)]))

    def _batch_that_divides(self, best: PlannedRun) -> str | None:
        """Return a batch that divides among the devices, and what it gains."""
        other = self._dividing()
        if other is None or best.job.layout.data == self.machine.devices:
            return None
        found = other.fitting()
        if found is None or found.tokens_per_s < GAIN * best.tokens_per_s:
            return None
        return (
            f"A batch of {self.global_batch:,} sequences does not divide among {self.machine.devices} devices; with "
            f"--global_batch_size {other.global_batch}, {name_of(found.job)} has "
            f"{three(found.tokens_per_s / best.tokens_per_s)} times the tokens/s"
        )

    def _fewer_devices(self, best: PlannedRun) -> str | None:
        """Return how much faster fewer devices are: where the network costs much of a step, one device or fewer nodes;
        where the batch does not divide, the most that it divides among.

        Cores are no devices that can be left out: with fewer ranks each has more of them.
        """
        machine = self.machine
        if machine.device.kind == "cpu" or machine.devices > MOST_TRIED:
            return None
        whole = [number for number in range(1, machine.devices) if self._is_whole(number)]
        numbers, halved = set(), []
        if sum(best.time.parts.get(name, 0.0) for name in (WITHIN, BETWEEN)) >= MUCH * best.time.seconds:
            numbers |= {1, machine.per_node} & {*whole}
            halved = [number for times in range(1, 7) if (number := machine.devices >> times) in whole]
        if self.global_batch % machine.devices:
            numbers.add(max(number for number in whole if self.global_batch % number == 0))
        first = best
        for number in sorted(numbers):
            first = min(first, self._on_fewer(number) or first, key=_by_time)
        for number in halved:
            run = self._on_fewer(number)
            first = min(first, run or first, key=_by_time)
            if run is None or run.time.seconds > WORTH_A_TRY * first.time.seconds:
                break  # half as many are slower still
        gain = best.time.seconds / first.time.seconds
        if gain < GAIN:
            return None
        name = f"{name_of(first.job)}{', tight' * first.is_tight}"
        return (
            f"{first.machine.devices} of them ({name}) would be {three(gain)} times as fast, with "
            f"{three(first.time.seconds)} s a step"
        )

    def _on_fewer(self, number: int) -> PlannedRun | None:
        """Return the best run on a number of devices, on one of any run type."""
        return (self._without("run_type") if number == 1 else self).on(number).fitting()

    def _with_offload(self, best: PlannedRun) -> str | None:
        """Return that DeepSpeed's offload has room, where nothing else has, and that it is not much slower."""
        asks = {"run_type": "optimized", "offload": "optimizer"}
        if self.machine.device.kind == "cpu" or any(name in self.given for name in asks):
            return None
        found = self._asked(None, **asks).fitting()
        if found is None or found.is_tight or (best.fits and found.time.seconds > WORTH_A_TRY * best.time.seconds):
            return None
        flags = " ".join(f"--{name} {value}" for name, value in asks.items())
        return f"{flags} has room: {name_of(found.job)}, {three(found.time.seconds)} s a step"

    def _unused(self, best: PlannedRun) -> str | None:
        """Return which typed flags the best run does without, as its run type has none such, and what one with them
        takes."""
        asks = [name for name, value in self.given.items() if value not in (None, False, "none", "off")]
        having = {name for entry in STRATEGIES.values() for name in asks if name in entry.options}
        typed = having - STRATEGIES[best.job.run_type or REFERENCE].options.keys()
        if not typed:
            return None
        flags = " and ".join(_typed(name, self.given[name]) for name in self.given if name in typed)
        owners = [name for name, entry in STRATEGIES.items() if typed <= entry.options.keys()]
        if not owners:
            return f"The first run does without {flags}: no run type has them all, so leave some of them out"
        fitting = (run for run in self.runs[0] if run.job.run_type in owners and run.fits)
        found = next(fitting, None) or self._asked(run_type=owners[0]).best()
        why = found if isinstance(found, str) else f"{name_of(found.job)} takes {three(found.time.seconds)} s a step"
        return f"The first run does without {flags}, which is for --run_type {' and '.join(owners)} alone: there, {why}"

    def with_room(self) -> str | None:
        """Return which typed flags leave room where they are left out, as few as can be; None if there are no such."""
        typed = sorted(self.given, key=lambda name: name == "run_type")  # most wanted last
        left = [names for number in (1, 2) for names in itertools.combinations(typed, number)]
        for names in left if self.machine.devices <= MOST_TRIED else ():
            other = self._without(*names)
            run = other.fitting()
            if run is not None and not run.is_tight:
                without = self._left_out(other)
                return f"Without {without} there is room: {name_of(run.job)}, {settings_of(run.job)}"
        return None

    def nothing_possible(self, refused: Mapping[str, str]) -> InputError:
        """Return the error of a question without candidates."""
        reason = self._reason(refused)
        words = [f"nothing can be planned for {self.devices_in_words}: {reason}", self.with_room()]
        words.append(self._as_asked_on_fewer())
        lead = re.match(r"--(\w+)", reason)
        if words[1] is None and lead and lead[1] in self.given:  # so without it there is another reason
            found, without = self._without(lead[1]).best(), f"Without {_typed(lead[1], self.given[lead[1]])}"
            if isinstance(found, str):
                words[1] = f"{without} too: {found}"
            else:
                words[1] = f"{without} {name_of(found.job)} would do{', tightly' * found.is_tight}"
        return InputError(". ".join(filter(None, words)))

    def _reason(self, refused: Mapping[str, str]) -> str:
        """Return why there is no candidate; of a batch that would divide, whether that has room."""
        typed = {name for name in self.given if any(name in entry.options for entry in STRATEGIES.values())}
        having = {name: why for name, why in refused.items() if typed <= {*STRATEGIES[name].options}}
        told = having or refused  # a run type without a typed flag has no other reason than that
        plain = told.get(REFERENCE) or told.get(PLAIN)  # others have rules of their own on top
        words = plain or next(iter(told.values()), "no run type runs on them")
        nearest = re.search(r"the nearest that (?:is|does): (\d+)$", words)
        if nearest is None:
            return words
        for batch in self._batches_below(int(nearest[1])):
            runs, _ = self._asked(batch).runs
            if runs and runs[0].fits:
                smallest = f"the smallest found that can be planned: {batch} ({name_of(runs[0].job)})"
                return words[: nearest.start()] + smallest
        found = self._asked(int(nearest[1])).best()
        if isinstance(found, PlannedRun):
            return f"{words} ({name_of(found.job)})"
        return f"{words}, and with it the model {found}" if found.startswith(LACKS) else f"{words}, and then: {found}"

    def _batches_below(self, nearest: int) -> Iterator[int]:
        """Yield the batch times powers of two, up to the nearest that divides among all devices: a pipeline or tensor
        ranks may share it."""
        batch = 2 * self.global_batch
        while batch < nearest and self.machine.devices <= MOST_TRIED:
            yield batch
            batch *= 2

    def _as_asked_on_fewer(self) -> str | None:
        """Return on how many devices the batch that is too small for these can be trained."""
        whole = (number for number in range(self.machine.devices - 1, 0, -1) if self._is_whole(number))
        number = next((number for number in whole if self.global_batch % number == 0), None)
        if (
            number is None
            or number < self.machine.devices / MOST_LEFT_IDLE
            or self.global_batch >= self.machine.devices
        ):
            return None
        run = self.on(number).fitting()
        if run is None:
            return None
        return f"{number} of them can train that batch: {name_of(run.job)}, {three(run.time.seconds)} s a step"

    def _is_whole(self, number: int) -> bool:
        return number <= self.machine.per_node or not number % self.machine.per_node

    @property
    def devices_in_words(self) -> str:
        return f"{self.machine.devices} x {self.machine.device.name}"

    def best(self) -> PlannedRun | str:
        """Return the best run, or why there is none."""
        runs, refused = self.runs
        if not runs:
            return self._reason(refused)
        return runs[0] if runs[0].fits else f"{LACKS}: {self._lack(runs[0])}"

    def fitting(self) -> PlannedRun | None:
        """Return the best run; None where there is none."""
        run = self.best()
        return None if isinstance(run, str) else run

    def _lack(self, run: PlannedRun) -> str:
        gib, has = run.needs_bytes / 2**30, self.machine.device.memory_bytes / 2**30
        is_at_start = run.memory.peak_moment == START
        whole = ", for DeepSpeed puts the whole model on each device before it cuts it" if is_at_start else ""
        return f"the least, {name_of(run.job)}, needs {gib:.1f} GiB of {has:.1f}{whole}"

    def _least(self, run: PlannedRun) -> str:
        def jobs_on(number: int) -> Iterator[Job]:
            machine = dataclasses.replace(self.machine, devices=number)
            for kind in ("block", "selective", "none"):  # the most frugal first, which not every mesh has
                frugal = {"micro_batch_size_per_gpu": 1, "activation_checkpointing": kind} | dict(self.given)
                yield from self._possible(machine, frugal)[0]

        number = smallest_number_of_devices(jobs_on, self.machine.device, self.machine.per_node)
        if number is None:
            is_there = any(run.needs_bytes <= device.memory_bytes for device in devices().values())
            more = "; devices with more memory may" if is_there else ""
            return f"{self._lack(run)}, and no number of them would do as asked{more}"
        if number < self.machine.devices:
            return f"{self._lack(run)}; fewer would do, as they divide otherwise: {number}"
        found = self.on(number).best()
        is_tight = isinstance(found, PlannedRun) and found.is_tight
        return f"{self._lack(run)}; {number} of them would do{', tightly' * is_tight}"


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
    values = {**default, "global_batch_size": _rounded(default["global_batch_size"], devices), **typed}
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


def _by_time(run: PlannedRun) -> tuple[bool, float]:
    return run.is_tight, run.time.seconds


def _typed(name: str, value: object) -> str:
    """Return a flag as it was typed."""
    return f"--{name} {('off', 'on')[value] if isinstance(value, bool) else value}"


def _rounded(batch: int, devices: Sequence[int]) -> int:
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


def machine_asked(gpu: str | None, here: bool, gpus: int | None, per_node: int | None, link: str | None) -> Machine:
    """Return the machine that flags ask for. InputError names the flag that cannot be."""
    if here and gpu is not None:
        raise InputError(f"--here is this machine, and --gpu {gpu} another; give one of them")
    if here:
        return machine_here(gpus, per_node, link)
    if gpu is None:
        raise InputError("--gpu is missing; give a kind of device such as --gpu h100-sxm, or --here for this machine")
    return machine_named(gpu, gpus, per_node, link)


def check_device(calibration: Path, device: Device) -> None:
    """Check that a calibration is of the kind of device that --gpu names.

    Raises:
        InputError: it is another's, or cannot be read.
    """
    was = read_calibration(calibration).device.name
    if was != device.name:
        raise InputError(
            f"--calibration {calibration} was measured on {was}, so its times say nothing about --gpu {device.name}; "
            "leave one of them out"
        )
