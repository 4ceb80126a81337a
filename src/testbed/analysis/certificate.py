"""machine_certificate.json of scripts/more/certify_machine.py: the noise of a machine, from pairs of equal runs.

The two runs of a pair have the same command, so the machine alone makes them differ. The file travels with results: a
sweep copies it into its folder, and the report quotes what lies above its runs.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
from msgspec import Meta

from testbed import typed_json
from testbed.analysis.comparison.confounders import confounders
from testbed.analysis.runs.arms import arm_name, configuration
from testbed.analysis.runs.load import Run, find_runs, load_run
from testbed.analysis.statistics import (
    DEFAULT_MARGIN,
    MIN_REPEATS,
    NO_DIFFERENCE,
    compare,
    detectable_effect,
    noise_of,
    repeats_needed,
    repeats_to_show,
)
from testbed.config.device_name import device_name
from testbed.distributed.launch import usable_cores
from testbed.errors import Failure, InputError, counted
from testbed.io import result_head, write_text
from testbed.metrics.fields.types import AboveZero, Count, Name, OneOrMore, Positive
from testbed.sweep.plan import SIDES
from testbed.sweep.runner import in_words
from testbed.sweep.state import FOLDERS_ABOVE_A_RUN

CERTIFICATE_FILE, SCHEMA_VERSION = "machine_certificate.json", "1.0"
DEFAULT_CERTIFICATE = Path("checkpoint/certificate") / CERTIFICATE_FILE
MOST_REPEATS = 1000  # that are counted
REPEATS = (5, 10, 20)  # for which the detectable difference is given
EFFECTS = (0.01, 0.02, 0.03, 0.05, 0.10)  # for which the repeats are given
SESSION = MIN_REPEATS  # pairs that a comparison would have had
# An outlier lies so many standard deviations from the median, by the median absolute deviation: one normal run in 1.7
# million. A few of them hardly move the medians that are compared, and can be most of a standard deviation.
OUTLIER, MEDIAN_DEVIATION, MOST_OUTLIERS = 5.0, 0.6745, 0.05


class Machine(TypedDict):
    hostname: str | None
    device_type: str | None
    device: str | None  # the model of the GPU, else of the CPU
    cores: Count | None


class Pair(TypedDict):
    """Throughput of two runs of one command, in tokens/s of all ranks together."""

    number: Positive
    first: Literal["a", "b"]
    a: AboveZero
    b: AboveZero


class Configuration(TypedDict):
    name: Name
    work: str
    command_line: str
    pairs: Annotated[list[Pair], Meta(min_length=MIN_REPEATS)]


class Certificate(TypedDict):
    schema_version: Literal["1.0"]
    timestamp_utc: str
    command_line: str
    git_commit: str | None
    git_dirty: bool | None
    torch_version: str | None
    machine: Machine
    configurations: OneOrMore[Configuration]


def read_certificate(path: Path) -> dict[str, Any]:
    """Return the content of a certificate, or of the one in a folder, with `found` computed from its pairs.

    InputError, one sentence that names the file.
    """
    return _with_findings(typed_json.read_checked(path / CERTIFICATE_FILE if path.is_dir() else path, _check))


def save_certificate(path: Path, content: dict[str, Any]) -> None:
    """Write a certificate in one move, with `found` computed from its pairs. InputError names the place of a fault."""
    _check(content)
    write_text(path, json.dumps(_with_findings(content), indent=1, allow_nan=False) + "\n")


def _check(content: Any) -> None:
    typed_json.check(content, Certificate, may_hold_more=True)
    typed_json.check_finite(content)


def _with_findings(content: Mapping[str, Any]) -> dict[str, Any]:
    return {**content, "found": [found_in(each["pairs"]) for each in content["configurations"]]}


def found_in(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what pairs of equal runs say of the machine.

    `noise`: standard deviation of one run as a fraction; `noise_below`: its upper 80 % confidence limit;
    `planning_noise`: that limit without the outliers, from which the plans are made. `claims`: sessions of five pairs
    that would have claimed a difference, of `sessions`.
    """
    a, b = ([pair[side] for pair in pairs] for side in SIDES)
    sides = compare(a, b)
    outliers = outliers_in([*a, *b])
    noise = noise_of([rate for rate in side if rate not in outliers] for side in (a, b))[1]
    assert noise is not None, "there are several runs"
    sessions = [slice(start, start + SESSION) for start in range(0, len(pairs) - SESSION + 1, SESSION)]
    return {
        "noise": sides.noise,
        "noise_below": sides.planning_noise,
        "outliers": len(outliers),
        "planning_noise": noise,
        "a_against_b": {name: getattr(sides, name) for name in ("ratio", "low", "high", "verdict")},
        "sessions": len(sessions),
        "claims": sum(compare(a[each], b[each]).verdict != NO_DIFFERENCE for each in sessions),
        "detectable": {str(number): detectable_effect(noise, number) for number in REPEATS},
        "repeats": {f"{effect:g}": repeats_needed(noise, effect) for effect in EFFECTS},
        "repeats_to_show_equal": {f"{margin:g}": repeats_to_show(noise, margin) for margin in EFFECTS},
    }


