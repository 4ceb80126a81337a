"""Fields that only some runs have: a profile of the steps, utilization, inference."""

from typing import Annotated, Literal, NotRequired, TypedDict

from testbed.metrics.fields.types import AboveZero, Amount, Count, Name, OneOrMore, Positive


class AttributedStep(TypedDict):
    step: Positive
    step_time_s: Annotated[Amount, "by the trace, slightly under the step clock; the sum of the next six"]
    data_wait_s: Annotated[Amount, "the phases without exposed communication"]
    forward_s: Amount
    backward_s: Amount
    optimizer_s: Amount
    exposed_communication_s: Annotated[
        Amount, "collectives not overlapped by computation of this rank, and the synchronisation after backward"
    ]
    idle_s: Annotated[
        Amount, "the rest: a pipeline's bubble with its point-to-point transfers; on CUDA, no kernel running"
    ]
    communication_s: Annotated[
        Amount, "collectives in flight; operators or kernels running. They overlap where communication is hidden"
    ]
    compute_s: Amount
    num_collectives: Annotated[
        Count, "operations on this rank, point-to-point included, and their input bytes (null if not in the trace)"
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
        "least bytes that a rank must send (ring: 2 (N-1)/N of an all-reduce's); null if the group of ranks is not "
        "known. gloo runs a reduce-scatter as an all-reduce",
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
        "share of the schedule without computation: each rank, mean, and (p-1)/(vm+p-1) for p pipeline ranks, m micro "
        "batches and v equal stages per rank (null for zero_bubble)",
    ]
    bubble_fraction: Amount
    ideal_bubble_fraction: Amount | None


class Attribution(TypedDict):
    source: Annotated[str, 'which steps; "host": phases of CPU threads, "device": CUDA kernels']
    timeline: Literal["host", "device"]
    per_rank: Annotated[list[AttributionOfRank], "one row per profiled step and rank"]
    collectives: Annotated[
        list[CollectiveKind], "by kind: number, input bytes and time in flight per optimizer step, mean over ranks"
    ]
    bound: Annotated[
        RingBound | None,
        "least time of all collectives: their bus bytes / the bandwidth of one large all-reduce at the end of the "
        "run. Null without collectives or if bytes are not known",
    ]
    pipeline: Annotated[PipelineBubble | None, "of pipelines: stages over all ranks, micro batches in flight"]


class UtilizationOfRank(TypedDict):
    rank: Count
    num_samples: Count
    cpu_percent_mean: Annotated[Amount | None, "CPU time / wall time of the process in its steps; 100 is one core"]
    rss_bytes_mean: Annotated[Amount | None, "resident memory"]
    rss_bytes_max: Count | None
    gpu_percent_mean: Annotated[
        Amount | None,
        "from NVML: share of time with any kernel running (not MFU), and memory used by all processes; null on CPU",
    ]
    gpu_memory_used_bytes_max: Count | None


class Utilization(TypedDict):
    interval_s: Amount
    per_rank: list[UtilizationOfRank]


class Inference(TypedDict):
    module: Annotated[
        Literal["plain"], '"plain": the weights without DeepSpeed or another strategy; precision they were cast to'
    ]
    precision: Literal["fp32", "bf16", "fp16"]
    threads: NotRequired[
        Annotated[Positive, "CPU threads: all cores, as the other ranks wait, so runs on any number of ranks compare"]
    ]
    batch_size: Annotated[Positive, "one sequence, with a key-value cache"]
    uses_cache: bool
    prompt_ids: Annotated[
        OneOrMore[Count], "first tokens of the training file, so runs of equal work have the same prompt"
    ]
    new_tokens: Annotated[Positive, "number of tokens generated (greedily, past end-of-text), and the tokens"]
    new_ids: OneOrMore[Count]
    warmup: Annotated[
        Count, "warm-up repeats; of each measured repeat, seconds to the last and to the first token on the host"
    ]
    latency_s: OneOrMore[AboveZero]
    time_to_first_token_s: OneOrMore[AboveZero]
