"""Logs as they are found: in other encodings, coloured, cut, run together. They are read rightly or not at all."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest
from support.real_logs import FOLDER, LOGS

from testbed.audit.claims import FAILS, audit, read_reported
from testbed.audit.reported import Reported
from testbed.errors import InputError

FACTS = (
    "form", "world_size", "global_batch_size", "micro_batch_size", "sequence_length", "num_parameters", "device_name",
    "peak_flops",
)  # fmt: skip
FIGURES = ("optimizer_steps", "time_s", "rate", "train_loss", "val_loss", "mfu", "tflops")


def read(path: Path, content: bytes) -> Reported | None:
    path.write_bytes(content)
    try:
        (run,) = read_reported([path])
    except InputError as error:
        assert "is no log that is known" in str(error)
        return None
    return run


def colours(text: str) -> str:
    """Return the lines as a terminal gets them: a title, the cursor to the left, colours around some words."""
    return "\n".join(f"\x1b]0;run\x07\x1b[2K\x1b[1G{line}\x1b[?25l" for line in text.split("\n")).replace(
        "loss", "\x1b[1;38;5;12mloss\x1b[0m\x1b[K"
    )


def copied_colours(text: str) -> str:
    """Return the lines as a browser's clipboard keeps colours: without the byte that begins them."""
    return text.replace("loss", "[32mloss").replace("|", "[39m|")


OTHERS = {
    "lines ended as by Windows": lambda text: text.replace("\n", "\r\n").encode(),
    "lines ended by returns alone": lambda text: text.replace("\n", "\r").encode(),
    "UTF-16 with its mark": lambda text: text.encode("utf-16"),
    "UTF-16": lambda text: text.encode("utf-16-le"),
    "UTF-16, the other order": lambda text: text.encode("utf-16-be"),
    "UTF-8 with a mark": lambda text: text.encode("utf-8-sig"),
    "colours": lambda text: colours(text).encode(),
    "colours of a copy": lambda text: copied_colours(text).encode(),
    "empty lines between": lambda text: text.replace("\n", "\n\n").encode(),
    "twice": lambda text: (text + text).encode(),
}


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("change", OTHERS)
def test_the_same_is_read_however_it_is_written(tmp_path, log, change):
    (sound,) = read_reported([log])
    text = log.read_text(encoding="utf-8")
    other = read(tmp_path / log.name, OTHERS[change](text if text.endswith("\n") else f"{text}\n"))
    assert other is not None
    assert {name: getattr(other, name) for name in FACTS + FIGURES} == {
        name: getattr(sound, name) for name in FACTS + FIGURES
    }


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
def test_a_log_that_was_cut_contradicts_nothing(tmp_path, log):
    """Cut anywhere at its end or at its beginning, and in the middle of a number."""
    (sound,) = read_reported([log])
    content, choose = log.read_bytes(), random.Random(5)
    path = tmp_path / log.name
    for _ in range(40):
        at = choose.randrange(1, len(content))
        for part in (content[:at], content[at:]):
            run = read(path, part)
            if run is None:
                continue
            assert all(getattr(run, name) in (None, getattr(sound, name)) for name in FACTS)
            assert [finding.message for finding in audit([path]) if finding.severity == FAILS] == []


def test_a_number_at_the_end_of_a_file_may_be_half_of_one(tmp_path):
    line = "step:  {0}  loss: 12.4  memory: 1.00GiB(9.00%)  tps: 1,360  tflops: 114.62  mfu: 5.09"
    whole = "\n".join(line.format(step) + "%" for step in range(1, 6)) + "\n"
    run = read(tmp_path / "a.log", (whole + line.format(6)[:-1]).encode())
    assert run is not None and "mfu" not in run.lines[-1].figures
    assert run.mfu == 0.0509


@pytest.mark.parametrize(("name", "mark"), [("torchtitan", "loss:"), ("nanochat", "| loss:"), ("llmc", "| loss "),
                                            ("megatron", "elapsed time per iteration (ms)")])  # fmt: skip
@pytest.mark.parametrize("between", ["\n", "", "\0"])
def test_two_lines_in_one_are_none(tmp_path, name, mark, between):
    """Two processes wrote at once, or a disk was full: which figure belongs to which step is unknown."""
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    first, second = [line for line in text.split("\n") if mark in line][-2:]
    (sound,) = read_reported([FOLDER / f"{name}.txt"])
    run = read(tmp_path / "a.log", text.replace(first + text.partition(first)[2].partition(second)[0] + second,
                                                first + between + second).encode())  # fmt: skip
    lines = run.lines if run else ()
    own = {"own tok/s", "total time", "sum of dt", "samples per iteration"}  # of two lines in a row
    figures = [{key: value for key, value in line.figures.items() if key not in own} for line in sound.lines]
    assert all({key: value for key, value in line.figures.items() if key not in own} in figures for line in lines)
    assert len(lines) == len(sound.lines) - 2 * (between != "\n")


