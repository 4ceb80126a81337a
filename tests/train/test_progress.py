"""The lines of a run without a terminal: how long it takes yet, and that validation moves."""

from __future__ import annotations

import pytest
from support.programs import write_token_files
from support.settings import settings_of

from testbed.train import console
from testbed.train.console import LINE_EVERY_S, Console


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
    assert lines[10].endswith("tokens/s  0:03:00 left")  # 90 x 2 s
    assert lines[20].endswith(
        "tokens/s  0:03:22 left"
    )  # 80 x (2 + 10 / 19) s: the median knows nothing of the slow step
    assert lines[90].endswith("tokens/s  0:00:29 left")  # 10 x (2 + 80 / 89) s


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
