"""Files of every version, built in code: what the tests of the metrics file, the runs and the charts start from."""

import copy
import json
import statistics
from pathlib import Path

SHA_TRAIN, SHA_VAL, SHA_OTHER = "a" * 64, "b" * 64, "c" * 64


def merge(base: dict, overrides: dict) -> dict:
    """`base` with `overrides` laid over it, dictionaries member by member."""
    for key, value in overrides.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merge(base[key], value)
        else:
            base[key] = value
    return base


def example_metrics(
    *, num_steps: int = 20, warmup_steps: int = 5, world_size: int = 2, step_time_s: float = 0.2, **overrides
) -> dict:
    """A whole, valid file of a finished CPU run of `num_steps` steps; `overrides` are merged over it.

    Global batch 8, sequence length 64: 512 tokens per step. Every eighth step is 25 % slower than `step_time_s`,
    warm-up steps take twice as long.
    """
    steps = _steps(num_steps, warmup_steps, world_size, step_time_s)
    metrics = {
        "schema_version": "2.2", "run_id": "20260101T120000Z-0123abcd", "timestamp_utc": "2026-01-01T12:00:00Z",
        "status": "complete", "failure": None, "git_commit": "0" * 40, "git_dirty": False,
        "command_line": "python src/gpt2.py --run_type baseline", "instrumented": False,
        **_machine(world_size),
        "training_config": _training_config(num_steps, world_size),
        "data": {
            "tokens_train": 64_001, "tokens_val": 6_401, "sequences_per_epoch": 1000,
            "sequences_dropped_per_epoch": 0, "steps_per_epoch": 125,
        },
        "settings": {"run_type": "baseline", "epochs": 1},
        "deepspeed_config": None,
        "schema_notes": {"steps": "epochs[].steps is deprecated and equals micro_steps"},
        **_results(steps, warmup_steps, world_size),
        "sample": {"prompt": "def", "text": "def main():", "num_tokens": 8, "seconds": 0.1},
        "shutdown": {"destroy_process_group_called": world_size > 1, "quiet_nccl_monitor": False},
        "completion": {
            "run_complete_file": "RUN_COMPLETE.txt", "printed_marker": True, "timestamp_utc": "2026-01-01T12:01:00Z",
        },
    }  # fmt: skip
    return merge(metrics, copy.deepcopy(overrides))


def _steps(num_steps: int, warmup_steps: int, world_size: int, step_time_s: float) -> list[dict]:
    rows = []
    for step in range(1, num_steps + 1):
        slowest = step_time_s * (2.0 if step <= warmup_steps else 1.25 if step % 8 == 0 else 1 + 0.002 * (step % 5))
        rows.append({
            "step": step, "epoch": 1, "is_warmup": step <= warmup_steps, "is_skipped": False,
            "loss": 9.0 - 3.0 * step / (step + 10), "grad_norm": 1.5, "lr": 6e-4,
            "step_time_s": slowest, "data_wait_s": 0.001,
            "per_rank_step_time_s": [slowest * (1 - 0.01 * rank) for rank in range(world_size)],
            "per_rank_data_wait_s": [0.001] * world_size,
        })  # fmt: skip
    return rows


def _machine(world_size: int) -> dict:
    return {
        "env": {
            "python_version": "3.11.2", "torch_version": "2.13.0", "transformers_version": None,
            "deepspeed_version": None, "cuda_version": None, "numpy_version": "2.4.6",
        },
        "host": {"hostname": "node0", "os": "Linux"},
        "hardware": {
            "device_type": "cpu", "gpu_name": None, "cpu_name": "Example CPU", "gpu_count_visible": 0,
            "world_size": world_size, "num_nodes": 1, "cuda_version": None, "cpu_cores_visible": 2,
            "cpu_threads_per_rank": 1, "backend": "gloo" if world_size > 1 else None,
        },
    }  # fmt: skip


