"""The table of flags, second part: devices, parallelism, files, measuring. See training_flags.py."""

import argparse
from dataclasses import dataclass
from typing import ClassVar

from testbed.config.flag import OF_RUN_TYPE, Filled, Flag, Kind, Resume, flag, row
from testbed.config.flag_types import bucket_size, not_negative, on_off_or_auto, positive, sample_length, thread_count
from testbed.config.tracker_names import tracker_names

WORK, PARALLELISM, EXECUTION, OUTPUT = Kind.WORK, Kind.PARALLELISM, Kind.EXECUTION, Kind.OUTPUT


@dataclass(frozen=True, kw_only=True)
class Compute:
    """device"""

    device: str = flag(  # compared as hardware
        "auto = CUDA if PyTorch finds it (default: %(default)s)",
        OUTPUT, choices=["auto", "cpu", "cuda"], default="auto", resume=Resume.CONSENT)
    backend: str = flag(
        "moves data between ranks: auto = nccl on CUDA, gloo on the CPU. gloo on CUDA lets allreduce and ddp run "
        "several ranks on one GPU, to try them out; it is slow (default: %(default)s)",
        EXECUTION, choices=["auto", "nccl", "gloo"], default="auto", before="auto", resume=Resume.ROUNDING)
    deterministic: bool = flag(
        "use only kernels that give the same bits every time, so that a resumed run repeats an uninterrupted one "
        "bit for bit on CUDA too; slower there, and an operation without such a kernel ends the run",
        EXECUTION, default=False, before=False)
    precision: str = flag(
        "precision of matrix products; weights and optimizer state stay fp32 (fp16 with optimized: DeepSpeed's fp16 "
        "mode). auto = bf16 if a trial shows it is faster, else fp32 (default: %(default)s)",
        WORK, choices=["auto", "fp32", "bf16", "fp16"], default="auto", in_config="precision")
    mixed_precision: str | None = flag(
        "autocast = fp32 weights and bf16 products, as the baseline computes; native = bf16 weights and activations with fp32 "
        "master weights (--precision bf16): less memory and traffic, recorded as other mathematics (default: autocast)",
        PARALLELISM, choices=["autocast", "native"], default=OF_RUN_TYPE, resume=Resume.MATHEMATICS)
    activation_checkpointing: str = flag(
        "recompute in backward to save memory: block = whole blocks; selective = all but matrix products and attention "
        "(default: %(default)s)",
        EXECUTION, choices=["none", "block", "selective"], default="none", resume=Resume.ROUNDING, in_config="activation_checkpointing")
    compile: bool | None = flag(
        "torch.compile each transformer block, in the first step. auto = on CUDA, for run types tested to compute the same; bare flag: on "
        "(default: auto)",
        EXECUTION, type=on_off_or_auto, const=True, metavar="auto|on|off", filled=Filled.DECIDED, before=False, in_config="compile")
    matmul: str = flag(
        "fp8 = linear layers of the blocks multiply in 8 bits (torchao float8, tensorwise scales) on Hopper or newer, recorded "
        "as other mathematics (default: %(default)s, as --precision)",
        WORK, choices=["default", "fp8"], default="default", before="default", in_config="matmul", compared_as="math_changes", names_arm=True)
    threads_per_rank: int = flag(
        "CPU threads of each rank (default: OMP_NUM_THREADS, else an even share of the cores)",
        EXECUTION, type=thread_count, metavar="N", resume=Resume.FREE, filled=Filled.BY_RANKS)  # segments[] names how many
    bind_cores: bool = flag(
        "bind each rank to its share of the node's cores (Linux; not if the launcher binds ranks)",
        EXECUTION, default=False, resume=Resume.FREE, before=False)
    local_rank: ClassVar[Flag] = row(argparse.SUPPRESS, OUTPUT, type=int, default=-1, of_one_start=True)
    quiet_nccl_monitor: bool = flag(
        "set TORCH_NCCL_ENABLE_MONITORING=0",
        EXECUTION, default=False, resume=Resume.FREE, names_arm=False)


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """data parallel (run types allreduce, ddp, fsdp)"""

    skip_gradient_sync: str | None = flag(
        "measure the cost of synchronisation by leaving it out, in all steps or every even one. Ranks train apart, so the run "
        "is marked as no training and leaves no weights (default: synchronise; bare flag: all)",
        PARALLELISM, choices=["all", "alternate"], const="all", metavar="all|alternate", default=OF_RUN_TYPE, resume=Resume.MATHEMATICS, is_instrument=True)
    bucket_cap_mb: float | None = flag(
        "size of gradient buckets averaged during backward (default: 25)",
        PARALLELISM, type=bucket_size, metavar="MIB", default=OF_RUN_TYPE)
    gradient_compression: str | None = flag(
        "average gradients in bf16: half the traffic, recorded as other mathematics (default: none)",
        PARALLELISM, choices=["none", "bf16"], default=OF_RUN_TYPE, resume=Resume.MATHEMATICS)
    reshard_after_forward: str | None = flag(
        "free weights after forward and gather them again for backward; off = less traffic, more memory (default: on; "
        "off with stages)",
        PARALLELISM, choices=["on", "off"], default=OF_RUN_TYPE, filled=Filled.DERIVED)
    shard_size: int | None = flag(
        "ranks that share one copy of the weights, context ranks among them; fewer than all = hybrid sharding, for "
        "example the ranks of a node (default: all)",
        PARALLELISM, type=positive, metavar="RANKS", default=OF_RUN_TYPE, filled=Filled.BY_RANKS)


