"""The fields of a metrics file about the run itself: how it ended, where it ran, its starts and its checkpoints."""

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
    started_utc: Annotated[str, "when; its first optimizer step, and the last that it did: null where it did none"]
    first_step: Positive
    last_step: Positive | None
    resumed_from: Annotated[
        str | None,
        "the checkpoint's folder; null: it began with the first step. In the first entry: of another run, "
        "whose steps are not in this file",
    ]
    world_size: Annotated[
        Positive,
        "ranks and strategy of this start. The rows of `steps` have as many entries per rank. Where starts "
        "differ in them, in the next line's or in settings, only the rows of the last kind count as measured: "
        "the others are marked `is_warmup`",
    ]
    run_type: str
    git_commit: NotRequired[
        Annotated[str | None, "the code, and the machine as rank 0 saw it. Not in files before these fields came"]
    ]
    git_dirty: NotRequired[bool | None]
    torch_version: NotRequired[str]
    hostname: NotRequired[str]
    device: NotRequired[str | None]
    cpu_threads_per_rank: NotRequired[Positive]
    ended: Annotated[
        Literal["complete", "stopped", "preempted", "failed"] | None,
        '"complete", "stopped" (`--stop_at_step`), "preempted" or "failed"; null while it runs, and where it '
        "was killed",
    ]
    setting_changes: Annotated[
        list[SettingChange],
        "settings in which this start is not what the checkpoint was saved with. What changes the work "
        "(`--allow-setting-change`) stands in `training_config.math_changes` too, so that the run compares "
        "with none that did not change it",
    ]
    random_numbers: Annotated[
        Literal["from the seed", "continued", "drawn anew"],
        'dropout\'s: "from the seed"; "continued" from every rank\'s saved state; "drawn anew" from seed, rank '
        "and step, where the checkpoint was saved on another number of ranks or another kind of device",
    ]
    lost_steps: Annotated[
        Count | None,
        "what the starts before had done after the state that this one began from: optimizer steps that are "
        "trained again, wall seconds. Steps are counted from rank 0's progress file too, which a kill does "
        "not outrun; validation after the save is kept and not lost. Added up over the entries: all that was "
        "lost, but for the time between starts and, of a start that was killed, the seconds after its last "
        "write. Null: not known, since the file was damaged",
    ]
    lost_s: Amount | None
    wall_time_s: Annotated[Amount, "of this start, from the moment at which its folder was its own"]


class CheckpointWritten(TypedDict):
    step: Count
    bytes: Count | None
    blocking_s: Annotated[
        Amount,
        "how long the loop stood still for it; time from then until it was on disk; whether it was written "
        "beside the next steps (`--async_mode async`). In no step time. `bytes` and `total_s` are null until "
        "it is on disk",
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
            "tasks of the step, which are torchrun's agents and not ranks unless `LAUNCHER=srun`; rank 0's place "
            "among them; how often the job was requeued, left out before the first time",
        ]
    ]
    procid: NotRequired[str]
    localid: NotRequired[str]
    restart_count: NotRequired[str]