def outliers_in(rates: Sequence[float]) -> list[float]:
    """Return the rates of the runs that were far slower or faster than the others.

    None where they are more than one run in 20, because then they are how this machine runs.
    """
    logs = np.log(rates)
    distances = np.abs(logs - np.median(logs))
    far = distances * MEDIAN_DEVIATION > OUTLIER * np.median(distances)
    return [rate for rate, is_far in zip(rates, far, strict=True) if is_far] if far.mean() <= MOST_OUTLIERS else []


def certificate_of(out_dir: Path, command_line: str) -> dict[str, Any]:
    """Return the certificate of the pairs in a folder of scripts/more/certify_machine.py, without its derived fields.

    Failure: a configuration has fewer than five whole pairs. InputError: the runs differ in more than their side.
    """
    sides: dict[str, dict[str, dict[str, Run]]] = {}
    for path in find_runs(out_dir):
        run, folder = load_run(path), path.parent.parent.name
        name, _, side = folder.rpartition("_")
        if side in SIDES and run.status == "complete" and not run.instrumented and run.tokens_per_s is not None:
            sides.setdefault(name, {each: {} for each in SIDES})[side][path.parent.name] = run
    configurations = [_configuration(name, found["a"], found["b"]) for name, found in sides.items()]
    if not configurations:
        raise Failure(f"no pair of runs ended well in {out_dir}, so there is no certificate")
    runs = [run for found in sides.values() for side in SIDES for run in found[side].values()]
    machines = [machine_of(run) for run in runs]
    if any(machine != machines[0] for machine in machines):
        raise InputError(f"{out_dir} holds runs of several machines; give a folder of one machine")
    example = runs[0]
    return result_head(SCHEMA_VERSION, command_line) | {
        "git_commit": example.git_commit,
        "git_dirty": example.record.get("git_dirty"),
        "torch_version": example.section("env").get("torch_version"),
        "machine": machines[0],
        "configurations": configurations,
    }


def _configuration(name: str, a: Mapping[str, Run], b: Mapping[str, Run]) -> dict[str, Any]:
    numbers = sorted((each for each in a if each in b), key=lambda folder: int(folder.rpartition("_")[2]))
    if len(numbers) < MIN_REPEATS:
        raise Failure(f"{name} has {len(numbers)} whole pairs of runs, and a certificate takes {MIN_REPEATS}")
    runs = [[side[number] for number in numbers] for side in (a, b)]
    others = {str(configuration(run)) for side in runs for run in side}
    if len(others) > 1 or (found := confounders(*runs)):
        differs = "settings" if len(others) > 1 else f"{found[0].what} {', '.join(sorted({*found[0].a, *found[0].b}))}"
        raise InputError(f"the runs of {name} differ in more than chance ({differs}); remove those that do not belong")
    example = runs[0][0]
    config = example.section("training_config")
    pairs = [
        {
            "number": int(folder.rpartition("_")[2]),
            # ISO 8601 in UTC: text order is time order
            "first": "a" if str(one.record.get("timestamp_utc")) <= str(other.record.get("timestamp_utc")) else "b",
            "a": one.tokens_per_s,
            "b": other.tokens_per_s,
        }
        for folder, one, other in zip(numbers, *runs, strict=True)
    ]
    return {
        "name": arm_name(str(example.run_type), example),
        "work": f"{config.get('model_name')}, {config.get('global_batch_size')} sequences of {config.get('seq_len')} "
        f"tokens, {example.work.get('optimizer_steps')} steps, {config.get('precision')}",
        "command_line": example.command_line or "",
        "pairs": pairs,
    }


