"""The table of flags, second part: where and how it is trained, and what is left behind. See training_flags.py."""

import argparse
from dataclasses import dataclass
from typing import ClassVar

from testbed.config.flag import OF_RUN_TYPE, Filled, Flag, Kind, Resume, flag, row
from testbed.config.flag_types import not_negative, on_off_or_auto, positive, positive_number

WORK, SPREAD, HOW, LOOK = Kind.WORK, Kind.SPREAD, Kind.HOW, Kind.LOOK


@dataclass(frozen=True, kw_only=True)
class Compute:
    """device"""

    device: str = flag(  # compared as hardware
        "auto = CUDA where PyTorch finds it (default: %(default)s)",
        LOOK, choices=["auto", "cpu", "cuda"], default="auto", resume=Resume.CONSENT)
    precision: str = flag(
        "of the matrix products; weights and optimizer state stay fp32 (fp16 under DeepSpeed: its own "
        "fp16 mode). auto = bf16 where a trial product is faster in it, else fp32 (default: %(default)s)",
        WORK, choices=["auto", "fp32", "bf16", "fp16"], default="auto", in_config="precision")
    mixed_precision: str | None = flag(
        "how fsdp and optimized use bf16: autocast = fp32 weights, bf16 products, the baseline's "
        "mathematics; native = the engine's own way, bf16 weights and activations beside fp32 masters; needs --precision bf16: less "
        "memory and traffic, recorded as changing the mathematics (default: autocast)",
        SPREAD, choices=["autocast", "native"], default=OF_RUN_TYPE, resume=Resume.MATHEMATICS)
    activation_checkpointing: str = flag(
        "what backward recomputes to save memory: block = each block from its input; selective = all "
        "but matrix products and attention (default: %(default)s)",
        HOW, choices=["none", "block", "selective"], default="none", resume=Resume.SPREAD, in_config="activation_checkpointing")
    compile: bool | None = flag(
        "compile each transformer block with torch.compile; the first step waits for it. auto = on CUDA "
        "where a test shows that the run type computes the same, not on the CPU; without a word: on (default: auto)",
        HOW, type=on_off_or_auto, const=True, metavar="auto|on|off", filled=Filled.DECIDED, before=False, in_config="compile")
    matmul: str = flag(
        "fp8 = the linear layers of the blocks multiply in 8 bits (torchao's float8 with tensorwise scales): "
        "Hopper or newer, recorded as changing the mathematics (default: %(default)s, what --precision says)",
        WORK, choices=["default", "fp8"], default="default", before="default", in_config="matmul", compared_as="math_changes", names_arm=True)
    threads_per_rank: int = flag(
        "CPU threads of each rank (default: OMP_NUM_THREADS, else the cores shared out evenly)",
        HOW, type=positive, metavar="N", resume=Resume.FREE, filled=Filled.BY_RANKS)  # segments[] names how many
    bind_cores: bool = flag(
        "keep each rank to its share of the node's cores (Linux; not where the launcher binds ranks itself)",
        HOW, default=False, resume=Resume.FREE, before=False)
    local_rank: ClassVar[Flag] = row(argparse.SUPPRESS, LOOK, type=int, default=-1, of_one_start=True)
    quiet_nccl_monitor: bool = flag(
        "switch NCCL's monitoring thread off (TORCH_NCCL_ENABLE_MONITORING=0)",
        HOW, default=False, resume=Resume.FREE, names_arm=False)


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """data parallel (run types allreduce, ddp, fsdp)"""

    skip_gradient_sync: str | None = flag(
        "allreduce, ddp: leave the synchronisation out to see what it costs, of all steps or of every even "
        "one; the ranks then train apart, so the run is marked as no training and leaves no weights "
        "(default: synchronise; without a word: all)",
        SPREAD, choices=["all", "alternate"], const="all", metavar="all|alternate", default=OF_RUN_TYPE, resume=Resume.MATHEMATICS, is_instrument=True)
    bucket_cap_mb: float | None = flag(
        "ddp: size of the buckets in which gradients are averaged while backward goes on (default: 25)",
        SPREAD, type=positive_number, metavar="MIB", default=OF_RUN_TYPE)
    gradient_compression: str | None = flag(
        "ddp: average gradients in bf16, half the traffic; recorded as changing the mathematics (default: none)",
        SPREAD, choices=["none", "bf16"], default=OF_RUN_TYPE, resume=Resume.MATHEMATICS)
    reshard_after_forward: str | None = flag(
        "fsdp: free gathered weights after forward and gather them again for backward; off = one "
        "gathering less, more memory (default: on)",
        SPREAD, choices=["on", "off"], default=OF_RUN_TYPE)
    shard_size: int | None = flag(
        "fsdp: ranks that share one copy of the weights; fewer than all = hybrid, copies are replicated "
        "as in ddp; the ranks of a node are a good choice (default: all)",
        SPREAD, type=positive, metavar="RANKS", default=OF_RUN_TYPE, filled=Filled.BY_RANKS)


