"""Which releases train the same model: what is judged, drawn, refused and resumed, and one pair in earnest."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from support.programs import run_here, script

from testbed.distributed.processes import Ended, Stop
from testbed.errors import Failure, InputError
from testbed.experiments.conformance import Trial, environments, plain, results
from testbed.experiments.conformance import trials as of_trials
from testbed.experiments.conformance.trials import Outcome, confirmed, judged, run, trials

TRIAL = Trial(2, 1, True, "fp32")
ROUNDED = Trial(2, 1, True, "bf16")
EXACT = Outcome([4.0, 3.0], [1.0, 0.9], np.ones(4))


def moved(loss: float = 0.0, norm: float = 0.0, weights: float = 0.0) -> Outcome:
    return Outcome(
        [each + loss for each in EXACT.losses], [each + norm for each in EXACT.norms], EXACT.weights + weights
    )


@pytest.mark.parametrize(
    ("actual", "agrees"),
    [
        (moved(), True),
        (moved(loss=1e-6, norm=1e-6, weights=1e-6), True),
        (moved(loss=6e-6), False),
        (moved(norm=6e-6), False),
        (moved(weights=2e-5), False),
        (moved(norm=float("nan")), False),
    ],
)
def test_fp32_agrees_within_the_tolerances_of_the_agreement_tests(actual, agrees):
    assert judged(TRIAL, EXACT, [], actual)["agrees"] is agrees


@pytest.mark.parametrize(("loss", "agrees"), [(1e-3, True), (1.9e-3, True), (2.1e-3, False)])
def test_bf16_may_be_twice_as_far_from_fp32_as_the_single_process(loss, agrees):
    alone = [moved(loss=5e-4, norm=1e-4, weights=1e-4), moved(loss=1e-3, norm=1e-4, weights=1e-4)]
    assert judged(ROUNDED, EXACT, alone, moved(loss=loss))["agrees"] is agrees


def test_a_run_that_ignored_bf16_does_not_count_as_agreement():
    line = judged(ROUNDED, EXACT, [moved(loss=1e-3)], moved(loss=1e-7))
    assert (line["agrees"], line["note"]) == (False, "computed in fp32")


def test_a_difference_in_bf16_counts_if_other_initial_weights_show_it_too():
    alone = [moved(loss=1e-3, norm=1e-3, weights=1e-3)]
    far, near = (judged(ROUNDED, EXACT, alone, moved(loss=loss)) for loss in (3e-3, 1e-3))
    assert confirmed(iter([near]))["agrees"], "no other is tried"
    assert confirmed(iter([far, far, near]))["agrees"]
    again = confirmed(iter([far, far, far]))
    assert (again["agrees"], again["again"]) == (False, [1.5, 1.5])


def test_a_difference_in_fp32_counts_and_the_table_says_what_other_weights_show():
    far, near = (judged(TRIAL, EXACT, [], moved(loss=loss)) for loss in (1e-5, 0.0))
    once = confirmed(iter([far, near, far]))
    assert (once["agrees"], once["again"]) == (False, [0.0, 2.0])
    line = {"deepspeed": "0.16.9", "torch": "2.11.0", **once}
    assert "; from other weights 0 to 2 times what is allowed |" in results.tables([line])


def test_a_repeat_that_fails_does_not_count():
    late = judged(TRIAL, EXACT, [], Outcome(error="it did not end within 180 s"))
    line = confirmed(iter([judged(TRIAL, EXACT, [], moved(loss=6e-6)), late]))
    assert (line["agrees"], line["again"]) == (False, [])


def test_a_failure_says_whether_the_single_process_failed_already():
    failed = Outcome(error="exit code 1: it broke")
    assert judged(TRIAL, EXACT, [], failed)["error"] == "exit code 1: it broke"
    assert judged(TRIAL, failed, [], failed)["error"] == "the single process: exit code 1: it broke"


@pytest.mark.launches
@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: int("of rank 1"), "ValueError: invalid literal"),
        (lambda: os._exit(3), "process 1 terminated with exit code 3"),
        (lambda: time.sleep(9), "did not end within 1 s"),
    ],
)
def test_a_rank_that_fails_or_hangs_says_why(monkeypatch, act, said):
    def be_rank(rank, *_):
        if rank == 1:
            act()

    monkeypatch.setattr(of_trials, "be_rank", be_rank)
    monkeypatch.setattr(of_trials, "TIMEOUT_S", 1.0)
    assert said in run(TRIAL, 0).error


def of_task(**changes) -> Outcome:
    """Run the single process of plain.py here."""
    return Outcome(*plain.alone(dataclasses.replace(TRIAL, stage=None, **changes), 0))


def test_the_small_model_is_the_same_however_the_batch_is_split_and_shows_a_small_fault(monkeypatch):
    whole = of_task()
    assert min(whole.norms) > 0.25, "clipping is active in every step"
    assert judged(TRIAL, whole, [], of_task(accumulation=4))["agrees"]
    assert not judged(TRIAL, whole, [], of_task(clipping=False))["agrees"]
    monkeypatch.setattr(plain, "RATE", plain.RATE * 1.001)
    assert not judged(TRIAL, whole, [], of_task())["agrees"]


LINES = [
    {"command": "python scripts/conformance.py", "commit": "c" * 40, "is_dirty": False, "cpu": "A", "cores": 2},
    *(
        {"deepspeed": "0.19.8", "torch": "2.13.0", "stage": 1, "accumulation": accumulation,
         "clipping": clipping, "precision": "bf16", "agrees": accumulation == 1,
         "distances": dict.fromkeys(("loss", "norm", "weights"), 0.1),
         "allowed": {"loss": 0.2, "norm": 0.01, "weights": 0.2}}
        for accumulation in (1, 2) for clipping in (True, False)
    ),
    {"deepspeed": "0.9.5", "torch": "2.13.0", "stage": 1, "accumulation": 1, "clipping": True,
     "precision": "fp32", "agrees": False, "error": "ImportError: <no> torch._six"},
]  # fmt: skip


def test_the_tables_count_what_agrees_and_name_what_does_not():
    text = results.tables(LINES)
    rows = [line for line in text.splitlines() if line.startswith("| 2.13.0")]
    assert rows == [
        "| 2.13.0 | 0.9.5 |  | does not run |  |  |",
        "| 2.13.0 | 0.19.8 |  | 2 of 4 agree |  |  |",
    ], "releases in the order of their numbers"
    which = "accumulation 2, clipping; accumulation 2, not clipping"
    assert f"| 0.19.8 | 2.13.0 | 1 | bf16 | {which} | loss 1.0e-01 (2e-01), norm 1.0e-01 (1e-02)" in text
    assert "ImportError: &lt;no&gt; torch._six" in text
    assert f"- `python scripts/conformance.py`, commit `{'c' * 40}`, 2 cores (A)" in text


def test_every_stage_precision_accumulation_and_clipping_is_tried_both_ways():
    every = trials()
    assert len({trial.name for trial in every}) == len(every) == 4 * 2 * 2 * 3


REFUSED = {
    "give --deepspeed and --torch": [],
    "or --here alone": ["--here", "--deepspeed", "0.19.8"],
    "and --torch with releases": ["--deepspeed", "0.19.8"],
    "not a release of three numbers": ["--deepspeed", "19", "--torch", "2.13.0"],
    "matches no combination": ["--here", "--only", "ZeRO 7"],
    "not a regular expression": ["--here", "--only", "("],
    "give --yes": ["--deepspeed", "0.19.8", "--torch", "2.13.0"],
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_run_is_refused(sentence, tmp_path):
    ended = run_here("scripts/conformance.py", *REFUSED[sentence], "--out_dir", tmp_path / "out")
    assert (ended.returncode, sentence in ended.stderr) == (2, True), ended.stderr
    assert not (tmp_path / "out").exists()


def test_disk_and_time_are_said_and_a_full_disk_refuses(tmp_path, monkeypatch):
    words = ["--deepspeed", "0.18.9", "0.19.8", "--torch", "2.13.0", "--out_dir", tmp_path / "out", "--dry_run"]
    said = run_here("scripts/conformance.py", *words)
    assert said.returncode == 0
    assert (
        "96 combinations of 2 pairs of releases, 0 of them are there; 3 environments to make: up to 7.2 GB"
        in said.stdout
    )
    assert "ZeRO 3, accumulation 2, not clipping, autocast" in said.stdout
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(1e9))
    refused = run_here("scripts/conformance.py", *words)
    assert refused.returncode == 2
    assert "a disk with 1 GB free" in refused.stderr


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Return a function that runs the program with a trainer that is made up, and the names of what it has trained."""
    module, trained = script("conformance.py"), []

    def lines_of(arguments, torch, deepspeed, wanted, stop):
        if not arguments.here:
            environments.make(arguments.out_dir, torch, deepspeed, stop)
        for trial in wanted:
            trained.append(trial.name)
            line = judged(trial, EXACT, [moved(loss=1e-3)], moved(loss=1e-3 if trial.precision != "fp32" else 0.0))
            yield {"deepspeed": deepspeed, "torch": torch, **line}

    def call(*words: object) -> int:
        monkeypatch.setattr("sys.argv", ["conformance.py", *map(str, words), "--out_dir", str(tmp_path / "out")])
        return module.main()

    monkeypatch.setattr(module, "lines_of", lines_of)
    return call, trained, tmp_path / "out"