def _training_config(num_steps: int, world_size: int) -> dict:
    return {
        "run_type": "baseline", "model_name": "nano", "model_size": "n_layer=2, n_head=2, n_embd=64",
        "num_layers": 2, "num_heads": 2, "embedding_size": 64, "vocab_size": 8192, "max_position_embeddings": 128,
        "dropout": 0.0, "label_smoothing": 0.0, "num_parameters": 632_448, "init_from": "scratch", "seq_len": 64,
        "epochs": 1, "max_train_steps": num_steps, "total_steps": num_steps, "stop_at_step": None,
        "micro_batch_size_per_gpu": 4, "grad_accum_steps": 1, "global_batch_size": 8, "data_world_size": world_size,
        "lr": 6e-4, "min_lr": 6e-5, "warmup_steps": 2, "lr_decay_steps": num_steps, "weight_decay": 0.1,
        "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "max_grad_norm": 1.0, "optimizer": "AdamW",
        "precision": "fp32", "deepspeed_enabled": False, "zero_stage": None, "seed": 1337,
        "dataset_name": "train_small", "dataset_subset_sizes": {"train": 1000, "val": 100},
        "dataset_sha256": {"train": SHA_TRAIN, "val": SHA_VAL}, "tokenizer": "bpe:8192", "attention": "sdpa",
    }  # fmt: skip


