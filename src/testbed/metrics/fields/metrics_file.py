"""All fields of training_metrics.json, and the sections of docs/metrics_file.md that explain them."""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from testbed.metrics.fields.profile import Attribution, Inference, Utilization
from testbed.metrics.fields.run import (
    CheckpointWritten,
    Completion,
    Environment,
    Failure,
    Host,
    Sample,
    Scheduler,
    SchemaNotes,
    Segment,
    Shutdown,
)
from testbed.metrics.fields.steps import Epoch, Evaluation, Flops, Memory, Step, Summary, Timing
from testbed.metrics.fields.training import Data, DeepSpeedConfig, Hardware, TrainingConfig
from testbed.metrics.fields.types import AboveZero, Name, OneOrMore
from testbed.metrics.fields.watched import TimedCollectives, Watched, WatchedSteps

SCHEMA_VERSION = "2.2"


class TrainingMetrics(TypedDict):
    schema_version: Annotated[Literal["2.2"], f'"{SCHEMA_VERSION}"']
    run_id: Annotated[Name, "UTC start time and 8 hexadecimal digits"]
    timestamp_utc: Annotated[str, "when the run began, ISO 8601"]
    status: Annotated[
        Literal["running", "complete", "preempted", "failed"],
        '"running", "complete", "preempted" (asked to end, and saved) or "failed"',
    ]
    failure: Annotated[Failure | None, "of a failed run: the reason in one sentence; the last finished step"]
    git_commit: Annotated[str | None, "commit of the code; whether tracked files differed from it"]
    git_dirty: bool | None
    command_line: Annotated[str, "quoted for a shell: paste it to run it again"]
    instrumented: Annotated[bool, "a profiler or a debug switch slowed the run: it never enters a comparison"]
    instruments: NotRequired[
        Annotated[
            list[str],
            "which: flags, variables of rank 0's environment, toggles of [evidence.sh](evidence.md); any start",
        ]
    ]
    env: Annotated[Environment, "versions; null if not installed"]
    host: Annotated[Host, "machine of rank 0"]
    settings: Annotated[dict[str, Any], "value of every flag, in the form of a `--config` file"]
    schema_notes: Annotated[SchemaNotes, "says that `epochs[].steps` is deprecated"]
    completion: Annotated[Completion | None, "null until the end; RUN_COMPLETE.txt, whether its line was printed, when"]
    shutdown: Annotated[
        Shutdown, "whether the process group was destroyed; whether NCCL's monitoring thread was switched off"
    ]
    sample: Annotated[
        Sample | None,
        "text generated at the end, and how long that took without warm-up: no benchmark of [inference](#inference)",
    ]
    segments: NotRequired[
        Annotated[OneOrMore[Segment], "one entry per start of the run: the first, and each `--resume`"]
    ]
    checkpoints: NotRequired[
        Annotated[list[CheckpointWritten], "one entry per checkpoint: its optimizer step, and the size of its files"]
    ]
    scheduler: NotRequired[Annotated[Scheduler, "only under Slurm, from its variables"]]
    hardware: Annotated[Hardware, "as rank 0 sees it"]
    training_config: Annotated[TrainingConfig, "effective values after flags, files and defaults"]
    data: Annotated[Data, "tokens in each file"]
    deepspeed_config: Annotated[DeepSpeedConfig | None, "null without DeepSpeed"]
    steps: Annotated[list[Step], "one row per optimizer step"]
    evaluations: Annotated[list[Evaluation], "one row per validation"]
    epochs: Annotated[list[Epoch], "one entry per epoch that was begun"]
    timing: Annotated[Timing, "of measured steps: all but warm-up"]
    memory: Annotated[Memory, "one entry per rank"]
    flops: Annotated[
        Flops,
        "forward + backward FLOPs of one token, without recomputation: 6N + 12 L C T, N without position embeddings "
        "(PaLM), and 6N + 6 L C T, N with all parameters and attention's causal half (llm.c)",
    ]
    summary: Annotated[
        Summary, "wall time of all starts, with validation, saving and lost steps, without the time between starts"
    ]
    attribution: NotRequired[Annotated[Attribution | None, "of the profiled steps"]]
    utilization: NotRequired[
        Annotated[
            Utilization | None,
            "sampled by a background thread from the first step to the last, validation and saving included",
        ]
    ]
    watched_steps: NotRequired[
        Annotated[list[WatchedSteps], "measured steps of the last start, in at most 128 windows: means over each"]
    ]
    watched: NotRequired[Annotated[Watched, "of the last start, once it has ended by itself"]]
    timed_collectives: NotRequired[
        Annotated[
            TimedCollectives,
            "with `--watch_collectives every_step` on NCCL: of the last 4,000 collectives of each rank those in steps",
        ]
    ]
    inference_latency: NotRequired[
        Annotated[
            AboveZero | None,
            "median seconds for all new tokens, prefill included, and new tokens per second; names of v1. Null if the "
            "model does not fit onto rank 0's device next to what trained it",
        ]
    ]
    inference_throughput: NotRequired[AboveZero | None]
    inference: NotRequired[Annotated[Inference | None, "generation with the final weights on rank 0"]]


# The sections of docs/metrics_file.md, by the first field of each: title, and a sentence before its table.
SECTIONS = {
    "schema_version": ("The run", ""),
    "hardware": ("Hardware", ""),
    "training_config": ("What was trained", ""),
    "steps": ("Every optimizer step", ""),
    "evaluations": ("Validation", ""),
    "epochs": ("Epochs", ""),
    "timing": ("The run in few numbers", ""),
    "attribution": (
        "Where the time of a step went",
        "Only with `--profile`: see [measuring.md](measuring.md#where-the-time-goes).",
    ),
    "watched_steps": (
        "Which rank holds the others back",
        "With `--watch_collectives`: see [diagnosis.md](diagnosis.md).",
    ),
    "inference_latency": (
        "Inference",
        "Only with `--run_inference_benchmark`: see [inference.md](inference.md#at-the-end-of-a-run).",
    ),
}
