"""Fields about the run itself: how it ended, where it ran, its starts and its checkpoints."""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from testbed.metrics.fields.types import Amount, Count, Name, Positive


class Failure(TypedDict):
    reason: Name
    step: Count | None


class Environment(TypedDict):
    python_version: str
    torch_version: str
    transformers_version: str | None
    deepspeed_version: str | None
    cuda_version: str | None
    numpy_version: str | None


class Host(TypedDict):
    hostname: str
    os: str


class SchemaNotes(TypedDict):
    steps: str


class Completion(TypedDict):
    run_complete_file: str
    printed_marker: bool
    timestamp_utc: str


class Shutdown(TypedDict):
    destroy_process_group_called: bool
    quiet_nccl_monitor: bool


class Sample(TypedDict):
    prompt: str
    text: str
    num_tokens: Count
    seconds: Amount


class SettingChange(TypedDict):
    name: Name
    before: Any
    now: Any


class Segment(TypedDict):
    started_utc: Annotated[str, "start time; first and last optimizer step, the last null if none was done"]
    first_step: Positive
    last_step: Positive | None
    resumed_from: Annotated[
        str | None, "the checkpoint; null: from the beginning. In the first entry it is a checkpoint of another run"
    ]
    world_size: Annotated[
        Positive,
        "ranks and strategy. Where starts differ in them, in the machine or in settings, only the last kind of rows "
        "is measured; the others are marked `is_warmup`",
    ]
    run_type: str
    git_commit: NotRequired[Annotated[str | None, "the code, and rank 0's machine"]]
    git_dirty: NotRequired[bool | None]
    torch_version: NotRequired[str]
    hostname: NotRequired[str]
    device: NotRequired[str | None]
    cpu_threads_per_rank: NotRequired[Positive]
    ended: Annotated[
        Literal["complete", "stopped", "preempted", "failed"] | None,
        '"complete", "stopped" (`--stop_at_step`), "preempted" or "failed"; null while it runs, or after a kill',
    ]
    setting_changes: Annotated[
        list[SettingChange],
        "settings that differ from the checkpoint's. Those that change the work are in "
        "`training_config.math_changes` too",
    ]
    random_numbers: Annotated[
        Literal["from the seed", "continued", "drawn anew"],
        'of dropout: "from the seed", "continued" from the saved state, or "drawn anew" from seed, rank and step on '
        "other ranks or another kind of device",
    ]
    lost_steps: Annotated[
        Count | None,
        "optimizer steps done before this start and trained again, and their wall seconds; null if the file was "
        "damaged. A killed start's seconds after its last write are unknown and not included. A start that was killed "
        "or failed within a step may have lost seconds and no whole step; one that ended by itself has not",
    ]
    lost_s: Amount | None
    wall_time_s: Annotated[Amount, "wall time of this start, from when it locked the folder"]


class CheckpointWritten(TypedDict):
    step: Count
    bytes: Count | None
    blocking_s: Annotated[
        Amount,
        "time the loop waited; time until it was on disk; whether it was written in the background "
        "(`--async_mode async`). Not in step times. `bytes` and `total_s` are null until it is on disk",
    ]
    total_s: Amount | None
    is_asynchronous: bool


class Scheduler(TypedDict):
    type: str
    job_id: NotRequired[str]
    job_name: NotRequired[str]
    cluster: NotRequired[str]
    partition: NotRequired[str]
    nodelist: NotRequired[str]
    nnodes: NotRequired[str]
    gpus: NotRequired[str]
    ntasks: NotRequired[
        Annotated[
            str,
            "tasks of the job step: torchrun's agents, or the ranks with `LAUNCHER=srun`; rank 0's place among them; "
            "how often the job was requeued",
        ]
    ]
    procid: NotRequired[str]
    localid: NotRequired[str]
    restart_count: NotRequired[str]
