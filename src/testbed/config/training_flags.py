"""The table of flags, first part: what is trained. One field is one flag, one dataclass one group of --help. No torch.

flag.py explains the columns. A value is of one start of a run, as it was worked out: nothing in it is open but what
autotune/choices.py decides on the device.
"""

from dataclasses import dataclass
from typing import ClassVar

from testbed.config.flag import Filled, Flag, Kind, Resume, flag, row
from testbed.config.flag_types import (
    fraction,
    not_negative,
    not_negative_number,
    positive,
    positive_number,
    positive_or_auto,
    share,
)
from testbed.config.run_types import STRATEGIES
from testbed.model.shape import LEARNING_RATES, MODEL_SIZES, MUON_LEARNING_RATES

WORK, SPREAD, HOW, LOOK = Kind.WORK, Kind.SPREAD, Kind.HOW, Kind.LOOK
LR_SCHEDULES = {
    "cosine": "falls by a cosine to the minimum",
    "wsd": "stays at its peak, then falls in a straight line over the last --decay_share of the steps",
    "constant": "stays",
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """run"""

    run_type: str = flag(
        "how an optimizer step is spread over ranks: " + "; ".join(f"{name} = {entry.summary}" for name, entry in STRATEGIES.items()) + " (default: %(default)s)",
        SPREAD, choices=list(STRATEGIES), default="baseline", in_config="run_type")
    config: ClassVar[Flag] = row(
        "read settings from a file, such as a run's effective_config.json; flags win over it (default: none)",
        LOOK, metavar="FILE.json", of_one_start=True)
    epochs: int = flag(
        "passes over the training windows (default: %(default)s)",
        WORK, type=positive, default=1, metavar="N", in_config="epochs", compared_as="total_steps")
    max_train_steps: int | None = flag(
        "end after this many optimizer steps; also the length of the schedule (default: all epochs)",
        WORK, type=positive, metavar="STEPS", in_config="max_train_steps", compared_as="total_steps")
    stop_at_step: int | None = flag(
        "stop after this optimizer step but keep the schedule of the whole run (default: do not)",
        WORK, type=positive, metavar="STEP", resume=Resume.FREE, in_config="stop_at_step", compared_as="optimizer_steps")
    max_val_steps: int | None = flag(
        "validate on the first BATCHES global batches; 0 = no validation (default: all)",
        WORK, type=not_negative, metavar="BATCHES", resume=Resume.FREE, compared_as="val_tokens", is_task=True)
    eval_every: int | None = flag(
        "validate every STEPS optimizer steps too, not only at the end of an epoch (default: do not)",
        HOW, type=positive, metavar="STEPS", resume=Resume.FREE, names_arm=False)
    eval_only: bool = flag(
        "train nothing: validate the weights of --init_from and write the run's files; of a run of ours, its "
        "sequence length, token files, global batch and --max_val_steps are the default, so the loss is the run's own; "
        "--val_data_path alone is enough data",
        WORK, default=False, compared_as="optimizer_steps", names_arm=True)
    seed: int = flag(
        "fixes initialisation, data order and dropout (default: %(default)s)",
        WORK, type=not_negative, default=42, metavar="N", in_config="seed", varies=True)
    grace_seconds: float = flag(
        "on SIGTERM or SIGUSR1: time to finish the step and save a checkpoint; then the process ends "
        "whatever it is doing, see docs/faults.md (default: %(default)g)",
        LOOK, type=positive_number, default=20.0, metavar="SECONDS")
    collective_timeout: float = flag(
        "a rank that waits longer for another one ends, and says for which and where; longer than what "
        "rank 0 does alone, such as writing the weights, and than ranks differ in loading PyTorch (default: %(default)g)",
        LOOK, type=positive_number, default=120.0, metavar="SECONDS")


@dataclass(frozen=True, kw_only=True)
class Model:
    """model (a size, and dimensions that override it)"""

    size: str = flag(
        "published size, or nano for a laptop core (default: %(default)s, 124M parameters)",
        WORK, name="model", choices=list(MODEL_SIZES), default="gpt2", compared_as="num_layers")
    num_layers: int = flag(
        "transformer blocks (default: the size's)",
        WORK, type=positive, metavar="N", resume=Resume.NEVER, in_config="num_layers", is_task=True)
    num_heads: int = flag(
        "attention heads (default: the size's)",
        WORK, type=positive, metavar="N", resume=Resume.NEVER, in_config="num_heads", is_task=True)
    embedding_size: int = flag(
        "width of the residual stream (default: the size's)",
        WORK, type=positive, metavar="CHANNELS", resume=Resume.NEVER, in_config="embedding_size", is_task=True)
    vocab_size: int = flag(
        "rows of the embedding; may exceed the data's (default: the data's, 50257 without a sidecar)",
        WORK, type=positive, metavar="TOKENS", resume=Resume.NEVER, in_config="vocab_size", is_task=True)
    max_position_embeddings: int = flag(
        "longest sequence that the model can read (default: the size's, 1024)",
        WORK, type=positive, metavar="TOKENS", resume=Resume.NEVER, in_config="max_position_embeddings", is_task=True)
    dropout: float = flag(
        "dropout probability (default: %(default)s)",
        WORK, type=fraction, default=0.0, metavar="P", in_config="dropout")
    init_from: str = flag(
        "starting weights: GPT-2's initialisation, published weights from the Hugging Face hub, "
        "or a folder with config.json and model.safetensors (default: %(default)s)",
        WORK, default="scratch", metavar="scratch|gpt2|gpt2-medium|gpt2-large|gpt2-xl|DIR", in_config="init_from", is_task=True)
    attention: str = flag(
        "the attention kernel; auto = on CUDA the fastest in a trial at the run's shape (of equally fast ones always the same), on the CPU what "
        "PyTorch picks, which is FlashAttention for CPU where it can (default: %(default)s)",
        HOW, choices=["auto", "flash", "cudnn", "efficient", "math"], default="auto", filled=Filled.DECIDED, before="auto")
    use_flash_attention: ClassVar[Flag] = row(
        "the same as --attention flash, from older commands",
        HOW, default=False, sets=("attention", "flash"))


@dataclass(frozen=True, kw_only=True)
class Data:
    """data"""

    train_data_path: str = flag(
        "training tokens (default: %(default)s)",
        WORK, default="train_small.bin", metavar="FILE.bin", resume=Resume.FREE, compared_as="train_data_sha256", is_task=True, varies=True)
    val_data_path: str = flag(
        "validation tokens (default: %(default)s)",
        WORK, default="val_small.bin", metavar="FILE.bin", resume=Resume.FREE, compared_as="val_data_sha256", is_task=True, varies=True)
    seq_length: int = flag(
        "tokens per sequence (default: %(default)s)",
        WORK, type=positive, default=512, metavar="TOKENS", in_config="seq_len", is_task=True)
    num_workers: int | None = flag(
        "steps whose batches a background thread reads ahead; 0 = read inside the step, "
        "which the clock counts as data wait (default: 1 on CUDA, 0 on the CPU)",
        HOW, type=not_negative, metavar="STEPS", resume=Resume.FREE, filled=Filled.DECIDED)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """batch (global batch = micro batch x gradient accumulation x data ranks; it never follows the world size)"""

    global_batch_size: int = flag(
        "sequences per optimizer step over all ranks (default: 32, or what --grad_accum_steps gives)",
        WORK, type=positive, metavar="SEQUENCES", in_config="global_batch_size")
    micro_batch_size_per_gpu: int = flag(
        "sequences of one forward pass on one rank; lower it when memory runs out. auto = the largest that "
        "fits into memory and divides a rank's share, see docs/automatic_choices.md "
        "(default: the largest up to 4 that divides a rank's share; in a pipeline smaller, so that "
        "every stage is busy, and under model_parallel the whole share)",
        SPREAD, type=positive_or_auto, metavar="SEQUENCES|auto", also=("--train_micro_batch_size_per_gpu",),
        filled=Filled.BY_RANKS, in_config="micro_batch_size_per_gpu")
    grad_accum_steps: int = flag(
        "micro batches per optimizer step and rank (default: follows from the global batch)",
        SPREAD, type=positive, metavar="N", filled=Filled.BY_RANKS, recorded=False, in_config="grad_accum_steps")
    enforce_global_batch_size: int | None = flag(
        "refuse to start unless the global batch is this (default: no check)",
        LOOK, type=positive, metavar="SEQUENCES")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """optimizer and schedule"""

    name: str = flag(
        "muon = orthogonalised momentum for the matrices inside the blocks, AdamW for embeddings, biases and "
        "LayerNorms (default: %(default)s)",
        WORK, name="optimizer", choices=["adamw", "muon"], default="adamw", resume=Resume.NEVER, before="adamw", in_config="optimizer", names_arm=True)
    learning_rate: float = flag(
        "peak learning rate (default: the size's: " + ", ".join(f"{name} {rate:g}" for name, rate in LEARNING_RATES.items())
        + f"; muon: nano {MUON_LEARNING_RATES['nano']:g}, else the same)",
        WORK, type=not_negative_number, metavar="LR", filled=Filled.DERIVED, in_config="lr")
    muon_learning_rate: float | None = flag(
        "muon: peak learning rate of the matrices, scaled so that a step changes them as much as AdamW's "
        "would at the same rate; its schedule is --learning_rate's in proportion (default: --learning_rate)",
        WORK, type=not_negative_number, metavar="LR", filled=Filled.DERIVED, needs=("optimizer", ("muon",)),
        in_config="muon_learning_rate", compared_as="optimizer", names_arm=True)
    muon_momentum: float | None = flag(
        "muon: share of the old momentum that a step keeps (default: 0.95)",
        WORK, type=fraction, metavar="B", filled=Filled.DERIVED, needs=("optimizer", ("muon",)),
        in_config="muon_momentum", compared_as="optimizer", names_arm=True)
    lr_schedule: str = flag(
        "after the linear warm-up: " + "; ".join(f"{name} = {what}" for name, what in LR_SCHEDULES.items()) + " (default: %(default)s)",
        WORK, choices=list(LR_SCHEDULES), default="cosine", before="cosine", in_config="lr_schedule", names_arm=True)
    min_learning_rate: float = flag(
        "learning rate at the end of the schedule (default: a tenth of --learning_rate; 0 with wsd)",
        WORK, type=not_negative_number, metavar="LR", filled=Filled.DERIVED, needs=("lr_schedule", ("cosine", "wsd")), in_config="min_lr")
    warmup_steps: int = flag(
        "steps of linear warm-up (default: a tenth of the run, at most 2000)",
        WORK, type=not_negative, metavar="STEPS", filled=Filled.DERIVED, in_config="warmup_steps")
    lr_decay_steps: int = flag(
        "step at which the fall of the learning rate ends (default: the run's last step)",
        WORK, type=positive, metavar="STEPS", filled=Filled.DERIVED, needs=("lr_schedule", ("cosine", "wsd")), in_config="lr_decay_steps")
    decay_share: float | None = flag(
        "wsd: the last share of the steps up to --lr_decay_steps, in which the learning rate falls (default: 0.2)",
        WORK, type=share, metavar="SHARE", filled=Filled.DERIVED, needs=("lr_schedule", ("wsd",)),
        in_config="decay_share", compared_as="lr_schedule", names_arm=True)
    weight_decay: float = flag(
        "decoupled decay of matrices and embeddings, not of biases and LayerNorms (default: %(default)s)",
        WORK, type=not_negative_number, default=0.1, metavar="W", in_config="weight_decay")
    adam_beta1: float = flag(
        "AdamW: share of the old mean of gradients that a step keeps (default: %(default)s)",
        WORK, type=fraction, default=0.9, metavar="B", in_config="adam_beta1")
    adam_beta2: float = flag(
        "AdamW: share of the old mean of squared gradients that a step keeps (default: %(default)s)",
        WORK, type=fraction, default=0.95, metavar="B", in_config="adam_beta2")
    adam_eps: float = flag(
        "AdamW: added to the root of that mean, so that it never divides by 0 (default: %(default)s)",
        WORK, type=not_negative_number, default=1e-8, metavar="E", in_config="adam_eps")
    max_grad_norm: float = flag(
        "scale gradients down to this global L2 norm; 0 = off (default: %(default)s)",
        WORK, type=not_negative_number, default=1.0, metavar="NORM", in_config="max_grad_norm")
