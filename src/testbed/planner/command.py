"""Write the command line that starts a planned run, as README and docs/strategies.md start one. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.config.mesh import STAGES_PER_RANK
from testbed.config.run_types import STRATEGIES
from testbed.distributed.mesh import MeshSizes
from testbed.memory_model.job import RECOMPUTE, Job, Machine

FIRST_NODE = "$FIRST_NODE:29400"  # the reader's: a shell without it ends with torchrun's own sentence
ALWAYS_SAID = ("zero_stage", "pipeline_schedule")  # also where they are the default
_CHECKPOINTING = {recompute: flag for flag, recompute in RECOMPUTE.items()}


def command_of(job: Job, machine: Machine, work: Sequence[str] = ()) -> list[str]:
    """Return the words of the command, to be run on every node.

    Args:
        job: a run of src/gpt2.py.
        work: flags of the model and the batch as they were typed.
    """
    words = [*_launcher(job, machine), "src/gpt2.py", *arguments_of(job, work)]
    if machine.device.kind == "cuda" or job.compiled:  # which decides much of the time, so it is said
        words += ["--compile", "on" if job.compiled else "off"]
    return words


def arguments_of(job: Job, work: Sequence[str] = ()) -> list[str]:
    """Return the flags of src/gpt2.py, but for --compile."""
    assert job.run_type is not None
    own, layout = STRATEGIES[job.run_type].options, job.layout
    flags: dict[str, object] = {"run_type": job.run_type}
    flags |= {
        "micro_batch_size_per_gpu": f"{job.micro_batch:g}",
        "activation_checkpointing": _CHECKPOINTING[job.recompute],
    }
    flags |= {"matmul": "fp8"} if job.precision == "fp8" else {"precision": job.precision}
    mesh = mesh_of(job)
    sizes = {
        **mesh.flags(),
        "zero_stage": layout.zero_stage,
        "pipeline_schedule": job.schedule or own.get("pipeline_schedule"),
        "stages_per_rank": layout.virtual_stages,
        "sequence_parallel": "on" if layout.sequence_parallel else "off",
        "context_parallel_method": "allgather" if job.gathers_keys else "ring",
        "offload": job.offload,
        "overlap_comm": "on" if job.overlap else "off",
        "reshard_after_forward": "on" if job.reshards else "off",
        "reduce_bucket_size": f"{job.bucket_elements:.0f}",
        "mixed_precision": "native" if job.has_16_bit_weights and job.precision == "bf16" else "autocast",
    }
    flags |= {name: value for name, value in sizes.items() if name in own}
    left_out: dict[str, object] = {name: default for name, default in own.items() if name not in ALWAYS_SAID}
    left_out |= {"activation_checkpointing": "none", "shard_size": layout.data * layout.context}
    left_out["reshard_after_forward"] = "off" if layout.pipeline > 1 else "on"
    left_out["stages_per_rank"] = STAGES_PER_RANK.get(job.schedule or "", 1)
    typed = ((name, str(value)) for name, value in flags.items() if str(value) != str(left_out.get(name)))
    words = [word for name, value in typed for word in (f"--{name}", value)]
    return [*words[:2], *work, *words[2:]]


def mesh_of(job: Job) -> MeshSizes:
    """Return the mesh of a run of src/gpt2.py."""
    layout = job.layout
    shard = layout.shard if layout.zero_stage else 1
    return MeshSizes(layout.data, layout.pipeline, layout.tensor, shard, layout.context)


def _launcher(job: Job, machine: Machine) -> list[str]:
    assert job.run_type is not None
    ranks, per_node = job.layout.devices, machine.per_node
    if not STRATEGIES[job.run_type].is_distributed or ranks == 1:
        return ["python"]
    if ranks > per_node:
        nodes = ["--nnodes", str(ranks // per_node), "--nproc-per-node", str(per_node)]
        return ["torchrun", *nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", FIRST_NODE]
    if STRATEGIES[job.run_type].engine == "deepspeed":
        return ["deepspeed", "--num_gpus", str(ranks)]
    return ["torchrun", "--nproc-per-node", str(ranks)]
