"""All fields of training_metrics.json, and the sections in which docs/metrics_file.md explains them."""

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


class TrainingMetrics(TypedDict):
    schema_version: Annotated[
        str,
        '"2.2"; a file of 2.1 is read with its names: `timing.step_time_median_s`, `timing.step_time_p95_s` and '
        "`steps[].learning_rate` have that of 2.0 now",
    ]
    run_id: Annotated[Name, "UTC start time and 8 hexadecimal digits: names this run among all"]
    timestamp_utc: Annotated[str, "when the run began, ISO 8601"]
    status: Annotated[
        Literal["running", "complete", "preempted", "failed"],
        '"running", "complete", "preempted" (asked to end, and saved) or "failed". **2.0:** the file was '
        "written only on success, so a crash left nothing",
    ]
    failure: Annotated[
        Failure | None,
        "null unless failed; one sentence, which names the step where the loss was at fault; the last step "
        "that was finished, null before the first",
    ]
    git_commit: Annotated[
        str | None,
        "commit of the code, and whether files differed from it. **2.0:** no dirty flag, so a commit could "
        "name code that never ran",
    ]
    git_dirty: bool | None
    command_line: Annotated[str, "the command, quoted for a shell: paste it to run it again. **2.0:** unquoted"]
    instrumented: Annotated[
        bool, "a profiler or a debug switch was on; such a run is slower and never enters a comparison"
    ]
    instruments: NotRequired[
        Annotated[
            list[str],
            "which: flags, variables of rank 0's environment, toggles of [evidence.sh](evidence.md); of all "
            "starts of a resumed run. Not in files before this field came",
        ]
    ]
    env: Annotated[Environment, "versions; null is not installed (CUDA: a CPU build)"]
    host: Annotated[Host, "the machine of rank 0"]
    settings: Annotated[dict[str, Any], "the effective value of every flag, in the form of a `--config` file"]
    schema_notes: Annotated[SchemaNotes, "says inside the file that `epochs[].steps` is deprecated"]
    completion: Annotated[
        Completion | None, "null until the end; name of RUN_COMPLETE.txt, whether its line was printed too, and when"
    ]
    shutdown: Annotated[
        Shutdown,
        "whether the process group was taken down (**2.0:** said whether one had been *started*), and whether "
        "NCCL's monitor was silenced",
    ]
    sample: Annotated[
        Sample | None,
        "text generated at the end; tokens that were generated, and how long that took. Null: skipped. No "
        "benchmark of inference, which is [below](#inference): nothing is warmed up",
    ]
    segments: NotRequired[
        Annotated[
            OneOrMore[Segment],
            "one entry for each start of the run, in their order: the first, and one for every `--resume`. Not in "
            "files before this field came",
        ]
    ]
    checkpoints: NotRequired[
        Annotated[
            list[CheckpointWritten],
            "one entry for each checkpoint that was begun: after which step, and the size of its files. Not in "
            "files before this field came",
        ]
    ]
    scheduler: NotRequired[
        Annotated[Scheduler, "only under a batch system, as its variables say; what it does not set is left out"]
    ]
    hardware: Annotated[Hardware, "as rank 0 sees it"]
    training_config: Annotated[TrainingConfig, "effective values after flags, files and defaults"]
    data: Annotated[Data, "tokens in each file"]
    deepspeed_config: Annotated[DeepSpeedConfig | None, "null without DeepSpeed"]
    steps: Annotated[
        list[Step],
        "one row for each optimizer step. **2.0:** every 50th *micro* step on rank 0: with accumulation 2 or "
        "4 never the one that communicates",
    ]
    evaluations: Annotated[list[Evaluation], "one row for each validation"]
    epochs: Annotated[list[Epoch], "one entry for each epoch that was begun"]
    timing: Annotated[Timing, "of measured steps, which are all but the first `timing.warmup_steps`"]
    memory: Annotated[Memory, "one entry for each rank"]
    flops: Annotated[
        Flops,
        "forward + backward FLOPs of one token, without recomputation: 6N + 12 L C T with N without position "
        "embeddings (PaLM), and 6N + 6 L C T, the causal half of attention, with N all parameters (llm.c)",
    ]
    summary: Annotated[
        Summary,
        "wall time of the run, validation and saving included; for a resumed run all its starts together, "
        "with the steps that were lost in between",
    ]
    attribution: NotRequired[Annotated[Attribution | None, "of the profiled steps; null or absent without `--profile`"]]
    utilization: NotRequired[
        Annotated[
            Utilization | None,
            "sampled by a thread beside the steps, from the first step to the last; validation and saving are inside",
        ]
    ]
    inference_latency: NotRequired[
        Annotated[
            AboveZero | None,
            "seconds for all new tokens, prefill included, median of the repeats; new tokens per second, from the "
            "same median. The names are v1's. Null where the model does not fit onto rank 0's device beside what "
            "trained it",
        ]
    ]
    inference_throughput: NotRequired[AboveZero | None]
    inference: NotRequired[
        Annotated[Inference | None, "of generation with the run's last weights, on rank 0; null as above"]
    ]


# The sections of docs/metrics_file.md, by the field with which each begins: title, and a sentence before its table.
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
        "Only with `--profile`; how it is computed: [measuring.md](measuring.md#where-the-time-goes).",
    ),
    "inference_latency": (
        "Inference",
        "Only with `--run_inference_benchmark`; not in files before these fields came. What it is and is "
        "not: [inference.md](inference.md#at-the-end-of-a-run).",
    ),
}
