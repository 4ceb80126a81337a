"""Plan faults: their kind, place and moment. All follows from the seed and the number of a fault, so it can be
repeated.

A moment is an event that can be seen in the run's folder and a share of the time that the reference run took from
there to the next event, so that a fault on a slower machine comes at the same place of the run.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from testbed.sweep.request import Variant

KINDS = {
    "kill_rank": "kill -9 of one rank at any moment, start-up and the end included; sometimes again while it resumes",
    "kill_rank_saving": "kill -9 of one rank while a checkpoint is written",
    "kill_launcher": "kill -9 of the launcher",
    "kill_everything": "kill -9 of the launcher and all ranks at once, as when a node is lost",
    "sigterm": "SIGTERM to one rank, to all ranks, or to the launcher",
    "sigusr1": "SIGUSR1 to one rank, to all ranks, or to the launcher",
    "stop_rank": "SIGSTOP: one rank stands still and answers nothing",
    "disk_full": "the disk is full at a random byte; then there is room again",
    "truncated_checkpoint": "everything killed, then a file of the newest checkpoint is shortened, emptied or removed",
    "flipped_bit": "everything killed, then one bit of one file of the newest checkpoint is flipped",
    "corrupt_metrics": "everything killed, then training_metrics.json is cut, emptied, removed or overwritten",
    "half_written_temporary": "everything killed, and half of a checkpoint and of a metrics file are left behind",
}
DAMAGE = {  # the forms that damage on disk takes
    "truncated_checkpoint": ("1 byte shorter", "half", "empty", "removed"),
    "flipped_bit": ("one bit",),
    "corrupt_metrics": ("half", "empty", "removed", "garbage", "other JSON"),
    "half_written_temporary": ("half of a checkpoint and of a metrics file",),
}
SIGNALS = {"sigterm": signal.SIGTERM, "sigusr1": signal.SIGUSR1, "stop_rank": signal.SIGSTOP}  # all others: SIGKILL
ENDS_IN_ORDER = ("sigterm", "sigusr1")  # the run saves before it ends, so no step may be lost

PROCESSES, TORCHRUN, RESTARTING, DEEPSPEED = "processes", "torchrun", "torchrun --max-restarts 2", "deepspeed"
# Two processes started side by side, as srun does, save the launcher's import of PyTorch; no launcher ends them.
_LAUNCHERS = {
    "kill_rank": (PROCESSES, PROCESSES, TORCHRUN, RESTARTING),
    "kill_rank_saving": (PROCESSES, PROCESSES, TORCHRUN, RESTARTING),
    "kill_launcher": (TORCHRUN,),
    "kill_everything": (PROCESSES, TORCHRUN),
    "sigterm": (PROCESSES, TORCHRUN, TORCHRUN),
    "sigusr1": (PROCESSES, TORCHRUN, TORCHRUN),
    "stop_rank": (TORCHRUN,),  # a stopped process cannot end itself: a launcher must do it
    "disk_full": (PROCESSES, TORCHRUN),
}
NUM_RANKS = 2
LAUNCH, METRICS, WEIGHTS = "launch", "metrics", "weights"  # events; the others are "save 3", "saved 3", ...


@dataclass(frozen=True)
class Moment:
    """A moment: `share` of the time from the event `after` to the one that follows it."""

    after: str
    share: float


@dataclass(frozen=True)
class Fault:
    """One fault. `moments`: in the first start, and in the second where it has a fault too; none for a full disk."""

    number: int  # counted from 1
    kind: str
    run_type: str  # as in --run_types
    launcher: str
    target: str  # "rank 0", "rank 1", "all ranks", "launcher", "everything"; of a full disk "disk"
    moments: tuple[Moment, ...]
    form: str | None  # of damage on disk
    shares: tuple[float, float]  # which file and which place in it; of a full disk the first is the room that is left

    @property
    def signal(self) -> signal.Signals:
        return SIGNALS.get(self.kind, signal.SIGKILL)

    def __str__(self) -> str:
        where = ", then ".join(f"after {moment.after} + {moment.share:.2f}" for moment in self.moments)
        what = {"disk": f"room for {self.shares[0]:.2f} of what the run needs"}.get(self.target, where)
        form = f" ({self.form})" if self.form else ""
        return f"{self.kind}{form}, {self.run_type} under {self.launcher}: {self.target}, {what}"


def events(steps: int, save_every: int) -> list[str]:
    """Return what can be seen in a run's folder, in the order of the reference run."""
    saves = range(save_every, steps + 1, save_every)
    return [LAUNCH, METRICS, *(f"{word} {step}" for step in saves for word in ("save", "saved")), WEIGHTS]


def plan(seed: int, number: int, variants: Sequence[Variant], steps: int, save_every: int) -> Fault:
    """Fault `number`. Of every len(KINDS) faults in a row each kind comes once, each time under another run type."""
    block, place = divmod(number - 1, len(KINDS))
    kind = random.Random(f"{seed} block {block}").sample(list(KINDS), len(KINDS))[place]
    rng = random.Random(f"{seed} fault {number}")
    variant = variants[(block + list(KINDS).index(kind)) % len(variants)]
    launcher = rng.choice(_LAUNCHERS.get(kind, (PROCESSES,)))
    if launcher == TORCHRUN and variant.run_type == "optimized" and rng.random() < 0.5:
        launcher = DEEPSPEED
    seen = events(steps, save_every)
    moments = _moments(kind, seen, rng)
    if launcher == RESTARTING:
        moments = moments[:1]  # its second start is torchrun's own
    form = rng.choice(DAMAGE[kind]) if kind in DAMAGE else None
    shares = (rng.random(), rng.random())
    return Fault(number, kind, variant.text, launcher, _target(kind, launcher, rng), moments, form, shares)


def _target(kind: str, launcher: str, rng: random.Random) -> str:
    one_rank = f"rank {rng.randrange(NUM_RANKS)}"
    if kind == "disk_full":
        return "disk"
    if kind in DAMAGE or kind == "kill_everything":
        return "everything"
    if kind == "kill_launcher":
        return "launcher"
    if kind in ENDS_IN_ORDER:
        return rng.choice((one_rank, "all ranks" if launcher == PROCESSES else "launcher"))
    return one_rank


def _moments(kind: str, seen: list[str], rng: random.Random) -> tuple[Moment, ...]:
    training = [event for event in seen if event not in (LAUNCH, WEIGHTS)]
    if kind == "disk_full":
        return ()
    if kind == "kill_rank_saving":
        return (Moment(rng.choice([event for event in seen if event.startswith("save ")]), rng.random()),)
    if kind in DAMAGE:  # something must have been saved, and the last save is too near to the end
        saved = [event for event in seen if event.startswith("saved ")][:-1]
        return (Moment(rng.choice(saved), rng.random()),)
    if kind == "kill_rank":
        # of a resumed start the folder shows little that is new; the second half of the start-up is where it loads
        again = (Moment(LAUNCH, rng.uniform(0.5, 1.2)),) if rng.random() < 0.25 else ()
        return (Moment(rng.choice(seen), rng.random()), *again)
    # start-up once in six: it is the longest stretch, and little can be lost in it. Never for a stopped rank: the other
    # may begin to wait long after the signal, and then torchrun gives the stopped one 30 s more
    is_in_start = kind != "stop_rank" and rng.random() < 1 / 6
    return (Moment(LAUNCH if is_in_start else rng.choice([*training, WEIGHTS]), rng.random()),)
