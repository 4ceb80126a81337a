"""Group runs of one configuration into arms, the repeats that an interval is made of, and name arms alike everywhere.

A strategy is how a step is spread over ranks: runs of it may differ in ranks, batch and seed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from testbed.analysis.runs.load import Run
from testbed.config.flag import Filled, Kind
from testbed.config.table import LEGACY_DEFAULTS, flags_where

# Settings in which repeats of one configuration may differ: where they wrote, what they said, where the data lies (what
# it holds is compared), and the seed, which a protocol may vary on purpose (see comparability.py).
NOT_PART_OF_AN_ARM = flags_where(lambda flag: flag.varies or (flag.kind is Kind.OUTPUT and not flag.is_instrument))
# Settings that do not make another strategy: work is told as unequal work, the rest is only how a run is looked at.
_NOT_IN_A_NAME = flags_where(lambda flag: not flag.names_arm)
_SPREADS = flags_where(lambda flag: flag.kind is Kind.PARALLELISM)
# Settings that follow the number of ranks. Arms that differ in them at the same ranks become strategies of their own.
_FOLLOW_RANKS = flags_where(lambda flag: flag.filled is Filled.BY_RANKS)
# What the program may choose itself where nobody did. Precision and micro batch have rules of their own: the one makes
# unequal work, the other follows the ranks.
_CHOSEN_ALIKE = flags_where(lambda flag: flag.filled is Filled.DECIDED)
_DEFAULT_BEFORE = {"compile": False, "num_workers": 0}  # in files from before the program chose
# Of the effective DeepSpeed configuration what says the same as settings of the kinds above.
_SETTINGS_OF_DEEPSPEED = frozenset(
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping bf16 fp16 "
    "torch_autocast data_types communication_data_type wall_clock_breakdown steps_per_print".split()
)
_DEEPSPEED = "DeepSpeed configuration"
_IN_THE_LABEL = frozenset(("run_type", "zero_stage", "deepspeed_enabled"))
_IN_THE_NAME_OF_AN_ARM = frozenset(("skip_gradient_sync",))


@dataclass(frozen=True, eq=False)
class Arm:
    """All runs of one configuration, in the order of their paths."""

    label: str
    runs: tuple[Run, ...]

    @property
    def example(self) -> Run:
        """Return the run that stands for all: one that may enter a headline, where there is one."""
        return (*self.measured_runs, *self.runs)[0]

    @property
    def ranks(self) -> int | None:
        return rank_count(self.example)

    @property
    def tokens_per_s(self) -> list[float]:
        """Return the throughput of every run that may enter a headline, one number per run."""
        return [run.tokens_per_s for run in self.measured_runs if run.tokens_per_s is not None]

    @cached_property
    def measured_runs(self) -> tuple[Run, ...]:
        """Return the runs that may enter a headline: finished, slowed down by no profiler, no copies of one another."""
        finished = (run for run in self.runs if run.status == "complete" and run.tokens_per_s is not None)
        return tuple(without_copies([run for run in finished if not run.instrumented])[0])


_TIMES_OF_A_CLOCK = 9  # so many different step times, equal to the last bit, are not a coincidence


def without_copies(runs: Sequence[Run]) -> tuple[list[Run], list[tuple[Run, str]]]:
    """Return the runs without copies of those before them, and each copy with the words that say of what.

    A copy has the run_id and the step times of another run: it is the same measurement, and no repeat. Under another
    run_id it is one all the same where a clock measured all those times: it never gives the same many twice. What
    records neither (versions 1 and 2.0) cannot be told to be a copy.
    """
    seen: dict[tuple, Run] = {}
    kept, copies = [], []
    for run in runs:
        times = run.all_step_times_s.tobytes()
        keys = [(run.run_id, times)] if run.run_id is not None and len(run.step_times_s) else []
        if len(set(run.all_step_times_s.tolist())) > max(_TIMES_OF_A_CLOCK, 0.5 * len(run.all_step_times_s)):
            keys.append((json.dumps(configuration(run), sort_keys=True, default=str), times))
        first = next((seen[key] for key in keys if key in seen), None)
        if first is None:
            seen |= dict.fromkeys(keys, run)
            kept.append(run)
        else:
            same = "" if run.run_id == first.run_id else ", the same step times"
            copies.append((run, f"a copy of {first.path} (run_id {run.run_id}{same}), and a copy is not a repeat"))
    return kept, copies


def rank_count(run: Run) -> int | None:
    """Return the number of devices that compute: the ranks, but all devices of the single process of run type dp."""
    return run.record.get("hardware", {}).get("num_devices") or run.world_size


# What computes. Times of other devices are times of another thing: no repeats, and no comparison of configurations.
DEVICE_FIELDS = ("device_type", "gpu_name", "cpu_name", "cpu_threads_per_rank", "instance_type")


def hardware_of(run: Run, name: str) -> Any:
    """Return a field of the file's hardware; None: not recorded, or of no account for how fast the devices compute.

    Threads of the CPU count where the CPU computes. A GPU's ranks share the cores, so their threads follow from the
    number of ranks.
    """
    hardware = run.record.get("hardware") or {}
    if name == "cpu_threads_per_rank" and hardware.get("device_type") != "cpu":
        return None
    return hardware.get(name)


def deepspeed_config_hash(run: Run) -> str | None:
    """Return the SHA-256 of the effective DeepSpeed configuration, which holds options that no setting shows."""
    return (run.record.get("deepspeed_config") or {}).get("sha256")


def group_into_arms(runs: Sequence[Run]) -> list[Arm]:
    """Group runs, as `load_run` gives them, by configuration, in the order in which configurations first appear.

    Arms whose runs carry the same label get what their settings differ in added to it.
    """
    members: dict[str, list[Run]] = {}
    for run in runs:
        members.setdefault(json.dumps(configuration(run), sort_keys=True, default=str), []).append(run)
    groups = list(members.values())
    labels = [group[0].label for group in groups]
    for label in {label for label in labels if labels.count(label) > 1}:
        alike = [number for number, other in enumerate(labels) if other == label]
        for number, added in zip(alike, differing_settings([groups[number][0] for number in alike]), strict=True):
            labels[number] = f"{label}, {added}" if added else label
    return [Arm(label, tuple(group)) for label, group in zip(labels, groups, strict=True)]


def configuration(run: Run) -> dict[str, Any]:
    """Return what repeats of one another have in common: settings, work, devices, and whether instrumented."""
    settings = _settings(run)
    # How far a run came is not a setting; the versions that record no settings have nothing else.
    left_out = {"seed", "optimizer_steps", "tokens"} if settings else {"seed"}
    return {
        "version": run.version,
        "label": None if settings else run.label,
        "settings": settings,
        "work": {name: value for name, value in run.work.items() if name not in left_out},
        "ranks": rank_count(run),
        "devices": [hardware_of(run, name) for name in DEVICE_FIELDS],
        "deepspeed_config": deepspeed_config_hash(run),
        "instrumented": run.instrumented,
    }


@dataclass(frozen=True)
class StrategyName:
    """What a strategy is called: `variant` as --run_types of a sweep has it, `name` in sentences, tables, pictures.

    "ddp:bucket_cap_mb=50+compile" is "ddp, bucket_cap_mb 50, compile". Both hold only those settings in which runs of
    one run type differ.
    """

    variant: str
    name: str


def strategies_of(runs: Sequence[Run]) -> list[StrategyName]:
    """Return the strategy of each run, named so that the strategies among `runs` are told apart."""
    hows: dict[tuple, set[str]] = {}
    for run in runs:
        place = (how_text(run), rank_count(run), run.work.get("global_batch_size"))
        hows.setdefault(place, set()).add(how_text(run, with_rank_settings=True))
    split = {how for (how, *_), found in hows.items() if len(found) > 1}
    keys = [how_text(run, with_rank_settings=how_text(run) in split) for run in runs]
    of_variant = _told_apart([_variant_without_settings(run) for run in runs], keys, _IN_THE_LABEL)
    of_name = _told_apart([_name_without_settings(run) for run in runs], keys, _IN_THE_LABEL | _IN_THE_NAME_OF_AN_ARM)
    found = []
    for run, variant, told in zip(runs, of_variant, of_name, strict=True):
        flags = "+".join(name if value is True else f"{name}={value}" for name, value in variant.items())
        found.append(
            StrategyName(
                _variant_without_settings(run)
                + (f"{'+' if ':' in _variant_without_settings(run) else ':'}{flags}" if flags else ""),
                ", ".join([_name_without_settings(run), *(_in_words(name, value) for name, value in told.items())]),
            )
        )
    return found


def arm_name(strategy: str, run: Run) -> str:
    """Return a strategy's name and the ranks of one of its runs, as every report names an arm: "ddp on 2 ranks".

    That ranks train apart is always said: "ddp without synchronisation on 2 ranks".
    """
    ranks = rank_count(run)
    strategy += f" {run.synchronisation}" if run.synchronisation else ""
    unit = "device" if (ranks or 0) > (run.world_size or 0) else "rank"  # the single process of dp computes on several
    return f"{strategy} on " + (f"{ranks} {unit}{'s' * (ranks > 1)}" if ranks else "an unknown number of ranks")


def arm_names(arms: Sequence[Arm]) -> list[str]:
    """Return `arm_name` of each, with the settings in the strategy's name that tell these arms apart."""
    examples = [arm.runs[0] for arm in arms]
    strategies = strategies_of(examples)
    return [arm_name(strategy.name, run) for strategy, run in zip(strategies, examples, strict=True)]