def test_settings_that_run_into_the_next_line_are_none(tmp_path):
    text = (FOLDER / "megatron.txt").read_text(encoding="utf-8")
    setting = next(line for line in text.split("\n") if "  micro_batch_size ." in line)
    run = read(tmp_path / "a.log", text.replace(f"{setting}\n", f"{setting}0: ").encode())
    assert run is not None and run.micro_batch_size is None


@pytest.mark.parametrize("name", ["llmc", "megatron", "nanochat", "nanogpt", "modded_nanogpt_2025"])
def test_of_two_runs_in_a_file_the_last_is_read(tmp_path, name):
    """A run of other figures stands before it, as in a log that is written on."""
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    (sound,) = read_reported([FOLDER / f"{name}.txt"])
    before = text.replace(" ms |", "0 ms |").replace("(ms): 1", "(ms): 71").replace("dt: 4", "dt: 94")
    before = before.replace(", time ", ", time 9").replace("train_time:", "train_time:9")
    assert before != text
    run = read(tmp_path / "a.log", f"{before}\n{text}\n".encode())
    assert run is not None and run.lines == sound.lines
    assert {field: getattr(run, field) for field in FIGURES} == {field: getattr(sound, field) for field in FIGURES}


def test_lines_of_an_earlier_run_of_another_length_are_left_out(tmp_path):
    """The later one begins at step 10 of 90, where its log was turned over."""
    text = (FOLDER / "megatron.txt").read_text(encoding="utf-8")
    later = [line.replace("/      15 |", "/      90 |") for line in text.split("\n") if "iteration       1" in line]
    run = read(tmp_path / "a.log", "\n".join([text, *later, ""]).encode())
    assert run is not None and [line.step for line in run.lines] == list(range(10, 16))


def test_settings_of_deepspeed_are_not_those_of_megatron(tmp_path):
    """DeepSpeed counts its data-parallel ranks alone as world_size."""
    line = "[2021-05-25 22:30:04,196] [INFO] [config.py:752:print]   world_size ................... 16\n"
    text = (FOLDER / "megatron_deepspeed.txt").read_text(encoding="utf-8")
    kept = "\n".join(row for row in text.splitlines() if "world" not in row)
    run = read(tmp_path / "a.log", f"{line}{kept}\n".encode())
    assert run is not None and run.world_size is None


def test_a_packed_file_says_so_and_in_a_folder_ends_nothing(tmp_path):
    text = (FOLDER / "nanogpt.txt").read_bytes()
    (tmp_path / "b.log").write_bytes(text)
    (tmp_path / "digits.txt").write_text("1" * 500, encoding="utf-8")
    (tmp_path / "quotes.csv").write_text('a,"b"c\n1,2\n', encoding="utf-8")
    for content, program in ((gzip.compress(text), "gzip"), (b"PK\x03\x04" + text, "zip")):
        (tmp_path / "a.log").write_bytes(content)
        with pytest.raises(InputError, match=f"{program} packed it; unpack it first"):
            read_reported([tmp_path / "a.log"])
        assert [run.path.name for run in read_reported([tmp_path])] == ["b.log"]


@pytest.mark.parametrize("content", [b"", b"\n", b"\0" * 5000, b"\xff\xfe", b"iter 1: loss 2.0", b"x" * 10])
def test_files_with_nothing_in_them_are_no_logs(tmp_path, content):
    assert read(tmp_path / "a.log", content) is None


def test_one_line_is_a_log_of_one_line(tmp_path):
    run = read(tmp_path / "a.log", b"iter 10: loss 2.5, time 100.00ms, mfu 30.00%\n")
    assert run is not None and (run.train_loss, run.time_s, run.mfu) == (2.5, 0.1, 0.3)


def test_digits_of_another_script_are_read_as_digits_or_not_at_all(tmp_path):
    line = "iter 10: loss 2.5, time 100.00ms, mfu 30.00%\n".translate(str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩"))
    run = read(tmp_path / "a.log", line.encode())
    assert run is None or (run.train_loss, run.time_s) == (2.5, 0.1)


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("prefix", ["[rank{0}]:", "{0}: ", ""])
def test_ranks_that_write_at_once_contradict_nothing(tmp_path, log, prefix):
    """Four ranks print every line, each a line behind the one before it."""
    (sound,) = read_reported([log])
    lines = log.read_text(encoding="utf-8").splitlines()
    mixed = [
        prefix.format(rank) + lines[number - rank]
        for number in range(len(lines) + 3)
        for rank in range(4)
        if 0 <= number - rank < len(lines)
    ]
    run = read(tmp_path / log.name, ("\n".join(mixed) + "\n").encode())
    if run is None:  # the format has no place for a prefix
        assert prefix
        return
    assert all(getattr(run, name) in (None, getattr(sound, name)) for name in (*FACTS, "train_loss", "optimizer_steps"))
    assert [finding.message for finding in audit([tmp_path / log.name]) if finding.severity == FAILS] == []
