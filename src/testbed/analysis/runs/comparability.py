"""Say what keeps runs from being comparable, unequal work first of all. An unfair comparison gets words, no number."""

import itertools
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from testbed.analysis.document.words import joined, ranges
from testbed.analysis.runs.arms import DEVICE_FIELDS, hardware_of, rank_count
from testbed.analysis.runs.load import TASK_FIELDS, VALIDATION_FIELDS, WORK_FIELDS, Run
from testbed.analysis.statistics import all_known
from testbed.config.run_types import STRATEGIES
from testbed.errors import value_text

UNKNOWN = "unknown"
MOST_IN_TURN = 5  # runs whose numbers of cores are listed one by one
INSTRUMENTS = "instruments"
IN_PROPORTION = ("global_batch_size", "tokens")  # in weak scaling, to the ranks
# Published 124M runs differ by 0.0013 to 0.0019 between seeds; below twice that, single runs cannot be told apart.
LOSS_NOISE = 0.004
# Where a side has one run, its file does not tell what its seed explains. Five seeds of a small model ended up to 0.056
# apart (docs/results/optimizers), so less than about twice that is not held against a run.
LOSS_NOISE_OF_ONE_RUN = 0.1


@dataclass(frozen=True)
class Difference:
    """A field in which runs differ, or which some file does not record.

    `recorded` are the values of the runs `numbers`, from 1; None: not in the file.
    """

    field: str
    recorded: tuple[Any, ...]
    numbers: tuple[int, ...]

    @property
    def values(self) -> tuple[str, ...]:
        return tuple(map(_text, self.recorded))

    @property
    def is_unknown_only(self) -> bool:
        """Return whether nothing contradicts: some file lacks the field, and the rest agree."""
        return len(set(self.values) - {UNKNOWN}) <= 1


def differing_work(runs: Sequence[Run], protocol: str = "strong") -> list[Difference]:
    """Return the fields of equal work that differ or are not in every file. Empty: the runs did equal work.

    All that compares runs asks here. `protocol` is that of a sweep:

    - strong: all of WORK_FIELDS are equal.
    - weak: the global batch and the tokens are in proportion to the ranks, the rest is equal.
    - time_to_loss: the task is the same, validation included. Batch, schedule, optimizer and steps may differ.
    """
    numbered = list(enumerate(runs, start=1))
    if protocol == "time_to_loss":
        found = _differences({number: run.work | run.validation for number, run in numbered}, TASK_FIELDS)
        return [*found, *compiler_with_strategy(runs)]
    ranks = {number: rank_count(run) for number, run in numbered} if protocol == "weak" else {}
    work = _differences({number: run.work for number, run in numbered}, WORK_FIELDS, ranks)
    return [*work, *unlike_skips(runs), *compiler_with_strategy(runs), *ranks_of_another_mathematics(runs)]


@dataclass(frozen=True)
class Mismatch:
    """A field in which two arms differ, or which some file does not record.

    `a` and `b` have each value of the arm's runs once, in their order; None: not recorded.
    """

    field: str
    a: tuple[Any, ...]
    b: tuple[Any, ...]

    @property
    def is_unknown(self) -> bool:
        """Return whether nothing contradicts: some file lacks the field, and the rest agree."""
        return len({_text(value) for value in (*self.a, *self.b) if value is not None}) <= 1

    @property
    def in_words(self) -> tuple[str, str]:
        return ", ".join(map(_text, self.a)), ", ".join(map(_text, self.b))

    def __str__(self) -> str:
        return f"{self.field.replace('_', ' ')} {' against '.join(self.in_words)}"


def mismatches(
    a: Sequence[Run], b: Sequence[Run], protocol: str = "strong", *, on_devices: bool = False
) -> list[Mismatch]:
    """Return where the work of two arms is unequal, or not known to be equal. `protocol` as in `differing_work`.

    Repeats may have different seeds if both arms drew them from one list.

    Args:
        on_devices: the devices, and what slowed the runs down, must be equal too.
    """
    runs = (*a, *b)
    found = differing_work(runs, protocol)
    seeds, others = ({run.work.get("seed") for run in side} for side in (a, b))
    if None not in seeds | others and (seeds <= others or others <= seeds):
        found = [item for item in found if item.field != "seed"]
    also: dict[str, Callable[[Run], Any]] = {"throughput is": lambda run: run.tokens_per_s_meaning}
    if on_devices:
        also |= {f"hardware.{name}": partial(hardware_of, name=name) for name in DEVICE_FIELDS}
        also[INSTRUMENTS] = instruments_in_words
    everyone = tuple(range(1, len(runs) + 1))
    for name, read in also.items():
        values = tuple(map(read, runs))
        if len(set(values)) > 1 or (name == INSTRUMENTS and any(run.instrumented for run in runs)):
            found.append(Difference(name, values, everyone))
    return [_between(item, len(a)) for item in found]


