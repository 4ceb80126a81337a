"""Files as scripts/evaluate.py writes them, built in code: what the tests of tables and pictures start from."""

from __future__ import annotations

import math

import numpy as np

from support.metrics_examples import merge
from testbed.analysis.statistics import compare
from testbed.inference.report import decode_rates

NOTHING_MEASURED = {"schemes": {}, "load": None, "wrapped": None, "data": None}
SCHEMES = {  # bits, share of the products, bytes in memory, factor on perplexity, decode tokens/s
    "none": (32, 0, 7_700_000, 1.0, 800.0),
    "bf16": (16, 17, 3_850_000, 1.0001, 560.0),
    "int8_dynamic": (8, 16, 5_400_000, 1.004, 500.0),
    "int8_weight_only": (8, 16, 5_400_000, 1.0002, 640.0),
    "int4_weight_only": (4, 16, 5_050_000, 1.08, 803.0),
}


def comparison(of: list[float], against: list[float]) -> dict:
    found = compare(of, against)
    return {"ratio": found.ratio, "low": found.low, "high": found.high, "verdict": found.verdict}


def percentiles(values: list[float]) -> dict[str, float]:
    return dict(zip(("p50", "p95", "p99"), np.percentile(values, (50, 95, 99)).tolist(), strict=True))


def quality(factor: float, windows: int = 20) -> dict:
    """A perplexity of about 300 x `factor`, with windows that differ by far more than schemes do."""
    nats = [(5.7 + 0.3 * math.sin(number) + math.log(factor)) * 512 for number in range(windows)]
    per_token = sum(nats) / (512 * windows)
    return {
        "value": math.exp(per_token),
        "low": math.exp(per_token - 0.1),
        "high": math.exp(per_token + 0.1),
        "nats_per_token": per_token,
        "bits_per_byte": 2.5,
        "window_nats": nats,
        "window_tokens": [512] * windows,
    }


def speed(tokens_per_s: float, repeats: int, new_tokens: int = 8) -> dict:
    """Repeats that scatter by a per cent around `tokens_per_s`, always in the same way."""
    factors = [1 + 0.01 * math.sin(3 * number) for number in range(repeats)]
    token_s = [[factor / tokens_per_s] * (new_tokens - 1) for factor in factors]
    times_s = {"prefill_s": [0.02 * factor for factor in factors]}
    times_s["time_to_first_token_s"] = [0.021 * factor for factor in factors]
    every = times_s | {"per_token_s": [each for of_repeat in token_s for each in of_repeat]}
    return {
        "prompt_tokens": 64,
        "new_tokens": new_tokens,
        "warmup": 2,
        "repeats": repeats,
        **times_s,
        "per_token_s": token_s,
        "percentiles": {name: percentiles(times) for name, times in every.items()},
        "prefill_tokens_per_s": 64 / 0.02,
        "decode_tokens_per_s": tokens_per_s,
    }


def scheme(name: str, repeats: int = 7, **overrides) -> dict:
    """An entry of `schemes`. Overrides: bytes_in_memory, factor, tokens_per_s."""
    bits, products, num_bytes, factor, tokens_per_s = SCHEMES[name]
    num_bytes = overrides.get("bytes_in_memory", num_bytes)
    factor, tokens_per_s = overrides.get("factor", factor), overrides.get("tokens_per_s", tokens_per_s)
    latency = speed(tokens_per_s, repeats)

    def against(other: str) -> dict | None:
        reference = speed(SCHEMES[other][4], repeats)
        return None if name == other else comparison(decode_rates(latency), decode_rates(reference))

    return {
        "unavailable": None,
        "summary": f"what {name} does",
        "bits": bits,
        "num_parameters": 1_900_000,
        "num_quantized_parameters": 0 if name == "none" else 786_432,
        "num_products": 17,
        "num_quantized_products": products,
        "bytes_in_memory": num_bytes,
        "bytes_on_disk": num_bytes + 12_000,
        "bytes_expected": round(num_bytes / 1.01),
        "perplexity": quality(factor),
        "perplexity_ratio": None if name == "none" else ratio(factor),
        "latency": latency,
        "speed_ratio": against("none"),
        "speed_ratio_bf16": against("bf16"),
    }


def ratio(factor: float, around: float = 0.0005) -> dict:
    return {"value": factor, "low": factor - around, "high": factor + around}


def unavailable(name: str, reason: str) -> dict:
    measured = scheme(name)
    kept = {"unavailable": reason, "summary": measured["summary"], "bits": measured["bits"]}
    return dict.fromkeys(measured) | kept