def device_of(run: Run) -> str:
    """Return what the label says after the strategy, without the number of devices: "CPU (1 thread), fp32"."""
    return ", ".join(part.split(" x ", 1)[-1] for part in run.label.split(", ")[1:])


def differing_conditions(runs: Sequence[Run], references: Sequence[Run]) -> list[str]:
    """Return the settings, apart from the strategy's own, in which runs differ from those of a baseline: "compile".

    Settings count as the run had them, chosen by a person or by the program. What only some strategies have, such as a
    bucket size, a file of the baseline records as null.
    """
    ignored = NOT_PART_OF_AN_ARM | _NOT_IN_A_NAME | _FOLLOW_RANKS | _SPREADS | _IN_THE_LABEL
    own, others = ([run.section("settings") for run in side] for side in (runs, references))
    names = {name for each in others for name, value in each.items() if value is not None} - ignored
    shared = [name for name in names if all(name in each for each in (*own, *others))]
    pairs = {name: (conditions(runs, name), conditions(references, name)) for name in shared}
    return sorted(name for name, (one, other) in pairs.items() if one and other and one != other)


def conditions(runs: Sequence[Run], name: str) -> list[str]:
    """Return the values of a setting in these runs, each once. Off and not set are the same; "auto" is none, where
    a file does not say which kernel it came to."""
    values = {str(automatic_choices(run).get(name, run.section("settings").get(name)) or False) for run in runs}
    return sorted(values - ({"auto"} if name in _CHOSEN_ALIKE else set()))


