"""Record sides on warm ranks, and compare them as scripts/first_divergence.py does."""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
import time
from pathlib import Path

from support.agreement import PAIRS, write_down
from support.divergence_faults import EXPECTED, Where
from support.programs import REPOSITORY, TINY_RUN, data_flags
from support.settings import typed
from support.variants import BF16, VARIANTS
from testbed.config.run_types import STRATEGIES
from testbed.experiments.divergence.answer import answer_of
from testbed.experiments.divergence.run_sides import Start, facts_of
from testbed.experiments.divergence.sides import Side, read_folder

RESULTS = REPOSITORY / "docs" / "results" / "first_divergence"
BELOW = "## The answers"  # in the page: what stands below follows from the file
STEPS = 3
WORKER = "support.divergence_worker"
OF_WORK = ("--label_smoothing", "--adam_eps", "--precision", "--optimizer", "--gelu")  # a baseline does the same
SOUND = {name: (run_type, ranks, flags) for name, (run_type, ranks, flags, _) in VARIANTS.items() if ranks <= 4} | {
    f"bf16, {name}": (
        run_type,
        4 if STRATEGIES[run_type].keeps == "axes" else 2 if STRATEGIES[run_type].is_distributed else 1,
        flags,
    )
    for name, (run_type, flags) in BF16.items()
    if "native" not in flags and "compression" not in flags  # which round what is exchanged, and are named for it
}
OTHER_SPLIT = ["--micro_batch_size_per_gpu", "4", "--attention", "math"]


class Sides:
    """Sides that were recorded; baselines are kept.

    Args:
        text, pairs: token files for training and validation.
    """

    def __init__(self, ranks, folder: Path, text, pairs):
        self.ranks, self.folder, self.text, self.pairs = ranks, folder, text, pairs
        self.number, self.references = 0, {}

    def flags(self, words: list[str]) -> list[str]:
        """Return all flags of a run: 16 sequences in micro batches of 2, clipping active."""
        batch = "--global_batch_size 16 --micro_batch_size_per_gpu 2 --max_val_steps 0"
        optimizer = f"--max_train_steps {STEPS} --learning_rate 0.01 --warmup_steps 2 --max_grad_norm 0.25"
        data = data_flags(self.pairs if PAIRS in words else self.text)
        words = [word for word in words if word != PAIRS]
        return [*TINY_RUN, *data, *batch.split(), *optimizer.split(), *words]

    def recorded(self, words: list[str], ranks: int, fault: str | None = None) -> Side:
        self.number += 1
        place, flags = self.folder / str(self.number), self.flags(words)
        self.ranks.run(WORKER, place, [[flags, fault, str(place / "prints"), STEPS]], ranks)
        settings = typed(flags, ranks).settings
        side = read_folder(place / "prints", facts_of(Start("a", "ours", flags, ranks, settings)), ranks)
        shutil.rmtree(place)
        return side

    def baseline(self, words: list[str]) -> tuple[Side, Side]:
        """Return a single process that does the work of these flags, and again in another split."""
        mine = ["--run_type", "baseline", *([PAIRS] if PAIRS in words else [])]
        for flag, value in itertools.pairwise(words):
            mine += [flag, value] if flag in OF_WORK else []
        key = shlex.join(mine)
        if key not in self.references:
            self.references[key] = (self.recorded(mine, 1), self.recorded([*mine, *OTHER_SPLIT], 1))
        return self.references[key]

    def answer(self, name: str, words: list[str], ranks: int, where: Where | None = None) -> dict:
        """Return the answer about a run, sound or with a fault that is to be found somewhere."""
        reference = None if where is None else where.reference
        b, noisy = self.baseline(words) if reference is None else (self.recorded(*reference), None)
        started_s = time.perf_counter()
        answer = answer_of(self.recorded(words, ranks, None if where is None else name), b, noisy)
        seconds = round(time.perf_counter() - started_s, 1)
        found = answer["divergence"]
        is_right = found is None if where is None else where.is_right(found)
        write_down("DIVERGENCE_FILE", {"name": name, "flags": " ".join(words), "ranks": ranks,
                   "is_fault": where is not None, "is_right": is_right, "seconds": seconds, **answer})  # fmt: skip
        assert is_right, answer
        return answer


def table() -> str:
    """Return what stands in docs/results/first_divergence/README.md. A file of several calls has a head for each."""
    path = RESULTS / "answers.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    calls, lines = ([line for line in lines if ("command" in line) == wanted] for wanted in (True, False))
    faults, sound = ([line for line in lines if line["is_fault"] == wanted] for wanted in (True, False))
    right, silent = (sum(line["is_right"] for line in of_kind) for of_kind in (faults, sound))
    tried = {line["name"] for line in sound}
    missing = sorted(SOUND.keys() - tried)
    of_any_name = sum(EXPECTED[line["name"]].name == ".*" for line in faults)
    of_any_rank = sum(EXPECTED[line["name"]].to_blame is None for line in faults)
    text = [
        f"`DIVERGENCE_FILE={path.relative_to(REPOSITORY)} {made['command']}`, commit `{made['commit']}`, "
        f"{made['cores']} cores ({made['cpu']}), PyTorch {made['torch']}.\n"
        for made in calls
    ] + [
        f"{right} of {len(faults)} planted faults were named where they are; for {of_any_name} any module or parameter "
        f"counted, for {of_any_rank} any rank. {silent} of the {len(SOUND.keys() | tried)} sound runs did not part, "
        f"{len(sound) - silent} did, and {len(missing)} were not run.\n",
        "| planted fault | run | ranks | named | size | likely cause |",
        "|---|---|---:|---|---:|---|",
    ]
    for line in faults:
        found, name = line["divergence"], line["name"].replace("_", " ")
        run = line["flags"].removeprefix("--run_type ").replace("--", "")
        if found is None:
            text.append(f"| {name} | {run} | {line['ranks']} | **nothing** | | |")
            continue
        ranks = f", rank {', '.join(map(str, found['ranks']))}" if found["ranks"] else ""
        wrong = "" if line["is_right"] else "**wrong:** "
        place = f"{wrong}step {found['step']}, {found['phase']}, {found['name']}{ranks}"
        text.append(f"| {name} | {run} | {line['ranks']} | {place} | {found['size']:.1e} | {found['cause']} |")
    names = (("Sound runs", [line["name"] for line in sound]), ("Sound runs that were not run", missing))
    return "\n".join([*text, *(f"\n{said}: {'; '.join(of_kind)}." for said, of_kind in names if of_kind)])


if __name__ == "__main__":
    page = RESULTS / "README.md"
    page.write_text(page.read_text(encoding="utf-8").partition(BELOW)[0] + f"{BELOW}\n\n{table()}\n", encoding="utf-8")