@dataclass(frozen=True, kw_only=True)
class DeepSpeed:
    """DeepSpeed (run type optimized)"""

    deepspeed_config: str | None = flag(
        'DeepSpeed\'s configuration; "auto" in it = decided by flags. A baseline that names the file does the same work '
        "(default: src/deepspeed_config.json)",
        PARALLELISM, metavar="FILE.json", resume=Resume.FREE)
    zero_stage: int | None = flag(
        "1 shards optimizer state, 2 also gradients, 3 also weights (default: the file's, else 1)",
        PARALLELISM, type=int, choices=[0, 1, 2, 3], default=OF_RUN_TYPE, in_config="zero_stage")
    offload: str | None = flag(
        "keep optimizer state in host memory, with parameters (stage 3) also the weights (default: the file's, else none)",
        PARALLELISM, choices=["none", "optimizer", "parameters"], default=OF_RUN_TYPE)
    reduce_bucket_size: int | None = flag(
        "size of gradient buckets (default: the file's, else 200000000)",
        PARALLELISM, type=positive, metavar="ELEMENTS", default=OF_RUN_TYPE)
    allgather_bucket_size: int | None = flag(
        "size of buckets of updated weights; an even number (default: the file's, else 200000000)",
        PARALLELISM, type=positive, metavar="ELEMENTS", default=OF_RUN_TYPE)
    overlap_comm: str | None = flag(
        "reduce gradients during backward (default: the file's, else on)",
        PARALLELISM, choices=["on", "off"], default=OF_RUN_TYPE)


