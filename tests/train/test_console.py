"""What a run says: warnings of its place before the first step, and lines of progress without a terminal."""

from __future__ import annotations

import re
import sys

import pytest
from support.programs import write_token_files
from support.settings import settings_of, stand_in

from testbed.distributed.launch import Launch, launcher
from testbed.train import console
from testbed.train.console import LINE_EVERY_S, Console

ONE, TWO, FOUR = Launch(0, 0, 1, 1), Launch(0, 0, 2, 2), Launch(0, 0, 4, 4)
ALONE = "plain python starts one: ddp with one rank has nothing to distribute; torchrun --nproc-per-node 2 src/"
COUNTS_NO_CORES = "one rank, because the deepspeed command counts no cores: .*; deepspeed --num_gpus 2 src/gpt2.py"


@pytest.mark.parametrize(
    ("by", "run_type", "device", "launch", "threads", "expected"),
    [
        ("python", "ddp", "cpu", ONE, 2, [ALONE]),
        ("python", "baseline", "cpu", ONE, 2, []),
        ("torchrun", "ddp", "cpu", ONE, 2, []),  # --nproc-per-node 1 was typed
        ("deepspeed", "optimized", "cpu", ONE, 2, [COUNTS_NO_CORES]),
        ("deepspeed", "optimized", "cuda", ONE, 2, []),  # there one rank is one GPU
        ("torchrun", "ddp", "cpu", FOUR, 1, ["4 ranks x 1 thread on 2 usable cores: they take turns"]),
        ("torchrun", "ddp", "cpu", Launch(0, 0, 4, 2), 1, []),  # two nodes
        ("python", "ddp", "cpu", ONE, 64, [ALONE, "1 rank x 64 threads on 2 usable cores"]),
    ],
)
def test_a_note_says_what_may_not_have_been_meant(monkeypatch, by, run_type, device, launch, threads, expected):
    monkeypatch.setattr(console, "usable_cores", lambda: 2)
    monkeypatch.setattr(console, "launcher", lambda: by)
    settings = stand_in(run_type=run_type, device=device, threads_per_rank=threads)
    notes = console.launch_warnings(settings, launch)
    assert len(notes) == len(expected)
    for note, words in zip(notes, expected, strict=True):
        assert note.startswith("note: ") and "\n" not in note
        assert re.search(words, note), note


def test_who_started_it():
    torchrun, deepspeed = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0"}, {"CROSS_RANK": "0", "RANK": "0", "LOCAL_SIZE": "1"}
    assert [launcher(variables) for variables in (torchrun, deepspeed, {"RANK": "0"}, {})] == [
        "torchrun", "deepspeed", "another", "python"
    ]  # fmt: skip


class Clock:
    now_s = 1000.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(console, "time", clock)
    return clock


@pytest.fixture
def quiet(tmp_path) -> Console:
    settings = settings_of(write_token_files(tmp_path), "--max_train_steps", "100", "--epochs", "10")
    return Console(settings, 0, is_speaking=True)


def test_lines_say_how_long_the_other_steps_take(quiet, clock, capsys):
    """2 s a step, a first one and another that are slow, and 10 s of validation after each 10th."""
    for step in range(1, 101):
        seconds = {1: 60.0, 15: 40.0}.get(step, 2.0)
        clock.now_s += seconds
        quiet.show_step(step, 5.0, 1e-3, seconds)
        if step % 10 == 0:
            clock.now_s += 10.0
    lines = {int(line.split("/")[0].split()[1]): line for line in capsys.readouterr().out.splitlines()}
    assert list(lines) == [1, *range(10, 101, 10)]
    assert lines[1].endswith("tokens/s") and lines[100].endswith("tokens/s"), "nothing is known yet; nothing is left"
    assert " 10,240 tokens  loss 5.0000  " in lines[10]
    assert lines[10].endswith("tokens/s  0:03:00 left")  # 90 x 2 s
    assert lines[20].endswith(
        "tokens/s  0:03:22 left"
    )  # 80 x (2 + 10 / 19) s: the median knows nothing of the slow step
    assert lines[90].endswith("tokens/s  0:00:29 left")  # 10 x (2 + 80 / 89) s


def test_a_terminal_has_the_lines_above_its_bar(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    settings = settings_of(write_token_files(tmp_path), "--max_train_steps", "20", "--epochs", "10")
    shown = Console(settings, 0, is_speaking=True)
    for step in range(1, 21):
        shown.show_step(step, 5.0, 1e-3, 1.0)
    shown.close()
    out, err = capsys.readouterr()
    assert [line.split("/")[0] for line in out.splitlines()] == [f"step {step:>5}" for step in (1, 10, 20)]
    assert "20/20" in err and "loss 5.0000" in err


def test_long_validation_says_how_far_it_is(quiet, clock, capsys):
    seen = []
    for index in quiet.batches(10, "validation"):
        seen.append(index)
        clock.now_s += 0.4 * LINE_EVERY_S
    assert seen == list(range(10))
    assert capsys.readouterr().out.splitlines() == [
        "validation: 3/10 batches  0:01:24 left", "validation: 6/10 batches  0:00:48 left",
        "validation: 9/10 batches  0:00:12 left",
    ]  # fmt: skip
    assert list(quiet.batches(10, "validation")) == seen and capsys.readouterr().out == ""  # a short one says nothing


def test_other_ranks_say_nothing(tmp_path, clock, capsys):
    silent = Console(settings_of(write_token_files(tmp_path)), 0, is_speaking=False)
    for _ in silent.batches(3, "validation"):
        clock.now_s += 2 * LINE_EVERY_S
        silent.show_step(10, 5.0, 1e-3, 1.0)
    assert capsys.readouterr() == ("", "")