def _between(item: Difference, num_a: int) -> Mismatch:
    sides: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for number, value in zip(item.numbers, item.recorded, strict=True):
        sides[number > num_a].setdefault(_text(value), value)
    return Mismatch(item.field, *(tuple(side.values()) for side in sides))


def unlike_skips(runs: Sequence[Run]) -> list[Difference]:
    """Return a difference where fp16 overflowed in many more steps of one run than of another: those train nothing.

    Where a loss scale begins explains a few.
    """
    counts = [int(np.isnan(run.grad_norms).sum()) for run in runs]
    steps = [len(run.grad_norms) for run in runs]
    if not runs or not all(steps) or max(counts) - min(counts) <= max(2, 0.05 * min(steps)):
        return []
    values = tuple(f"{count} of {number}" for count, number in zip(counts, steps, strict=True))
    return [Difference("steps skipped by fp16 overflow", values, tuple(range(1, len(runs) + 1)))]


def compiler_with_strategy(runs: Sequence[Run]) -> list[Difference]:
    """Return a difference where one strategy was compiled and another was not: their ratio would be the compiler's.

    Runs of one strategy may differ in --compile. Then the compiler is what is compared.
    """
    recorded = {number: run.section("training_config") for number, run in enumerate(runs, start=1)}
    recorded = {number: config for number, config in recorded.items() if config.get("compile") is not None}
    pairs = itertools.combinations(recorded.values(), 2)
    if not any(a["compile"] != b["compile"] and _strategy(a) != _strategy(b) for a, b in pairs):
        return []
    values = tuple("on" if config["compile"] else "off" for config in recorded.values())
    return [Difference("compile, of unlike run types", values, tuple(recorded))]


def ranks_of_another_mathematics(runs: Sequence[Run]) -> list[Difference]:
    """Return a difference where the ranks of a strategy that does not equal the baseline differ: so does its work."""
    counts = tuple(map(rank_count, runs))
    unlike = {name for name, entry in STRATEGIES.items() if not entry.equals_baseline}
    if len(set(counts)) < 2 or not any(run.run_type in unlike for run in runs):
        return []
    return [Difference("ranks, on which what this strategy computes depends", counts, tuple(range(1, len(runs) + 1)))]


def _strategy(config: dict) -> tuple:
    return config.get("run_type"), config.get("zero_stage")


def differing_validation(runs: Sequence[Run]) -> list[Difference]:
    """Return what keeps validation losses from being comparable: other data, or another number of tokens."""
    records = {number: run.validation for number, run in enumerate(runs, start=1) if run.validation_losses}
    return _differences(records, VALIDATION_FIELDS)


def loss_noise(a: Sequence[float], b: Sequence[float]) -> tuple[float, int | None]:
    """Return how far apart chance can put the median final losses of two arms, and whose spread that is: 0 a's, 1 b's.

    The larger of LOSS_NOISE (then None) and the largest minus the smallest loss of the arm with the lower median. Never
    the other's: a noisy arm must not hide its own regression. Where an arm has one run,
    LOSS_NOISE_OF_ONE_RUN stands for LOSS_NOISE.
    """
    better = 0 if statistics.median(a) < statistics.median(b) else 1
    spread = max((a, b)[better]) - min((a, b)[better])
    least = LOSS_NOISE_OF_ONE_RUN if min(len(a), len(b)) == 1 else LOSS_NOISE
    return (spread, better) if spread > least else (least, None)


def instruments_in_words(run: Run) -> str:
    """Return what slowed a run down, as its file names it, or "none"."""
    if not run.instrumented:
        return "none"
    return ", ".join(run.instruments) or "a profiler or a debug switch"


def speed_ups(runs: Sequence[Run]) -> list[float | str]:
    """Return throughput over the first run's, or the words why there is none: only equal, finished work compares."""
    found: list[float | str] = []
    first = runs[0]
    for run in runs:
        pair = (runs[0], run)
        if any(run.instrumented for run in pair):
            found.append("n/a (instrumented)")
        elif any(run.status != "complete" for run in pair):
            found.append("n/a (not complete)")
        elif run is not runs[0] and (differences := differing_work(pair)):
            unknown_only = all(difference.is_unknown_only for difference in differences)
            found.append("n/a (work not known)" if unknown_only else "n/a (work differs)")
        elif run.tokens_per_s and first.tokens_per_s and run.tokens_per_s_meaning == first.tokens_per_s_meaning:
            found.append(run.tokens_per_s / first.tokens_per_s)
        else:
            found.append("n/a")
    return found


