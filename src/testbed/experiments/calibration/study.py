"""Plan the study of predictions: runs of src/gpt2.py at sizes that no calibration trained. No torch.

Every run type that a CPU runs, on one rank and on two, over the machine's own memory and over a slow link between two
hosts of the network lab. sweep/runner.py makes the runs, as it does those of any sweep.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.config.settings import RunSettings
from testbed.errors import InputError
from testbed.experiments.calibration.work import FLAGS_OF_KIND, Setting
from testbed.experiments.network_lab.links import Link as LabLink
from testbed.experiments.network_lab.links import parse_rate
from testbed.memory_model.devices import Link
from testbed.memory_model.job import Job, Machine
from testbed.planner.calibration import Calibration
from testbed.sweep.plan import Cell, order_of_round, settings_of

UNLIMITED = "unlimited"
LAB_LATENCY_S = 50e-6  # between two namespaces of one machine, an estimate; it is in what was measured too
ONE_PROCESS, CUT = ("baseline",), ("model_parallel", "tensor")
PIPELINE_MICRO_BATCHES = 4
SECONDS_PER_RUN = 9  # most of it is loading PyTorch


@dataclass(frozen=True, kw_only=True)
class Work:
    """Model and batch that all runs of a set share. `batch`: the global one."""

    name: str
    layers: int
    heads: int
    hidden: int
    vocab: int
    seq_length: int
    batch: int

    def setting(self, kind: str, ranks: int) -> Setting:
        """Return how a run type takes the batch: a data rank its share at once, a pipeline four micro batches."""
        accumulation = PIPELINE_MICRO_BATCHES if kind.startswith("pipeline") else 1
        shares = 1 if kind.startswith("pipeline") or kind in CUT else ranks
        sizes = {name: getattr(self, name) for name in ("layers", "heads", "hidden", "vocab", "seq_length")}
        return Setting(**sizes, micro_batch=self.batch // shares // accumulation, accumulation=accumulation)


WORKS = (
    Work(name="nano, batch 8", layers=4, heads=4, hidden=128, vocab=8192, seq_length=128, batch=8),
    Work(name="nano, batch 32", layers=4, heads=4, hidden=128, vocab=8192, seq_length=128, batch=32),
    Work(name="wider, batch 16", layers=3, heads=6, hidden=192, vocab=4096, seq_length=64, batch=16),
    Work(name="deeper, batch 8", layers=8, heads=4, hidden=96, vocab=2048, seq_length=128, batch=8),
)
QUICK_WORKS = (Work(name="tiny, batch 4", layers=3, heads=2, hidden=48, vocab=1024, seq_length=32, batch=4),)


@dataclass(frozen=True)
class StudyArm:
    """One configuration: a run type on some ranks over a link."""

    work: Work
    kind: str
    ranks: int
    link: str

    @property
    def name(self) -> str:
        """Also its folder."""
        words = f"{self.work.name}_{self.kind}_{self.ranks}_{self.link}"
        return words.replace(", ", "_").replace(" ", "_")

    @property
    def of_set(self) -> tuple[str, int, str]:
        """The runs that compete: a plan chooses one of them."""
        return self.work.name, self.ranks, self.link

    def job(self, precision: str) -> Job:
        return self.work.setting(self.kind, self.ranks).job(self.kind, self.ranks, precision)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The request for a study. `folder`: --out_dir; `program`, `network`: gpt2.py and network.py.

    Attributes:
        environment: NAME=VALUE of every run.
    """

    works: tuple[Work, ...]
    kinds: tuple[str, ...]
    links: tuple[str, ...]
    repeats: int
    steps: int
    warmup_steps: int
    folder: str
    program: str
    network: str
    ranks: tuple[int, ...] = (1, 2)
    environment: tuple[str, ...] = ()


def arms_of(asked: Asked) -> list[StudyArm]:
    """Return every configuration once: what is cut over ranks needs two, a link has one host at each end."""
    arms = []
    places = [(ranks, link) for ranks in asked.ranks for link in (asked.links if ranks > 1 else (UNLIMITED,))]
    for work in asked.works:
        for ranks, link in places:
            kinds = [kind for kind in asked.kinds if (kind in ONE_PROCESS) <= (ranks == 1)]
            if ranks == 1:
                kinds = [kind for kind in kinds if not kind.startswith("pipeline") and kind not in CUT]
            arms += [StudyArm(work, kind, ranks, link) for kind in kinds]
    return arms


def cells_of(asked: Asked) -> list[Cell]:
    """Return every run in its order: round 1 with each arm once, then round 2."""
    arms = arms_of(asked)
    return [
        _cell(asked, arms[index], repeat)
        for repeat in range(1, asked.repeats + 1)
        for index in order_of_round(len(arms), repeat)
    ]


def settings_by_name(cells: Sequence[Cell]) -> dict[str, RunSettings]:
    """Return the settings of every configuration; the token files must be there.

    Raises:
        InputError: gpt2.py refuses one.
    """
    found: dict[str, RunSettings] = {}
    for cell in cells:
        if cell.configuration not in found:
            try:
                found[cell.configuration] = settings_of(cell)
            except InputError as error:
                raise InputError(f"{cell.name} cannot run: {error}") from None
    return found


def _cell(asked: Asked, arm: StudyArm, repeat: int) -> Cell:
    folder = f"{arm.name}/run_{repeat}"
    data = Path(asked.folder) / "data"
    words = arm.work.setting(arm.kind, arm.ranks).arguments(arm.kind, data, asked.steps, asked.warmup_steps)
    words += ["--precision", "fp32", "--device", "cpu", "--threads_per_rank", "1", "--seed", "42"]
    if arm.link == UNLIMITED:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arm.ranks}"]
        launcher = launcher if arm.ranks > 1 else []
        program = ["python", *launcher, asked.program]
    else:
        lab = ["run", "--hosts", str(arm.ranks), "--rate", arm.link, "--seconds", "600"]
        program = ["python", asked.network, *lab, "--", "python", asked.program]
    return Cell(
        name=arm.name,
        variant=arm.kind,
        run_type=FLAGS_OF_KIND[arm.kind][1],
        ranks=arm.ranks,
        batch_size=arm.work.batch,
        repeat=repeat,
        seed=42,
        folder=folder,
        command=[
            *("env", "OMP_NUM_THREADS=1", *asked.environment, *program, *words),
            *("--checkpoint_path", str(Path(asked.folder) / folder), "--overwrite"),
        ],
        oversubscribed=False,
    )


def machine_of(arm: StudyArm, calibration: Calibration) -> Machine:
    """Return the devices and links of an arm: two ranks of one machine, or one on each of two hosts."""
    machine = calibration.machine(arm.ranks)
    if arm.link == UNLIMITED:
        return machine
    return dataclasses.replace(machine, per_node=1, between_nodes=lab_link(arm.link))


def lab_link(rate: str) -> Link:
    """Return a link of the network lab by its data sheet: rate and token bucket."""
    lab = LabLink(parse_rate(rate))
    assert lab.bytes_per_s is not None, "a limited link"
    return Link(
        name=rate,
        latency_s=LAB_LATENCY_S,
        bytes_per_s=lab.bytes_per_s,
        burst_bytes=lab.burst_bytes,
        source="network_lab/links.py",
    )


def rates_of(names: Sequence[str]) -> None:
    """Check names of links. InputError says what is understood."""
    for name in names:
        parse_rate(name)
