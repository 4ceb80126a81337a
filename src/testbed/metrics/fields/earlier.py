"""Fields of the versions 1 and 2.0, which are only read. Their files may hold more."""

from typing import Any, Literal, NotRequired, TypedDict

from testbed.metrics.fields.types import Amount, Count, Number, Positive


class DeepSpeedConfigEarlier(TypedDict, total=False):
    selected: dict[str, Any] | None


class SectionsEarlier(TypedDict, total=False):
    """What readers of every version look into."""

    settings: dict[str, Any]
    deepspeed_config: DeepSpeedConfigEarlier | None
    scheduler: dict[str, Any] | None
    run_id: str
    timestamp_utc: str
    git_commit: str | None
    command_line: str


class MetricsFile1(SectionsEarlier):
    training_config: NotRequired[dict[str, Any]]
    hardware: NotRequired[dict[str, Any]]
    summary: NotRequired[dict[str, Any]]
    train_time_per_epoch: list[Amount]
    train_loss_per_epoch: list[Number]
    val_loss_per_epoch: NotRequired[list[Number | None]]
    train_throughput: NotRequired[list[Amount]]
    inference_latency: NotRequired[Amount | None]
    inference_throughput: NotRequired[Amount | None]


class Hardware20(TypedDict):
    gpu_name: NotRequired[str | None]
    gpu_count_visible: NotRequired[Count | None]
    world_size: NotRequired[Positive | None]
    cuda_version: NotRequired[str | None]
    instance_type: NotRequired[str | None]
    cluster: NotRequired[str | None]


class SubsetSizes20(TypedDict):
    train: NotRequired[Count | None]
    val: NotRequired[Count | None]


class TrainingConfig20(TypedDict):
    model_name: NotRequired[str | None]
    model_size: NotRequired[str | None]
    seq_len: NotRequired[Count | None]
    epochs: NotRequired[Count | None]
    micro_batch_size_per_gpu: NotRequired[Count | None]
    grad_accum_steps: NotRequired[Count | None]
    global_batch_size: NotRequired[Count | None]
    lr: NotRequired[Amount | None]
    optimizer: NotRequired[str | None]
    precision: NotRequired[str | None]
    deepspeed_enabled: NotRequired[bool | None]
    zero_stage: NotRequired[Count | None]
    dataset_name: NotRequired[str | None]
    dataset_subset_sizes: NotRequired[SubsetSizes20 | None]


class Epoch20(TypedDict):
    epoch_idx: Positive
    epoch_wall_time_sec: NotRequired[Amount | None]
    steps: NotRequired[Count | None]
    micro_steps: NotRequired[Count | None]
    optimizer_steps: NotRequired[Count | None]
    tokens_processed_global: NotRequired[Count | None]
    tokens_per_sec_global: NotRequired[Amount | None]
    step_time_mean_sec: NotRequired[Amount | None]
    step_time_p50_sec: NotRequired[Amount | None]
    step_time_p95_sec: NotRequired[Amount | None]
    dataload_time_mean_sec: NotRequired[Amount | None]
    train_loss_avg_global: NotRequired[Number | None]
    val_loss_avg_global: NotRequired[Number | None]
    max_cuda_mem_allocated_bytes_rank0: NotRequired[Count | None]
    max_cuda_mem_reserved_bytes_rank0: NotRequired[Count | None]
    max_cuda_mem_allocated_bytes_global: NotRequired[Count | None]
    max_cuda_mem_reserved_bytes_global: NotRequired[Count | None]


class Summary20(TypedDict):
    total_wall_time_sec: NotRequired[Amount | None]
    best_val_loss: NotRequired[Number | None]
    mean_tokens_per_sec_global: NotRequired[Amount | None]


class MetricsFile20(SectionsEarlier):
    schema_version: Literal["2.0"]
    env: NotRequired[dict[str, Any]]
    host: NotRequired[dict[str, Any]]
    hardware: Hardware20
    training_config: TrainingConfig20
    epochs: list[Epoch20]
    summary: NotRequired[Summary20]
    shutdown: NotRequired[dict[str, Any]]
    completion: NotRequired[dict[str, Any] | None]
