"""Plant slow-downs into runs on two ranks, and count how often scripts/diagnose.py names rank and cause.

    cd tests
    PYTHONPATH=../src:. python -m support.diagnosis_study --planted 54 --clean 24 --seed 1 --into FILE.jsonl
    PYTHONPATH=../src:. python -m support.diagnosis_study --table --into FILE.jsonl
    PYTHONPATH=../src:. python -m support.diagnosis_study --overhead 1000 --into OVERHEAD.jsonl

A case that the file holds is not run again, so it continues where it was stopped. `--keep FOLDER` keeps what each run
recorded, so that another rule can be asked about the same runs. Cases are drawn from the seed: the
run types and causes in turn, rank, style and share of the step (1 to 30 %, uniform on the log scale) at random.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from support.alternation import compared, in_words
from support.planted_causes import CAUSES
from support.programs import REPOSITORY, data_flags, write_token_files
from support.ranks import Ranks
from testbed.analysis.diagnosis.diagnose import diagnose
from testbed.analysis.diagnosis.words import json_of
from testbed.metrics.file import read_metrics
from testbed.profiling.collective_watch import START_UP

RUN_TYPES = ("allreduce", "ddp", "fsdp", "optimized", "tensor", "pipeline")
FLAGS = [
    "--model", "nano", "--seq_length", "64", "--global_batch_size", "8", "--precision", "fp32", "--device", "cpu",
    "--max_val_steps", "0", "--sample_tokens", "0", "--save_at_end", "off", "--threads_per_rank", "1",
]  # fmt: skip
RUN_S, STEPS = 30.0, (60, 1000)  # how long to train, and bounds of the steps for it
OVERHEAD_OF = ("ddp", "allreduce")
NOTHING = ", nothing changed over"
START_UP_S = (5.0, 12.0)  # once, for shares of 0 to 30 %


def planted(seed: int, count: int) -> Iterator[dict]:
    draw = random.Random(seed)
    for number in range(count):
        cause = list(CAUSES)[number % len(CAUSES)]
        yield {
            "id": f"planted {seed} {number}",
            "run_type": RUN_TYPES[number // len(CAUSES) % len(RUN_TYPES)],
            "cause": cause,
            "rank": draw.randrange(2),
            "style": draw.choice(["sleep", "compute"]),
            "share": round(math.exp(draw.uniform(math.log(0.01), math.log(0.3))), 4),
        }


def clean(seed: int, count: int) -> Iterator[dict]:
    for number in range(count):
        run_type = RUN_TYPES[number % len(RUN_TYPES)]
        yield {"id": f"clean {seed} {number}", "run_type": run_type, "cause": None, "rank": None}


class Study:
    """Runs cases, each in a fresh process per rank."""

    def __init__(self, folder: Path, keep: Path | None = None):
        self.folder, self.keep, self.ranks = folder, keep, Ranks(folder / "ranks.log")
        self.data = data_flags(write_token_files(folder, train_tokens=200_000))
        self.step_s: dict[str, float] = {}

    def step_of(self, run_type: str) -> float:
        """Return the median step of an undisturbed run of 40 steps."""
        if run_type not in self.step_s:
            self.step_s[run_type] = self.run(run_type, 40, None)["timing"]["step_time_p50_sec"]
        return self.step_s[run_type]

    def run(self, run_type: str, steps: int, plant: list | None, *more: str) -> dict:
        folder = self.folder / "run"
        shutil.rmtree(folder, ignore_errors=True)
        words = ["--run_type", run_type, *FLAGS, *self.data, "--max_train_steps", str(steps), *more]
        words += ["--checkpoint_path", str(folder / "out")]
        done = self.ranks.run_program(words, folder, 2, plant=plant)
        assert done.returncode == 0, done.stderr[-3000:]
        return read_metrics(folder / "out" / "training_metrics.json")

    def outcome(self, case: dict) -> dict:
        """Run a case; return it with what was found."""
        step_s, plant = self.step_of(case["run_type"]), None
        if case["cause"] is not None:
            amount = case["share"] * step_s
            if case["cause"] == "core":
                amount = case["share"]
            if case["cause"] == "start-up":
                low, high = START_UP_S
                amount = low + (high - low) * case["share"] / 0.3
            plant = [case["cause"], amount, case["rank"], case["style"]]
        steps = max(STEPS[0], min(STEPS[1], round(RUN_S / step_s)))
        metrics = self.run(case["run_type"], steps, plant, "--watch_collectives", "every_step")
        if self.keep is not None:
            self.keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.folder / "run" / "out" / "training_metrics.json", self.keep / f"{case['id']}.json")
        said = json_of(diagnose(metrics))
        findings = [
            {name: one[name] for name in ("cause", "rank", "seconds", "low", "high")} for one in said["findings"]
        ]
        timing = {"step_s": metrics["timing"]["step_time_p50_sec"], "windows": len(metrics["watched_steps"])}
        scatter = metrics["timing"]["step_time_p95_above_median"]
        if said["unknown"]:
            timing["unknown"] = said["unknown"]
        return {**case, **timing, "steps": steps, "scatter": scatter, "findings": findings, "commit": commit()}


def commit() -> str:
    words = ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def is_right(case: dict) -> tuple[bool, bool]:
    """Return whether the first finding names the rank, and the cause."""
    first = case["findings"][0] if case["findings"] else {"rank": None, "cause": None}
    return first["rank"] == case["rank"], first["cause"] == case["cause"]


def table(cases: list[dict]) -> str:
    """Return the counts in Markdown."""
    planted_cases = [case for case in cases if case["cause"] is not None]
    clean_cases = [case for case in cases if case["cause"] is None]
    lines = ["| cause | planted | rank right | cause right | nothing said |", "|---|--:|--:|--:|--:|"]
    groups = {cause: [case for case in planted_cases if case["cause"] == cause] for cause in CAUSES}
    bounds = ((0.01, 0.03), (0.03, 0.1), (0.1, 0.31))
    for low, high in bounds:
        name = f"of all, {low:.0%} to {min(high, 0.3):.0%} of the step"
        in_steps = [case for case in planted_cases if case["cause"] not in ("start-up", "core")]
        groups[name] = [case for case in in_steps if low <= case["share"] < high]
    groups["all"] = planted_cases
    for name, group in groups.items():
        rank, cause = (sum(is_right(case)[place] for case in group) for place in (0, 1))
        silent = sum(not case["findings"] for case in group)
        lines.append(f"| {name} | {len(group)} | {rank} | {cause} | {silent} |")
    false = sum(bool(case["findings"]) for case in clean_cases)
    return "\n".join([*lines, "", f"Clean runs with a finding: {false} of {len(clean_cases)}."])


def overhead(rows: list[dict]) -> str:
    """Return what watching every step costs, in Markdown."""
    lines = ["| run type | calls | a step | a watched step takes longer by | to change over |", "|---|--:|--:|---|--:|"]
    for name in dict.fromkeys(row["run_type"] for row in rows):
        of_kind = [row for row in rows if row["run_type"] == name]
        step_ms = 1e3 * float(np.mean([row["step_s"] for row in of_kind]))
        changing_s = [seconds for row in of_kind for seconds in row["changing_s"]]
        changing = f"{1e3 * float(np.median(changing_s)):.1f} ms" if changing_s else "-"
        told = in_words([row["longer"] for row in of_kind])
        lines.append(f"| {name} | {of_kind[0]['calls']:.0f} | {step_ms:.0f} ms | {told} | {changing} |")
    return "\n".join(lines)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure_overhead(steps: int, into: Path) -> None:
    """Train with every step watched in some blocks of steps and none in others, and once with all watched.

    A run type that the file holds is run with the next seed (alternation.py).
    """
    with tempfile.TemporaryDirectory() as folder, into.open("a") as file:
        study, moments = Study(Path(folder)), Path(folder) / "moments.json"
        for run_type, changes_over in [*((name, True) for name in OVERHEAD_OF), (OVERHEAD_OF[0], False)]:
            name = run_type + ("" if changes_over else NOTHING)
            seed = sum(row["run_type"] == name for row in read(into))
            plant = ["unwatched", steps, None, str(moments), seed, changes_over]
            watched = study.run(run_type, steps, plant, "--watch_collectives", "every_step")["watched"]["per_rank"][0]
            found = json.loads(moments.read_text())
            row = {
                "run_type": name,
                "calls": sum(one["num"] for one in watched["collectives"] if one["phase"] != START_UP)
                / watched["num_steps"],
                "changing_s": [round(one, 5) for one in found["changing_s"]],
                "step_s": round(float(np.median(np.diff(found["moments"], axis=0)[:, 0])), 5),
                "longer": compared(found["moments"], seed),
            }
            file.write(json.dumps({**row, "commit": commit()}) + "\n")
            file.flush()
        study.ranks.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planted", type=int, default=0)
    parser.add_argument("--clean", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--overhead", type=int, default=0, metavar="STEPS")
    arguments = parser.parse_args()
    if arguments.table:
        rows = read(arguments.into)
        print(overhead(rows) if "longer" in rows[0] else table(rows))
        return
    if arguments.overhead:
        measure_overhead(arguments.overhead, arguments.into)
        return
    done = {case["id"] for case in read(arguments.into)}
    cases = [*planted(arguments.seed, arguments.planted), *clean(arguments.seed, arguments.clean)]
    with tempfile.TemporaryDirectory() as folder, arguments.into.open("a") as file:
        study = Study(Path(folder), arguments.keep)
        for case in random.Random(arguments.seed).sample(cases, len(cases)):
            if case["id"] in done:
                continue
            outcome = study.outcome(case)
            file.write(json.dumps(outcome) + "\n")
            file.flush()
            print(outcome["id"], outcome["run_type"], outcome["cause"], outcome["rank"], outcome.get("share"),
                  is_right(outcome), outcome["findings"][:2], flush=True)  # fmt: skip
        study.ranks.close()


if __name__ == "__main__":
    main()
