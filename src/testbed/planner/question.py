"""Read the question of a plan (model, batch, devices, the whole run), and answer it. No torch."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from testbed.memory_model.memory import START, fits, memory_of
from testbed.model.shape import MODEL_SIZES, ModelShape, size_name
from testbed.planner.candidates import possible, precision_of
from testbed.planner.constants import Constants
from testbed.planner.machines import check_whole_nodes
from testbed.planner.plan import Budget, PlannedRun, duration, name_of, plan, roomy_bytes, settings_of, three
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
OTHER_MODELS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "models.json").read_bytes())["models"]
# flags of a plan -> what they change in a model
OF_OTHERS = {"ffn": "ffn", "kv_heads": "kv_heads", "gated": "gated", "untied": "tied"}
DIMENSIONS = {"num_layers": "layers", "num_heads": "heads", "embedding_size": "hidden", "vocab_size": "vocab"}
WORTH_SAYING = 1.2  # times as fast
LOW_MFU, LARGER, MUCH_FASTER = 0.3, 8, 1.5  # of the peak; times the batch that is tried there; times as fast with it
MUCH = 0.3  # of a step
GAIN = 1.05  # times as fast, from where on another number of devices or another batch is named
STAYS = ("optimizer", "dropout")  # flags of the mathematics, which nobody leaves out for speed
STEPS_ASIDE = ("mixed_precision", "run_type")  # flags that may exclude fp16
OFFLOADED = {"run_type": "optimized", "offload": "optimizer"}
MOST_HALVINGS = 7  # of a number of devices that cannot share the batch
MOST_TRIED = 4096  # devices, above which other plans take too long to be made for a hint
MOST_DOUBLINGS = 14  # of a node, in the search for enough memory


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
            InputError: the program refuses every candidate, or none fits into the memory; with what else has room.
        """
        runs, refused = self.runs
        if not runs or not runs[0].fits:
            raise InputError(self.refusal())
        return runs, refused

    def best(self) -> PlannedRun | str:
        """Return the best run, or why there is none."""
        runs, refused = self.runs
        if not runs:
            return self._reason(refused)
        return runs[0] if runs[0].fits else f"does not fit: {self._lack(runs[0])}"

    def fitting(self) -> PlannedRun | None:
        """Return the best run; None where there is none."""
        run = self.best()
        return None if isinstance(run, str) else run

    def hints(self, best: PlannedRun) -> list[str]:
        """Return what else to ask for, where it promises more: flags first, then on top of them another batch, or fewer
        devices."""
        said = [*self._with_other_flags(best)]
        asked, fastest = said[-1] if said else (self, best)
        said += filter(None, [asked.with_batch_that_divides(fastest), asked._with_fewer_devices(fastest)])
        found = [self._with_larger_batch(best), *(self._faster(other, run, best) for other, run in said)]
        told = [other for other, _ in said]
        found += [self._has_room(*way) for way in self._ways() if way[0] not in told] if best.is_tight else []
        return [hint for hint in (*found, self._unused(best)) if hint]

    def faster_with_batch_that_divides(self, best: PlannedRun) -> str | None:
        """Return a batch that divides among the devices, and what it gains."""
        found = self.with_batch_that_divides(best)
        return self._faster(*found, best) if found else None

    def _asked(self, global_batch: int | None = None, /, **given: Any) -> Question:
        """Return the same question with another batch, or with more flags."""
        return dataclasses.replace(self, global_batch=global_batch or self.global_batch, given={**self.given, **given})

    def _without(self, *names: str) -> Question:
        """Return the same question without some of its flags; without a run type, without that one's too."""
        own = STRATEGIES[self.given.get("run_type", REFERENCE)].options if "run_type" in names else ()
        given = {name: value for name, value in self.given.items() if name not in (*names, *own)}
        return dataclasses.replace(self, given=given)

    def _change_to(self, other: Question) -> str:
        """Return in words how another question differs: `With --precision fp16, without --run_type fsdp`."""
        comes = [_typed(name, value) for name, value in other.given.items() if self.given.get(name) != value]
        comes += [f"--global_batch_size {other.global_batch}"] if other.global_batch != self.global_batch else []
        comes += [f"--gpus {other.machine.devices}"] if other.machine.devices != self.machine.devices else []
        goes = [_typed(name, value) for name, value in self.given.items() if name not in other.given]
        changes = (("with", comes), ("without", goes))
        words = ", ".join(f"{lead} {' and '.join(flags)}" for lead, flags in changes if flags)
        return words[:1].upper() + words[1:]

    def _in_words(self, run: PlannedRun) -> str:
        """Return a run that was found for another question."""
        words = (
            f"{name_of(run.job)}, {settings_of(run.job)}, {three(run.time.seconds)} s a step{', tight' * run.is_tight}"
        )
        cost = self.budget.cost(run)
        words += f", cost {three(cost)}" if cost is not None else ""
        if self.budget.deadline is None:
            return words
        days = self.budget.days(run) or 0.0
        meets = "within" if days <= self.budget.deadline else "longer than"
        return words + f", {duration(days)}, {meets} --deadline {duration(self.budget.deadline)}"

    def _faster(self, other: Question, run: PlannedRun, best: PlannedRun) -> str:
        gain = three(run.tokens_per_s / best.tokens_per_s)
        return f"{self._change_to(other)}: {gain} times the tokens/s ({self._in_words(run)})"

    def _with_other_flags(self, best: PlannedRun) -> Iterator[tuple[Question, PlannedRun]]:
        """Yield the change of a flag that is fastest, where it is much faster, and each further one that is much faster
        again on top: fp16 where bf16 is emulated, compiled 8-bit layers, and leaving a typed flag out."""
        asked, fastest = self, best
        while self.machine.devices <= MOST_TRIED:
            others = [asked._without(name) for name in asked.given if asked._may_slow_down(name)]
            others += itertools.islice((other for other in asked._in_fp16() if other.fitting()), 1)
            if asked.given.get("matmul") == "fp8" and not asked.given.get("compile"):
                others.append(asked._asked(compile=True))
            found = [(other, run) for other in others if (run := other.fitting()) and run.is_tight <= fastest.is_tight]
            most_kept = sorted(found, key=lambda each: (-each[1].tokens_per_s, -len(each[0].given)))
            if not most_kept or most_kept[0][1].tokens_per_s < WORTH_SAYING * fastest.tokens_per_s:
                return
            asked, fastest = most_kept[0]
            yield asked, fastest

    def _may_slow_down(self, name: str) -> bool:
        """Return whether a typed flag may be left out for speed: one that changes the mathematics stays, and
        --precision does where it is what `auto` takes."""
        is_usual = name == "precision" and self.given[name] == precision_of("auto", self.machine.device)
        return name not in STAYS and not is_usual

    def _in_fp16(self) -> list[Question]:
        """Return the question in fp16 on a device without native bf16: as it is, with a batch that divides, and without
        native bf16 or a run type, which may exclude fp16."""
        peaks = self.machine.device.peak_flops
        if self.given.get("precision") == "fp16" or "fp16" not in peaks or "bf16" in peaks:
            return []
        without = [self._without(*names) for names in ((), ("mixed_precision",), ("run_type",), STEPS_ASIDE)]
        batches = dict.fromkeys((None, self._dividing()))
        return [other._asked(batch, precision="fp16") for other in without for batch in batches]

    def _dividing(self) -> int | None:
        """Return a batch near this one that divides among all devices; None where this one does."""
        devices = self.machine.devices
        if devices > self.global_batch or not self.global_batch % devices or devices > MOST_TRIED:
            return None
        return _rounded(self.global_batch, [devices * (self.given.get("micro_batch_size_per_gpu") or 1)])

    def with_batch_that_divides(self, best: PlannedRun) -> tuple[Question, PlannedRun] | None:
        """Return the question with a batch that divides among the devices, where that gains."""
        batch = self._dividing()
        if batch is None or best.job.layout.data == self.machine.devices:
            return None
        found = self._asked(batch).fitting()
        if found is None or found.tokens_per_s < GAIN * best.tokens_per_s:
            return None
        return self._asked(batch), found

    def _with_larger_batch(self, best: PlannedRun) -> str | None:
        """Return that the batch is too small, where the devices reach little of their peak, and much more with LARGER
        times as many sequences: most of a step is then paid once, however large the batch."""
        devices = self.machine.devices
        if devices == 1 or devices > MOST_TRIED or best.mfu >= LOW_MFU:
            return None
        larger = self._asked(LARGER * self.global_batch)
        larger = larger._asked(larger._dividing())
        run = larger.fitting()
        if run is None or run.tokens_per_s < MUCH_FASTER * best.tokens_per_s:
            return None
        each = three(best.job.tokens_per_step / devices)
        words = f"The batch is too small for so many devices: {each} tokens a device"
        return f"{words}. {self._faster(larger, run, best)}"

    def _with_fewer_devices(self, best: PlannedRun) -> tuple[Question, PlannedRun] | None:
        """Return the question on fewer devices that are faster, or as fast: where the network costs much of a step, one
        of them or fewer nodes; where the batch does not divide, the most that it divides among.

        Cores are no devices that can be left out: with fewer ranks each has more of them.
        """
        machine = self.machine
        if machine.device.kind == "cpu" or machine.devices > MOST_TRIED:
            return None
        numbers: set[int] = set()
        if sum(best.time.parts.get(name, 0.0) for name in (WITHIN, BETWEEN)) >= MUCH * best.time.seconds:
            numbers |= {1, machine.per_node, *(machine.devices >> times for times in range(1, 4))}
        if self.global_batch % machine.devices:
            numbers |= {max(number for number in self._fewer() if self.global_batch % number == 0)}
        fewer = [self._on_fewer(number) for number in sorted(numbers & {*self._fewer()})]
        found = [(other, run) for other in fewer if (run := other.fitting()) and run.is_tight <= best.is_tight]
        least = min([best.time.seconds, *(run.time.seconds for _, run in found)])
        most = least if self.budget.price is None else GAIN * least
        as_fast = [(other, run) for other, run in found if run.time.seconds <= most]
        is_worth_saying = self.budget.price is not None or best.time.seconds >= GAIN * least
        return as_fast[0] if as_fast and is_worth_saying else None

    def _fewer(self) -> list[int]:
        """Return the smaller numbers of devices that are whole nodes, or of one node."""
        per_node = self.machine.per_node
        return [number for number in range(1, self.machine.devices) if number <= per_node or not number % per_node]

    def _on_fewer(self, number: int) -> Question:
        """Return the question on a number of devices, on one of any run type."""
        return (self._without("run_type") if number == 1 else self).on(number)

    def _unused(self, best: PlannedRun) -> str | None:
        """Return which typed flags the best run does without, as its run type has none such."""
        asks = [name for name, value in self.given.items() if value not in (None, False, "none", "off")]
        having = {name for entry in STRATEGIES.values() for name in asks if name in entry.options}
        typed = having - STRATEGIES[best.job.run_type or REFERENCE].options.keys()
        if not typed:
            return None
        flags = " and ".join(_typed(name, self.given[name]) for name in asks if name in typed)
        owners = [name for name, entry in STRATEGIES.items() if typed <= entry.options.keys()]
        are = "is" if len(typed) == 1 else "are"
        whose = f", which {are} for --run_type {' and '.join(owners)}" if owners else ": no run type has them all"
        return f"The first run does without {flags}{whose}"

    def ways_out(self) -> list[str]:
        """Return what has room, where nothing has that was asked for; else how many devices would."""
        runs, _ = self.runs
        ways = [self._has_room(*way) for way in self._ways()]
        return ways or [self._least(runs[0]) for _ in runs[:1]]

    def _has_room(self, other: Question, run: PlannedRun) -> str:
        return f"{self._change_to(other)} there is room: {self._in_words(run)}"

    def _ways(self, may_be_tight: bool = False) -> list[tuple[Question, PlannedRun]]:
        """Return which changes have room, the first of each kind: typed flags left out, as few as can be; DeepSpeed's
        offload, also in fp16; and where the batch keeps every candidate out, another batch, or fewer devices. Where
        none has, all typed flags are left out with offload, or some on fewer devices."""
        if self.machine.devices > MOST_TRIED:
            return []
        typed = sorted(self.given, key=lambda name: name == "run_type")  # most wanted last
        left_out = [names for number in (1, 2) for names in itertools.combinations(typed, number)]
        kinds: list[Iterable[Question]] = [(self._without(*names) for names in left_out), *self._offloaded()]
        if not self.runs[0] and self.global_batch % self.machine.devices:
            kinds += [map(self._asked, self._other_batches()), self._fewer_for_the_batch()]
        found = [*filter(None, (self._first_with_room(kind, may_be_tight) for kind in kinds))]
        if not found and typed:
            free = self._without(*typed)
            without = ([free], *free._offloaded())
            found = [*filter(None, (self._first_with_room(kind, may_be_tight) for kind in without))]
        if not found and typed:
            numbers = [number for number in self._fewer()[::-1] if number.bit_count() == 1][:2]
            free_run = self._first_with_room((free.on(number) for number in numbers), may_be_tight)
            enough = [free_run[0].machine.devices] if free_run else []
            fewer = (self._without(*names).on(number) for number in enough for names in left_out)
            found = [*filter(None, [self._first_with_room(fewer, may_be_tight)])]
        return found

    def _offloaded(self) -> list[list[Question]]:
        """Return the question with DeepSpeed's offload, and those with fp16 too; none where typed flags decide it."""
        if self.machine.device.kind == "cpu" or self.given.keys() & OFFLOADED.keys():
            return []
        first, *in_fp16 = [other._asked(None, **OFFLOADED) for other in (self, *self._in_fp16())]
        return [[first], in_fp16]

    def _first_with_room(self, others: Iterable[Question], may_be_tight: bool) -> tuple[Question, PlannedRun] | None:
        """Return the first of other questions whose best run has room, else the first that fits, if that will do."""
        tight = None
        for other in others:
            run = other.fitting()
            if run is not None and not run.is_tight:
                return other, run
            if run is not None and tight is None:
                tight = other, run
        return tight if may_be_tight else None

    def _other_batches(self) -> Iterator[int]:
        """Yield larger batches, which a pipeline or tensor ranks may share, and one that divides among all devices."""
        batch = 2 * self.global_batch
        while batch < self.machine.devices:
            yield batch
            batch *= 2
        yield self._dividing() or self.machine.devices

    def _fewer_for_the_batch(self) -> list[Question]:
        """Return the question on the most devices that divide the batch, on a half of all devices, whose tensor,
        context or pipeline ranks may share a sequence, and on halves of each; the fastest first."""
        fewer = self._fewer()
        firsts = [*[number for number in fewer if self.global_batch % number == 0][-1:], self.machine.devices // 2]
        numbers = {first >> times for first in firsts for times in range(MOST_HALVINGS)}
        found = [self._on_fewer(number) for number in sorted(numbers & {*fewer})]
        return sorted(found, key=lambda other: run.time.seconds if (run := other.fitting()) else math.inf)

    def refusal(self) -> str:
        """Return why there is no run, and what has room."""
        runs, refused = self.runs
        ways, batch = self._ways(may_be_tight=True), self._dividing()
        lacking = runs
        if not runs and not ways and batch is not None:
            lacking, _ = self._asked(batch).runs  # the batch is not all that is in the way
        if lacking:
            words = f"{self.model_name} does not fit on {self.devices_in_words}: {self._least(lacking[0])}"
        else:
            words = f"nothing can be planned for {self.devices_in_words}: {self._reason(refused)}"
        said, free = [self._has_room(*way) for way in ways], self._without(*self.given)
        if not ways and not runs and free.given != self.given:
            found = free.best()
            said = [f"{self._change_to(free)} too: {found}"] if isinstance(found, str) else []
        return ". ".join([words, *said])

    def _reason(self, refused: Mapping[str, str]) -> str:
        """Return why there is no candidate: of the run types that have the typed flags, of the plain ones first."""
        typed = {name for name in self.given if any(name in entry.options for entry in STRATEGIES.values())}
        having = {name: why for name, why in refused.items() if typed <= {*STRATEGIES[name].options}}
        told = having or refused  # a run type without a typed flag has no other reason than that
        plain = told.get(REFERENCE) or told.get(PLAIN)  # others have rules of their own on top
        words = plain or next(iter(told.values()), "no run type runs on them")
        return re.sub(r"; the nearest that (is|does): \d+$", "", words)  # which may not do: `ways` has one that does

    @property
    def devices_in_words(self) -> str:
        return f"{self.machine.devices} x {self.machine.device.name}"

    def _lack(self, run: PlannedRun) -> str:
        gib, has = run.needs_bytes / 2**30, self.machine.device.memory_bytes / 2**30
        is_at_start = run.memory.peak_moment == START
        whole = ", for DeepSpeed puts the whole model on each device before it cuts it" if is_at_start else ""
        return f"the least, {name_of(run.job)}, needs {gib:.1f} GiB of {has:.1f}{whole}"

    def _least(self, run: PlannedRun) -> str:
        """Return what the most frugal run lacks, and how many devices fit, and have room; where no number of them does,
        how many without the typed flags."""
        words, enough = f"{self._lack(run)}; ", self._enough()
        free = self._without(*self.given)
        if not enough and free.given != self.given and (enough := free._enough()):
            change = self._change_to(free)
            words += f"no number of them would do as asked, and {change[:1].lower()}{change[1:]} "
        if not enough:
            return f"{self._lack(run)}, and no number of them would do as asked"
        roomy = enough.get(True)
        words += f"{enough[False]} of them would do"
        if roomy != enough[False]:
            words += f" tightly, and {roomy} with room" if roomy else " tightly"
        return words

    def _enough(self) -> dict[bool, int]:
        """Return how many devices fit, and how many have room, as far as there are: each number up to a node is tried,
        then twice as many again."""
        per_node, device = self.machine.per_node, self.machine.device
        enough: dict[bool, int] = {}  # has room -> devices
        for number in (*range(1, per_node + 1), *(per_node << times for times in range(1, MOST_DOUBLINGS))):
            memories = [memory for memory in map(memory_of, self._frugal_jobs(number)) if fits(memory, device)]
            for memory in memories:
                enough.setdefault(False, number)
                if roomy_bytes(memory, device) <= device.memory_bytes:
                    enough.setdefault(True, number)
            if True in enough or (enough and number > MOST_TRIED):
                break
        return enough

    def _frugal_jobs(self, devices: int) -> Iterator[Job]:
        """Yield the runs on a number of devices that need least memory."""
        machine = dataclasses.replace(self.machine, devices=devices)
        for kind in ("block", "selective", "none"):  # the most frugal first, which not every mesh has
            frugal = {"micro_batch_size_per_gpu": 1, "activation_checkpointing": kind} | dict(self.given)
            yield from self._possible(machine, frugal)[0]


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