def point(latency_s: float, tokens_per_s: float, rejected: int = 0, **load: float) -> dict:
    """A POINT of 20 requests of 16 tokens."""
    samples = [
        {
            "arrival_s": 0.1 * number,
            "first_token_s": 0.1 * number + latency_s / 4,
            "end_s": 0.1 * number + latency_s * (1 + 0.02 * number),
            "prompt_tokens": 40,
            "new_tokens": 16,
        }
        for number in range(20 - rejected)
    ]
    return {
        **load,
        "requests": 20,
        "completed": 20 - rejected,
        "rejected": rejected,
        "wall_s": 16 * (20 - rejected) / tokens_per_s,
        "tokens_per_s": tokens_per_s,
        "latency_s": percentiles([each["end_s"] - each["arrival_s"] for each in samples]),
        "time_to_first_token_s": percentiles([each["first_token_s"] - each["arrival_s"] for each in samples]),
        "samples": samples,
    }


def load(**overrides) -> dict:
    """Closed loops that saturate at 4 at once, open ones of which the last two are too fast."""
    closed = {1: (0.02, 800), 2: (0.025, 1300), 4: (0.036, 1800), 8: (0.07, 1830), 16: (0.14, 1840)}
    opened = {30: (0.03, 480), 60: (0.04, 960), 90: (0.08, 1440), 110: (0.4, 1800, 3)}
    return merge(
        {
            "scheme": "none",
            "prompt_tokens": 64,
            "new_tokens": 32,
            "max_batch": 8,
            "max_queue": 16,
            "seed": 0,
            "cache_bytes": 3_145_728,
            "peak_allocated_bytes": None,
            "closed": [point(*found, concurrency=number) for number, found in closed.items()],
            "open": [point(*found, rate_per_s=number) for number, found in opened.items()],
            "saturation": {"tokens_per_s": 1840, "concurrency": 4, "rate_per_s": 90},
        },
        overrides,
    )


def wrapped(engine_tokens_per_s: float = 700.0, repeats: int = 7) -> dict:
    """The training engine at `engine_tokens_per_s`, the plain module at 800; init_inference does not run."""
    rates = {"plain": 800.0, "training_engine": engine_tokens_per_s}
    found = {name: decode_rates(speed(rate, repeats)) for name, rate in rates.items()}
    arms = {
        name: {"unavailable": None, "same_tokens": True, "latency_s": [32 / rate for rate in of]}
        | {"decode_tokens_per_s": of}
        for name, of in found.items()
    }
    arms["init_inference"] = dict.fromkeys(arms["plain"]) | {"latency_s": [], "decode_tokens_per_s": []}
    arms["init_inference"]["unavailable"] = "it needs a kernel that is not built here"
    return {
        "prompt_tokens": 64,
        "new_tokens": 32,
        "warmup": 2,
        "repeats": repeats,
        "arms": arms,
        "comparisons": {"training_engine": comparison(found["training_engine"], found["plain"])},
    }


def example_inference(**overrides) -> dict:
    """A whole, valid file of a CPU; `overrides` are merged over it."""
    return merge(
        {
            "schema_version": "1.0",
            "status": "complete",
            "failure": None,
            "timestamp_utc": "2026-01-01T12:00:00Z",
            "command_line": "python scripts/evaluate.py --checkpoint checkpoint/baseline",
            "git_commit": "0" * 40,
            "git_dirty": False,
            "environment": {
                "env": {"python_version": "3.11.2", "torch_version": "2.13.0", "torchao_version": "0.18.0"},
                "host": {"hostname": "node0", "os": "Linux"},
                "hardware": {"device_type": "cpu", "gpu_name": None}
                | {"cpu_name": "Example CPU", "cpu_cores_visible": 2},
            },
            "device": "cpu",
            "threads": 1,
            "checkpoint": {
                "name": "baseline",
                "model_size": "n_layer=4, n_head=4, n_embd=128",
                "num_parameters": 1_900_000,
                "vocab_size": 8192,
                "max_position_embeddings": 1024,
                "weights_sha256": "a" * 64,
            },
            "data": {
                "name": "val_small.bin",
                "sha256": "b" * 64,
                "num_tokens": 100_001,
                "window": 1024,
                "stride": 512,
                "num_windows": 20,
                "num_target_tokens": 10_240,
                "num_bytes": 34_000,
            },
            "schemes": {name: scheme(name) for name in SCHEMES},
            "load": load(),
            "wrapped": wrapped(),
            "bleu": None,
        },
        overrides,
    )
