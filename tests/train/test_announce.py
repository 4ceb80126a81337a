"""What a run says of its place before the first step: nothing, where ranks and threads are what a person meant."""

from __future__ import annotations

import re

import pytest
from support.settings import stand_in

from testbed.distributed.launch import Launch, launcher
from testbed.train import console

ONE, TWO, FOUR = Launch(0, 0, 1, 1), Launch(0, 0, 2, 2), Launch(0, 0, 4, 4)
ALONE = "plain python starts one: ddp with one rank has nothing to distribute; torchrun --nproc-per-node 2 src/"
COUNTS_NO_CORES = "one rank, because the deepspeed command counts no cores: .*; deepspeed --num_gpus 2 src/gpt2.py"


@pytest.mark.parametrize(
    ("by", "run_type", "device", "launch", "threads", "expected"),
    [
        ("python", "ddp", "cpu", ONE, 2, [ALONE]),
        ("python", "ddp", "cuda", ONE, 2, [ALONE]),
        ("python", "baseline", "cpu", ONE, 2, []),
        ("torchrun", "ddp", "cpu", ONE, 2, []),  # --nproc-per-node 1 was typed
        ("torchrun", "ddp", "cpu", TWO, 1, []),
        ("deepspeed", "optimized", "cpu", ONE, 2, [COUNTS_NO_CORES]),
        ("deepspeed", "optimized", "cuda", ONE, 2, []),  # there one rank is one GPU
        ("deepspeed", "optimized", "cpu", TWO, 1, []),
        ("torchrun", "ddp", "cpu", FOUR, 1, ["4 ranks x 1 thread on 2 usable cores: they take turns"]),
        ("torchrun", "ddp", "cuda", FOUR, 1, []),
        ("torchrun", "ddp", "cpu", Launch(0, 0, 4, 2), 1, []),  # two nodes
        ("python", "baseline", "cpu", ONE, 64, ["1 rank x 64 threads on 2 usable cores.*--threads_per_rank"]),
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


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "0"}, "torchrun"),
        ({"CROSS_RANK": "0", "RANK": "0", "LOCAL_SIZE": "1"}, "deepspeed"),
        ({"RANK": "0"}, "another"),
        ({}, "python"),
    ],
)
def test_who_started_it(variables, expected):
    assert launcher(variables) == expected
