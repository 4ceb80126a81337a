"""The clock, the FLOPs and the peak, against numbers worked out elsewhere."""

from __future__ import annotations

import time

import pytest
import torch

from testbed.flops import flops_per_token_causal, flops_per_token_palm, mfu, peak_from_table
from testbed.measure import StepClock, is_bf16_faster, measured_peak, peak_memory
from testbed.model_shape import MODEL_SIZES

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("size", "palm", "causal"),
    [("gpt2", 855.2e6, 803.3e6), ("gpt2-large", 5202.5e6, 4927.3e6), ("gpt2-xl", 10279.6e6, 9817.5e6)],
)
def test_flops_per_token_are_the_published_ones(size, palm, causal):
    """At 1,024 tokens: PaLM's convention as nanoGPT counts it, and llm.c's."""
    assert flops_per_token_palm(MODEL_SIZES[size], 1024) == pytest.approx(palm, rel=1e-4)
    assert flops_per_token_causal(MODEL_SIZES[size], 1024) == pytest.approx(causal, rel=1e-4)


def test_an_unknown_device_has_no_peak_and_no_peak_means_no_mfu():
    assert peak_from_table("NVIDIA H100 80GB HBM3", "bf16")[0] == 989.4e12
    assert peak_from_table("NVIDIA H100 PCIe", "bf16") is None, "another board, another rate"
    assert peak_from_table(None, "bf16") is None
    assert peak_from_table("Tesla T4", "fp32") is None
    for almost in ("NVIDIA L40S", "NVIDIA RTX A1000", "NVIDIA GH200 480GB", "NVIDIA H200 NVL"):
        assert peak_from_table(almost, "bf16") is None, "a name that contains another board's"
    assert mfu(1000.0, 10**9, None, 1) is None
    assert mfu(1000.0, 10**9, 2e12, 2) == pytest.approx(0.25)


def test_the_clock_covers_the_block_and_knows_the_wait():
    clock = StepClock(CPU)
    before_s = time.perf_counter()
    with clock:
        assert clock.data_wait(lambda step: time.sleep(0.02) or step, 3) == 3
        time.sleep(0.03)
    around_s = time.perf_counter() - before_s
    time.sleep(0.05)  # what comes after does not count
    assert 0.02 <= clock.data_wait_s <= clock.step_time_s - 0.03
    assert 0.05 <= clock.step_time_s <= around_s
    with clock:
        pass
    assert clock.data_wait_s == 0.0, "each step starts at nothing"


def test_the_measured_peak_is_a_rate_this_machine_can_have():
    rate, source = measured_peak(CPU, "fp32", repeats=2)
    assert 1e9 < rate < 1e14 and "products of" in source and "threads" in source


def test_the_trial_of_bf16_follows_the_clock(monkeypatch):
    """Not what the CPU claims to be but what it does: the timing alone decides."""
    slow = {torch.float32: 1.0, torch.bfloat16: 0.7}
    monkeypatch.setattr("testbed.measure._seconds_of_product", lambda left, right, device: slow[left.dtype])
    assert not is_bf16_faster(CPU)
    slow[torch.bfloat16] = 0.3
    assert is_bf16_faster(CPU)


def test_peak_memory_counts_bytes():
    block = torch.ones(25_000_000)  # 100 MB
    peaks = peak_memory(CPU)
    assert peaks["peak_rss_bytes"] > block.numel() * 4
    assert peaks["peak_rss_bytes"] < 64e9
    assert peaks["peak_allocated_bytes"] is None
