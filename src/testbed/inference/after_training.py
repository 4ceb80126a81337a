"""Time generation with the weights of a run that has just ended: --run_inference_benchmark.

Always the plain module, whatever strategy trained it: the weights are one state dict by then. What wrapping the same
weights with DeepSpeed does to generation is another question, which scripts/evaluate.py --wrapped answers.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from typing import Any

import torch

from testbed.config.settings import BENCHMARK_NEW_TOKENS, BENCHMARK_PROMPT_TOKENS, RunSettings
from testbed.data.token_file import TokenFile
from testbed.distributed import process_group
from testbed.distributed.launch import usable_cores
from testbed.inference.cached_model import CachedModel
from testbed.inference.latency import time_in_turn
from testbed.model.gpt2 import GPT2
from testbed.profiling.device_limits import is_out_of_memory

WARMUP, REPEATS = 2, 7
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def benchmark_generation(
    state_dict: dict[str, torch.Tensor],
    settings: RunSettings,
    token_file: TokenFile,
    device: torch.device,
) -> tuple[dict[str, Any] | None, str]:
    """Time the same request several times on rank 0, while the others wait for as long as it takes. All ranks call it.

    The prompt is the beginning of the training data: runs of equal work have the same one, and it needs no tokenizer.

    Args:
        state_dict: of the whole model; only rank 0's is looked at.

    Returns:
        The `inference` field of training_metrics.json (None where the model does not fit onto rank 0's device next to
        what trained it, and on other ranks), and a line for the screen.
    """
    prompt = [int(token) for token in token_file.tokens[:BENCHMARK_PROMPT_TOKENS]]
    try:
        found = process_group.by_rank_0(lambda: _measure(state_dict, settings, prompt, device))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # A model that was trained in shards. The run itself lacks nothing.
        return None, f"no inference benchmark: the whole model does not fit onto {device} next to what trained it"
    if found is None:
        return None, ""
    latency_s = statistics.median(found["latency_s"])
    first_s = statistics.median(found["time_to_first_token_s"])
    return found, (
        f"generation: {BENCHMARK_NEW_TOKENS} greedy tokens in {latency_s:.3f} s, the first after {first_s:.4f} s "
        f"(median of {REPEATS}): {BENCHMARK_NEW_TOKENS / latency_s:,.1f} tokens/s"
    )


def _measure(
    state_dict: dict[str, torch.Tensor], settings: RunSettings, prompt: list[int], device: torch.device
) -> dict[str, Any]:
    model = GPT2(settings.shape)
    model.load_state_dict(state_dict)
    model.to(device, DTYPES[settings.compute.precision])
    prompts = [prompt] * (WARMUP + REPEATS)
    plain = {"plain": CachedModel(model).eval()}
    with _all_cores() as threads:
        answers = time_in_turn(plain, settings.shape, prompts, BENCHMARK_NEW_TOKENS, WARMUP, device)["plain"]
    return {
        "module": "plain",
        "threads": threads,
        "precision": settings.compute.precision,
        "batch_size": 1,
        "uses_cache": True,
        "prompt_ids": prompt,
        "new_tokens": BENCHMARK_NEW_TOKENS,
        "new_ids": answers[0].tokens,
        "warmup": WARMUP,
        "latency_s": [answer.latency_s for answer in answers],
        "time_to_first_token_s": [answer.time_to_first_token_s for answer in answers],
    }


@contextlib.contextmanager
def _all_cores() -> Iterator[int]:
    """Use all cores of this process, and yield their number: a rank's own share would make runs with more ranks
    slower here, though the other ranks wait. Set in the thread that measures, where OpenMP keeps it."""
    share = torch.get_num_threads()
    torch.set_num_threads(usable_cores())
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(share)