def automatic_choices(run: Run) -> dict[str, Any]:
    """Return what the program or PyTorch chose where no flag did: attention, compilation, reading ahead.

    A file that does not say which kernel PyTorch took has no choice of attention.
    """
    if run.version != "2.2":
        return {}
    config, settings = run.section("training_config"), run.section("settings")
    recorded = config.get("automatic_choices")
    found = {name: recorded[name] for name in _CHOSEN_ALIKE if name in recorded} if recorded else {}
    _, _, kernel = config["attention"].partition("sdpa ")
    if settings["attention"] == "auto" and kernel:
        found["attention"] = kernel
    if recorded is None:
        found |= {name: value for name, value in _DEFAULT_BEFORE.items() if settings.get(name) == value}
    return found


def how_text(run: Run, with_rank_settings: bool = False) -> str:
    """Return the settings that say how a step is spread over the ranks, as JSON to compare."""
    ignored = NOT_PART_OF_AN_ARM | _NOT_IN_A_NAME | (frozenset() if with_rank_settings else _FOLLOW_RANKS)
    config = run.section("training_config")
    how = {name: value for name, value in _settings(run).items() if name not in ignored}
    how |= {name: config.get(name) for name in ("zero_stage", "deepspeed_enabled")}
    how["run_type"] = run.run_type or _name_without_settings(run)
    how[_DEEPSPEED] = _deepspeed_options(run)
    return json.dumps(how, sort_keys=True, default=str)