@dataclass(frozen=True, kw_only=True)
class DeepSpeed:
    """DeepSpeed (run type optimized)"""

    deepspeed_config: str | None = flag(
        'settings for DeepSpeed; "auto" = decided by the flags here. Values in it also set the work '
        "of a baseline that names the same file (default: deepspeed_config.json beside gpt2.py)",
        SPREAD, metavar="FILE.json", resume=Resume.FREE)
    zero_stage: int | None = flag(
        "what ZeRO shards: 1 optimizer state, 2 and gradients, 3 and weights (default: the file's, else 1)",
        SPREAD, type=int, choices=[0, 1, 2, 3], default=OF_RUN_TYPE, in_config="zero_stage")
    offload: str | None = flag(
        "keep the optimizer state, or with stage 3 the weights too, in host memory (default: the file's, else none)",
        SPREAD, choices=["none", "optimizer", "parameters"], default=OF_RUN_TYPE)
    reduce_bucket_size: int | None = flag(
        "gradients reduced at once (default: the file's, else 200000000)",
        SPREAD, type=positive, metavar="ELEMENTS", default=OF_RUN_TYPE)
    allgather_bucket_size: int | None = flag(
        "updated weights gathered at once; an even number (default: the file's, else 200000000)",
        SPREAD, type=positive, metavar="ELEMENTS", default=OF_RUN_TYPE)
    overlap_comm: str | None = flag(
        "reduce gradients while backward goes on (default: the file's, else on)",
        SPREAD, choices=["on", "off"], default=OF_RUN_TYPE)


