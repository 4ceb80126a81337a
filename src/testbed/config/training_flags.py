"""The table of flags, first part: what is trained. A field is a flag, a class a group of --help. No torch.

flag.py explains the columns.
"""

from dataclasses import dataclass
from typing import ClassVar

from testbed.config.flag import Filled, Flag, Kind, Resume, flag, row
from testbed.config.flag_types import (
    fraction,
    layer_count,
    not_negative,
    not_negative_number,
    positive,
    positive_or_auto,
    share,
    steps_ahead,
    token_count,
    waiting_time,
)
from testbed.config.run_types import REFERENCE, STRATEGIES, WITH_AUTOMATIC_MICRO_BATCH
from testbed.model.shape import GELUS, LEARNING_RATES, MODEL_SIZES, MUON_LEARNING_RATES

WORK, PARALLELISM, EXECUTION, OUTPUT = Kind.WORK, Kind.PARALLELISM, Kind.EXECUTION, Kind.OUTPUT
LR_SCHEDULES = {
    "cosine": "cosine decay",
    "wsd": "constant, then linear decay over --decay_share of the steps",
    "constant": "no decay",
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """run"""

    run_type: str = flag(
        "parallelism strategy: " + "; ".join(f"{name} = {entry.summary}" for name, entry in STRATEGIES.items())
        + "; auto = what --choice or else the plan says is fastest, see docs/find_fastest.md (default: %(default)s)",
        PARALLELISM, choices=[*STRATEGIES, "auto"], default=REFERENCE, in_config="run_type")
    config: ClassVar[Flag] = row(
        "settings from a file of flag names and values: JSON, such as a run's effective_config.json, TOML, YAML, or a .py of "
        "nanoGPT; flags win over it (default: none)",
        OUTPUT, metavar="FILE", of_one_start=True)
    choice: ClassVar[Flag] = row(
        "with --run_type auto: what scripts/find_fastest.py wrote; refused if it is for other work, ranks or devices "
        "(default: checkpoint/fastest/choice.json, passed over if it does not fit)",
        OUTPUT, metavar="FILE.json", of_one_start=True)
    epochs: int = flag(
        "passes over the training data; without effect where --max_train_steps is given (default: %(default)s)",
        WORK, type=positive, default=1, metavar="N", in_config="epochs", compared_as="total_steps")
    max_train_steps: int | None = flag(
        "train this many optimizer steps, however many epochs they are; the schedule is planned for them (default: --epochs)",
        WORK, type=positive, metavar="STEPS", in_config="max_train_steps", compared_as="total_steps")
    max_tokens: int | None = flag(
        "train on this many tokens, such as 500M or 10B, rounded up to whole optimizer steps, in place of --max_train_steps (default: --epochs)",
        WORK, type=token_count, metavar="TOKENS", compared_as="total_steps")
    stop_at_step: int | None = flag(
        "stop after this optimizer step, with the schedule of the whole run (default: do not)",
        WORK, type=positive, metavar="STEP", resume=Resume.FREE, in_config="stop_at_step", compared_as="optimizer_steps")
    max_val_steps: int | None = flag(
        "validate on this many global batches; 0 = no validation (default: all)",
        WORK, type=not_negative, metavar="BATCHES", resume=Resume.FREE, compared_as="val_tokens", is_task=True)
    eval_every: int | None = flag(
        "also validate every STEPS optimizer steps (default: only at the end of an epoch)",
        EXECUTION, type=positive, metavar="STEPS", resume=Resume.FREE, names_arm=False)
    early_stop_patience: int | None = flag(
        "stop after so many validations in a row without a lower loss than before; --keep_best keeps the best weights "
        "(default: do not)",
        WORK, type=positive, metavar="VALIDATIONS", resume=Resume.FREE, compared_as="optimizer_steps")
    eval_multiple_choice: str | None = flag(
        "at each validation also answer the questions of this file, in HellaSwag's form; each rank reads a share of them "
        "in fp32, with a whole copy of the weights; see docs/inference.md (default: none)",
        EXECUTION, metavar="FILE.jsonl", resume=Resume.FREE, names_arm=False)
    eval_only: bool = flag(
        "validate the weights of --init_from without training. If they are a run's, its sequence length, token files, "
        "global batch and --max_val_steps are the defaults, so the loss is the run's own. --val_data_path alone is enough data",
        WORK, default=False, compared_as="optimizer_steps", names_arm=True)
    seed: int = flag(
        "seed of initialisation, data order and dropout (default: %(default)s)",
        WORK, type=not_negative, default=42, metavar="N", in_config="seed", varies=True)
    grace_seconds: float = flag(
        "time to finish the step and save a checkpoint after SIGTERM or SIGUSR1, before the process ends; see "
        "docs/faults.md (default: %(default)g)",
        OUTPUT, type=waiting_time, default=20.0, metavar="SECONDS")
    collective_timeout: float = flag(
        "a rank that waits longer for another rank fails and names it. Give more than rank 0 needs to write the weights, "
        "and than ranks differ in loading PyTorch (default: %(default)g)",
        OUTPUT, type=waiting_time, default=120.0, metavar="SECONDS")


@dataclass(frozen=True, kw_only=True)
class Model:
    """model (a size, and dimensions that override it)"""

    size: str = flag(
        "GPT-2 size, or nano for a laptop core (default: %(default)s, 124M parameters)",
        WORK, name="model", choices=list(MODEL_SIZES), default="gpt2", compared_as="num_layers")
    num_layers: int = flag(
        "transformer blocks (default: the size's)",
        WORK, type=layer_count, metavar="N", resume=Resume.NEVER, in_config="num_layers", is_task=True)
    num_heads: int = flag(
        "attention heads (default: the size's)",
        WORK, type=positive, metavar="N", resume=Resume.NEVER, in_config="num_heads", is_task=True)
    embedding_size: int = flag(
        "width of the residual stream (default: the size's)",
        WORK, type=positive, metavar="CHANNELS", resume=Resume.NEVER, in_config="embedding_size", is_task=True)
    vocab_size: int = flag(
        "vocabulary size, at least the data's (default: the data's; 50257 without a sidecar)",
        WORK, type=positive, metavar="TOKENS", resume=Resume.NEVER, in_config="vocab_size", is_task=True)
    max_position_embeddings: int = flag(
        "longest sequence of the model (default: the size's, 1024, and of a new model at least --seq_length)",
        WORK, type=positive, metavar="TOKENS", resume=Resume.NEVER, in_config="max_position_embeddings", is_task=True)
    gelu: str = flag(
        "form of GELU: GPT-2's, or the exact one, which nanoGPT computes (default: the weights', else tanh)",
        WORK, choices=GELUS, metavar="tanh|exact", before="tanh", in_config="gelu", is_task=True)
    dropout: float = flag(
        "dropout probability (default: %(default)s)",
        WORK, type=fraction, default=0.0, metavar="P", in_config="dropout")
    label_smoothing: float = flag(
        "train on targets that give this share of the probability to all tokens of the vocabulary alike, the target among "
        "them. The recorded training loss has it, the validation loss does not (default: %(default)s)",
        WORK, type=fraction, default=0.0, metavar="SHARE", before=0.0, in_config="label_smoothing")
    init_from: str = flag(
        "initial weights: random, published on the Hugging Face hub, a folder with config.json and model.safetensors, "
        "nanoGPT's ckpt.pt, llm.c's .bin, or a universal checkpoint of DeepSpeed with its config.json (default: %(default)s)",
        WORK, default="scratch", metavar="scratch|gpt2|gpt2-medium|gpt2-large|gpt2-xl|DIR|FILE", in_config="init_from", is_task=True)
    attention: str = flag(
        "attention kernel. auto = the fastest in a trial on CUDA, PyTorch's choice on the CPU (default: %(default)s)",
        EXECUTION, choices=["auto", "flash", "cudnn", "efficient", "math"], default="auto", filled=Filled.DECIDED, before="auto")


@dataclass(frozen=True, kw_only=True)
class Data:
    """data"""

    train_data_path: str = flag(
        "training tokens; a pattern such as 'fineweb/*train*.bin' takes many files as one (default: %(default)s)",
        WORK, default="train_small.bin", metavar="FILE.bin", resume=Resume.FREE, compared_as="train_data_sha256", is_task=True, varies=True)
    val_data_path: str = flag(
        "validation tokens; a pattern likewise (default: %(default)s)",
        WORK, default="val_small.bin", metavar="FILE.bin", resume=Resume.FREE, compared_as="val_data_sha256", is_task=True, varies=True)
    seq_length: int = flag(
        "tokens per sequence (default: %(default)s)",
        WORK, type=positive, default=512, metavar="TOKENS", in_config="seq_len", is_task=True)
    num_workers: int | None = flag(
        "steps that a background thread reads ahead; 0 = read inside the step (default: 1 on CUDA, 0 on the CPU)",
        EXECUTION, type=steps_ahead, metavar="STEPS", resume=Resume.FREE, filled=Filled.DECIDED)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """batch (global batch = micro batch x gradient accumulation x data ranks; it never follows the world size)"""

    global_batch_size: int = flag(
        "sequences per optimizer step of all ranks (default: 32, or follows from --grad_accum_steps)",
        WORK, type=positive, metavar="SEQUENCES", in_config="global_batch_size")
    micro_batch_size_per_gpu: int = flag(
        "sequences per forward pass on one rank; lower it if memory runs out. auto = the largest that fits into memory, see "
        f"docs/automatic_choices.md (default: auto on CUDA with {', '.join(WITH_AUTOMATIC_MICRO_BATCH)}, unless "
        "--grad_accum_steps is given; else the largest up to 4 that divides a rank's share of the batch, smaller in a "
        "pipeline, the whole share with model_parallel)",
        PARALLELISM, type=positive_or_auto, metavar="SEQUENCES|auto", also=("--train_micro_batch_size_per_gpu",),
        filled=Filled.BY_RANKS, in_config="micro_batch_size_per_gpu")
    grad_accum_steps: int = flag(
        "forward passes per optimizer step on one rank (default: follows from the global batch)",
        PARALLELISM, type=positive, metavar="N", filled=Filled.BY_RANKS, recorded=False, in_config="grad_accum_steps")
    enforce_global_batch_size: int | None = flag(
        "fail if the global batch is another (default: no check)",
        OUTPUT, type=positive, metavar="SEQUENCES")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """optimizer and schedule"""

    name: str = flag(
        "muon = orthogonalised momentum for matrices inside blocks, AdamW for the rest (default: %(default)s)",
        WORK, name="optimizer", choices=["adamw", "muon"], default="adamw", resume=Resume.NEVER, before="adamw", in_config="optimizer", names_arm=True)
    learning_rate: float = flag(
        "peak learning rate (default: the size's: " + ", ".join(f"{name} {rate:g}" for name, rate in LEARNING_RATES.items())
        + f"; muon: nano {MUON_LEARNING_RATES['nano']:g}, else the same)",
        WORK, type=not_negative_number, metavar="LR", filled=Filled.DERIVED, in_config="lr")
    muon_learning_rate: float | None = flag(
        "muon: peak learning rate of the matrices, scaled to updates as large as AdamW's; it follows the schedule of "
        "--learning_rate in proportion (default: --learning_rate)",
        WORK, type=not_negative_number, metavar="LR", filled=Filled.DERIVED, needs=("optimizer", ("muon",)),
        in_config="muon_learning_rate", compared_as="optimizer", names_arm=True)
    muon_momentum: float | None = flag(
        "muon: momentum (default: 0.95)",
        WORK, type=fraction, metavar="B", filled=Filled.DERIVED, needs=("optimizer", ("muon",)),
        in_config="muon_momentum", compared_as="optimizer", names_arm=True)
    lr_schedule: str = flag(
        "learning rate after warm-up: " + "; ".join(f"{name} = {what}" for name, what in LR_SCHEDULES.items()) + " (default: %(default)s)",
        WORK, choices=list(LR_SCHEDULES), default="cosine", before="cosine", in_config="lr_schedule", names_arm=True)
    min_learning_rate: float = flag(
        "learning rate at the end of the schedule (default: a tenth of --learning_rate; 0 with wsd)",
        WORK, type=not_negative_number, metavar="LR", filled=Filled.DERIVED, needs=("lr_schedule", ("cosine", "wsd")), in_config="min_lr")
    warmup_steps: int = flag(
        "steps of warm-up (default: a tenth of all, at most 2000)",
        WORK, type=not_negative, metavar="STEPS", filled=Filled.DERIVED, in_config="warmup_steps")
    warmup_shape: str = flag(
        "rise of the learning rate: linear, or log as in DeepSpeed's warm-up (default: %(default)s)",
        WORK, choices=["linear", "log"], default="linear", before="linear", in_config="warmup_shape", compared_as="lr_schedule",
        names_arm=True)
    lr_decay_steps: int = flag(
        "step at which the decay ends (default: the last)",
        WORK, type=positive, metavar="STEPS", filled=Filled.DERIVED, needs=("lr_schedule", ("cosine", "wsd")), in_config="lr_decay_steps")
    decay_share: float | None = flag(
        "wsd: share of the steps up to --lr_decay_steps that decay (default: 0.2)",
        WORK, type=share, metavar="SHARE", filled=Filled.DERIVED, needs=("lr_schedule", ("wsd",)),
        in_config="decay_share", compared_as="lr_schedule", names_arm=True)
    weight_decay: float = flag(
        "weight decay of matrices and embeddings, not of biases and LayerNorms (default: %(default)s)",
        WORK, type=not_negative_number, default=0.1, metavar="W", in_config="weight_decay")
    adam_beta1: float = flag(
        "AdamW: decay of the mean of gradients (default: %(default)s)",
        WORK, type=fraction, default=0.9, metavar="B", in_config="adam_beta1")
    adam_beta2: float = flag(
        "AdamW: decay of the mean of squared gradients (default: %(default)s)",
        WORK, type=fraction, default=0.95, metavar="B", in_config="adam_beta2")
    adam_eps: float = flag(
        "AdamW: epsilon of the denominator (default: %(default)s)",
        WORK, type=not_negative_number, default=1e-8, metavar="E", in_config="adam_eps")
    max_grad_norm: float = flag(
        "clip gradients to this global L2 norm; 0 = off (default: %(default)s)",
        WORK, type=not_negative_number, default=1.0, metavar="NORM", in_config="max_grad_norm")