def test_what_is_there_is_not_run_again(program, capsys):
    call, trained, out = program
    assert call("--here", "--only", "ZeRO 1.*fp32") == 0
    assert len(trained) == 4
    file = out / results.FILE
    kept = file.read_text().splitlines()
    file.write_text("\n".join(kept[:-1]) + "\n")
    assert call("--here", "--only", "ZeRO 1.*fp32") == 0
    assert trained[4:] == trained[3:4], "the one whose line was removed"
    assert call("--here", "--only", "ZeRO [12].*fp32") == 0
    assert [name[:6] for name in trained[5:]] == ["ZeRO 2"] * 4
    assert "all 4 agree | all 4 agree" in capsys.readouterr().out


def test_a_last_line_that_was_cut_off_is_dropped(tmp_path):
    file = tmp_path / results.FILE
    results.add(file, LINES[1])
    with file.open("a") as cut:
        cut.write('{"deepsp')
    assert results.read(file) == [LINES[1]]
    results.add(file, LINES[2])
    assert results.read(file) == LINES[1:3]


OURS = b'"torch": "2.13.0", "deepspeed": "0.19.8", "stage": 0, "accumulation": 1, "clipping": true, "precision": "fp32"'
NONE_OF_OURS = [
    b"[]", b"{}", b"\xff\xfe", b"[" * 200_000, b'{"torch": 5, "agrees": true}', b'"command"', b'{"command": "x"}',
    b"{%b}" % OURS, b'{%b, "agrees": "no"}' % OURS, b'{%b, "agrees": false}' % OURS,
]  # fmt: skip