@dataclass(frozen=True, kw_only=True)
class ModelParallel:
    """cutting the model (run types model_parallel, pipeline, tensor; the ranks left over are data parallel)"""

    pipeline_stages: int | None = flag(
        "ranks that the layers are cut over, balanced by cost (default: all ranks)",
        SPREAD, type=positive, metavar="RANKS", default=OF_RUN_TYPE, filled=Filled.BY_RANKS)
    pipeline_schedule: str | None = flag(
        "pipeline: the order of forward and backward passes (default: 1f1b)",
        SPREAD, choices=["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"], default=OF_RUN_TYPE)
    stages_per_rank: int | None = flag(
        "pipeline: pieces of the model on each rank (default: 2 for interleaved_1f1b and zero_bubble, else 1)",
        SPREAD, type=positive, metavar="N", default=OF_RUN_TYPE, filled=Filled.DERIVED)
    tensor_parallel_size: int | None = flag(
        "tensor: ranks that attention heads, MLP and vocabulary are cut over (default: all ranks)",
        SPREAD, type=positive, metavar="RANKS", default=OF_RUN_TYPE, filled=Filled.BY_RANKS)


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """files"""

    checkpoint_path: str = flag("folder of this run's files (default: checkpoint/<run_type>)", LOOK, metavar="DIR")
    overwrite: bool = flag(
        "replace what --checkpoint_path holds of a run, or under the names of one, and say what that is",
        LOOK, default=False, of_one_start=True)
    resume: str | None = flag(  # auto, or the path of a checkpoint or a run
        "auto, or without a word: continue the run that --checkpoint_path holds from its newest whole "
        "checkpoint; begin it where there is none; end with 0 where it is complete. PATH: from this checkpoint, or "
        "the newest of this run's folder; that of another run begins a new one in --checkpoint_path. See "
        "docs/checkpoints.md (default: begin, and refuse a folder that holds a run)",
        LOOK, const="auto", metavar="auto|PATH", of_one_start=True)
    allow_setting_change: bool = flag(
        "let --resume go on with other settings than the checkpoint's where they change the work, and write "
        "each into training_metrics.json (default: refuse)",
        LOOK, default=False, spelled="--allow-setting-change", of_one_start=True)
    save_every: int | None = flag(
        "write a checkpoint to resume from every STEPS optimizer steps (default: only at --stop_at_step)",
        LOOK, type=positive, metavar="STEPS")
    keep_last: int = flag(
        "keep the newest K checkpoints; should the disk damage one, there is the one before (default: %(default)s)",
        LOOK, type=positive, default=2, metavar="K")
    async_mode: str = flag(
        "async = the loop goes on as soon as a checkpoint's state is copied to host memory, and it is written "
        "while the next steps run, which that can slow down; not with --run_type optimized (default: %(default)s)",
        HOW, choices=["disabled", "async"], default="disabled", resume=Resume.FREE, before="disabled")
    keep_best: bool = flag("also keep the weights with the lowest validation loss, in DIR/best", LOOK, default=False)


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """measuring and output"""

    steps_per_print: int = flag(
        "a line of progress every STEPS where there is no terminal for a bar (default: %(default)s)",
        LOOK, type=positive, default=10, metavar="STEPS")
    timing_warmup_steps: int = flag(
        "first steps marked as warm-up; kept in the file, left out of medians (default: %(default)s)",
        HOW, type=not_negative, default=5, metavar="STEPS", resume=Resume.FREE, names_arm=False)
    timing_sample_every: int = flag(
        "kept from older commands; every step is timed whatever it says (default: %(default)s)",
        LOOK, type=positive, default=1, metavar="STEPS")
    profile: bool = flag(
        "record a torch.profiler trace of --profile_steps steps after warm-up in DIR/profiler_logs, and where "
        "the time of these steps went in training_metrics.json; marks the run as instrumented",
        LOOK, default=False, is_instrument=True)
    profile_steps: int = flag(
        "steps that --profile looks at (default: %(default)s)",
        HOW, type=positive, default=5, metavar="STEPS", resume=Resume.FREE, names_arm=False)
    profile_mode: bool = flag(
        "for Nsight: NVTX ranges around the step, its phases and validation, no progress bar; marks the run "
        "as instrumented",
        LOOK, default=False, is_instrument=True)
    log_collectives: bool = flag(
        "write when each rank enters and leaves each collective to DIR/evidence, see docs/evidence.md; marks "
        "the run as instrumented",
        LOOK, default=False, is_instrument=True)
    tensorboard: bool = flag(
        "write loss, gradient norm, learning rate, step time and tokens/s to DIR/tensorboard while training "
        "(default: do not)",
        LOOK, default=False)
    sample_prompt: str = flag(
        "start of the sample generated at the end (default: %(default)r)",
        LOOK, default="import ", metavar="TEXT")
    sample_tokens: int = flag(
        "length of that sample; 0 = none (default: %(default)s)",
        LOOK, type=not_negative, default=64, metavar="TOKENS")
    run_inference_benchmark: bool = flag(
        "at the end rank 0 times generation with the trained weights (100 greedy tokens, batch 1, key-value "
        "cache) and writes inference_latency and inference_throughput, see docs/inference.md (default: do not)",
        LOOK, default=False, before=False)
