"""Fields that every run measures: steps, validation, epochs, and figures derived from them."""

from typing import Annotated, Literal, NotRequired, TypedDict

from testbed.metrics.fields.types import Amount, Count, Number, OneOrMore, Positive


class Step(TypedDict):
    step: Annotated[Positive, "counted from 1"]
    epoch: Positive
    is_warmup: Annotated[
        bool,
        "not measured: among the first `timing.warmup_steps` of a start, or of a start on other ranks, machine or "
        "settings than the last",
    ]
    is_skipped: Annotated[bool, "fp16 overflow: the step took time but changed no weight"]
    loss: Annotated[Number, "exact mean over all target tokens of the global batch, before the update"]
    grad_norm: Annotated[
        Amount | None,
        "global L2 norm before clipping, summed in float64 (ZeRO 1 and 2 round each rank's sum to float32); null if it "
        "overflowed",
    ]
    lr: Annotated[Amount, "learning rate of this step"]
    step_time_s: Annotated[
        Amount,
        "data wait + forward + backward + synchronisation + optimizer, device synchronised on both sides; slowest "
        "rank, and each rank. Excludes validation, checkpoints and logging",
    ]
    per_rank_step_time_s: OneOrMore[Amount]
    data_wait_s: Annotated[Amount, "the part that waits for the batch; largest over ranks, and each rank"]
    per_rank_data_wait_s: OneOrMore[Amount]
    per_rank_forward_s: NotRequired[
        Annotated[
            OneOrMore[Amount],
            "the other phases, each exclusive. **A phase includes the communication inside it**: backward in `ddp` "
            "and `fsdp`, the optimizer in `optimized`; `attribution` separates them. No phase holds a pipeline's "
            "bubble and the Python between phases",
        ]
    ]
    per_rank_backward_s: NotRequired[OneOrMore[Amount]]
    per_rank_synchronise_s: NotRequired[OneOrMore[Amount]]
    per_rank_optimizer_s: NotRequired[OneOrMore[Amount]]


class Share(TypedDict):
    value: Number
    low: Annotated[Number, "95 % interval (Wilson 1927)"]
    high: Number


class Answers(TypedDict):
    num_questions: Positive
    accuracy: Annotated[
        dict[Literal["by_sum", "by_character", "by_token"], Share],
        "share of right answers, by what an ending's log-likelihood is divided",
    ]
    seconds: Annotated[Amount, "part of `wall_time_s`"]


class Evaluation(TypedDict):
    step: Annotated[Count, "after this optimizer step; 0 is before training"]
    epoch: Count
    val_loss: Annotated[Number, "mean over target tokens, of the same windows on any number of ranks"]
    num_target_tokens: Annotated[Positive, "amount of data; losses over different amounts do not compare"]
    num_sequences: Positive
    wall_time_s: Annotated[Amount, "of this validation"]
    train_time_s: Annotated[Amount, "sum of step times so far: the time axis of the loss chart"]
    elapsed_s: Annotated[Amount, "wall time since the first step began: the axis of time to loss"]
    multiple_choice: NotRequired[Annotated[Answers, "with --eval_multiple_choice"]]


class Epoch(TypedDict):
    epoch_idx: Annotated[Positive, "counted from 1; the run ended inside this epoch"]
    is_partial: bool
    epoch_wall_time_sec: Annotated[Amount, "wall time without validation"]
    steps: Annotated[Count, "micro batches per data rank; use `micro_steps`, `steps` is deprecated"]
    micro_steps: Count
    optimizer_steps: Annotated[Count, "all optimizer steps, and those that an fp16 overflow skipped"]
    skipped_optimizer_steps: Count
    tokens_processed_global: Annotated[Count, "input tokens"]
    tokens_per_sec_global: Annotated[Amount | None, "tokens of measured steps / sum of their times"]
    train_loss_avg_global: Annotated[
        Number | None,
        "mean of the steps' losses, each step weighted alike; validation loss at the epoch's end, null without one",
    ]
    val_loss_avg_global: Number | None
    max_cuda_mem_allocated_bytes_rank0: Annotated[
        Count | None, "peak since the epoch began, on rank 0 and the largest of all ranks; null on CPU"
    ]
    max_cuda_mem_reserved_bytes_rank0: Count | None
    max_cuda_mem_allocated_bytes_global: Count | None
    max_cuda_mem_reserved_bytes_global: Count | None
    num_measured_steps: Annotated[Count, "steps that the next four are computed from"]
    step_time_mean_sec: Annotated[Amount | None, "of measured steps, slowest rank"]
    step_time_p50_sec: Amount | None
    step_time_p95_sec: Amount | None
    dataload_time_mean_sec: Amount | None


class Timing(TypedDict):
    warmup_steps: Annotated[Count, "steps marked as warm-up, and steps measured"]
    num_measured_steps: Count
    step_time_p50_sec: Annotated[Amount | None, "of `steps[].step_time_s`"]
    step_time_p95_sec: Amount | None
    step_time_p95_above_median: Annotated[Amount | None, "p95 / median - 1; above 0.1 the machine was not quiet"]
    data_wait_fraction: Annotated[Amount | None, "sum of data waits / sum of step times"]
    tokens_per_sec_global: NotRequired[
        Annotated[Amount | None, "only in older files: equals `summary.mean_tokens_per_sec_global`"]
    ]
    wall_clock_tokens_per_sec_global: Annotated[
        Amount | None,
        "tokens / wall time from the first to the last measured step, validation, checkpoints and logging included",
    ]
    startup_time_s: Annotated[Amount | None, "from the start of the program to the first step"]


class MemoryOfRank(TypedDict):
    rank: Annotated[Count, "peak resident memory of the process"]
    peak_rss_bytes: Count
    peak_allocated_bytes: Annotated[Count | None, "peak CUDA memory in tensors, and held by the allocator; null on CPU"]
    peak_reserved_bytes: Count | None
    rss_before_model_bytes: NotRequired[
        Annotated[Count, "resident memory just before the model was built: libraries, process group, data"]
    ]


class Memory(TypedDict):
    per_rank: list[MemoryOfRank]


class Flops(TypedDict):
    per_token_palm: Positive
    per_token_causal: Positive
    model_flops_per_s: Annotated[Amount | None, "`per_token_palm` x tokens/s of all ranks"]
    peak_flops_per_s_per_device: Annotated[
        Amount | None, "peak of one device in this precision, from a table or measured; null if unknown"
    ]
    peak_source: str | None
    mfu: Annotated[Amount | None, "`model_flops_per_s` / (peak x devices), 0 to 1"]


class Summary(TypedDict):
    total_wall_time_sec: Amount
    best_val_loss: Annotated[Number | None, "lowest and last validation loss"]
    final_val_loss: Number | None
    mean_tokens_per_sec_global: Annotated[
        Amount | None, "tokens / sum of step times, of measured steps: the throughput to quote"
    ]
