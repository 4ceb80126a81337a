"""Change token files while they are read."""

import itertools
import os
import time
from pathlib import Path

import numpy as np
import pytest
from support.token_file_cases import write, write_pairs

from testbed.data.disk_array import DiskArray, FileChanged
from testbed.data.token_file import (
    CLOCK_TICK_S,
    check_token_file,
    open_token_file,
    scan_token_file,
)
from testbed.data.windows import Windows


def cut_off(path):
    with path.open("r+b") as file:
        file.truncate(4)


def write_other_ids(path):
    """As many, all valid. The clock that stamps files ticks every few milliseconds, so the moment is set."""
    with path.open("r+b") as file:
        file.write(np.array([7, 7], "<u2").tobytes())
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**7))


def replace_by_another(path):
    other = path.with_suffix(".new")
    other.write_bytes(np.array([9] * 50, "<u2").tobytes())
    other.replace(path)


def read_once(path):
    """The file as a run has it once it trains; the clock that stamps files has ticked since it was written."""
    file = open_token_file(path)
    check_token_file(file, 300)
    time.sleep(CLOCK_TICK_S)
    return file


@pytest.mark.parametrize("name", ["a.bin", "a.targets.bin"])
@pytest.mark.parametrize(
    ("change", "fault"),
    [(cut_off, "it ends inside the bytes"), (write_other_ids, "it was written to, and its data are others")],
)
def test_a_file_that_changes_in_place_is_not_read_on(tmp_path, name, change, fault):
    """Mapped into memory, the first of these would kill the process."""
    path = write_pairs(tmp_path / "a.bin")
    windows = Windows(read_once(path), 8)
    expected = windows.read([0, 1], 2)
    change(tmp_path / name)
    with pytest.raises(FileChanged, match=f"{name} is no longer the file that was opened: {fault}") as caught:
        windows.read([0, 1], 2)
    assert "--resume auto" in str(caught.value) and "\n" not in str(caught.value)
    assert expected[0].tolist() == [[1, 2, 10, 11] + [299] * 5, [3, 10] + [299] * 7]


def test_text_that_changes_in_place_is_not_read_on(tmp_path):
    windows = Windows(read_once(write(tmp_path / "a.bin", [range(20)])), 4)
    windows.read([0, 3], 2)
    write_other_ids(tmp_path / "a.bin")
    with pytest.raises(FileChanged):
        windows.read([3], 1)


def write_under_the_old_time(path):
    """As rsync --inplace -t does it."""
    before = path.stat()
    write_other_ids(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("name", ["a.bin", "a.targets.bin"])
def test_other_ids_under_the_old_time_are_not_read_on(tmp_path, name):
    path = write_pairs(tmp_path / "a.bin")
    windows = Windows(read_once(path), 8)
    write_under_the_old_time(tmp_path / name)
    with pytest.raises(FileChanged, match=f"{name} is no longer the file that was opened: it was written to, and its"):
        windows.read([0, 1], 2)


def write_the_same(path):
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.write(data)


@pytest.mark.parametrize("name", ["a.bin", "a.targets.bin"])
@pytest.mark.parametrize("do", [Path.touch, write_the_same, lambda path: path.chmod(0o600)])
def test_a_file_whose_data_are_the_same_is_read_on(tmp_path, monkeypatch, name, do):
    """It is read once for that, and then it is as it was."""
    file, readings = read_once(write_pairs(tmp_path / "a.bin")), []
    windows = Windows(file, 8)
    expected = windows.read([0, 1], 2)
    monkeypatch.setattr(
        "testbed.data.token_file.scan_token_file", lambda file, **_: readings.append(1) or scan_token_file(file)
    )
    do(tmp_path / name)
    for _ in range(3):
        assert [rows.tolist() for rows in windows.read([0, 1], 2)] == [rows.tolist() for rows in expected]
    assert len(readings) == 1
    write_under_the_old_time(tmp_path / name)
    with pytest.raises(FileChanged):
        windows.read([0, 1], 2)


def test_what_was_read_before_the_data_were_put_back_is_read_again(tmp_path, monkeypatch):
    """A step must not train on ids that were there for a moment, before the reading that finds all as it was."""
    path = write(tmp_path / "a.bin", [range(20)])
    windows, data = Windows(read_once(path), 4), path.read_bytes()
    write_other_ids(path)
    look = type(windows.token_file).check_unchanged

    def put_back_and_look(file):
        if path.read_bytes() != data:
            path.write_bytes(data)
        return look(file)

    monkeypatch.setattr(type(windows.token_file), "check_unchanged", put_back_and_look)
    assert windows.read([0], 1)[0].tolist() == [[0, 1, 2, 3, 4]]


def test_a_file_that_somebody_goes_on_writing_to_is_not_read_on(tmp_path, monkeypatch):
    """Each time it has been read its data are still the same, and its times are others."""
    path = write(tmp_path / "a.bin", [range(20)])
    windows, moments = Windows(read_once(path), 4), itertools.count(1)

    def scan(file, **_):
        found = scan_token_file(file)
        os.utime(path, ns=(0, next(moments)))
        return found

    monkeypatch.setattr("testbed.data.token_file.scan_token_file", scan)
    path.touch()
    with pytest.raises(FileChanged, match="somebody goes on writing to it"):
        windows.read([0], 1)


def test_a_file_that_is_replaced_is_read_as_it_was(tmp_path):
    """So does preprocess_small.py: a run that trains goes on with what it began with."""
    path = write(tmp_path / "a.bin", [[1, 2, 3]])
    windows = Windows(read_once(path), 3)
    replace_by_another(path)
    assert windows.read([0], 1)[0].tolist() == [[1, 2, 3, 299]]


def test_a_disk_that_fails_says_so(tmp_path, monkeypatch):
    file = open_token_file(write(tmp_path / "a.bin", [[1, 2, 3]]))

    def fails(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("testbed.data.disk_array.os.pread", fails)
    with pytest.raises(FileChanged, match=r"a.bin .* it cannot be read \(Input/output error\)"):
        check_token_file(file, 300)


def test_a_file_that_grows_between_two_looks_is_not_opened(tmp_path):
    path = write(tmp_path / "a.bin", [[1, 2, 3]])
    with pytest.raises(FileChanged, match="changed while it was opened"):
        DiskArray(path, "<u2", 5)


def test_a_slice_is_read_whole_however_little_a_call_gives(tmp_path, monkeypatch):
    pread = os.pread
    array = DiskArray(write(tmp_path / "a.bin", [range(20)]), "<u2", 21)
    monkeypatch.setattr(
        "testbed.data.disk_array.os.pread", lambda file, size, offset: pread(file, min(size, 3), offset)
    )
    assert array[:].tolist() == [*range(20), 299] and array[2:7].tolist() == [2, 3, 4, 5, 6]
    assert array[30:].tolist() == [] and int(array[-1]) == 299 and len(array) == 21
    with pytest.raises(IndexError):
        array[21]


def test_looking_whether_a_file_changed_is_one_look_and_no_reading(tmp_path, monkeypatch):
    """Once per step."""
    file = read_once(write(tmp_path / "a.bin", [[1, 2, 3]]))
    fstat, looks = os.fstat, []
    monkeypatch.setattr("testbed.data.disk_array.os.fstat", lambda number: looks.append(1) or fstat(number))
    monkeypatch.setattr("testbed.data.disk_array.os.pread", None)
    assert not file.check_unchanged() and len(looks) == 1
