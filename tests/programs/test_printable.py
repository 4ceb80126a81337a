"""What a file or a folder is called reaches a terminal, a page and a picture as letters: no control characters, no
formulas."""

from __future__ import annotations

import contextlib
import os
import unicodedata
from pathlib import Path

import pytest
from support import evil
from support.evil import complete_again, evil_metrics
from support.metrics_examples import save
from support.programs import TINY_RUN, run_here
from support.report_cases import load
from support.settings import typed

from testbed.analysis.charts.training import plot_results, write_charts
from testbed.analysis.report.build import write_html, write_markdown
from testbed.distributed.launch import refuse
from testbed.errors import one_line, printable, say_if_read
from testbed.train.console import Console

OBEYED = "\x1b[2J\x1b]0;owned\x07\r\u202e\x9b31m"  # clears, renames, overwrites, turns around, colours
FORMULA = "$x^{2$"


def obeyed(text: str) -> set[str]:
    return {each for each in text if unicodedata.category(each) in ("Cc", "Cf", "Zl", "Zp") and each not in "\n\t"}


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """Two runs that say it wherever a file may say what it likes, in folders that are called so."""
    monkeypatch.setattr(evil, "EVIL", f"{OBEYED}{FORMULA}\u2028next")
    for number in (1, 2):
        save(tmp_path / "runs" / f"{OBEYED}{FORMULA}{number}", evil_metrics(number) | complete_again())
        save(tmp_path / "runs" / f"{OBEYED}{number}_failed", evil_metrics(number))
    return tmp_path / "runs"


def test_pages_and_pictures_hold_letters_alone(runs, tmp_path):
    found = load(runs)
    assert not any(obeyed(run.full_label) for run in found)
    write_html(found, tmp_path / "report.html")
    write_markdown(found, tmp_path / "report.md")
    for page in ("report.html", "report.md"):
        text = (tmp_path / page).read_text(encoding="utf-8")
        assert not obeyed(text) and "owned" in text, page
    assert len(write_charts(found, tmp_path / "charts")) > 3
    whole = [run for run in found if run.status == "complete"]
    plot_results({f"{OBEYED}{FORMULA}": whole[:1], "b": whole[1:]}, "tokens_per_second", tmp_path / "a.png")


@pytest.mark.parametrize(
    "words",
    [
        ["scripts/more/verify_run_artifacts.py", "--metrics-only", "--dir", "RUNS"],
        ["scripts/compare_runs.py", "RUNS", "--against", "RUNS"],
        ["scripts/sample.py", "--prompt", "x", "--checkpoint", "RUNS"],
    ],
    ids=lambda words: Path(words[0]).stem,
)
def test_a_terminal_is_told_letters_alone(words, runs, tmp_path):
    moved = runs.rename(tmp_path / f"moved{OBEYED}")
    words = [word.replace("RUNS", str(moved)) for word in words]
    done = run_here(words[0], *words[1:])
    assert "Traceback" not in done.stderr
    assert not obeyed(done.stdout + done.stderr) and "owned" in done.stdout + done.stderr


def test_the_trainer_tells_letters_alone(token_files, tmp_path, capsys):
    names = ["--train_data_path", str(token_files[0]), "--val_data_path", str(token_files[1])]
    checked = typed([*TINY_RUN, *names])
    Console(checked.settings, 0, is_speaking=True).say(f"metrics: {tmp_path}/{OBEYED}\nsecond line")
    refuse(None, f"--checkpoint_path {OBEYED} is not a folder")
    said = "".join(capsys.readouterr())
    assert not obeyed(said) and said.count("owned") == 2 and "\nsecond line\n" in said


def test_letters_of_all_scripts_stay():
    text = "Grüße 漢字 naïve … 10\u202f000\xa0€ 🎉"
    assert printable(text) == text == one_line(text)
    assert printable("a\nb\tc\x00", kept="\n\t") == "a\nb\tc\\x00" and printable("a\nb") == "a\\nb"
    assert printable("\udcff\u200b\u2066") == "\\udcff\\u200b\\u2066"


def test_a_stream_without_a_reader_is_no_error(capsys):
    say_if_read("a\x1b[2Jb")
    assert capsys.readouterr().err == "a\\x1b[2Jb\n"
    read_end, write_end = os.pipe()
    os.close(read_end)
    stream = os.fdopen(write_end, "w")
    say_if_read("unread", stream)
    with contextlib.suppress(BrokenPipeError):  # it tries again
        stream.close()
