"""scripts/find_fastest.py: what it prints and writes, with runs from a list and with two tiny real ones."""

from __future__ import annotations

import json
import math
import shlex

import pytest
from support.certificate_cases import write_certificate
from support.programs import REPOSITORY, TINY_RUN, data_flags, run_here
from support.sweep_cases import finish

from testbed.analysis.certificate import CERTIFICATE_FILE, read_certificate
from testbed.analysis.comparison.fastest import FASTEST, UNDECIDED, verdict
from testbed.analysis.report.build import report_of
from testbed.analysis.runs.load import find_runs, load_runs
from testbed.config.automatic_run_type import read_choice
from testbed.config.flag_types import duration, percentage
from testbed.sweep import request, runner
from testbed.sweep.plan import COMPLETE, FAILED
from testbed.sweep.runner import Runner

PROGRAM = REPOSITORY / "scripts" / "find_fastest.py"
SPEEDS = {"ddp": 1000.0, "fsdp": 900.0, "tensor": 300.0, "baseline": 500.0, "mesh": 2000.0}


@pytest.fixture
def work(token_files, tmp_path, monkeypatch) -> list[str]:
    """Flags after `--` for a tiny run; the current folder is empty, and nothing is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(request, "facts_of_machine", lambda: {"devices": 0, "commit": "c" * 40, "is_dirty": False})
    return ["--", *TINY_RUN, *data_flags(token_files), "--timing_warmup_steps", "2"]


@pytest.fixture
def runs(monkeypatch) -> list[str]:
    """Folders of the runs that were made, in order. They appear with the speeds of `SPEEDS`; of fsdp the loss too."""
    made: list[str] = []

    def make(self, cell, bar=None) -> None:
        made.append(f"{self.out_dir.name}/{cell.folder}")
        wobble = 0.01 * math.cos(7.0 * cell.repeat + len(cell.run_type) + len(self.out_dir.parts))
        speed, run_id = SPEEDS[cell.run_type] * math.exp(wobble), f"{self.out_dir}/{cell.folder}"
        finish(cell, self.out_dir, speed, git_dirty=False, run_id=run_id)
        cell.status, cell.seconds = COMPLETE, 10.0
        self.sweep.write(self.out_dir)

    monkeypatch.setattr(Runner, "make", make)
    monkeypatch.setattr(Runner, "warm_up", lambda self, cell, number: None)
    monkeypatch.setattr("testbed.sweep.race_runs.seconds_left", lambda cells, settings, machine: 10.0)
    return made


def find(work: list[str], tmp_path, *flags: str):
    return run_here(
        PROGRAM,
        "--ranks",
        "1,2",
        "--run_types",
        "baseline,ddp,fsdp,tensor",
        "--steps",
        "8",
        *flags,
        *work,
        cwd=tmp_path,
    )


def test_a_race_ends_with_a_verdict_a_command_and_a_choice_that_auto_takes(work, runs, tmp_path):
    done = find(work, tmp_path, "--budget", "1h")
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "verdict: ddp on 2 ranks is the fastest: " in said and "faster than fsdp on 2 ranks (" in said
    assert "fresh runs of each" in said and "command: torchrun --nproc-per-node=2 " in said
    assert any(folder.startswith("ddp") or "/ddp" in folder for folder in runs)
    content = json.loads((tmp_path / "checkpoint/fastest/choice.json").read_text())
    assert content["verdict"]["kind"] == "fastest" and content["verdict"]["ended"] == "one leads"
    ratio, low, high = content["fresh"]["ratio"]
    assert 1 < low < ratio < high and ratio == pytest.approx(1000 / 900, rel=0.03)
    arms = {arm["name"].split("_2")[0].split("_1")[0]: arm for arm in content["arms"]}
    assert len(arms) == 4 and content["arms"][0]["name"].startswith("ddp")
    assert all(arm["predicted_seconds_per_step"] for arm in content["arms"])
    choice = read_choice(tmp_path / "checkpoint/fastest/choice.json")
    assert (choice.run_type, choice.content["ranks"], choice.content["commit"]) == ("ddp", 2, "c" * 40)
    assert "ddp on 1 rank" in content["did_not_race"]
    words = shlex.split(content["command"])
    assert (
        words[words.index("--run_type") + 1] == "ddp"
        and "--max_train_steps" not in words
        and "--overwrite" not in words
    )
    (auto,) = (line.split("or: ", 1)[1] for line in said.splitlines() if line.startswith("     or: "))
    accepted = run_here(REPOSITORY / "src" / "gpt2.py", *shlex.split(auto)[3:], "--precision", "fp99", cwd=tmp_path)
    assert "fp99" in accepted.stderr, "the rest of the command is read"


def test_meshes_race_under_the_names_of_their_axes_and_auto_takes_the_one_that_won(work, runs, tmp_path):
    words = ("--ranks", "4", "--run_types", "ddp,mesh", "--steps", "8", "--budget", "1h", "--yes", *work)
    done = run_here(PROGRAM, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    races = [line.removeprefix("races: ") for line in done.stdout.splitlines() if line.startswith("races: mesh")]
    assert len(races) == 3 and all(line.startswith("mesh:shard_size=") and " on 4 ranks" in line for line in races)
    content = json.loads((tmp_path / "checkpoint/fastest/choice.json").read_text())
    winner = content["arms"][0]["name"]
    assert (tmp_path / "checkpoint/fastest" / winner / "run_1").is_dir()
    choice = read_choice(tmp_path / "checkpoint/fastest/choice.json")
    assert choice.run_type == "mesh" and winner.startswith(f"mesh-shard_size={choice.flags['shard_size']}")
    for flag, value in choice.flags.items():
        assert f"--{flag} {value}" in content["command"]
    (auto,) = (line.split("or: ", 1)[1] for line in done.stdout.splitlines() if line.startswith("     or: "))
    accepted = run_here(REPOSITORY / "src" / "gpt2.py", *shlex.split(auto)[3:], "--precision", "fp99", cwd=tmp_path)
    assert "fp99" in accepted.stderr, "the rest of the command is read"


def test_it_goes_on_where_it_was_and_makes_no_run_twice(work, runs, tmp_path):
    assert find(work, tmp_path, "--budget", "60s").returncode == 0
    first = list(runs)
    done = find(work, tmp_path, "--budget", "1h")
    assert done.returncode == 0, done.stderr
    assert len(first) == 6 and len(set(runs)) == len(runs) > len(first)
    again = find(work, tmp_path, "--budget", "1h")
    assert again.returncode == 0 and again.stdout.count("; ") and len(set(runs)) == len(runs)


def test_the_certificate_travels_with_a_race_and_its_report_quotes_it(work, runs, tmp_path, monkeypatch):
    certificate = write_certificate(tmp_path / "checkpoint" / "certificate")
    here = read_certificate(certificate)["machine"]
    monkeypatch.setattr("testbed.analysis.certificate.this_machine", lambda kind: here)
    assert find(work, tmp_path, "--budget", "60s").returncode == 0
    assert read_certificate(tmp_path / "checkpoint/fastest") == read_certificate(certificate)
    report = report_of(load_runs(find_runs(tmp_path / "checkpoint/fastest")), tmp_path)
    assert "How noisy the machine is" in [section.title for section in report.sections]
    monkeypatch.setattr("testbed.analysis.certificate.this_machine", lambda kind: here | {"cores": 64})
    assert find(work, tmp_path, "--budget", "60s", "--out_dir", "other").returncode == 0
    assert not (tmp_path / "other" / CERTIFICATE_FILE).exists()
    done = find(work, tmp_path, "--certificate", str(certificate), "--out_dir", "third")
    assert done.returncode == 2 and "is of another machine" in done.stderr


def test_a_budget_that_ends_early_has_a_verdict_too(work, runs, tmp_path):
    done = find(work, tmp_path, "--budget", "20s")
    assert done.returncode == 0, done.stderr
    assert "verdict: of those that ran, no detectable difference between" in done.stdout and len(runs) == 2
    assert "did not run" in done.stdout and "flatter the winner" in done.stdout
    runs_before = list(runs)
    done = find(work, tmp_path, "--budget", "5s", "--out_dir", "other")
    assert done.returncode == 2 and runs_before == runs and not (tmp_path / "other").exists()
    assert "--budget 5 s is too short for a single run, which takes about 10 s" in done.stderr
    assert "such as --budget 15m" in done.stderr


def test_what_ran_while_others_did_not_is_not_the_fastest_of_all(work, runs, tmp_path):
    done = find(work, tmp_path, "--budget", "10s")
    assert done.returncode == 0 and len(runs) == 1, done.stderr
    assert "did not run: it is not shown to be the fastest of all" in done.stdout
    assert " is the fastest" not in done.stdout
    content = json.loads((tmp_path / "checkpoint/fastest/choice.json").read_text())
    assert content["verdict"]["kind"] == "not all ran"


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--budget", "0"), "--budget: '0' is not a time such as 90s, 15m or 2h"),
        (("--budget", "1d"), "--budget: '1d' is not a time"),
        (("--budget", "5"), "--budget: 5 has no unit; give 5m for minutes, or 5s or 5h"),
        (("--equivalent", "100%"), "--equivalent: '100' is not a percentage such as 2%"),
        (("--over", "colour"), "--over colour: 'colour' is not one of micro_batch, compile"),
        (("--calibration", "nowhere.json"), "nowhere.json"),
        (("--run_timeout_s", "1e300"), "--run_timeout_s: 1e300 is more than 604800, the seconds of a week"),
        (("--budget", "1e300h"), "--budget: 1e300h is longer than a week"),
    ],
)
def test_a_bad_flag_is_one_sentence_and_exit_code_2(work, runs, tmp_path, flags, words):
    done = find(work, tmp_path, *flags)
    assert done.returncode == 2 and words in done.stderr and runs == []
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("text, seconds", [("90s", 90), ("15m", 900), ("1.5h", 5400), ("2H", 7200)])
def test_a_time_has_a_unit(text, seconds):
    assert duration(text) == seconds


def test_a_percentage_is_a_fraction():
    assert percentage("2%") == percentage("2") == 0.02


def test_a_winner_that_learns_worse_is_no_winner(work, runs, tmp_path, monkeypatch):
    make = Runner.make

    def worse(self, cell, bar=None) -> None:
        make(self, cell, bar)
        file = self.out_dir / cell.folder / "training_metrics.json"
        metrics = json.loads(file.read_text())
        if cell.run_type == "ddp":
            for step in metrics["steps"]:
                step["loss"] += 1.0
        file.write_text(json.dumps(metrics))

    monkeypatch.setattr(Runner, "make", worse)
    done = find(work, tmp_path, "--budget", "1h")
    assert done.returncode == 1 and "faster but learns worse" in done.stderr
    assert not (tmp_path / "checkpoint/fastest/choice.json").exists()


def test_runs_that_all_fail_are_exit_code_1_with_the_reason(work, runs, tmp_path, monkeypatch):
    def fail(self, cell, bar=None) -> None:
        cell.status, cell.reason, cell.seconds = FAILED, "out of memory", 1.0

    monkeypatch.setattr(Runner, "make", fail)
    done = find(work, tmp_path, "--budget", "1h")
    assert done.returncode == 1 and "no configuration ran: failed: out of memory" in done.stderr


def test_a_dry_run_writes_nothing(work, runs, tmp_path):
    done = find(work, tmp_path, "--dry_run", "--over", "bucket")
    assert done.returncode == 0 and runs == [] and not (tmp_path / "checkpoint").exists()
    assert "races: ddp:bucket_cap_mb=5 on 2 ranks; predicted " in done.stdout and "does not race: " in done.stdout


def test_a_dry_run_needs_no_data(work, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_here(PROGRAM, "--ranks", 2, "--run_types", "ddp,tensor", "--dry_run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "note: train_small.bin is not here" in done.stdout and list(tmp_path.iterdir()) == [] and runs == []
    assert done.stdout.count("--train_data_path train_small.bin --val_data_path val_small.bin") == 2
    assert run_here(PROGRAM, "--ranks", 2, cwd=tmp_path).returncode == 2


@pytest.mark.launches
@pytest.mark.slow
def test_two_tiny_configurations_race(ranks, token_files, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "run", ranks.in_place_of_launches(tmp_path / "launches"))
    words = ["--ranks", "2", "--run_types", "ddp,tensor", "--steps", "6", "--batch_size", "4"]
    words += ["--budget", "35s", "--warmup_runs", "0", "--equivalent", "50%"]
    words += ["--", *TINY_RUN, *data_flags(token_files), "--timing_warmup_steps", "2"]
    done = run_here(PROGRAM, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    choice = read_choice(tmp_path / "checkpoint/fastest/choice.json")
    assert choice.content["ranks"] == 2 and choice.run_type in ("ddp", "tensor") and "verdict: " in done.stdout
    assert len(list((tmp_path / "checkpoint/fastest").rglob("training_metrics.json"))) >= 2


def test_what_ran_alone_is_the_fastest_only_if_nothing_else_was_to_run():
    names = {"ddp": "ddp", "fsdp": "fsdp"}
    assert verdict(None, ["ddp"], names)[0] == FASTEST
    kind, sentence = verdict(None, ["ddp"], names, ["fsdp"])
    assert kind == UNDECIDED and "ddp ran, and fsdp did not run" in sentence and "is the fastest;" not in sentence
