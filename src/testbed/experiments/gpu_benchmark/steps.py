"""Make the steps of one machine from the table: commands, estimates, and why a step is left out. No torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from testbed.experiments.gpu_benchmark import table
from testbed.experiments.gpu_benchmark.table import COLD_S, Check, Row

PYTHON = "python"  # in a command: the interpreter of the benchmark
DATA = ("tokens", "data/train_small.bin")  # what nearly every step needs: the step that makes it, and the file
NANOGPT = "NANOGPT_DIR names no copy of nanoGPT"


@dataclass(frozen=True)
class Machine:
    """The machine that a plan is for. `packages`: modules that can be imported, of those that some steps need."""

    device: str
    name: str
    gpus: int
    torch_version: str
    packages: frozenset[str]
    nanogpt_dir: str | None = None

    def __str__(self) -> str:
        gpus = f" x {self.gpus}" if self.gpus > 1 else ""
        return f"{self.name}{gpus}, torch {self.torch_version}"


@dataclass(frozen=True)
class Step:
    """A command of the benchmark.

    Attributes:
        seconds: estimate with warm caches; `cold_s` adds what is to be compiled.
        cold: names in COLD_S.
        needs: (step, file below the benchmark's folder) that it reads.
        input: (file below the benchmark's folder, text) that is written before it starts.
        left_out: why it cannot run here; None: it can.
    """

    name: str
    shows: str
    command: tuple[str, ...] = ()
    seconds: int = 0
    cold: tuple[str, ...] = ()
    check: Check | None = None
    needs: tuple[tuple[str, str], ...] = ()
    input: tuple[str, str] | None = None
    left_out: str | None = None

    def estimate_s(self, warm: Collection[str] = ()) -> int:
        """Return seconds when the compiler's results of `warm` are in its cache."""
        return self.seconds + sum(COLD_S[name] for name in self.cold if name not in warm)


def plan(machine: Machine, out: str, peer_rounds: int = 5) -> list[Step]:
    """Return all steps, the most important first, with those that this machine cannot run.

    Args:
        out: the benchmark's folder as commands name it; relative, as records should not name a home folder.
    """
    return [
        *_data(machine, out),
        *(_training(row, machine, out) for row in table.FIRST),
        _matrix_rate(machine, out),
        *(_training(row, machine, out) for row in _run_types(machine)),
        *(_training(row, machine, out) for row in table.PATHS),
        *_peers(machine, out, peer_rounds),
        *(_training(row, machine, out) for row in table.SPEED),
        *(_training(row, machine, out) for row in _compiled_run_types(machine)),
        _training(_traced_ddp(machine), machine, out),
    ]


def _data(machine: Machine, out: str) -> list[Step]:
    """Return the steps that make tokens of the source of Python's own library, which is on every machine."""
    folder = f"{out}/data"
    limit = ("--max_docs", "60") if machine.device == "cpu" else ()
    corpus = (PYTHON, "download_data.py", "--dataset", "stdlib", "--output_dir", folder, "--overwrite", *limit)
    tokens = (PYTHON, "preprocess_small.py", "--input", f"{folder}/stdlib", "--tokenizer", "bpe:8192")
    seconds = (3, 12) if machine.device == "cuda" else (2, 3)
    return [
        Step("corpus", "text", corpus, seconds[0]),
        Step("tokens", "token files", (*tokens, "--output_dir", folder), seconds[1],
             needs=(("corpus", "data/stdlib/manifest.json"),)),
    ]  # fmt: skip


def _training(row: Row, machine: Machine, out: str) -> Step:
    """Return the step of a run of src/gpt2.py."""
    device = machine.device
    step = Step(row.name, row.shows, seconds=row.seconds, cold=row.cold, check=row.check, left_out=row.left_out)
    if device == "cpu":
        if isinstance(row.on_cpu, str):
            step = dataclasses.replace(step, left_out=row.on_cpu)
        else:
            step = dataclasses.replace(step, seconds=row.on_cpu, cold=(), check=_check_on_cpu(row))
    for package in row.packages:
        if package not in machine.packages and step.left_out is None:
            step = dataclasses.replace(step, left_out=f"the package {package} is not installed")
    if step.left_out is not None:
        return step
    places = {
        "runs": f"{out}/runs",
        "half": table.STEPS[row.work][device] // 2,
        "compile": "on" if device == "cuda" else "off",
        "math": 16 if device == "cuda" else 4,
    }
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={row.ranks}") if row.ranks > 1 else ()
    words = [
        *("--train_data_path", f"{out}/data/train_small.bin", "--val_data_path", f"{out}/data/val_small.bin"),
        *("--sample_tokens", "0", "--device", device),
        *table.WORK[row.work][device].split(),
        *row.flags.format(**places).split(),
        *("--checkpoint_path", f"{out}/runs/{row.name}"),
    ]
    needs: tuple[tuple[str, str], ...] = (DATA,)
    if row.needs is not None:
        name, file = row.needs
        needs += ((name, f"runs/{name}/{file.format(**places)}"),)
    return dataclasses.replace(step, command=(PYTHON, *launcher, "src/gpt2.py", *words), needs=needs)


def _check_on_cpu(row: Row) -> Check | None:
    if row.check is None:
        return None
    reference = table.REFERENCE_ON_CPU.get(row.check.reference, row.check.reference)
    return dataclasses.replace(row.check, reference=reference)


def _run_types(machine: Machine) -> Iterator[Row]:
    """Yield every run type in fp32, on as many ranks as there are GPUs, and two ranks that share one over gloo."""
    ranks = ranks_of(machine)
    one_rank = "1 rank, so nothing travels" if ranks == 1 else f"{ranks} ranks"
    for name, flags in table.ON_ONE_RANK.items():
        row = _in_fp32(f"{name}_{_ranks(ranks)}", f"{one_rank}: the losses of one process", flags, ranks)
        yield dataclasses.replace(row, on_cpu=table.NOT_ON_CPU.get(name, row.on_cpu))
    for name, flags in table.ON_RANKS.items():
        cut = min(ranks, table.LARGEST_CUT)
        row = _in_fp32(
            f"{name}_{_ranks(ranks)}", f"{one_rank}: the losses of one process", flags.format(cut=cut), ranks
        )
        yield (
            row if ranks > 1 else dataclasses.replace(row, left_out="it cuts the model over devices, and there is one")
        )
    dp = _in_fp32("dp", "one process drives all devices", "--run_type dp --micro_batch_size_per_gpu 16", 1)
    yield dp if machine.gpus > 1 else dataclasses.replace(dp, left_out="it needs two CUDA devices")
    for name in table.TWO_ON_ONE_GPU:
        flags = f"--run_type {name} --backend gloo"
        yield _in_fp32(f"{name}_2ranks_gloo", "2 ranks, which may share a GPU, over gloo", flags, 2)


def _in_fp32(name: str, shows: str, flags: str, ranks: int) -> Row:
    is_deepspeed = "optimized" in flags
    return Row(
        name,
        shows,
        "small",
        f"--precision fp32 --compile off {flags}",
        (18 if is_deepspeed else 12) + (12 if ranks > 1 else 0),
        (8 if is_deepspeed else 5) + (3 if ranks > 1 else 0),
        check=Check("fp32", "fp32"),
        packages=("deepspeed",) if is_deepspeed else (),
        ranks=ranks,
    )


def _compiled_run_types(machine: Machine) -> Iterator[Row]:
    """Yield the run types that are compiled by default, compiled."""
    ranks = ranks_of(machine)
    for name, cold in table.COMPILED_RUN_TYPES.items():
        row = _in_fp32(f"{name}_compiled_{_ranks(ranks)}", "compiled, as by default", table.ON_ONE_RANK[name], ranks)
        flags = row.flags.replace("--compile off", "--compile on")
        yield dataclasses.replace(row, flags=flags, seconds=row.seconds + 6, cold=(cold,), on_cpu=table.COMPILED_ONCE)


def _traced_ddp(machine: Machine) -> Row:
    ranks = ranks_of(machine)
    return Row(
        f"profile_ddp_{_ranks(ranks)}",
        "a trace with NCCL's kernels",
        "large",
        f"--run_type ddp --compile on --profile --profile_steps 3 --global_batch_size {32 * ranks}",
        46,
        "a CPU has no NCCL",
        cold=("large",),
        ranks=ranks,
    )


def ranks_of(machine: Machine) -> int:
    """Return the ranks of a distributed run: the largest power of two of the GPUs, which divides every batch, up to
    8."""
    return max(ranks for ranks in (1, 2, 4, 8) if ranks <= max(1, machine.gpus))


def _ranks(number: int) -> str:
    return "1rank" if number == 1 else f"{number}ranks"


def _matrix_rate(machine: Machine, out: str) -> Step:
    """Return the step that measures the rate of a large matrix product, which the summary has next to MFU."""
    precisions = ["bf16", "fp32"] if machine.device == "cuda" else ["fp32"]
    work = {"kind": "ceilings", "precisions": precisions, "repeats": 10, "threads": 1, "device": machine.device}
    content = json.dumps({**work, "out": f"{out}/matrix_rate.json"}) + "\n"
    return Step(
        "matrix_rate",
        "the rate of a large matrix product",
        (PYTHON, "scripts/more/compare_peers.py", "--worker", f"{out}/matrix_rate_work.json"),
        12 if machine.device == "cuda" else 6,
        input=("matrix_rate_work.json", content),
    )


def _peers(machine: Machine, out: str, rounds: int) -> Iterator[Step]:
    """Yield ours against one other trainer after the other: interleaved rounds, of which five give an interval.

    One comparison of all three would not fit into a part.
    """
    nanogpt = None if machine.nanogpt_dir else NANOGPT
    lacking = [name for name in ("transformers", "accelerate") if name not in machine.packages]
    transformers = f"the package {lacking[0]} is not installed" if lacking else None
    for name, peer, seconds, cold, left_out in (
        ("peers_nanogpt", "nanogpt", 30, "nanogpt", nanogpt),
        ("peers_transformers", "transformers-compiled", 25, "transformers", transformers),
    ):
        step = Step(
            name,
            f"ours against {peer if machine.device == 'cuda' else name.removeprefix('peers_')}, interleaved",
            left_out=left_out,
        )
        if machine.device == "cuda":
            work = "--model gpt2 --batch_size 32 --seq_length 1024 --precision bf16 --steps 40 --warmup_steps 10"
            # a round: ours 20 s, the other, and 9 s for the matrix product; 12 s for starting and drawing
            step = dataclasses.replace(step, seconds=rounds * (20 + seconds + 9) + 12, cold=("large", cold))
        else:
            work, rounds, peer = "--quick --precision fp32", 1, peer.removesuffix("-compiled")
            step = dataclasses.replace(step, seconds=25)
        place = ("--nanogpt_dir", machine.nanogpt_dir) if peer == "nanogpt" and machine.nanogpt_dir else ()
        words = (
            *(PYTHON, "scripts/more/compare_peers.py", *work.split()),
            *("--repeats", str(rounds), "--peers", f"ours,{peer}"),
            *("--train_data_path", f"{out}/data/train_small.bin", "--val_data_path", f"{out}/data/val_small.bin"),
            *(*place, "--device", machine.device, "--run_timeout_s", "240"),
            *("--out_dir", f"{out}/{name}", "--overwrite"),
        )
        yield step if left_out else dataclasses.replace(step, command=words, needs=(DATA,))
