"""The fields of a metrics file that only some runs have: a profile of the steps, utilization, inference."""

from typing import Annotated, Literal, NotRequired, TypedDict

from testbed.metrics.fields.types import AboveZero, Amount, Count, Name, OneOrMore, Positive


class AttributedStep(TypedDict):
    step: Positive
    step_time_s: Annotated[
        Amount, "of the trace, slightly under the step clock's; the next six are exclusive and add up to it"
    ]
    data_wait_s: Annotated[Amount, "the phases, without the exposed communication in them"]
    forward_s: Amount
    backward_s: Amount
    optimizer_s: Amount
    exposed_communication_s: Annotated[
        Amount, "collectives that no computation of this rank covers, and the synchronisation after backward"
    ]
    idle_s: Annotated[
        Amount, "the rest: a pipeline's bubble with its point-to-point transfers, on CUDA a device without a kernel"
    ]
    communication_s: Annotated[
        Amount,
        "time in which a collective was in flight, and in which an operator or kernel was at work. Not "
        "exclusive: their overlap is what is hidden",
    ]
    compute_s: Amount
    num_collectives: Annotated[
        Count,
        "operations of the step on this rank, transfers between stages too, and the bytes of their inputs "
        "(null where the trace does not tell)",
    ]
    collective_bytes: Count | None


class AttributionOfRank(TypedDict):
    rank: Count
    steps: list[AttributedStep]


class CollectiveKind(TypedDict):
    name: Name
    num_per_step: Amount
    bytes_per_step: Amount | None
    seconds_per_step: Amount
    bus_bytes_per_step: Annotated[
        Amount | None,
        "bytes that a rank must send for them at least (ring: 2 (N-1)/N of an all-reduce's); null where "
        "several groups of ranks could be meant. gloo carries out a reduce-scatter as an all-reduce",
    ]


class RingBound(TypedDict):
    bus_bytes_per_step: Amount
    bus_bandwidth_bytes_per_s: Amount
    seconds_per_step: Amount
    source: str


class PipelineBubble(TypedDict):
    stages: Positive
    micro_batches: Positive
    per_rank_bubble_fraction: Annotated[
        list[Amount],
        "share of the schedule in which a rank computes nothing, each and mean, beside (p-1)/(vm+p-1) for p "
        "pipeline ranks, m micro batches and v stages on a rank of equal cost; null for the zero-bubble "
        "schedule",
    ]
    bubble_fraction: Amount
    ideal_bubble_fraction: Amount | None


class Attribution(TypedDict):
    source: Annotated[str, 'which steps; "host": phases of the CPU\'s threads, "device": kernels of the CUDA device']
    timeline: Literal["host", "device"]
    per_rank: Annotated[list[AttributionOfRank], "a row for each profiled optimizer step on each rank"]
    collectives: Annotated[
        list[CollectiveKind],
        "by kind of operation: number, bytes of the inputs and time in flight of an optimizer step, mean over ranks",
    ]
    bound: Annotated[
        RingBound | None,
        "the least time for all of them: their bus bytes over the bandwidth that one large all-reduce reached "
        "alone at the run's end. Null where the bytes are not known or there is no collective",
    ]
    pipeline: Annotated[
        PipelineBubble | None, "only for pipelines: stages over all ranks, micro batches that pass at once"
    ]


class UtilizationOfRank(TypedDict):
    rank: Count
    num_samples: Count
    cpu_percent_mean: Annotated[Amount | None, "CPU time of the process over wall time, 100 is one core"]
    rss_bytes_mean: Annotated[Amount | None, "resident memory"]
    rss_bytes_max: Count | None
    gpu_percent_mean: Annotated[
        Amount | None,
        "NVML's: share of time in which some kernel ran (not how well it used the device; that is MFU), and "
        "memory in use on the device by all processes. Null on the CPU",
    ]
    gpu_memory_used_bytes_max: Count | None


class Utilization(TypedDict):
    interval_s: Amount
    per_rank: list[UtilizationOfRank]


class Inference(TypedDict):
    module: Annotated[
        Literal["plain"],
        '"plain": nothing of DeepSpeed or of another strategy is around the weights; what they were cast to, '
        "the run's `training_config.precision`",
    ]
    precision: Literal["fp32", "bf16", "fp16"]
    threads: NotRequired[
        Annotated[
            Positive,
            "CPU threads of rank 0 while it generated: all cores that it may use, as the other ranks wait, so "
            "runs of one and of several ranks have the same; not in files before this field came",
        ]
    ]
    batch_size: Annotated[
        Positive,
        "one sequence; keys and values are kept, so that each token is read once (v1 read the whole prefix "
        "again for each)",
    ]
    uses_cache: bool
    prompt_ids: Annotated[
        OneOrMore[Count], "the first tokens of the training file, so that runs of equal work have the same prompt"
    ]
    new_tokens: Annotated[Positive, "how many tokens were generated, greedily and past end-of-text; which ones"]
    new_ids: OneOrMore[Count]
    warmup: Annotated[
        Count,
        "answers before the repeats; of each repeat, seconds until the last token and until the first, from "
        "an idle device until the host holds the token",
    ]
    latency_s: OneOrMore[AboveZero]
    time_to_first_token_s: OneOrMore[AboveZero]