def cores_of(run: Run) -> int | None:
    """Return the cores of a CPU that a run computes on, ranks times threads; None on GPUs and where unknown."""
    hardware = run.section("hardware")
    if run.version != "2.2" or hardware.get("device_type") != "cpu":
        return None
    return hardware.get("num_devices", run.world_size) * hardware["cpu_threads_per_rank"]


def note_on_cores(runs: Sequence[Run]) -> str | None:
    """Return the sentence for every table and picture of runs on other numbers of CPU cores; None: all equal."""
    cores = all_known(map(cores_of, runs))
    if cores is None or len(set(cores)) <= 1:
        return None
    in_turn = f"{', '.join(map(str, cores[:-1]))} and {cores[-1]} cores in turn"
    which = in_turn if len(cores) <= MOST_IN_TURN else f"{min(cores)} to {max(cores)} cores"
    return (
        f"One core is one device: these runs compute on {which}, and most of a "
        "ratio between runs on different numbers of cores is what the extra cores gain."
    )


def warnings(runs: Sequence[Run], most_fields: int | None = None) -> list[str]:
    """Return what every picture of these runs must say: why they do not compare, and what makes a run unfit.

    Args:
        most_fields: list the values of so many fields, and name the others. None: list all.
    """
    found = []
    differences = differing_work(runs)
    differing = [item for item in differences if not item.is_unknown_only]
    if differing:
        found.append(f"Not equal work: {_listed(differing, most_fields)}.")
    if unknown := [item.field.replace("_", " ") for item in differences if item.is_unknown_only]:
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        found.append(f"Equal work cannot be shown, not recorded in every file: {', '.join(unknown[:8])}{more}.")
    other_validation = [item for item in differing_validation(runs) if not item.is_unknown_only]
    if other_validation:
        found.append(f"Validation losses do not compare: {_listed(other_validation, most_fields)}.")
    if any(run.instrumented for run in runs):
        found.append(
            "An instrumented run (profiler or debug switch on) is slower than the real one: no speed-up from it."
        )
    if any(run.status != "complete" for run in runs):
        found.append("A run that is not complete shows the steps it has done so far.")
    losses = all_known(run.final_validation_loss for run in runs)
    if losses and max(losses) - min(losses) > LOSS_NOISE and not differing and not other_validation:
        at = "at work that is not shown to be equal" if differences else "at equal work"
        found.append(
            f"Final validation losses differ by {max(losses) - min(losses):.4f} {at}. Seeds explain "
            f"{LOSS_NOISE} in published 124M runs; what they explain here, only repeats tell. A faster run that learns "
            "worse is not faster."
        )
    return found


def marks_of(runs: Sequence[Run]) -> dict[Run, str]:
    """Return "[1] " and so on, to stand before the names of runs in a picture whose warnings number them; else ""."""
    has_numbers = any(re.search(r" \[\d", text) for text in warnings(runs))
    return {run: f"[{number}] " * has_numbers for number, run in enumerate(runs, start=1)}


def _listed(differences: Sequence[Difference], most: int | None) -> str:
    names = [difference.field.replace("_", " ") for difference in differences]
    left = [] if most is None else names[most:]
    texts = [_difference_text(difference) for difference in differences[: len(names) - len(left)]]
    return "; ".join([*texts, f"also {joined(left)}"] if left else texts)


def _difference_text(difference: Difference) -> str:
    """Return `seed 1 / 2` for up to three runs in order, or `seed 1 [1, 3] / 2 [2, 4-6]` where order would not tell."""
    texts = list(difference.values)
    if difference.numbers not in ((1, 2), (1, 2, 3)):
        numbers_of: dict[str, list[int]] = {}
        for number, value in zip(difference.numbers, difference.values, strict=True):
            numbers_of.setdefault(value, []).append(number)
        texts = [f"{value} [{ranges(numbers)}]" for value, numbers in numbers_of.items()]
    return f"{difference.field.replace('_', ' ')} {' / '.join(texts)}"


def _differences(
    records: dict[int, dict], fields: Sequence[str], ranks: Mapping[int, int | None] | None = None
) -> list[Difference]:
    """Return the fields in which records differ; with `ranks`, of those IN_PROPORTION the values per rank."""
    found = []
    for name in fields if len(records) > 1 else ():
        recorded = tuple(record.get(name) for record in records.values())
        compared: list[Any] = [value_text(value) for value in recorded]
        if ranks and name in IN_PROPORTION and all(isinstance(value, int) for value in recorded):
            compared = [Fraction(record[name], ranks[number] or 1) for number, record in records.items()]
        if len(set(compared)) > 1 or None in recorded:
            found.append(Difference(name, recorded, tuple(records)))
    return found


def _text(value: Any) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value):
        return value[:8]  # eight digits of a hash tell two files apart on a picture
    return value_text(value)
