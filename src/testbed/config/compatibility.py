"""Tables of flags, strategies and ranks that do not work together. No torch.

A rule is the values of flags that it is about, and why. Its sentence begins with these flags and their values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from testbed.config.run_types import (
    MAY_REFUSE,
    STRATEGIES,
    WITH_AUTOMATIC_MICRO_BATCH,
    StrategyEntry,
    run_types_that_work_with,
    run_types_with,
)
from testbed.config.settings import BENCHMARK_NEW_TOKENS, BENCHMARK_PROMPT_TOKENS
from testbed.config.table import FLAGS
from testbed.errors import InputError

# flag -> its value, several in a tuple, or a condition; a condition of "run_type" gets the row of the registry
When = Mapping[str, Any]
Rule = tuple[When, str | Callable[[Mapping[str, Any]], str]]  # why, and the way out
_BENCHMARK_TOKENS = BENCHMARK_PROMPT_TOKENS + BENCHMARK_NEW_TOKENS


def _is_positive(value: float) -> bool:
    return value > 0


def _is_several(size: int | None) -> bool:
    return size is not None and size > 1


def _is_no_multiple_of_16(size: int) -> bool:
    return size % 16 != 0


def _of_16(size: int) -> str:
    return f"8-bit products need multiples of 16 on every side; give {-(-size // 16) * 16}"


def _with_engine(engine: str) -> Callable[[StrategyEntry], bool]:
    return lambda entry: entry.engine == engine


RULES: tuple[Rule, ...] = (
    ({"backend": "nccl", "device": "cpu"}, "NCCL moves data between GPUs; use --backend gloo or auto"),
    ({"mixed_precision": "native", "precision": ("auto", "fp32", "fp16")},
     "it is about how bf16 is used; give --precision bf16"),
    *(({"zero_stage": 0, "precision": "fp16", **of},
       f"DeepSpeed's optimizer for that pair begins Adam at step 2 and trains differently; use {other}, or bf16")
      for of, other in (({"optimizer": "muon"}, "ddp"), ({}, "--zero_stage 1"))),
    ({"zero_stage": 0, "mixed_precision": "native"},
     "DeepSpeed's optimizer for that pair begins Adam at step 2 and trains differently; use --zero_stage 1, or "
     "--mixed_precision autocast"),
    ({"activation_checkpointing": "selective", "zero_stage": 3},
     "DeepSpeed gathers weights and adds biases in place inside the blocks, so what was kept is not what is computed "
     "again; use block, or fsdp"),
    ({"optimizer": "muon", "zero_stage": (1, 2, 3)},
     "ZeRO gives an optimizer flat pieces that cut through matrices, and DeepSpeed's own Muon clips after the "
     "orthogonalisation, which is another update; use --zero_stage 0, or --run_type fsdp, which shards as much"),
    ({"allgather_bucket_size": lambda size: size and size % 2, "zero_stage": (1, 2)},
     lambda values: f"DeepSpeed needs an even number; give {values['allgather_bucket_size'] + 1}"),
    ({"offload": "optimizer", "zero_stage": 0}, "ZeRO must shard the optimizer state; give --zero_stage 1, 2 or 3"),
    ({"offload": "parameters", "zero_stage": (0, 1, 2)}, "only stage 3 shards the weights; give --zero_stage 3"),
    ({"dropout": _is_positive, "tensor_parallel_size": _is_several},
     "tensor ranks would need the same random numbers in the residual stream and different ones in their heads, which "
     "is not built; use --dropout 0"),
    ({"dropout": _is_positive, "context_parallel_size": _is_several},
     "context ranks would have to drop the same attention weights as one process, piece by piece, which is not built; "
     "use --dropout 0"),
    ({"context_parallel_size": _is_several, "context_parallel_method": "ring",
      "attention": ("efficient", "cudnn", "math")},
     "the ring calls the flash kernel by its name; use --context_parallel_method allgather, or --attention auto"),
    ({"pipeline_schedule": "zero_bubble", "reshard_after_forward": "on", "pipeline_stages": _is_several},
     "its second half of backward would find the weights freed, and their gradients would be lost; leave "
     "--reshard_after_forward out"),
    ({"activation_checkpointing": ("block", "selective"), "pipeline_schedule": "zero_bubble"},
     "it runs the backward pass in two halves, and a block is computed again for one only; use 1f1b, or none"),
    ({"matmul": "fp8", "device": "cpu"}, "no CPU multiplies in 8 bits; leave --matmul out"),
    ({"matmul": "fp8", "precision": ("fp32", "fp16")},
     "what is not multiplied in 8 bits runs in bf16 autocast; give --precision bf16 or auto"),
    ({"matmul": "fp8", "mixed_precision": "native"},
     "what is not multiplied in 8 bits runs in bf16 autocast; give --mixed_precision autocast"),
    ({"matmul": "fp8", "embedding_size": _is_no_multiple_of_16}, lambda values: _of_16(values["embedding_size"])),
    ({"matmul": "fp8", "seq_length": _is_no_multiple_of_16}, lambda values: _of_16(values["seq_length"])),
    ({"micro_batch_size_per_gpu": "auto", "run_type": lambda entry: entry.micro_batch == "given"},
     "it is not built for dp, and stages want many small micro batches; give a number, or use "
     + ", ".join(WITH_AUTOMATIC_MICRO_BATCH)),
    ({"micro_batch_size_per_gpu": "auto", "pipeline_stages": _is_several},
     "it finds the largest that fits, and stages want many small ones; give a number"),
    ({"micro_batch_size_per_gpu": "auto", "grad_accum_steps": bool},
     "the number of micro batches follows from their size; leave one of them out, and give --global_batch_size for "
     "the work of a step"),
    # files and what is measured
    ({"overwrite": True, "resume": bool}, "one replaces the run and the other continues it; give one of them"),
    ({"allow_setting_change": True, "resume": None},
     "it is about a run that is resumed; give --resume too, or leave it out"),
    ({"eval_only": True, "resume": bool},
     "nothing is trained, so there is nothing to continue; leave one of them out"),
    *(({"skip_gradient_sync": bool, flag: bool},
       f"steps without synchronisation are not training, so there is nothing to save or continue; leave --{flag} out")
      for flag in ("save_every", "resume")),
    ({"run_inference_benchmark": True, "skip_gradient_sync": bool},
     "one measures the trained weights, and the other leaves none; leave one of them out"),
    ({"run_inference_benchmark": True, "max_position_embeddings": lambda positions: positions < _BENCHMARK_TOKENS},
     f"it generates {BENCHMARK_NEW_TOKENS} tokens after a prompt of {BENCHMARK_PROMPT_TOKENS}; give "
     f"--max_position_embeddings {_BENCHMARK_TOKENS} or more, or leave it out"),
)  # fmt: skip
# once it is known whether --device auto is the CPU or CUDA
ON_DEVICE: tuple[Rule, ...] = (
    ({"precision": "fp16", "device": "cpu"}, "it needs a CUDA device; use fp32 or bf16"),
    ({"backend": "gloo", "device": "cuda", "run_type": lambda entry: not entry.gloo_on_cuda},
     "gloo averages and broadcasts tensors on a GPU, and nothing else; use "
     + ", ".join(run_types_with(gloo_on_cuda=True)) + ", or --backend nccl"),
    ({"attention": ("flash", "cudnn"), "precision": "fp32", "device": "cuda"},
     "those kernels of a GPU take 16 bits alone; use --attention efficient, or --precision bf16"),
    ({"context_parallel_size": _is_several, "context_parallel_method": "ring", "precision": "fp32", "device": "cuda"},
     "the ring needs the flash kernel, which a GPU has for 16 bits alone; use --context_parallel_method allgather, or "
     "--precision bf16"),
    ({"context_parallel_size": _is_several, "context_parallel_method": "allgather", "attention": "flash",
      "device": "cuda"},
     "gathered keys need a mask, which the flash kernel of a GPU does not take; leave --attention out"),
)  # fmt: skip
# with --compile, and what is not compiled by itself either
COMPILE: tuple[tuple[When, str], ...] = (
    ({"pipeline_schedule": "zero_bubble"},
     "it runs the backward pass of weights apart from that of activations, which a compiled block does not offer; use "
     "1f1b"),
    ({"tensor_parallel_size": _is_several, "activation_checkpointing": "block"},
     "the compiler cannot keep a device mesh for the recomputation; use selective"),
    ({"zero_stage": 3},
     "DeepSpeed gathers weights in hooks inside the blocks, which break a compiled block into pieces; use "
     "--zero_stage 2 or fsdp"),
)  # fmt: skip
# what --compile auto leaves alone, as no agreement test compiles it
UNPROVEN: tuple[When, ...] = (
    {"run_type": lambda entry: not entry.compiles_with},
    {"precision": "fp16"},
    {"dropout": _is_positive},
    {"mixed_precision": "native"},
    {"matmul": "fp8"},
)
# what a run computes differently from the baseline
MATHEMATICS: tuple[tuple[When, str], ...] = (
    ({"skip_gradient_sync": "all"}, "gradients are not synchronised: this is not training"),
    ({"skip_gradient_sync": "alternate"}, "gradients of every even step are not synchronised: this is not training"),
    ({"gradient_compression": "bf16"}, "gradients are averaged in bf16"),
    ({"mixed_precision": "native", "run_type": _with_engine("deepspeed")},
     "DeepSpeed's own bf16 mode: bf16 weights, activations and averages of gradients"),
    ({"mixed_precision": "native", "run_type": _with_engine("torch")},
     "FSDP's own mixed precision: bf16 weights and activations, gradients averaged in fp32"),
    ({"precision": "fp16", "run_type": _with_engine("deepspeed")},
     "DeepSpeed's own fp16 mode: fp16 weights, activations and averages of gradients"),
    ({"matmul": "fp8"}, "the linear layers of the blocks multiply in fp8"),
)  # fmt: skip


def check_combination(values: Mapping[str, Any]) -> None:
    """Refuse settings that do not work together. `values` are final but for what the device decides."""
    run_type = values["run_type"]
    for refusable, reason in STRATEGIES[run_type].refuses.items():
        refused, way_out = MAY_REFUSE[refusable]
        if _applies(refused, values):
            others = ", ".join(run_types_that_work_with(refusable))
            said = f"{_said(refused, values)} with --run_type {run_type}"
            raise InputError(f"{said}: {reason}; use {others}, or {way_out}")
    _refuse_first(RULES, values)
    if values["compile"] and (blocked := compile_blocker(values)) is not None:
        raise InputError(f"--compile {blocked}, or give --compile off")


def check_on_device(values: Mapping[str, Any]) -> None:
    """Refuse what does not work on the device of this rank: "cpu" or "cuda" in `values`."""
    _refuse_first((*RULES, *ON_DEVICE), values)


def _refuse_first(rules: Sequence[Rule], values: Mapping[str, Any]) -> None:
    for when, why in rules:
        if _applies(when, values):
            raise InputError(f"{_said(when, values)}: {why if isinstance(why, str) else why(values)}")


def _applies(when: When, values: Mapping[str, Any]) -> bool:
    """Return whether flags have the values that a rule is about."""
    for name, wanted in when.items():  # a planner asks this 100,000 times: `all` takes twice as long
        if not _fits(wanted, STRATEGIES[values[name]] if name == "run_type" else values[name]):
            return False
    return True


def _fits(wanted: Any, value: Any) -> bool:
    if callable(wanted):
        return bool(wanted(value))
    return value in wanted if isinstance(wanted, tuple) else bool(value == wanted)


def _said(when: When, values: Mapping[str, Any]) -> str:
    """Return the flags of a rule as they would be typed: `--zero_stage 0 with --precision fp16`."""
    first, *others = _words(when, values)
    return f"{first} with {' and '.join(others)}" if others else first


def _words(when: When, values: Mapping[str, Any]) -> list[str]:
    return [
        FLAGS[name].option_strings[0] + ("" if values[name] is True else f" {values[name]}")
        for name in when
        if values[name] is not None
    ]


def refusals() -> list[tuple[str, str]]:
    """Return the combinations that are refused: the flags with their values, and the reason.

    Combinations are in the order of the tables. Run types that refuse a flag for one reason are in one row.
    """
    of_run_types: list[Rule] = []
    for refusable, (when, _) in MAY_REFUSE.items():
        reasons = (entry.refuses[refusable] for entry in STRATEGIES.values() if refusable in entry.refuses)
        for reason in dict.fromkeys(reasons):
            named = tuple(name for name, entry in STRATEGIES.items() if entry.refuses.get(refusable) == reason)
            of_run_types.append(({**when, "run_type": named}, reason))
    with_compile = [({"compile": True, **when}, why) for when, why in COMPILE]
    return [
        (
            " with ".join(_condition(name, wanted) for name, wanted in when.items()),
            why.partition(";")[0] if isinstance(why, str) else "the number does not divide",
        )
        for when, why in (*of_run_types, *RULES, *ON_DEVICE, *with_compile)
    ]


def _condition(name: str, wanted: Any) -> str:
    """Return a flag with the values of a rule: `--dropout above 0`."""
    if name == "run_type" and callable(wanted):
        wanted = tuple(other for other, entry in STRATEGIES.items() if wanted(entry))
    if callable(wanted):
        said = {_is_positive: "above 0", _is_several: "above 1", _is_no_multiple_of_16: "no multiple of 16"}
        value = said.get(wanted, "above 0" if name == "dropout" else "")
    elif isinstance(wanted, tuple):
        value = ", ".join(map(str, wanted))
    else:
        value = {True: "", None: "left out"}.get(wanted, wanted)
    return f"`--{name} {value}`".replace(" `", "`")


def compile_blocker(values: Mapping[str, Any]) -> str | None:
    """Return what --compile does not work with, why, and what does; None if it works."""
    refused = STRATEGIES[values["run_type"]].refuses.get("compile")
    if refused is not None:
        return f"with --run_type {values['run_type']}: {refused}"
    found = ((when, why) for when, why in COMPILE if _applies(when, values))
    return next((f"with {' and '.join(_words(when, values))}: {why}" for when, why in found), None)


def auto_compile_blocker(values: Mapping[str, Any]) -> str | None:
    """Return why --compile auto does not compile on CUDA; None if an agreement test covers it.

    Args:
        values: all flags, with the final precision.
    """
    if (reason := compile_blocker(values)) is not None:
        return reason
    unproven = [_words(when, values) for when in UNPROVEN if _applies(when, values)]
    if values["activation_checkpointing"] not in STRATEGIES[values["run_type"]].compiles_with:
        unproven.append(_words({"run_type": "", "activation_checkpointing": ""}, values))
    if not unproven:
        return None
    untested = "no test shows that compiled blocks compute the same there; give --compile to do it anyway"
    return f"with {' and '.join(unproven[0])}: {untested}"


def math_changes(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return in words what this run computes differently from the baseline; empty for equal mathematics."""
    of_run_type = STRATEGIES[values["run_type"]].differs_because
    changes = [words for when, words in MATHEMATICS if _applies(when, values)]
    return (*([of_run_type] if of_run_type else []), *changes)