def machine_of(run: Run) -> Machine:
    """Return the machine that a run was made on, as its file has it."""
    hardware = run.section("hardware")
    return {
        "hostname": run.section("host").get("hostname"),
        "device_type": hardware.get("device_type"),
        "device": hardware.get("gpu_name") or hardware.get("cpu_name"),
        "cores": hardware.get("cpu_cores_visible"),
    }


def this_machine(kind: str) -> Machine:
    """Return the machine that this process runs on. `kind`: cpu or cuda."""
    device = device_name(kind) if kind == "cuda" else device_name("cpu")
    return {"hostname": socket.gethostname(), "device_type": kind, "device": device, "cores": usable_cores()}


def machine_in_words(machine: Mapping[str, Any]) -> str:
    """Return `node1, AMD EPYC, 2 cores`."""
    parts = [machine["hostname"], machine["device"], counted(machine["cores"], "core") if machine["cores"] else None]
    return ", ".join(part for part in parts if part) or "a machine that is not named"


def largest(certificate: Mapping[str, Any], name: str) -> float:
    """Return `noise_below` or `planning_noise` of the configuration that has the largest."""
    return max(found[name] for found in certificate["found"])


def certificates_above(runs: Iterable[Path]) -> dict[Path, dict[str, Any]]:
    """Return the certificate in or above the folder of each of these files, by its path. InputError names a file that
    is none."""
    folders = {folder for run in runs for folder in list(run.absolute().parents)[:FOLDERS_ABOVE_A_RUN]}
    paths = [path for folder in sorted(folders) if (path := folder / CERTIFICATE_FILE).is_file()]
    return {path: read_certificate(path) for path in paths}


# What the repeats of a sweep can show, said before it runs: by the noise of its finished runs, or by the certificate.


KnownNoise = tuple[float, str]  # upper limit of the standard deviation of one run, as a fraction, and where it is from


def certificate_here(asked: Path | None, machine: Machine) -> tuple[Path, dict[str, Any]] | None:
    """Return the certificate that was asked for, or the one in the default place; None: there is none of this machine.

    InputError: the one that was asked for cannot be read, or is of another machine.
    """
    path = asked or DEFAULT_CERTIFICATE
    if asked is None and not path.is_file():
        return None
    content = read_certificate(path)
    if content["machine"] == machine:
        return path, content
    if asked is None:
        return None
    raise InputError(
        f"--certificate {asked} is of another machine ({machine_in_words(content['machine'])}; this one is "
        f"{machine_in_words(machine)}); make one with scripts/more/certify_machine.py"
    )


def known_noise(
    arms: Mapping[str, Sequence[float]], certificate: tuple[Path, Mapping[str, Any]] | None
) -> KnownNoise | None:
    """Return the noise of a run: of the finished runs of the sweep, by configuration, else of the certificate."""
    counts = [len(rates) for rates in arms.values() if len(rates) > 1]
    if sum(counts) - len(counts) >= MIN_REPEATS - 1:  # as much as one arm says from which a claim is made
        below = noise_of(arms.values())[1]
        assert below is not None, "an arm has two rates"
        return below, f"{sum(counts)} finished runs of this sweep"
    if certificate is None:
        return None
    return largest(certificate[1], "planning_noise"), str(certificate[0])


def power_lines(known: KnownNoise | None, repeats: int, seconds_per_repeat: float) -> list[str]:
    """Return what so many repeats show, and how many a difference takes, with the time for all of them."""
    if known is None:
        return [
            "which difference these repeats can show is not known before some were made; "
            "python scripts/more/certify_machine.py measures the noise of this machine"
        ]
    below, source = known

    def taken(number: int) -> str:
        if number > MOST_REPEATS:
            return f"more than {MOST_REPEATS:,} repeats"
        return f"{number} repeats ({in_words(number * seconds_per_repeat)})"

    if repeats < MIN_REPEATS:
        shown = f"{repeats} repeats make no claim; it takes {MIN_REPEATS}"
    else:
        shown = f"{repeats} repeats find a difference of {detectable_effect(below, repeats):.1%} in 80 % of cases"
    plans = [f"{effect:.0%}: {taken(repeats_needed(below, effect))}" for effect in EFFECTS]
    equal = taken(repeats_to_show(below, DEFAULT_MARGIN))
    return [
        f"{shown}; noise of a run below {below:.1%}, from {source}",
        f"to find a difference of {'; '.join(plans)}",
        f"to show that two are equal within {DEFAULT_MARGIN:.0%}: {equal}",
    ]
