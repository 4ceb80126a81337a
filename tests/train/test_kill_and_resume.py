"""Kill runs at random moments, or ask them to end, and resume them: the weights are those of an undisturbed run.

    bash scripts/test.sh --all tests/train/test_kill_and_resume.py --drills 50                    # new ones each time
    bash scripts/test.sh --all tests/train/test_kill_and_resume.py --drills 1 --drill-seed 1234   # one of them again

A drill draws a run type, how it is started, and one or two disturbances. All follow from its seed, which a failing
drill names. At which instruction a signal arrives depends on the machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.endings import COMPLETE, PREEMPTED, Started, flags_of, ranks, started
from support.programs import python_command, torchrun_command, write_token_files

from testbed.config.run_types import STRATEGIES
from testbed.distributed import watchdog
from testbed.metrics.file import read_metrics

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="signals and process states as Linux has them")

STEPS, SAVE_EVERY = 12, 3
WORK = (
    "--num_heads 4 --global_batch_size 32 --micro_batch_size_per_gpu 4 --max_val_steps 0 --sample_tokens 0 "
    f"--max_train_steps {STEPS} --save_every {SAVE_EVERY} --resume auto --collective_timeout 20 --grace_seconds 20"
).split()
RUN_TYPES = {
    **{name: f"--run_type {name} --dropout 0.1" for name in STRATEGIES if name != "dp"},  # dp needs several GPUs
    "tensor": "--run_type tensor",  # refuses dropout
    "ZeRO 3": "--run_type optimized --zero_stage 3 --dropout 0.1",
    "fsdp, saving in the background": "--run_type fsdp --async_mode async --dropout 0.1",
}
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1)
DAMAGE: dict[str, Callable[[bytes, int], bytes]] = {  # what becomes of a file's content, at a place in it
    "one bit flipped": lambda content, place: content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :],
    "cut off": lambda content, place: content[:place],
}


@dataclasses.dataclass(frozen=True)
class Disturbance:
    """A signal to some processes, a delay after a step (0: after the start), and what then happens to a file.

    Attributes:
        targets: ranks, or the launcher.
        damage: of a file of the newest checkpoint; None: nothing.
        shares: which file, and where in it.
    """

    number: signal.Signals
    targets: tuple[int | str, ...]
    step: int
    delay_s: float
    damage: str | None
    shares: tuple[float, float]


def drawn(seed: int) -> tuple[str, bool, list[Disturbance]]:
    """Return the run type, whether torchrun starts it, and what disturbs one start after the other."""
    rng = random.Random(seed)
    name = rng.choice(list(RUN_TYPES))
    is_alone = name == "baseline"
    has_launcher = not is_alone and rng.random() < 1 / 3
    choices = [(0,)] if is_alone else [(0,), (1,), ("launcher",) if has_launcher else (0, 1)]
    disturbances = []
    for _ in range(rng.choice((1, 1, 2))):
        number = rng.choice(SIGNALS)
        damage = rng.choice((None, *DAMAGE)) if number is signal.SIGKILL else None
        place = rng.choice(choices), rng.randrange(STEPS), rng.uniform(0, 0.2)
        disturbances.append(Disturbance(number, *place, damage, (rng.random(), rng.random())))
    return name, has_launcher, disturbances


def begin(
    name: str, folder: Path, files: tuple[Path, Path], has_launcher: bool
) -> contextlib.AbstractContextManager[Started]:
    flags = flags_of(files, folder, *WORK, *RUN_TYPES[name].split())
    if name == "baseline":
        return started(folder, [[*python_command(), *flags]])
    return started(folder, [[*torchrun_command(2), *flags]]) if has_launcher else ranks(folder, flags)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Callable[[str], tuple[Path, tuple[Path, Path]]]:
    """Return a complete run of this type, which is run once, and the token files."""
    files = write_token_files(tmp_path_factory.mktemp("tokens"))

    @functools.cache
    def run(name: str) -> tuple[Path, tuple[Path, Path]]:
        folder = tmp_path_factory.mktemp("undisturbed") / "run"
        with begin(name, folder, files, has_launcher=False) as run:
            assert set(run.codes()) == {0}, run.text
        return folder, files

    return run


def processes_of(run: Started, has_launcher: bool) -> dict[int | str, psutil.Process]:
    """Return the processes that there are now, by rank or as the launcher."""
    found: dict[int | str, psutil.Process] = {}
    with contextlib.suppress(psutil.Error):
        if not has_launcher:
            return {rank: psutil.Process(process.pid) for rank, process in enumerate(run.processes)}
        found["launcher"] = psutil.Process(run.processes[0].pid)
        for child in found["launcher"].children():
            if "RANK" in (variables := child.environ()):
                found[int(variables["RANK"])] = child
    return found


def has_come(run: Started, it: Disturbance, there: dict[int | str, psutil.Process]) -> bool:
    """Return whether the targets are there, and rank 0 is at the step. An earlier start left a progress file too."""
    if not set(it.targets) <= there.keys():
        return False
    place = watchdog.read_place(run.folder, 0)
    is_of_this_start = place is not None and 0 in there and place.process == there[0].pid
    return it.step == 0 or (is_of_this_start and place.step >= it.step)


def disturb(run: Started, it: Disturbance, has_launcher: bool) -> bool:
    """Send the signal at its moment and wait until nothing of the start is left. False where it had ended before."""
    deadline_s = time.monotonic() + 150
    there = processes_of(run, has_launcher)
    while not has_come(run, it, there) and None in [process.poll() for process in run.processes]:
        assert time.monotonic() < deadline_s, f"waited in vain for step {it.step}\n{run.text}"
        time.sleep(0.002)
        there = processes_of(run, has_launcher)
    time.sleep(it.delay_s)
    is_over = (run.folder / COMPLETE).exists() or None not in [process.poll() for process in run.processes]
    for target in it.targets:
        with contextlib.suppress(psutil.NoSuchProcess, KeyError):
            there[target].send_signal(it.number)
    run.codes(60)
    _, left = psutil.wait_procs(there.values(), 60)
    assert not left, f"{left} still run after a signal to {it.targets}\n{run.text}"
    return not is_over


def checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "checkpoints").glob("step_*") if re.fullmatch(r"step_\d{6}", path.name))


def damage(it: Disturbance, folder: Path) -> None:
    """Damage a file of the newest checkpoint, and leave half of another checkpoint and of a metrics file."""
    newest = checkpoints(folder)[-1]
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    path = files[int(it.shares[0] * len(files))]
    content = path.read_bytes()
    path.write_bytes(DAMAGE[it.damage](content, int(it.shares[1] * (len(content) - 1))))
    shutil.copytree(newest, newest.with_name(f".step_{STEPS:06d}.tmp"), dirs_exist_ok=True)
    (folder / ".training_metrics.json.999999.tmp").write_text('{"schema_version": ')


def carry_out(seed: int, folder: Path, undisturbed) -> None:
    name, has_launcher, disturbances = drawn(seed)
    reference, files = undisturbed(name)
    newest = 0
    for it in disturbances:
        with begin(name, folder, files, has_launcher) as run:
            is_met = disturb(run, it, has_launcher)
        steps = [int(path.name[5:]) for path in checkpoints(folder)]
        newest = steps[-1] if steps else 0
        if (folder / PREEMPTED).exists():
            assert read_metrics(folder / "training_metrics.json")["steps"][-1]["step"] == newest, "a stop loses no step"
        if is_met and it.damage and steps and not (folder / COMPLETE).exists():
            damage(it, folder)
            newest = steps[-2] if len(steps) > 1 else 0
    was_complete = (folder / COMPLETE).exists()
    with begin(name, folder, files, has_launcher) as run:
        assert set(run.codes()) == {0}, run.text
        run.mark(COMPLETE)
    metrics, expected = (read_metrics(path / "training_metrics.json") for path in (folder, reference))
    assert was_complete or metrics["segments"][-1]["first_step"] == newest + 1, "it resumed the newest whole checkpoint"
    rows, expected_rows = ([(row["step"], row["loss"]) for row in each["steps"]] for each in (metrics, expected))
    assert rows == expected_rows, "each step once, with the loss of the undisturbed run"
    assert (folder / "model.safetensors").read_bytes() == (reference / "model.safetensors").read_bytes()
    assert [path.name for path in folder.rglob("*.tmp")] == []


@pytest.mark.launches
@pytest.mark.slow
def test_a_disturbed_run_ends_with_the_weights_of_an_undisturbed_one(drill_seed, undisturbed, tmp_path):
    try:
        carry_out(drill_seed, tmp_path / "run", undisturbed)
    except BaseException as error:
        error.add_note(f"{drawn(drill_seed)}; again: --drills 1 --drill-seed {drill_seed}")
        raise


def test_a_drill_follows_from_its_seed_and_all_that_can_be_drawn_is():
    drills = [drawn(seed) for seed in range(300)]
    assert drills == [drawn(seed) for seed in range(300)]
    assert {name for name, *_ in drills} == RUN_TYPES.keys()
    all_of_them = [it for *_, disturbances in drills for it in disturbances]
    assert {it.damage for it in all_of_them} == {None, *DAMAGE} and {it.number for it in all_of_them} == {*SIGNALS}
    assert {it.step for it in all_of_them} == {*range(STEPS)}
    assert {it.targets for it in all_of_them} == {(0,), (1,), (0, 1), ("launcher",)}
