"""Start again without glibc's caches of small chunks: when, and with which command."""

from __future__ import annotations

import os
import sys

import pytest

from testbed.distributed import heap


@pytest.fixture
def started_again(monkeypatch):
    """The commands with which the process would have gone on, as on a machine with glibc and without a GPU."""
    commands: list[list[str]] = []
    monkeypatch.setattr(heap.os, "execv", lambda path, words: commands.append([path, *words]))
    monkeypatch.setattr(heap.platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(heap.Path, "exists", lambda path: False)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "src/gpt2.py", "--run_type", "ddp"])
    monkeypatch.delenv(heap.VARIABLE, raising=False)
    return commands


def test_a_run_on_a_cpu_starts_again_once_with_the_same_command(started_again, monkeypatch):
    monkeypatch.setenv(heap.VARIABLE, "glibc.malloc.check=0")
    heap.without_small_caches("/there/src/gpt2.py", "auto")
    assert os.environ[heap.VARIABLE] == f"glibc.malloc.check=0:{heap.SETTING}"
    assert started_again == [[sys.executable, sys.executable, "-u", "src/gpt2.py", "--run_type", "ddp"]]
    heap.without_small_caches("/there/src/gpt2.py", "auto")
    assert len(started_again) == 1


def test_nothing_starts_again_on_a_gpu_or_where_a_test_runs_the_program(started_again, monkeypatch):
    heap.without_small_caches("/there/src/gpt2.py", "cuda")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "pytest", "tests"])
    heap.without_small_caches("/there/src/gpt2.py", "cpu")
    assert not started_again and heap.VARIABLE not in os.environ


@pytest.mark.parametrize(
    "before",
    ["-m pdb", "-mpdb", "-m cProfile -o out", "-X importtime -m trace --trace", "/bin/coverage run", "-c code"],
)
def test_a_debugger_or_profiler_keeps_its_process(started_again, monkeypatch, before):
    monkeypatch.setattr(sys, "orig_argv", ["python", *before.split(), "src/gpt2.py", "--run_type", "ddp"])
    heap.without_small_caches("/there/src/gpt2.py", "cpu")
    assert not started_again


@pytest.mark.parametrize("before", ["", "-u", "-X importtime -O", "-W error -Xdev"])
def test_options_of_python_are_kept(started_again, monkeypatch, before):
    monkeypatch.setattr(sys, "orig_argv", ["python", *before.split(), "src/gpt2.py"])
    heap.without_small_caches("/there/src/gpt2.py", "cpu")
    assert started_again == [[sys.executable, sys.executable, *before.split(), "src/gpt2.py"]]


def test_a_process_that_may_not_start_again_goes_on(started_again, monkeypatch):
    def refuse(path, words):
        raise PermissionError

    monkeypatch.setattr(heap.os, "execv", refuse)
    heap.without_small_caches("/there/src/gpt2.py", "cpu")