@dataclass(frozen=True, kw_only=True)
class ModelParallel:
    """splitting the model (run types model_parallel, pipeline, tensor, mesh; the other ranks are data parallel)"""

    pipeline_stages: int | None = flag(
        "ranks that the layers are split over, balanced by cost (default: all; mesh: 1)",
        PARALLELISM, type=positive, metavar="RANKS", default=OF_RUN_TYPE, filled=Filled.BY_RANKS)
    pipeline_schedule: str | None = flag(
        "order of forward and backward passes (default: 1f1b)",
        PARALLELISM, choices=["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"], default=OF_RUN_TYPE)
    stages_per_rank: int | None = flag(
        "stages on each rank (default: 2 for interleaved_1f1b and zero_bubble, else 1)",
        PARALLELISM, type=positive, metavar="N", default=OF_RUN_TYPE, filled=Filled.DERIVED)
    tensor_parallel_size: int | None = flag(
        "ranks that attention heads, MLP and vocabulary are split over (default: all; mesh: 1)",
        PARALLELISM, type=positive, metavar="RANKS", default=OF_RUN_TYPE, filled=Filled.BY_RANKS)
    sequence_parallel: str | None = flag(
        "tensor ranks also share the tokens of what lies between the matrices: fewer activations on each (default: off)",
        PARALLELISM, choices=["on", "off"], default=OF_RUN_TYPE)
    context_parallel_size: int | None = flag(
        "ranks that share each sequence, for long ones (default: 1)",
        PARALLELISM, type=positive, metavar="RANKS", default=OF_RUN_TYPE, filled=Filled.BY_RANKS)
    context_parallel_method: str | None = flag(
        "how a rank's attention meets the keys of the others: they go round in a ring, or all are gathered (default: ring)",
        PARALLELISM, choices=["ring", "allgather"], default=OF_RUN_TYPE)


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """files"""

    checkpoint_path: str = flag("folder of the run (default: checkpoint/<run_type>)", OUTPUT, metavar="DIR")
    overwrite: bool = flag(
        "replace the run that --checkpoint_path holds, and files with the names of one",
        OUTPUT, default=False, of_one_start=True)
    resume: str | None = flag(  # auto, or the path of a checkpoint or a run
        "auto, or bare flag: continue the run in --checkpoint_path from its newest valid checkpoint; start a new run if "
        "there is none; exit with 0 if it is complete. PATH: continue from this checkpoint or run; another run's, or a folder of convert_checkpoint.py, begins a new run in "
        "--checkpoint_path. See docs/checkpoints.md (default: begin, and refuse a folder that holds a run)",
        OUTPUT, const="auto", metavar="auto|PATH", of_one_start=True)
    allow_setting_change: bool = flag(
        "let --resume change settings that change the work; each is recorded (default: refuse)",
        OUTPUT, default=False, spelled="--allow-setting-change", of_one_start=True)
    save_every: int | None = flag(
        "save a checkpoint every STEPS optimizer steps (default: only at --stop_at_step and at the end)",
        OUTPUT, type=positive, metavar="STEPS")
    save_at_end: str = flag(
        "save the last state with the optimizer's, so that the run can be extended (default: %(default)s)",
        OUTPUT, choices=["on", "off"], default="on")
    keep_last: int = flag(
        "keep the newest K checkpoints (default: %(default)s)",
        OUTPUT, type=positive, default=2, metavar="K")
    async_mode: str = flag(
        "async = write checkpoints in the background, after a copy to host memory, which can slow the next steps; not with "
        "--run_type optimized (default: %(default)s)",
        EXECUTION, choices=["disabled", "async"], default="disabled", resume=Resume.FREE, before="disabled")
    keep_best: bool = flag("keep the weights with the lowest validation loss in DIR/best", OUTPUT, default=False)


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """measuring and output"""

    steps_per_print: int = flag(
        "a line of progress every STEPS (default: %(default)s)",
        OUTPUT, type=positive, default=10, metavar="STEPS")
    timing_warmup_steps: int = flag(
        "first steps left out of medians and throughput (default: %(default)s)",
        EXECUTION, type=not_negative, default=5, metavar="STEPS", resume=Resume.FREE, names_arm=False)
    timing_sample_every: int = flag(
        "no effect, for older commands: every step is timed (default: %(default)s)",
        OUTPUT, type=positive, default=1, metavar="STEPS")
    profile: bool = flag(
        "trace --profile_steps steps after warm-up with torch.profiler in DIR/profiler_logs, and attribute their time in "
        "training_metrics.json; marks the run as instrumented",
        OUTPUT, default=False, is_instrument=True)
    profile_steps: int = flag(
        "steps that --profile traces (default: %(default)s)",
        EXECUTION, type=positive, default=5, metavar="STEPS", resume=Resume.FREE, names_arm=False)
    profile_mode: bool = flag(
        "for Nsight: NVTX ranges around step, phases and validation, no progress bar; marks the run as instrumented",
        OUTPUT, default=False, is_instrument=True)
    log_collectives: bool = flag(
        "log when each rank enters and leaves each collective in DIR/evidence, see docs/evidence.md; marks the run as "
        "instrumented",
        OUTPUT, default=False, is_instrument=True)
    watch_collectives: str = flag(
        "add up in memory how long each rank is blocked in collectives, for scripts/diagnose.py. auto = on the CPU, in so many "
        "steps that it takes under 1 %% of the time; every_step = in all; on NCCL PyTorch's flight recorder then times the last 4,000, "
        "which marks the run as instrumented (default: %(default)s)",
        OUTPUT, choices=["auto", "every_step", "off"], default="auto")
    tensorboard: bool = flag(
        "as --track tensorboard",
        OUTPUT, default=False)
    track: str | None = flag(
        "send loss, gradient norm, learning rate, tokens, step time and tokens/s of each step, validation losses, flags and "
        "files to these, with commas: tensorboard, wandb, mlflow, trackio. Without credentials or an address they write "
        "into DIR/tensorboard and DIR/trackers (default: none)",
        OUTPUT, type=tracker_names, metavar="NAMES", takes_several=True)
    sample_prompt: str = flag(
        "prompt of the text generated at the end (default: %(default)r)",
        OUTPUT, default="import ", metavar="TEXT")
    sample_tokens: int = flag(
        "length of that text; 0 = none (default: %(default)s)",
        OUTPUT, type=sample_length, default=64, metavar="TOKENS")
    run_inference_benchmark: bool = flag(
        "time generation at the end on rank 0 (100 greedy tokens, batch 1, key-value cache) and record inference_latency and "
        "inference_throughput, see docs/inference.md",
        OUTPUT, default=False, before=False)
