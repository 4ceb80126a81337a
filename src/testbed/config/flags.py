"""Every flag of `src/gpt2.py`: its name, unit, effect and default. No torch, so that --help answers at once.

A default that depends on something else (the world size, the model, the data) is None here and is worked out
in settings.py; its help says how.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from testbed.config.environment_variables import check_no_secret
from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import (
    fraction,
    not_negative,
    not_negative_number,
    on_off_or_auto,
    positive,
    positive_number,
    positive_or_auto,
    share,
)
from testbed.config.run_types import STRATEGIES
from testbed.io import read_json
from testbed.model.shape import LEARNING_RATES, MODEL_SIZES, MUON_LEARNING_RATES

LR_SCHEDULES = {
    "cosine": "falls by a cosine to the minimum",
    "wsd": "stays at its peak, then falls in a straight line over the last --decay_share of the steps",
    "constant": "stays",
}
# They belong to one start, not to the work.
NOT_IN_CONFIG_FILES = {"config", "local_rank", "overwrite", "resume", "allow_setting_change"}


@dataclass(frozen=True)
class CommandLine:
    """What was asked for: every flag's value, and which of them a person set (on the command line or in --config)."""

    values: dict[str, Any]
    explicit: frozenset[str]
    typed: frozenset[str]  # of these, what stood on the command line


def parse_command_line(arguments: list[str]) -> CommandLine:
    """Flags win over the --config file, the file wins over the defaults.

    Raises:
        SystemExit: 0 after --help.
        ValueError: a flag does not exist or has no such value, or the --config file cannot be used.
    """
    for word in arguments:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{word!r} is not UTF-8, in which a run's files are written; rename what it names, or set a UTF-8 locale"
            ) from None
    parser = build_parser()
    values = vars(parser.parse_args(arguments))
    typed = _typed(arguments) & values.keys()
    from_file = _read_config_file(Path(values["config"]), parser) if values["config"] else {}
    merged = {**values, **{name: value for name, value in from_file.items() if name not in typed}}
    explicit = typed | {name for name, value in from_file.items() if value is not None}
    return CommandLine(merged, frozenset(explicit), frozenset(typed))


def _typed(arguments: list[str]) -> set[str]:
    """The flags that stand on the command line: parsed once more by a parser that fills in nothing."""
    parser = build_parser()
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return set(vars(parser.parse_args(arguments)))


