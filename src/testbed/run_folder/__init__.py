"""Names of the files and folders in a run's directory."""

from __future__ import annotations

from pathlib import Path

METRICS = "training_metrics.json"
COMPLETE = "RUN_COMPLETE.txt"
FAILED = "RUN_FAILED.txt"
PREEMPTED = "RUN_PREEMPTED.txt"
LAUNCHER = "launcher_metadata.json"
EFFECTIVE_CONFIG = "effective_config.json"
CHECKPOINTS = "checkpoints"
DESCRIPTION = "checkpoint.json"  # of a checkpoint
BEST = "best"
PROFILER_LOGS = "profiler_logs"
TENSORBOARD = "tensorboard"
TRACKERS = "trackers"
WEIGHTS = ("model.safetensors", "config.json")
TOKENIZER = "tokenizer.json"  # beside the weights: the BPE that their ids belong to, unless it is GPT-2's
INFERENCE = "inference_metrics.json"  # what scripts/evaluate.py measured of the weights
OWN_FILES = (EFFECTIVE_CONFIG, LAUNCHER, METRICS, COMPLETE, FAILED, PREEMPTED, *WEIGHTS, TOKENIZER, INFERENCE)
OWN_FOLDERS = (BEST, PROFILER_LOGS, TENSORBOARD, TRACKERS, CHECKPOINTS)


def is_converted(path: Path | str) -> bool:
    """Return whether a path is a folder of convert_checkpoint.py with AdamW's state: no record of a run."""
    folder = Path(path)
    has_weights = all((folder / name).is_file() for name in WEIGHTS)
    return has_weights and not (folder / METRICS).exists() and any((folder / CHECKPOINTS).glob("step_*"))
