"""The runs of the benchmark of a GPU machine, as data: flags, seconds, tolerances.

Seconds are estimates of an H100 until a summary says what a step took: 8 s for the start of a process, 250,000 tokens/s
of GPT-2 124M in bf16 and 350,000 compiled.
"""

from __future__ import annotations

from dataclasses import dataclass

# Seconds of the compiler, once per machine: later processes find the kernels in the cache.
COLD_S = {
    "small": 45,
    "large": 60,
    "efficient": 60,
    "fp8": 70,
    "ddp": 30,
    "fsdp": 30,
    "zero": 30,
    "nanogpt": 80,
    "transformers": 100,
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
class Check:
    """The run with which a run is compared. `within` names a tolerance."""

    reference: str
    within: str


@dataclass(frozen=True)
class Row:
    """A run of src/gpt2.py.

    Attributes:
        work: "small", "large" or "learning" (WORK).
        flags: further flags. {runs} is the folder of the runs, {half} half the steps of the work, {compile} on or, on a
            CPU, off, {math} a micro batch whose attention scores fit into memory.
        seconds: with warm caches, on an H100.
        on_cpu: seconds of the tiny variant, or why the CPU is left out.
        cold: names in COLD_S of what it compiles.
        packages: it needs, besides those that every run needs.
        needs: an earlier run whose files it reads, and which of them.
        ranks: processes that torchrun starts; 1 is plain python.
        left_out: why no machine like this one can run it; None: it can.
    """

    name: str
    shows: str
    work: str
    flags: str
    seconds: int
    on_cpu: int | str = 5
    cold: tuple[str, ...] = ()
    check: Check | None = None
    packages: tuple[str, ...] = ()
    needs: tuple[str, str] | None = None
    ranks: int = 1
    left_out: str | None = None


# work -> device -> flags
TINY = "--num_layers 2 --num_heads 2 --embedding_size 64 --max_position_embeddings 128 --seq_length 64"
WORK = {
    "small": {
        "cuda": "--model nano --seq_length 128 --global_batch_size 16 --micro_batch_size_per_gpu 2 "
        "--max_train_steps 20 --learning_rate 1e-3 --max_val_steps 1",
        "cpu": f"{TINY} --global_batch_size 4 --micro_batch_size_per_gpu 2 --max_train_steps 6 --learning_rate 1e-3 "
        "--max_val_steps 1",
    },
    "large": {
        "cuda": "--model gpt2 --vocab_size 50257 --seq_length 1024 --global_batch_size 64 "
        "--micro_batch_size_per_gpu 32 --max_train_steps 24 --max_val_steps 0 --precision bf16",
        "cpu": f"{TINY} --global_batch_size 8 --micro_batch_size_per_gpu 4 --max_train_steps 8 --max_val_steps 0 "
        "--precision bf16",
    },
    # a time to a loss counts every step, also the first, which would wait for the compiler
    "learning": {
        "cuda": "--model nano --seq_length 256 --global_batch_size 64 --micro_batch_size_per_gpu 64 "
        "--max_train_steps 600 --eval_every 50 --max_val_steps 4 --warmup_steps 60 --precision bf16 --compile off",
        "cpu": f"{TINY} --global_batch_size 8 --max_train_steps 20 --eval_every 5 --max_val_steps 2 --precision fp32",
    },
}
STEPS = {"small": {"cuda": 20, "cpu": 6}, "large": {"cuda": 24, "cpu": 8}, "learning": {"cuda": 600, "cpu": 20}}
REFERENCE_ON_CPU = {"large_compiled": "large_eager"}  # what is left out there -> what takes its place
SAME_ON_CPU = "on the CPU it would be the run that it is compared with"
COMPILED_ONCE = "fp32_compiled shows on the CPU that compiling works"
# name in ON_ONE_RANK -> why the CPU is left out, where the suite compares every run type anyway
NOT_ON_CPU = {
    **dict.fromkeys(("allreduce", "ddp"), "on the CPU two ranks show it"),
    **dict.fromkeys(("zero0", "zero2"), "zero1 and zero3 show on the CPU that DeepSpeed works"),
}

FIRST = (
    Row("cpu_fp32", "the reference of all small runs, on the CPU", "small",
        "--device cpu --precision fp32 --compile off", 14, SAME_ON_CPU),
    Row("fp32", "the device computes what the CPU computes", "small", "--precision fp32 --compile off", 12,
        check=Check("cpu_fp32", "fp32 on another device")),
    Row("bf16", "bf16 stays near fp32", "small", "--precision bf16 --compile off", 12,
        check=Check("fp32", "16 bits against fp32")),
    Row("fp32_compiled", "blocks and head compiled compute the same", "small", "--precision fp32 --compile on", 18, 20,
        cold=("small",), check=Check("fp32", "fp32")),
    Row("large_compiled", "speed of GPT-2 124M, blocks and head compiled", "large", "--compile on", 26, COMPILED_ONCE,
        cold=("large",), check=Check("large_eager", "bf16")),
    Row("large_eager", "the same without the compiler", "large", "--compile off", 20),
)  # fmt: skip
PATHS = (
    Row("deterministic", "a run that repeats its bits", "small",
        "--precision bf16 --compile off --deterministic --save_every {half}", 14, check=Check("bf16", "bf16")),
    Row("deterministic_resumed", "resumed from its checkpoint, it repeats them", "small",
        "--precision bf16 --compile off --deterministic --resume {runs}/deterministic/checkpoints/step_{half:06}", 13,
        check=Check("deterministic", "same bits"), needs=("deterministic", "checkpoints/step_{half:06}/manifest.json")),
    Row("fp16", "fp16 with its loss scale", "small", "--precision fp16", 12, "fp16 needs a CUDA device",
        check=Check("fp32", "16 bits against fp32")),
    Row("profile", "torch.profiler, and the time of a step by cause", "large",
        "--compile {compile} --profile --profile_steps 3", 34, cold=("large",)),
    Row("saved", "a checkpoint between the steps", "large",
        "--compile {compile} --save_every {half}", 36, "saved_async shows on the CPU that saving works",
        cold=("large",), check=Check("large_compiled", "bf16")),
    Row("saved_async", "a checkpoint written in the background", "large",
        "--compile {compile} --save_every {half} --async_mode async", 36, cold=("large",),
        check=Check("large_compiled", "bf16")),
    Row("resumed", "a run goes on from it", "large",
        "--compile {compile} --resume {runs}/saved_async/checkpoints/step_{half:06}", 30, cold=("large",),
        check=Check("saved_async", "bf16"), needs=("saved_async", "checkpoints/step_{half:06}/manifest.json")),
    Row("micro_batch_auto", "the micro batch by memory, the kernel by trial, and what --compile auto does", "large",
        "--micro_batch_size_per_gpu auto --global_batch_size 128", 34, cold=("large",)),
)  # fmt: skip
SPEED = (
    Row("recomputed_block", "blocks computed again in backward", "large",
        "--compile off --activation_checkpointing block", 22, check=Check("large_eager", "bf16")),
    Row("recomputed_selective", "all but products and attention computed again", "large",
        "--compile off --activation_checkpointing selective", 22,
        "recomputed_block shows on the CPU that recomputing works", check=Check("large_eager", "bf16")),
    Row("attention_flash", "the flash kernel", "large", "--compile off --attention flash", 19,
        "every other run on the CPU takes it",
        check=Check("large_eager", "bf16")),
    Row("attention_cudnn", "cuDNN's kernel", "large", "--compile off --attention cudnn", 19,
        "a CPU has no cuDNN", check=Check("large_eager", "bf16")),
    Row("attention_efficient", "the memory-efficient kernel", "large", "--compile off --attention efficient", 19,
        "a CPU has no such kernel", check=Check("large_eager", "bf16")),
    # of the fused kernels the one that --attention auto takes last, so that large_compiled has another
    Row("efficient_compiled", "the memory-efficient kernel in compiled blocks", "large",
        "--compile on --attention efficient", 25, "a CPU has no such kernel", cold=("efficient",),
        check=Check("large_compiled", "bf16")),
    Row("attention_math", "attention without a fused kernel", "large",
        "--compile off --attention math --micro_batch_size_per_gpu {math}", 26,
        check=Check("large_eager", "bf16")),
    Row("fp8", "linear layers multiply in 8 bits", "large", "--compile on --matmul fp8", 34,
        "no CPU multiplies in 8 bits", cold=("fp8",), check=Check("large_compiled", "fp8 against bf16"),
        packages=("torchao",)),
    Row("large_fp32", "speed in fp32", "large",
        "--compile off --precision fp32 --micro_batch_size_per_gpu 16 --max_train_steps 8", 22,
        "every small run on the CPU is in fp32"),
    Row("time_to_loss_adamw", "time to a loss", "learning", "--optimizer adamw", 18),
    Row("time_to_loss_muon", "time to the same loss with Muon", "learning", "--optimizer muon", 20,
        "time_to_loss_adamw shows it on the CPU"),
    Row("generation", "text at the end, and how long it takes", "small",
        "--precision bf16 --compile off --sample_tokens 16 --run_inference_benchmark", 20, 7),
)  # fmt: skip
# run type -> further flags: what one rank can do, in the order of docs/strategies.md
ON_ONE_RANK = {
    "allreduce": "--run_type allreduce",
    "ddp": "--run_type ddp",
    "fsdp": "--run_type fsdp",
    "zero1": "--run_type optimized --zero_stage 1",
    "zero0": "--run_type optimized --zero_stage 0",
    "zero2": "--run_type optimized --zero_stage 2",
    "zero3": "--run_type optimized --zero_stage 3",
}
# {cut}: ranks that the model is cut over
ON_RANKS = {
    "model_parallel": "--run_type model_parallel --pipeline_stages {cut}",
    "pipeline": "--run_type pipeline --pipeline_stages {cut}",
    "gpipe": "--run_type pipeline --pipeline_schedule gpipe --pipeline_stages {cut}",
    "tensor": "--run_type tensor --tensor_parallel_size {cut}",
}
LARGEST_CUT = 4  # nano has four blocks and four heads
# compiled by default on CUDA; name in ON_ONE_RANK -> name in COLD_S
COMPILED_RUN_TYPES = {"ddp": "ddp", "fsdp": "fsdp", "zero1": "zero"}
TWO_ON_ONE_GPU = ("allreduce", "ddp")  # what --backend gloo can do with tensors on a GPU