def _deepspeed_options(run: Run) -> str | None:
    """Return eight digits for the options of a DeepSpeed file that no setting shows; None: no DeepSpeed.

    The hash of the whole effective configuration would not do: it holds the micro batch, which follows the ranks.
    """
    config = run.record.get("deepspeed_config") or {}
    options = {
        name: value for name, value in (config.get("effective") or {}).items() if name not in _SETTINGS_OF_DEEPSPEED
    }
    if not options:
        return config["sha256"][:8] if config.get("sha256") else None
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:8]


def _told_apart(bases: Sequence[str], keys: Sequence[str], hidden: frozenset[str]) -> list[dict[str, Any]]:
    """Return for each key, a JSON of settings, those in which keys of the same base differ; what is off is left out."""
    settings_of = {key: json.loads(key) for key in keys}
    differing: dict[str, list[str]] = {}
    for base in set(bases):
        alike = [settings_of[key] for key in {key for other, key in zip(bases, keys, strict=True) if other == base}]
        names = sorted({name for each in alike for name in each} - hidden)
        differing[base] = [name for name in names if len({str(each.get(name)) for each in alike}) > 1]
    return [
        {name: value for name in differing[base] if (value := settings_of[key].get(name)) is not None}
        for base, key in zip(bases, keys, strict=True)
    ]


def _variant_without_settings(run: Run) -> str:
    config = run.record.get("training_config", {})
    if run.run_type is None:  # 2.0: the label starts with what its command line says
        return _name_without_settings(run)
    zero = config.get("zero_stage") if config.get("deepspeed_enabled") else None
    return run.run_type + (f":zero_stage={zero}" if zero is not None else "")


def _name_without_settings(run: Run) -> str:
    return run.label.partition(", ")[0]


def _in_words(name: str, value: Any) -> str:
    if value is True:
        return name
    return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"


def _settings(run: Run) -> dict[str, Any]:
    """Return what was set, in one form for files of every version.

    A switch that is off, null, and a flag that an older file lacks are the same. What the program chose itself was not
    set; where it may choose, off was set.
    """
    chosen = automatic_choices(run)
    found = {name: value for name, value in run.section("settings").items() if name not in chosen}
    if found.get("compile") is False:
        found["compile"] = "off"
    return {
        name: value
        for name, value in found.items()
        if name not in NOT_PART_OF_AN_ARM and value is not False and value not in (None, LEGACY_DEFAULTS.get(name))
    }


def differing_settings(runs: Sequence[Run], ignored: frozenset[str] = frozenset()) -> list[str]:
    """Return for each run the settings in which the runs differ, in words: "bucket_cap_mb 50".

    What a run has not set is not said. The hash of the DeepSpeed configuration is added where the settings do not tell
    the runs apart.

    Args:
        ignored: settings that other words name already.
    """
    settings = [_settings(run) for run in runs]
    names = sorted({name for each in settings for name in each} - ignored)
    differing = [name for name in names if len({str(each.get(name)) for each in settings}) > 1]
    told = [", ".join(_in_words(name, each[name]) for name in differing if name in each) for each in settings]
    hashes = [f"DeepSpeed configuration {str(deepspeed_config_hash(run))[:8]}" for run in runs]
    if len(set(told)) == len(told) or len(set(hashes)) == 1:
        return told
    return [", ".join(filter(None, pair)) for pair in zip(told, hashes, strict=True)]
