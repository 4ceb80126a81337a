"""scripts/fault_drill.py: what it plans, that it strikes what it says, and that nothing that is lost escapes it."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.fault_drill_cases import VARIANTS, fault
from support.programs import REPOSITORY

from testbed.experiments.fault_drill.damage import FILE_SIZE_LIMIT, TMPFS, SmallDisk, damage_files, disk_full_backend
from testbed.experiments.fault_drill.faults import (
    DAMAGE,
    DEEPSPEED,
    KINDS,
    LAUNCH,
    PROCESSES,
    RESTARTING,
    TORCHRUN,
    events,
    plan,
)
from testbed.experiments.fault_drill.start import _BEGINS
from testbed.experiments.fault_drill.verdict import weights_sha256
from testbed.experiments.fault_drill.work import Work


def test_a_fault_follows_from_the_seed_and_its_number_alone():
    """So that a lost one can be repeated: whatever else is asked for, and on whatever day."""
    faults = [plan(7, number, VARIANTS, 12, 3) for number in range(1, 201)]
    assert faults == [plan(7, number, VARIANTS, 12, 3) for number in range(1, 201)]
    assert plan(7, 150, VARIANTS, 12, 3) == faults[149]
    others = [plan(8, number, VARIANTS, 12, 3) for number in range(1, 201)]
    assert sum(one != other for one, other in zip(faults, others, strict=True)) > 190


def test_each_kind_strikes_each_run_type_and_every_part_of_a_run():
    faults = [plan(1, number, VARIANTS, 12, 3) for number in range(1, 205)]
    for block in range(0, 204, 12):
        assert {each.kind for each in faults[block : block + 12]} == set(KINDS), (
            "12 faults, the short form, have all kinds"
        )
    assert set(Counter((each.kind, each.run_type) for each in faults).values()) <= {5, 6}
    after = {each.moments[0].after for each in faults if each.moments}
    assert after == set(events(12, 3)), "start-up, steps, each save and the end"
    of_saves = [each for each in faults if each.kind == "kill_rank_saving"]
    assert all(each.moments[0].after.startswith("save ") for each in of_saves)
    assert any(len(each.moments) == 2 for each in faults), "some are struck again while they resume"
    forms = {(each.kind, each.form) for each in faults if each.form}
    assert forms == {(kind, form) for kind, each in DAMAGE.items() for form in each}


def test_what_strikes_can_be_struck():
    """A launcher is there to be killed; what a stopped rank needs is there to end it; something is there to damage."""
    for number in range(1, 400):
        each = plan(3, number, VARIANTS, 12, 3)
        if each.target == "launcher" or each.kind == "stop_rank":
            assert each.launcher != PROCESSES
        if each.kind == "stop_rank":
            assert each.moments[0].after != LAUNCH
        if each.launcher == DEEPSPEED:
            assert each.run_type.startswith("optimized")
        if each.launcher == RESTARTING:
            assert each.kind.startswith("kill_rank") and len(each.moments) == 1
        if each.kind in DAMAGE:
            assert each.moments[0].after in ("saved 3", "saved 6", "saved 9") and each.target == "everything"
        assert each.signal is {"sigterm": signal.SIGTERM, "sigusr1": signal.SIGUSR1, "stop_rank": signal.SIGSTOP}.get(
            each.kind, signal.SIGKILL
        )


@pytest.mark.parametrize(("version", "is_told"), [("2.11.0", False), ("2.12.0", True)])
def test_torchrun_is_told_how_long_to_wait_where_it_can_be(monkeypatch, tmp_path, version, is_told):
    monkeypatch.setattr("importlib.metadata.version", {"torch": version}.__getitem__)
    work = Work(tmp_path, tmp_path, "tiny", steps=8, save_every=2, collective_timeout=20, grace=15)
    ((command, _),) = work.commands(TORCHRUN, [])
    assert ("--shutdown-timeout" in command) == is_told


def checkpoint_with_files(directory: Path) -> Path:
    folder = directory / "checkpoints" / "step_000006"
    (folder / "inside").mkdir(parents=True)
    for number, name in enumerate(("a.bin", "inside/b.bin", "manifest.json")):
        (folder / name).write_bytes(np.random.default_rng(number).bytes(1000))
    earlier = directory / "checkpoints" / "step_000003"
    shutil.copytree(folder, earlier)
    (directory / "checkpoints" / "step_000006.damaged").mkdir()
    (directory / "training_metrics.json").write_text(json.dumps({"steps": list(range(300))}))
    return folder


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("kind", "form"), [(kind, form) for kind, forms in DAMAGE.items() for form in forms])
@pytest.mark.parametrize("shares", [(0.0, 0.0), (0.5, 0.73), (0.999, 0.999)])
def test_damage_does_what_it_says_and_no_more(kind, form, shares, tmp_path):
    checkpoint_with_files(tmp_path)
    before = bytes_of(tmp_path)
    said = damage_files(fault(kind, form=form, shares=shares), tmp_path)
    after = bytes_of(tmp_path)
    if kind == "half_written_temporary":
        assert before.items() <= after.items() and all(
            name.split("/")[-1] in said or "/." in name for name in after.keys() - before.keys()
        )
        halves = {name: content for name, content in after.items() if name not in before}
        assert all(".tmp" in name for name in halves) and any("step_000007.tmp" in name for name in halves)
        assert len(halves) <= 4 and sum(map(len, halves.values())) < 3 * 1000 + len(before["training_metrics.json"])
        return
    changed = [name for name in before if after.get(name) != before[name]]
    assert len(changed) == 1 and after.keys() <= before.keys()
    assert changed[0].startswith("training_metrics" if kind == "corrupt_metrics" else "checkpoints/step_000006/")
    assert Path(changed[0]).name in said
    old, new = before[changed[0]], after.get(changed[0])
    if form == "one bit":
        flipped = np.unpackbits(np.frombuffer(old, np.uint8) ^ np.frombuffer(new, np.uint8)).sum()
        assert flipped == 1
    elif form == "1 byte shorter":
        assert len(new) == len(old) - 1
    elif form == "half":
        assert old.startswith(new) and len(new) < len(old)
    else:
        assert new is None if form == "removed" else new == b"" if form == "empty" else new != old


def test_a_manifest_that_lost_a_byte_is_no_json_any_more(tmp_path):
    """Its last byte is a line feed, and without that it would be as whole as before."""
    newest = tmp_path / "checkpoints" / "step_000006"
    newest.mkdir(parents=True)
    (newest / "manifest.json").write_text('{"files": {}}\n')
    damage_files(fault("truncated_checkpoint", form="1 byte shorter"), tmp_path)
    assert (newest / "manifest.json").read_text() == '{"files": {}\n'


def test_what_the_drill_reads_in_a_log_is_what_the_program_says():
    assert _BEGINS in (REPOSITORY / "src" / "gpt2.py").read_text()


def test_nothing_there_to_damage_is_said(tmp_path):
    assert damage_files(fault("flipped_bit"), tmp_path) is None
    assert damage_files(fault("corrupt_metrics"), tmp_path) is None


@pytest.mark.launches
@pytest.mark.skipif(disk_full_backend() != TMPFS, reason="this process may not mount a tmpfs")
def test_a_small_disk_is_full_until_there_is_room(tmp_path):
    file = tmp_path / "disk" / "file"
    with SmallDisk(tmp_path / "disk", 128 * 1024, TMPFS) as disk:
        with pytest.raises(OSError, match="No space left"):
            file.write_bytes(bytes(200_000))
        disk.make_room()
        file.write_bytes(bytes(200_000))
    assert not (tmp_path / "disk").is_mount() and not file.exists()


@pytest.mark.launches
def test_the_fallback_limits_the_length_of_files(tmp_path):
    with SmallDisk(tmp_path / "disk", 100_000, FILE_SIZE_LIMIT) as disk:
        limit = disk.file_size_limit
        disk.make_room()
        assert disk.file_size_limit is None
    code = f"import pathlib; pathlib.Path({str(tmp_path / 'file')!r}).write_bytes(bytes(200_000))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    assert "File too large" in done.stderr and (tmp_path / "file").stat().st_size == limit


def test_the_hash_sees_tensors_and_nothing_else(tmp_path):
    weights = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones(4, np.float32)}

    def hash_of(tensors: dict, metadata: dict | None = None) -> str:
        save_file(tensors, tmp_path / "weights.safetensors", metadata)
        return weights_sha256(tmp_path / "weights.safetensors")

    same = hash_of(weights)
    assert hash_of(dict(reversed(weights.items())), {"saved": "later"}) == same
    changed = weights["b"].copy()
    changed.view(np.uint32)[1, 2] ^= 1
    others = [
        {**weights, "b": changed},
        {**weights, "b": weights["b"].reshape(3, 2)},
        {**weights, "b": weights["b"].view(np.int32)},
        {"c": weights["b"], "a": weights["a"]},
    ]
    assert same not in [hash_of(each) for each in others]