@pytest.mark.parametrize("text", NONE_OF_OURS)
def test_a_line_that_is_none_of_ours_is_one_sentence(tmp_path, text):
    (tmp_path / results.FILE).write_bytes(text + b"\n")
    with pytest.raises(InputError, match=r"line 1: is none of this program's; remove it"):
        results.read(tmp_path / results.FILE)


@pytest.fixture
def pip(monkeypatch):
    """Record what would be run to make environments; a package called by `fails` cannot be installed."""
    commands: list[list[str]] = []
    fails: list[str] = []

    def run(command, log, stop, **options):
        commands.append(command)
        folder = Path(command[-1] if "venv" in command else command[0]).parents[0 if "venv" in command else 1]
        (folder if "venv" not in command else Path(command[-1])).joinpath(
            f"lib/python{environments.sys.version_info.major}.{environments.sys.version_info.minor}/site-packages"
        ).mkdir(parents=True, exist_ok=True)
        has_failed = any(name in word for word in command for name in fails)
        log.write_text("ERROR: No matching distribution\n" if has_failed else "")
        return Ended(int(has_failed), 0.0)

    monkeypatch.setattr(environments, "run", run)
    return commands, fails


def test_releases_of_deepspeed_share_the_environment_of_their_pytorch(pip, tmp_path):
    commands, fails = pip
    for deepspeed in ("0.18.9", "0.19.8", "0.19.8"):
        python = environments.make(tmp_path, "2.13.0", deepspeed, Stop())
    base, pair = environments.folders(tmp_path, "2.13.0", "0.19.8")
    assert python == pair / "bin" / "python"
    installs = [command[command.index("install") + 2 :] for command in commands if "install" in command]
    assert [words[0] for words in installs] == ["torch==2.13.0", "deepspeed==0.18.9", "deepspeed==0.19.8"]
    assert "numpy" in installs[0]
    assert [path.read_text().strip() for path in pair.rglob("base.pth")] == [str(next(base.rglob("site-packages")))]
    fails.append("deepspeed==0.0.1")
    with pytest.raises(Failure, match=r"deepspeed==0\.0\.1 cannot be installed: ERROR: No matching distribution"):
        environments.make(tmp_path, "2.13.0", "0.0.1", Stop())


def test_a_release_that_is_none_fails_and_the_others_are_tried(pip, program, capsys):
    call, trained, out = program
    pip[1].append("deepspeed==0.0.1")
    words = ["--deepspeed", "0.0.1", "0.19.8", "--torch", "2.13.0", "--only", "ZeRO 1.*fp32", "--yes"]
    assert call(*words) == 1
    assert len(trained) == 4
    assert "deepspeed==0.0.1 cannot be installed" in capsys.readouterr().out
    assert {line["deepspeed"] for line in results.combinations(results.read(out / results.FILE))} == {"0.19.8"}


def test_what_stands_in_a_file_forges_no_line():
    head = LINES[0] | {"cpu": "A\n- `python other.py`"}
    assert len(results.tables([head]).splitlines()) == len(results.tables(LINES[:1]).splitlines())


@pytest.mark.launches
@pytest.mark.slow
def test_the_installed_release_agrees(tmp_path):
    only = "ZeRO 2, accumulation 2, clipping, fp32"
    ended = run_here("scripts/conformance.py", "--here", "--only", only, "--out_dir", tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    made, line = [json.loads(line) for line in (tmp_path / results.FILE).read_text().splitlines()]
    assert made["command"].startswith("python scripts/conformance.py --here")
    assert max(line["distances"].values()) < 5e-6