def _results(steps: list[dict], warmup_steps: int, world_size: int) -> dict:
    """What follows from the rows of the steps."""
    num_steps, times = len(steps), [row["step_time_s"] for row in steps]
    measured = [row["step_time_s"] for row in steps if not row["is_warmup"]] or times
    percentiles = {"step_time_p50_sec": statistics.median(measured), "step_time_p95_sec": max(measured)}
    tokens_per_s = 512 * len(measured) / sum(measured)
    cuda = {f"max_cuda_mem_{kind}_bytes_{of}": None for of in ("rank0", "global") for kind in ("allocated", "reserved")}
    epoch = {
        "epoch_idx": 1, "is_partial": True, "epoch_wall_time_sec": sum(times),
        "steps": num_steps, "micro_steps": num_steps, "optimizer_steps": num_steps, "skipped_optimizer_steps": 0,
        "tokens_processed_global": 512 * num_steps, "tokens_per_sec_global": tokens_per_s,
        "train_loss_avg_global": 7.5, "val_loss_avg_global": 7.0, **cuda, "num_measured_steps": len(measured),
        "step_time_mean_sec": statistics.fmean(measured), **percentiles, "dataload_time_mean_sec": 0.001,
    }  # fmt: skip
    return {
        "epochs": [epoch],
        "steps": steps,
        "evaluations": [
            {"step": step, "epoch": 1, "val_loss": 9.1 - 3.0 * step / (step + 10), "num_target_tokens": 6400,
             "num_sequences": 100, "wall_time_s": 0.4, "train_time_s": sum(times[:step]),
             "elapsed_s": sum(times[:step]) + 0.4}
            for step in sorted({num_steps // 2, num_steps} - {0})
        ],
        "timing": {
            "warmup_steps": warmup_steps, "num_measured_steps": len(measured), **percentiles,
            "step_time_p95_above_median": max(measured) / statistics.median(measured) - 1,
            "data_wait_fraction": 0.005,
            "wall_clock_tokens_per_sec_global": tokens_per_s * 0.9, "startup_time_s": 3.0,
        },
        "memory": {"per_rank": [
            {"rank": rank, "peak_rss_bytes": (700 + rank) * 2**20, "peak_allocated_bytes": None,
             "peak_reserved_bytes": None}
            for rank in range(world_size)
        ]},
        "flops": {
            "per_token_palm": 3_800_000, "per_token_causal": 3_700_000, "model_flops_per_s": 3_800_000 * tokens_per_s,
            "peak_flops_per_s_per_device": 1e11, "peak_source": "measured: 2048^3 matrix product",
            "mfu": 3_800_000 * tokens_per_s / (1e11 * world_size),
        },
        "summary": {
            "total_wall_time_sec": sum(times) + 5, "best_val_loss": 7.0, "final_val_loss": 7.0,
            "mean_tokens_per_sec_global": tokens_per_s,
        },
    }  # fmt: skip


def as_2_1(metrics: dict) -> dict:
    """Return a file of today's version as 2.1 wrote it: two figures had other names."""
    timing = dict(metrics["timing"])
    timing["step_time_median_s"], timing["step_time_p95_s"] = (
        timing.pop("step_time_p50_sec"),
        timing.pop("step_time_p95_sec"),
    )
    steps = [
        {"learning_rate" if name == "lr" else name: value for name, value in row.items()} for row in metrics["steps"]
    ]
    return metrics | {"schema_version": "2.1", "timing": timing, "steps": steps}


def inference_fields(latencies_s: list[float]) -> dict:
    """What --run_inference_benchmark adds to a 2.1 file, for repeats that took so long."""
    median_s = statistics.median(latencies_s)
    return {
        "inference": {
            "module": "plain",
            "threads": 2,
            "precision": "fp32",
            "batch_size": 1,
            "uses_cache": True,
            "prompt_ids": [1, 2, 3],
            "new_tokens": 100,
            "new_ids": [4] * 100,
            "warmup": 2,
            "latency_s": latencies_s,
            "time_to_first_token_s": [each / 50 for each in latencies_s],
        },
        "inference_latency": median_s,
        "inference_throughput": 100 / median_s,
    }


def v1_metrics(num_gpus: int = 1) -> dict:
    """What seed 000 recorded on 1 and on 4 T4; the throughput is per rank, because the world size was read as 1."""
    if num_gpus == 1:
        time_s, losses, throughput, latency_s = 2258.76, (6.281, 5.634), 12914.9, 0.8416
    else:
        time_s, losses, throughput, latency_s = 650.37, (6.846, 6.181), 11213.5, 1.0160
    return {
        "train_time_per_epoch": [time_s],
        "train_loss_per_epoch": [losses[0]],
        "val_loss_per_epoch": [losses[1]],
        "train_throughput": [throughput],
        "inference_latency": latency_s,
        "inference_throughput": 100 / latency_s,
    }


def v20_metrics(world_size: int = 4, **overrides) -> dict:
    """A 2.0 file with the numbers that seed 004 published for 4 x V100 (an early file: no deepspeed_enabled)."""
    return merge(
        {
            "schema_version": "2.0",
            "run_id": "20260108T000000Z-89abcdef",
            "timestamp_utc": "2026-01-08T00:00:00Z",
            "git_commit": "unknown",
            "command_line": "src/gpt2.py --run_type optimized --epochs 1",
            "env": {"python_version": "3.10.0", "torch_version": "2.1.0"},
            "host": {"hostname": "gpu-node", "os": "Linux"},
            "hardware": {
                "gpu_name": "Tesla V100-SXM2-16GB",
                "gpu_count_visible": 4,
                "world_size": world_size,
                "cuda_version": "12.1",
            },
            "training_config": {
                "model_name": "gpt2",
                "model_size": "n_layer=12, n_head=12, n_embd=768",
                "seq_len": 512,
                "epochs": 1,
                "micro_batch_size_per_gpu": 4,
                "grad_accum_steps": 1,
                "global_batch_size": 16,
                "lr": 1e-4,
                "optimizer": "AdamW",
                "precision": "fp16_deepspeed",
                "zero_stage": 1,
                "dataset_name": "train_small",
                "dataset_subset_sizes": {"train": 56976, "val": 5738},
            },
            "deepspeed_config": {"path": "src/deepspeed_config.json", "sha256": SHA_OTHER},
            "schema_notes": {"steps": "deprecated"},
            "epochs": [
                {
                    "epoch_idx": 1,
                    "epoch_wall_time_sec": 289.4,
                    "steps": 3561,
                    "micro_steps": 3561,
                    "optimizer_steps": 3561,
                    "tokens_processed_global": 29_171_712,
                    "tokens_per_sec_global": 100_791.0,
                    "train_loss_avg_global": 6.3,
                    "val_loss_avg_global": 5.640,
                    "max_cuda_mem_allocated_bytes_rank0": 5 * 2**30,
                    "step_time_p50_sec": 0.0805,
                    "step_time_p95_sec": 0.0808,
                    "dataload_time_mean_sec": None,
                }
            ],
            "summary": {
                "total_wall_time_sec": 296.1,
                "best_val_loss": 5.640,
                "mean_tokens_per_sec_global": 100_791.0,
            },
        },
        copy.deepcopy(overrides),
    )


def save(directory: Path, metrics: dict, name: str = "training_metrics.json") -> Path:
    """Write `metrics` as they are, valid or not, into `directory`; returns the file."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_text(json.dumps(metrics), encoding="utf-8")
    return path
