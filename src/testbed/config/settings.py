"""The settings of a run, worked out and checked. No torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from testbed.config.deepspeed_file import DeepSpeedFile
from testbed.config.flags import NOT_IN_CONFIG_FILES
from testbed.data.token_file import TokenFile
from testbed.distributed.mesh import MeshSizes
from testbed.model.shape import ModelShape

FOLLOWS = frozenset(
    "micro_batch_size_per_gpu learning_rate muon_learning_rate muon_momentum min_learning_rate warmup_steps "
    "lr_decay_steps decay_share threads_per_rank shard_size "
    "pipeline_stages stages_per_rank tensor_parallel_size".split()
)
# What automatic_choices.py chooses for the device and the run type: the file of one run is used with others.
CHOSEN_ANEW = frozenset({"attention", "compile", "num_workers"})
# Of --run_inference_benchmark: v1's 100 greedy tokens, after a prompt from the training data, which equal work shares.
BENCHMARK_PROMPT_TOKENS, BENCHMARK_NEW_TOKENS = 16, 100


@dataclass(frozen=True)
class RunSettings:
    """The settings of one run. Field names are the flags'; what a flag left open is filled in."""

    run_type: str
    epochs: int
    max_train_steps: int | None
    stop_at_step: int | None
    max_val_steps: int | None
    eval_every: int | None
    eval_only: bool
    seed: int
    grace_seconds: float
    collective_timeout: float
    model: str
    num_layers: int
    num_heads: int
    embedding_size: int
    vocab_size: int
    max_position_embeddings: int
    dropout: float
    init_from: str
    attention: str  # "auto": PyTorch chooses in every call
    train_data_path: str
    val_data_path: str
    seq_length: int
    num_workers: int | None  # None: left to automatic_choices.py, as with `compile`
    global_batch_size: int
    micro_batch_size_per_gpu: int
    grad_accum_steps: int
    enforce_global_batch_size: int | None
    optimizer: str
    learning_rate: float
    muon_learning_rate: float | None  # this and the momentum: None with --optimizer adamw
    muon_momentum: float | None
    lr_schedule: str
    min_learning_rate: float
    warmup_steps: int
    lr_decay_steps: int
    decay_share: float | None  # None but with --lr_schedule wsd
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    max_grad_norm: float
    device: str
    precision: str
    threads_per_rank: int
    bind_cores: bool
    quiet_nccl_monitor: bool
    mixed_precision: str | None  # this and what follows to tensor_parallel_size: None where the run type has it not
    skip_gradient_sync: str | None
    bucket_cap_mb: float | None
    gradient_compression: str | None
    reshard_after_forward: str | None
    shard_size: int | None
    deepspeed_config: str | None
    zero_stage: int | None
    offload: str | None
    reduce_bucket_size: int | None
    allgather_bucket_size: int | None
    overlap_comm: str | None
    pipeline_stages: int | None
    pipeline_schedule: str | None
    stages_per_rank: int | None
    tensor_parallel_size: int | None
    activation_checkpointing: str
    compile: bool | None  # None: left to automatic_choices.py
    matmul: str
    checkpoint_path: str
    overwrite: bool
    resume: str | None  # "auto" or the path of a checkpoint or a run
    allow_setting_change: bool
    save_every: int | None
    keep_last: int
    async_mode: str
    keep_best: bool
    steps_per_print: int
    timing_warmup_steps: int
    timing_sample_every: int
    profile: bool
    profile_steps: int
    profile_mode: bool
    log_collectives: bool
    tensorboard: bool
    sample_prompt: str
    sample_tokens: int
    run_inference_benchmark: bool
    # worked out, not flags
    finds_micro_batch: bool  # micro_batch_size_per_gpu stands for "auto" and is still to be found on the device
    mesh: MeshSizes
    math_changes: tuple[str, ...]  # what makes the run compute something else than the baseline does
    data_world_size: int
    steps_per_epoch: int
    total_steps: int  # optimizer steps that the schedule is made for
    given: frozenset[str] = dataclasses.field(compare=False)  # what a person set; the rest is default or follows
    chosen: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)  # by automatic_choices.py

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            self.num_layers, self.num_heads, self.embedding_size, self.vocab_size, self.max_position_embeddings
        )

    @property
    def last_step(self) -> int:
        """Optimizer steps that this start of the run may reach."""
        if self.eval_only:
            return 0
        return min(self.total_steps, self.stop_at_step or self.total_steps)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_length

    @property
    def instruments(self) -> list[str]:
        """The flags that slow the step down or change its timing: a run with any of them enters no headline."""
        names = ("profile", "profile_mode", "log_collectives", "skip_gradient_sync")
        return [f"--{name}" for name in names if getattr(self, name)]

    def as_config(self) -> dict[str, Any]:
        """The settings in the form of a --config file. What nobody set and follows from other settings (the micro batch
        from the ranks, the warm-up from the steps, the attention kernel from the device) is null there, so that it
        follows again where the file is used."""
        return self.as_recorded() | dict.fromkeys(CHOSEN_ANEW & self.chosen)

    def as_recorded(self) -> dict[str, Any]:
        """As `as_config`, but with what the program chose for this run."""
        return self.as_dict() | dict.fromkeys(FOLLOWS - self.given)

    def as_dict(self) -> dict[str, Any]:
        """Every flag that is part of the work, with the value that it has in this run."""
        worked_out = {"mesh", "math_changes", "data_world_size", "steps_per_epoch", "total_steps", "grad_accum_steps"}
        worked_out.add("finds_micro_batch")
        fields = dataclasses.asdict(self)
        return {
            name: value
            for name, value in fields.items()
            if name not in worked_out | {"given", "chosen"} | NOT_IN_CONFIG_FILES
        }


@dataclass(frozen=True)
class CheckedRun:
    """All that is known before torch is imported."""

    settings: RunSettings
    train_file: TokenFile
    val_file: TokenFile
    deepspeed_file: DeepSpeedFile | None
