"""The fields of a metrics file that every run measures: steps, validation, epochs, and figures made of them."""

from typing import Annotated, NotRequired, TypedDict

from testbed.metrics.fields.types import Amount, Count, OneOrMore, Positive


class Step(TypedDict):
    step: Annotated[Positive, "both count from 1"]
    epoch: Positive
    is_warmup: Annotated[
        bool,
        "among the first `timing.warmup_steps`, of the run and again after each resume, or of a start on "
        "other ranks or with other settings than the last one's: kept here, left out of medians and "
        "throughput",
    ]
    is_skipped: Annotated[
        bool, "fp16 overflow: the step took its time but changed no weight. **2.0:** counted as a step like any other"
    ]
    loss: Annotated[float, "training loss, exact mean over all target tokens of the global batch, before the update"]
    grad_norm: Annotated[
        Amount | None,
        "global L2 norm before clipping, squares summed in float64; null where there is none, or where it overflowed",
    ]
    lr: Annotated[Amount, "used in this step"]
    step_time_s: Annotated[
        Amount,
        "data wait + forward + backward + gradient synchronisation + optimizer, device synchronised on both "
        "sides; the slowest rank, and each rank. Evaluation, checkpoints and logging lie outside",
    ]
    per_rank_step_time_s: OneOrMore[Amount]
    data_wait_s: Annotated[Amount, "the part of it spent waiting for the batch; largest over ranks, and each rank"]
    per_rank_data_wait_s: OneOrMore[Amount]
    per_rank_forward_s: NotRequired[
        Annotated[
            OneOrMore[Amount],
            "the other phases of the step on each rank, between marks that cost microseconds. No phase counts "
            "inside another. **A phase holds the communication that happens in it**: in `ddp` and `fsdp` backward "
            "holds what is overlapped and what is not, in `optimized` the optimizer holds the gathering of "
            "weights. What communication really costs stands in `attribution`. What no phase holds is Python "
            "between them, and a pipeline's bubble. Not in files before these fields came",
        ]
    ]
    per_rank_backward_s: NotRequired[OneOrMore[Amount]]
    per_rank_synchronise_s: NotRequired[OneOrMore[Amount]]
    per_rank_optimizer_s: NotRequired[OneOrMore[Amount]]


class Evaluation(TypedDict):
    step: Annotated[Count, "after this optimizer step; 0 is before training"]
    epoch: Count
    val_loss: Annotated[float, "mean over target tokens; the same windows for every world size"]
    num_target_tokens: Annotated[Positive, "how many were used. Losses over different numbers do not compare"]
    num_sequences: Positive
    wall_time_s: Annotated[Amount, "of this validation; in no step time"]
    train_time_s: Annotated[Amount, "sum of all step times so far: the time axis of the loss chart"]
    elapsed_s: Annotated[Amount, "wall time since the first step began, everything included: the axis of time to loss"]


class Epoch(TypedDict):
    epoch_idx: Annotated[Positive, "counts from 1; the run ended inside this epoch"]
    is_partial: bool
    epoch_wall_time_sec: Annotated[Amount, "wall time of its training, validation excluded"]
    steps: Annotated[Count, "micro batches per data rank; `steps` is deprecated and equal to it"]
    micro_steps: Count
    optimizer_steps: Annotated[
        Count,
        "all steps, and those of them that an overflow skipped. **2.0:** micro steps over accumulation, "
        "rounded up, whatever was skipped",
    ]
    skipped_optimizer_steps: Count
    tokens_processed_global: Annotated[Count, "input tokens over all ranks"]
    tokens_per_sec_global: Annotated[
        Amount | None, "tokens of measured steps / sum of their times. **2.0:** warm-up and logging were inside"
    ]
    train_loss_avg_global: Annotated[
        float | None,
        "mean of the losses of its steps, each a mean over the step's targets (of text, whose steps have "
        "equally many, that is the mean over all targets; of pairs a step counts as one whatever it has); the "
        "mean over all validation targets at the epoch's end, null without one. **2.0:** 0.0 where nothing "
        "was validated",
    ]
    val_loss_avg_global: float | None
    max_cuda_mem_allocated_bytes_rank0: Annotated[
        Count | None, "peak since the epoch began, on rank 0 and the largest of all ranks; null on CPU"
    ]
    max_cuda_mem_reserved_bytes_rank0: Count | None
    max_cuda_mem_allocated_bytes_global: Count | None
    max_cuda_mem_reserved_bytes_global: Count | None
    num_measured_steps: Annotated[Count, "steps behind the next four"]
    step_time_mean_sec: Annotated[
        Amount | None, "of measured optimizer steps, slowest rank. **2.0:** of a few micro steps; p95 of five values"
    ]
    step_time_p50_sec: Amount | None
    step_time_p95_sec: Amount | None
    dataload_time_mean_sec: Amount | None


class Timing(TypedDict):
    warmup_steps: Annotated[Count, "steps marked as warm-up; n of what follows"]
    num_measured_steps: Count
    step_time_p50_sec: Annotated[Amount | None, "of `steps[].step_time_s`"]
    step_time_p95_sec: Amount | None
    step_time_p95_above_median: Annotated[Amount | None, "p95 / median - 1: above 0.1 the machine was not quiet"]
    data_wait_fraction: Annotated[Amount | None, "sum of data waits / sum of step times"]
    tokens_per_sec_global: Annotated[Amount | None, "tokens / sum of measured step times: the throughput to quote"]
    wall_clock_tokens_per_sec_global: Annotated[
        Amount | None,
        "the same tokens / wall time from the first to the last measured step; evaluation, checkpoints and "
        "logging inside. What it is lower by is the cost outside the clock",
    ]
    startup_time_s: Annotated[Amount | None, "from the start of the program to the first step"]


class MemoryOfRank(TypedDict):
    rank: Annotated[Count, "peak resident memory of the process"]
    peak_rss_bytes: Count
    peak_allocated_bytes: Annotated[Count | None, "of CUDA memory: in tensors, and held by the allocator; null on CPU"]
    peak_reserved_bytes: Count | None


class Memory(TypedDict):
    per_rank: list[MemoryOfRank]


class Flops(TypedDict):
    per_token_palm: Positive
    per_token_causal: Positive
    model_flops_per_s: Annotated[Amount | None, "per_token_palm x tokens/s, all ranks together"]
    peak_flops_per_s_per_device: Annotated[
        Amount | None,
        "peak of one device in this precision, and where the number is from: a table or a measurement. Null: not known",
    ]
    peak_source: str | None
    mfu: Annotated[Amount | None, "model FLOP/s / (peak x devices), 0 to 1; null without a peak"]


class Summary(TypedDict):
    total_wall_time_sec: Amount
    best_val_loss: Annotated[float | None, "lowest and last; null without validation. **2.0:** 0.0 without validation"]
    final_val_loss: float | None
    mean_tokens_per_sec_global: Annotated[
        Amount | None,
        "measured tokens / their time, equal to `timing.tokens_per_sec_global`. **2.0:** mean of the epochs' "
        "rates with warm-up inside",
    ]
