"""List the runs that try every path of a GPU machine, and compare those that must agree. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from testbed.analysis.runs.load import Run
from testbed.config.run_types import PLAIN, REFERENCE, STRATEGIES
from testbed.config.table import FLAGS

LARGEST_CUT = 4  # the small models have four blocks and four heads
STEPS = {"small": {"cuda": 20, "cpu": 6}, "large": {"cuda": 24, "cpu": 8}}
TINY = "--num_layers 4 --num_heads 4 --embedding_size 64 --max_position_embeddings 128 --seq_length 64"
WORK = {  # work -> device -> flags
    "small": {
        "cuda": "--model nano --seq_length 128 --global_batch_size 16 --micro_batch_size_per_gpu 2 --max_val_steps 1",
        "cpu": f"{TINY} --global_batch_size 4 --micro_batch_size_per_gpu 2 --max_val_steps 1",
    },
    "large": {
        "cuda": "--model gpt2 --vocab_size 50257 --seq_length 1024 --global_batch_size 64 "
        "--micro_batch_size_per_gpu 32 --max_val_steps 0 --precision bf16",
        "cpu": f"{TINY} --global_batch_size 8 --micro_batch_size_per_gpu 4 --max_val_steps 0 --precision bf16",
    },
}


@dataclass(frozen=True)
class Tolerance:
    """The largest difference of any step: of losses in nats, of unclipped gradient norms relative to the reference."""

    loss: float
    norm: float


TOLERANCES = {
    "same bits": Tolerance(0.0, 0.0),
    "fp32": Tolerance(1e-4, 1e-3),  # sums in another order
    "fp32 on another device": Tolerance(1e-3, 1e-2),
    "bf16": Tolerance(0.05, 0.1),  # other kernels round elsewhere
    "16 bits against fp32": Tolerance(0.02, 0.1),
    "fp8 against bf16": Tolerance(0.1, 0.25),
}


@dataclass(frozen=True)
class Row:
    """A run of src/gpt2.py.

    Attributes:
        work: a key of WORK.
        flags: further flags. {runs} is the folder of the runs, {half} half the steps.
        reference: the run whose losses and gradient norms it must have, `within` this tolerance; None: no such run.
        ranks: processes that torchrun starts; 1 is plain python.
        reads: a run whose checkpoint it resumes.
        on_cpu: whether the CPU can do it too, and it shows something there.
        devices: CUDA devices without which it is left out.
        package: without which it is left out.
    """

    name: str
    work: str
    flags: str
    reference: str | None = None
    within: str = "bf16"
    ranks: int = 1
    reads: str | None = None
    on_cpu: bool = True
    devices: int = 0
    package: str | None = None

    def words(self, runs: str, device: str, data: str) -> list[str]:
        """Return the command, which begins with "python"."""
        launcher = f"-m torch.distributed.run --standalone --nproc-per-node={self.ranks}".split()
        steps = STEPS[self.work][device]
        return [
            *("python", *(launcher if self.ranks > 1 else []), "src/gpt2.py"),
            *("--train_data_path", f"{data}/train.bin", "--val_data_path", f"{data}/val.bin", "--device", device),
            *("--learning_rate", "1e-3", "--max_train_steps", str(steps), "--epochs", str(steps)),
            *WORK[self.work][device].split(),
            *self.flags.format(runs=runs, half=steps // 2).split(),
            *([] if "--sample_tokens" in self.flags else ["--sample_tokens", "0"]),
            *("--checkpoint_path", f"{runs}/{self.name}"),
        ]


FP32 = "--precision fp32 --compile off"
RESUME = "--resume {runs}/%s/checkpoints/step_{half:06}"
FIRST = (  # what the others are compared with, and precisions
    Row("cpu_fp32", "small", f"{FP32} --device cpu", on_cpu=False),
    Row("fp32", "small", FP32, "cpu_fp32", "fp32 on another device"),
    Row("fp32_compiled", "small", "--precision fp32 --compile on", "fp32", "fp32"),
    Row("bf16", "small", "--precision bf16 --compile off", "fp32", "16 bits against fp32"),
    Row("fp16", "small", "--precision fp16 --compile off", "fp32", "16 bits against fp32", on_cpu=False),
    Row("large", "large", "--compile off"),
    Row("large_compiled", "large", "--compile on", "large", on_cpu=False),
    Row("large_fp32", "large", f"{FP32} --micro_batch_size_per_gpu 16", "large", on_cpu=False),
    Row("fp8", "large", "--compile on --matmul fp8", "large_compiled", "fp8 against bf16", on_cpu=False,
        package="torchao"),
)  # fmt: skip
DETERMINISTIC = "--precision bf16 --compile off --deterministic --save_every {half}"
OTHERS = (
    Row("deterministic", "small", DETERMINISTIC, "bf16"),
    Row("deterministic_resumed", "small", f"{DETERMINISTIC} {RESUME % 'deterministic'}", "deterministic", "same bits",
        reads="deterministic"),
    Row("saved", "large", "--compile off --save_every {half}", "large"),
    Row("saved_async", "large", "--compile off --save_every {half} --async_mode async", "large"),
    Row("resumed", "large", f"--compile off {RESUME % 'saved_async'}", "saved_async", reads="saved_async"),
    Row("micro_batch_auto", "large", "--compile off --micro_batch_size_per_gpu auto", "large"),
    Row("recomputed_block", "large", "--compile off --activation_checkpointing block", "large"),
    Row("recomputed_selective", "large", "--compile off --activation_checkpointing selective", "large"),
    Row("attention_math", "large", "--compile off --attention math --micro_batch_size_per_gpu 4", "large"),
    Row("attention_flash", "large", "--compile off --attention flash", "large", on_cpu=False),
    Row("attention_cudnn", "large", "--compile off --attention cudnn", "large", on_cpu=False),
    Row("attention_efficient", "large", "--compile off --attention efficient", "large", on_cpu=False),
    # the kernel that --attention auto takes last: a graph of another kernel must not be taken from the compiler's cache
    Row("efficient_compiled", "large", "--compile on --attention efficient", "large_compiled", on_cpu=False),
    Row("muon", "small", f"{FP32} --optimizer muon"),
    Row("generation", "small", "--precision bf16 --compile off --sample_tokens 16 --run_inference_benchmark", "bf16"),
    Row("profile", "large", "--compile off --profile --profile_steps 2", "large"),
    Row("profile_compiled", "large", "--compile on --profile --profile_steps 2", "large_compiled", on_cpu=False),
)  # fmt: skip


def rows(gpus: int) -> list[Row]:
    """Return all runs for a machine with so many CUDA devices, 0: the CPU; the most important first."""
    ranks = max(number for number in (1, 2, 4, 8) if number <= gpus) if gpus else 2
    traffic = Row(f"profile_{PLAIN}", "large", f"--run_type {PLAIN} --compile on --profile --profile_steps 2 "
                  f"--global_batch_size {32 * ranks}", ranks=ranks, on_cpu=False)  # fmt: skip
    return [*FIRST, *_strategies(ranks), *OTHERS, traffic]


def _strategies(ranks: int) -> Iterator[Row]:
    """Yield each strategy in fp32 on all ranks, its further forms, compiled, and over gloo where ranks share a GPU."""
    for name, entry in STRATEGIES.items():
        if name == REFERENCE:
            continue
        fields: dict[str, Any] = {
            "reference": "fp32" if entry.equals_baseline else None,
            "within": "fp32",
            "ranks": ranks if entry.is_distributed else 1,
            "devices": 2 if entry.cuts_model or entry.keeps == "axes" or not entry.is_distributed else 0,
            "on_cpu": entry.is_distributed,
            "package": "deepspeed" if entry.engine == "deepspeed" else None,
        }
        flags = f"{FP32} --run_type {name}"
        cut = [option for option in ("pipeline_stages", "tensor_parallel_size") if option in entry.options]
        if entry.keeps == "axes":  # the axis that no other run type has; the ring's kernel has no fp32 there
            cut, flags = ["context_parallel_size"], f"{flags} --context_parallel_method allgather"
        whole = f"{flags} " + " ".join(f"--{option} {min(ranks, LARGEST_CUT)}" for option in cut)
        if not entry.is_distributed:  # one process shares each micro batch out
            whole += "--micro_batch_size_per_gpu 16"
        yield Row(name, "small", whole.strip(), **fields)
        for option in ("zero_stage", "pipeline_schedule") if entry.keeps != "axes" else ():
            for value in FLAGS[option].choices or () if option in entry.options else ():
                if value != entry.options[option]:
                    more = "".join(f" --{axis} 2" for axis in cut)
                    yield Row(f"{name}_{value}", "small", f"{flags} --{option} {value}{more}", **fields)
        if entry.is_distributed and entry.compiles_with and not entry.cuts_model and entry.keeps != "axes":
            compiled = flags.replace("--compile off", "--compile on")
            yield Row(f"{name}_compiled", "small", compiled, **{**fields, "on_cpu": False})
        if entry.is_distributed and entry.gloo_on_cuda:
            yield Row(f"{name}_gloo", "small", f"{flags} --backend gloo", **{**fields, "ranks": 2, "on_cpu": False})


def why_left_out(row: Row, gpus: int, packages: Iterable[str]) -> str | None:
    """Return why a machine cannot do a run. `packages`: those that are installed, of the optional ones."""
    if not gpus and not row.on_cpu:
        return "it needs a CUDA device, or shows nothing new on a CPU"
    if gpus and row.devices > gpus:
        return f"it needs {row.devices} CUDA devices"
    if row.package is not None and row.package not in packages:
        return f"the package {row.package} is not installed"
    return None


def with_what_they_need(chosen: Sequence[Row], plan: Sequence[Row]) -> list[Row]:
    """Return the chosen rows, those that they read and those that they are compared with, in the order of the plan."""
    names = {row.name for row in chosen}
    for row in reversed(plan):
        if row.name in names:
            names |= {row.reads or row.name, row.reference or row.name}
    return [row for row in plan if row.name in names]


def compare(run: Run, reference: Run, within: str) -> tuple[bool, str]:
    """Return whether loss and gradient norm of every step that both runs have agree, and by how much they differ.

    A resumed run has the later steps. A skipped update makes the steps after it other work, so the comparison ends with
    its loss.
    """
    steps, ours, theirs = np.intersect1d(run.train_steps, reference.train_steps, return_indices=True)
    norms, expected = run.grad_norms[ours], reference.grad_norms[theirs]
    skipped = np.flatnonzero(np.isnan(norms) | np.isnan(expected))
    end = int(skipped[0]) if len(skipped) else len(steps)
    losses = np.abs(run.train_losses[ours] - reference.train_losses[theirs])[: end + 1]
    relative = np.abs(norms - expected)[:end] / np.maximum(expected[:end], math.ulp(1.0))
    if not len(losses):
        return False, "no step in common"
    most, loss, norm = TOLERANCES[within], float(losses.max()), float(relative.max(initial=0.0))
    words = f"{len(losses)} steps, loss within {loss:.1e}, norm within {norm:.1e}"
    return loss <= most.loss and norm <= most.norm, words