def _read_config_file(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Settings from JSON, each checked by the flag of the same name."""
    content = read_json(path, f"--config {path}")
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} must hold one JSON object of flag names and values")
    check_no_secret(f"--config {path}", content)
    actions = {action.dest: action for action in parser._actions}
    checked = {}
    for name, value in content.items():
        action = actions.get(name)
        if action is None or name in NOT_IN_CONFIG_FILES or name == "help":
            raise ValueError(f"--config {path}: {name!r} is not a setting; the names are those of the flags, see --help")
        checked[name] = checked_like_a_flag(action, value, f"--config {path}: {name}")
    return checked


def checked_like_a_flag(action: argparse.Action, value: Any, place: str) -> Any:
    """A value from a file, held to the same rules as if it had been typed.

    Raises:
        ValueError: it breaks them; the sentence begins with `place`.
    """
    if value is None:
        return action.default
    if isinstance(action, argparse._StoreTrueAction):
        if not isinstance(value, bool):
            raise ValueError(f"{place} must be true or false, not {value!r}")
        return value
    if isinstance(value, str) and "\0" in value:
        raise ValueError(f"{place} cannot be {value!r}: it holds a NUL character")
    try:
        typed = action.type(str(value)) if action.type else str(value)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise ValueError(f"{place} cannot be {value!r} ({error})") from None
    if action.choices is not None and typed not in action.choices:
        raise ValueError(f"{place} {value!r} is not one of {', '.join(map(str, action.choices))}")
    return typed


class RaisingParser(FlagParser):
    """Hands the sentence to whoever asked: of many ranks one speaks."""

    def refuse(self, sentence: str) -> NoReturn:
        raise ValueError(sentence)


def build_parser() -> argparse.ArgumentParser:
    """The command line of `src/gpt2.py`, grouped as a user thinks."""
    parser = RaisingParser(
        prog="gpt2.py",
        description="Train GPT-2 under one way of spreading the work over devices, and measure it.",
        epilog="Start with python, torchrun or deepspeed. Guides: README.md, docs/.",
        allow_abbrev=False,
    )
    for add_group in (_run_flags, _model_flags, _data_flags, _batch_flags, _optimizer_flags, _device_flags,
                      _data_parallel_flags, _deepspeed_flags, _model_cutting_flags, _checkpoint_flags,
                      _report_flags):  # fmt: skip
        add_group(parser)
    return parser


def _run_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument("--run_type", choices=list(STRATEGIES), default="baseline",
                       help="how an optimizer step is spread over ranks: "
                       + "; ".join(f"{name} = {entry.summary}" for name, entry in STRATEGIES.items())
                       + " (default: %(default)s)")
    group.add_argument("--config", metavar="FILE.json",
                       help="read settings from a file, such as a run's effective_config.json; flags win over it (default: none)")
    group.add_argument("--epochs", type=positive, default=1, metavar="N",
                       help="passes over the training windows (default: %(default)s)")
    group.add_argument("--max_train_steps", type=positive, metavar="STEPS",
                       help="end after this many optimizer steps; also the length of the schedule (default: all epochs)")
    group.add_argument("--stop_at_step", type=positive, metavar="STEP",
                       help="stop after this optimizer step but keep the schedule of the whole run (default: do not)")
    group.add_argument("--max_val_steps", type=not_negative, metavar="BATCHES",
                       help="validate on the first BATCHES global batches; 0 = no validation (default: all)")
    group.add_argument("--eval_every", type=positive, metavar="STEPS",
                       help="validate every STEPS optimizer steps too, not only at the end of an epoch (default: do not)")
    group.add_argument("--eval_only", action="store_true",
                       help="train nothing: validate the weights of --init_from and write the run's files; of a run of ours, its "
                       "sequence length, token files, global batch and --max_val_steps are the default, so the loss is the run's own; "
                       "--val_data_path alone is enough data")
    group.add_argument("--seed", type=not_negative, default=42, metavar="N",
                       help="fixes initialisation, data order and dropout (default: %(default)s)")
    group.add_argument("--grace_seconds", type=positive_number, default=20.0, metavar="SECONDS",
                       help="on SIGTERM or SIGUSR1: time to finish the step and save a checkpoint; then the process ends "
                       "whatever it is doing, see docs/faults.md (default: %(default)g)")
    group.add_argument("--collective_timeout", type=positive_number, default=120.0, metavar="SECONDS",
                       help="a rank that waits longer for another one ends, and says for which and where; longer than what "
                       "rank 0 does alone, such as writing the weights, and than ranks differ in loading PyTorch "
                       "(default: %(default)g)")


def _model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model (a size, and dimensions that override it)")
    group.add_argument("--model", choices=list(MODEL_SIZES), default="gpt2",
                       help="published size, or nano for a laptop core (default: %(default)s, 124M parameters)")
    group.add_argument("--num_layers", type=positive, metavar="N", help="transformer blocks (default: the size's)")
    group.add_argument("--num_heads", type=positive, metavar="N", help="attention heads (default: the size's)")
    group.add_argument("--embedding_size", type=positive, metavar="CHANNELS",
                       help="width of the residual stream (default: the size's)")
    group.add_argument("--vocab_size", type=positive, metavar="TOKENS",
                       help="rows of the embedding; may exceed the data's (default: the data's, 50257 without a sidecar)")
    group.add_argument("--max_position_embeddings", type=positive, metavar="TOKENS",
                       help="longest sequence that the model can read (default: the size's, 1024)")
    group.add_argument("--dropout", type=fraction, default=0.0, metavar="P",
                       help="dropout probability (default: %(default)s)")
    group.add_argument("--init_from", default="scratch", metavar="scratch|gpt2|gpt2-medium|gpt2-large|gpt2-xl|DIR",
                       help="starting weights: GPT-2's initialisation, published weights from the Hugging Face hub, "
                       "or a folder with config.json and model.safetensors (default: %(default)s)")
    group.add_argument("--attention", choices=["auto", "flash", "cudnn", "efficient", "math"], default="auto",
                       help="the attention kernel; auto = on CUDA the fastest in a trial at the run's shape (of equally fast ones always the same), on the CPU what "
                       "PyTorch picks, which is FlashAttention for CPU where it can (default: %(default)s)")
    group.add_argument("--use_flash_attention", action="store_true", help="the same as --attention flash, from older commands")


def _data_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("--train_data_path", default="train_small.bin", metavar="FILE.bin",
                       help="training tokens (default: %(default)s)")
    group.add_argument("--val_data_path", default="val_small.bin", metavar="FILE.bin",
                       help="validation tokens (default: %(default)s)")
    group.add_argument("--seq_length", type=positive, default=512, metavar="TOKENS",
                       help="tokens per sequence (default: %(default)s)")
    group.add_argument("--num_workers", type=not_negative, metavar="STEPS",
                       help="steps whose batches a background thread reads ahead; 0 = read inside the step, "
                       "which the clock counts as data wait (default: 1 on CUDA, 0 on the CPU)")


def _batch_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "batch (global batch = micro batch x gradient accumulation x data ranks; it never follows the world size)")
    group.add_argument("--global_batch_size", type=positive, metavar="SEQUENCES",
                       help="sequences per optimizer step over all ranks (default: 32, or what --grad_accum_steps gives)")
    group.add_argument("--micro_batch_size_per_gpu", "--train_micro_batch_size_per_gpu", type=positive_or_auto,
                       metavar="SEQUENCES|auto",
                       help="sequences of one forward pass on one rank; lower it when memory runs out. auto = the largest that "
                       "fits into memory and divides a rank's share, see docs/automatic_choices.md "
                       "(default: the largest up to 4 that divides a rank's share; in a pipeline smaller, so that "
                       "every stage is busy, and under model_parallel the whole share)")
    group.add_argument("--grad_accum_steps", type=positive, metavar="N",
                       help="micro batches per optimizer step and rank (default: follows from the global batch)")
    group.add_argument("--enforce_global_batch_size", type=positive, metavar="SEQUENCES",
                       help="refuse to start unless the global batch is this (default: no check)")


def _optimizer_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer and schedule")
    group.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw",
                       help="muon = orthogonalised momentum for the matrices inside the blocks, AdamW for embeddings, biases and "
                       "LayerNorms (default: %(default)s)")
    group.add_argument("--learning_rate", type=not_negative_number, metavar="LR",
                       help="peak learning rate (default: the size's: " + ", ".join(f"{name} {rate:g}" for name, rate in LEARNING_RATES.items())
                       + f"; muon: nano {MUON_LEARNING_RATES['nano']:g}, else the same)")
    group.add_argument("--muon_learning_rate", type=not_negative_number, metavar="LR",
                       help="muon: peak learning rate of the matrices, scaled so that a step changes them as much as AdamW's "
                       "would at the same rate; its schedule is --learning_rate's in proportion (default: --learning_rate)")
    group.add_argument("--muon_momentum", type=fraction, metavar="B",
                       help="muon: share of the old momentum that a step keeps (default: 0.95)")
    group.add_argument("--lr_schedule", choices=list(LR_SCHEDULES), default="cosine",
                       help="after the linear warm-up: " + "; ".join(f"{name} = {what}" for name, what in LR_SCHEDULES.items())
                       + " (default: %(default)s)")
    group.add_argument("--min_learning_rate", type=not_negative_number, metavar="LR",
                       help="learning rate at the end of the schedule (default: a tenth of --learning_rate; 0 with wsd)")
    group.add_argument("--warmup_steps", type=not_negative, metavar="STEPS",
                       help="steps of linear warm-up (default: a tenth of the run, at most 2000)")
    group.add_argument("--lr_decay_steps", type=positive, metavar="STEPS",
                       help="step at which the fall of the learning rate ends (default: the run's last step)")
    group.add_argument("--decay_share", type=share, metavar="SHARE",
                       help="wsd: the last share of the steps up to --lr_decay_steps, in which the learning rate falls "
                       "(default: 0.2)")
    group.add_argument("--weight_decay", type=not_negative_number, default=0.1, metavar="W",
                       help="decoupled decay of matrices and embeddings, not of biases and LayerNorms (default: %(default)s)")
    group.add_argument("--adam_beta1", type=fraction, default=0.9, metavar="B", help="(default: %(default)s)")
    group.add_argument("--adam_beta2", type=fraction, default=0.95, metavar="B", help="(default: %(default)s)")
    group.add_argument("--adam_eps", type=not_negative_number, default=1e-8, metavar="E", help="(default: %(default)s)")
    group.add_argument("--max_grad_norm", type=not_negative_number, default=1.0, metavar="NORM",
                       help="scale gradients down to this global L2 norm; 0 = off (default: %(default)s)")


def _device_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("device")
    group.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto",
                       help="auto = CUDA where PyTorch finds it (default: %(default)s)")
    group.add_argument("--precision", choices=["auto", "fp32", "bf16", "fp16"], default="auto",
                       help="of the matrix products; weights and optimizer state stay fp32 (fp16 under DeepSpeed: its own "
                       "fp16 mode). auto = bf16 where a trial product is faster in it, else fp32 (default: %(default)s)")
    group.add_argument("--mixed_precision", choices=["autocast", "native"],
                       help="how fsdp and optimized use bf16: autocast = fp32 weights, bf16 products, the baseline's "
                       "mathematics; native = the engine's own way, bf16 weights and activations beside fp32 masters; needs --precision bf16: less "
                       "memory and traffic, recorded as changing the mathematics (default: autocast)")
    group.add_argument("--activation_checkpointing", choices=["none", "block", "selective"], default="none",
                       help="what backward recomputes to save memory: block = each block from its input; selective = all "
                       "but matrix products and attention (default: %(default)s)")
    group.add_argument("--compile", type=on_off_or_auto, nargs="?", const=True, metavar="auto|on|off",
                       help="compile each transformer block with torch.compile; the first step waits for it. auto = on CUDA "
                       "where a test shows that the run type computes the same, not on the CPU; without a word: on (default: auto)")
    group.add_argument("--matmul", choices=["default", "fp8"], default="default",
                       help="fp8 = the linear layers of the blocks multiply in 8 bits (torchao's float8 with tensorwise scales): "
                       "Hopper or newer, recorded as changing the mathematics (default: %(default)s, what --precision says)")
    group.add_argument("--threads_per_rank", type=positive, metavar="N",
                       help="CPU threads of each rank (default: OMP_NUM_THREADS, else the cores shared out evenly)")
    group.add_argument("--bind_cores", action="store_true",
                       help="keep each rank to its share of the node's cores (Linux; not where the launcher binds ranks itself)")
    group.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    group.add_argument("--quiet_nccl_monitor", action="store_true",
                       help="switch NCCL's monitoring thread off (TORCH_NCCL_ENABLE_MONITORING=0)")


def _data_parallel_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data parallel (run types allreduce, ddp, fsdp)")
    group.add_argument("--skip_gradient_sync", nargs="?", const="all", choices=["all", "alternate"], metavar="all|alternate",
                       help="allreduce, ddp: leave the synchronisation out to see what it costs, of all steps or of every even "
                       "one; the ranks then train apart, so the run is marked as no training and leaves no weights "
                       "(default: synchronise; without a word: all)")
    group.add_argument("--bucket_cap_mb", type=positive_number, metavar="MIB",
                       help="ddp: size of the buckets in which gradients are averaged while backward goes on (default: 25)")
    group.add_argument("--gradient_compression", choices=["none", "bf16"],
                       help="ddp: average gradients in bf16, half the traffic; recorded as changing the mathematics "
                       "(default: none)")
    group.add_argument("--reshard_after_forward", choices=["on", "off"],
                       help="fsdp: free gathered weights after forward and gather them again for backward; off = one "
                       "gathering less, more memory (default: on)")
    group.add_argument("--shard_size", type=positive, metavar="RANKS",
                       help="fsdp: ranks that share one copy of the weights; fewer than all = hybrid, copies are replicated "
                       "as in ddp; the ranks of a node are a good choice (default: all)")


def _model_cutting_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "cutting the model (run types model_parallel, pipeline, tensor; the ranks left over are data parallel)")
    group.add_argument("--pipeline_stages", type=positive, metavar="RANKS",
                       help="ranks that the layers are cut over, balanced by cost (default: all ranks)")
    group.add_argument("--pipeline_schedule", choices=["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"],
                       help="pipeline: the order of forward and backward passes (default: 1f1b)")
    group.add_argument("--stages_per_rank", type=positive, metavar="N",
                       help="pipeline: pieces of the model on each rank (default: 2 for interleaved_1f1b and zero_bubble, "
                       "else 1)")
    group.add_argument("--tensor_parallel_size", type=positive, metavar="RANKS",
                       help="tensor: ranks that attention heads, MLP and vocabulary are cut over (default: all ranks)")


def _deepspeed_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("DeepSpeed (run type optimized)")
    group.add_argument("--deepspeed_config", metavar="FILE.json",
                       help='settings for DeepSpeed; "auto" = decided by the flags here. Values in it also set the work '
                       "of a baseline that names the same file (default: deepspeed_config.json beside gpt2.py)")
    group.add_argument("--zero_stage", type=int, choices=[0, 1, 2, 3],
                       help="what ZeRO shards: 1 optimizer state, 2 and gradients, 3 and weights (default: the file's, else 1)")
    group.add_argument("--offload", choices=["none", "optimizer", "parameters"],
                       help="keep the optimizer state, or with stage 3 the weights too, in host memory (default: the file's, else none)")
    group.add_argument("--reduce_bucket_size", type=positive, metavar="ELEMENTS",
                       help="gradients reduced at once (default: the file's, else 200000000)")
    group.add_argument("--allgather_bucket_size", type=positive, metavar="ELEMENTS",
                       help="updated weights gathered at once; an even number (default: the file's, else 200000000)")
    group.add_argument("--overlap_comm", choices=["on", "off"],
                       help="reduce gradients while backward goes on (default: the file's, else on)")


def _checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("files")
    group.add_argument("--checkpoint_path", metavar="DIR",
                       help="folder of this run's files (default: checkpoint/<run_type>)")
    group.add_argument("--overwrite", action="store_true", help="replace what --checkpoint_path holds of a run, or under the names of one, and say what that is")
    group.add_argument("--resume", nargs="?", const="auto", metavar="auto|PATH",
                       help="auto, or without a word: continue the run that --checkpoint_path holds from its newest whole "
                       "checkpoint; begin it where there is none; end with 0 where it is complete. PATH: from this checkpoint, or "
                       "the newest of this run's folder; that of another run begins a new one in --checkpoint_path. See "
                       "docs/checkpoints.md (default: begin, and refuse a folder that holds a run)")
    group.add_argument("--allow-setting-change", action="store_true",
                       help="let --resume go on with other settings than the checkpoint's where they change the work, and write "
                       "each into training_metrics.json (default: refuse)")
    group.add_argument("--save_every", type=positive, metavar="STEPS",
                       help="write a checkpoint to resume from every STEPS optimizer steps (default: only at --stop_at_step)")
    group.add_argument("--keep_last", type=positive, default=2, metavar="K",
                       help="keep the newest K checkpoints; should the disk damage one, there is the one before (default: "
                       "%(default)s)")
    group.add_argument("--async_mode", choices=["disabled", "async"], default="disabled",
                       help="async = the loop goes on as soon as a checkpoint's state is copied to host memory, and it is written "
                       "beside the next steps, which that can slow down; not with --run_type optimized (default: %(default)s)")
    group.add_argument("--keep_best", action="store_true",
                       help="also keep the weights with the lowest validation loss, in DIR/best")


def _report_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measuring and output")
    group.add_argument("--steps_per_print", type=positive, default=10, metavar="STEPS",
                       help="a line of progress every STEPS where there is no terminal for a bar (default: %(default)s)")
    group.add_argument("--timing_warmup_steps", type=not_negative, default=5, metavar="STEPS",
                       help="first steps marked as warm-up; kept in the file, left out of medians (default: %(default)s)")
    group.add_argument("--timing_sample_every", type=positive, default=1, metavar="STEPS",
                       help="kept from older commands; every step is timed whatever it says (default: %(default)s)")
    group.add_argument("--profile", action="store_true",
                       help="record a torch.profiler trace of --profile_steps steps after warm-up in DIR/profiler_logs, and where "
                       "the time of these steps went in training_metrics.json; marks the run as instrumented")
    group.add_argument("--profile_steps", type=positive, default=5, metavar="STEPS",
                       help="steps that --profile looks at (default: %(default)s)")
    group.add_argument("--profile_mode", action="store_true",
                       help="for Nsight: NVTX ranges around the step, its phases and validation, no progress bar; marks the run "
                       "as instrumented")
    group.add_argument("--log_collectives", action="store_true",
                       help="write when each rank enters and leaves each collective to DIR/evidence, see docs/evidence.md; marks "
                       "the run as instrumented")
    group.add_argument("--tensorboard", action="store_true",
                       help="write loss, gradient norm, learning rate, step time and tokens/s to DIR/tensorboard while training "
                       "(default: do not)")
    group.add_argument("--sample_prompt", default="import ", metavar="TEXT",
                       help="start of the sample generated at the end (default: %(default)r)")
    group.add_argument("--sample_tokens", type=not_negative, default=64, metavar="TOKENS",
                       help="length of that sample; 0 = none (default: %(default)s)")
    group.add_argument("--run_inference_benchmark", action="store_true",
                       help="at the end rank 0 times generation with the trained weights (100 greedy tokens, batch 1, key-value "
                       "cache) and writes inference_latency and inference_throughput, see docs/inference.md (default: do not)")
