"""The clock, the FLOPs and the peak, against numbers worked out elsewhere."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from support.programs import REPOSITORY

from testbed.distributed.launch import usable_cores
from testbed.model.flops import flops_per_token_causal, flops_per_token_palm, mfu, peak_from_table
from testbed.model.shape import MODEL_SIZES
from testbed.profiling.device_limits import (
    BF16_INSTRUCTIONS,
    FIRST_MEASUREMENT,
    PeakRate,
    begin_peak_rate,
    choose_precision,
    peak_memory,
)
from testbed.profiling.step_clock import StepClock, phase
from testbed.profiling.utilization import UtilizationSampler

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
    assert peak_from_table("NVIDIA H100 PCIe", "bf16")[0] == 756.5e12, "another board, another rate"
    assert peak_from_table("NVIDIA H100 80GB HBM3", "fp8")[0] == 2 * 989.45e12
    assert peak_from_table(None, "bf16") is None
    assert peak_from_table("Tesla T4", "fp32") is None
    for almost in ("NVIDIA L40", "NVIDIA RTX A1000", "NVIDIA A10G", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert peak_from_table(almost, "bf16") is None, "a name that contains another board's"
    assert mfu(1000.0, 10**9, None, 1) is None
    assert mfu(1000.0, 10**9, 2e12, 2) == pytest.approx(0.25)


@pytest.mark.alone
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


@pytest.mark.alone
def test_phases_are_exclusive_and_only_inside_a_step():
    """What is inside another phase is not part of the outer one; the rest of the step is in none."""
    clock = StepClock(CPU)
    with phase("forward"):  # no step is being timed: validation, say
        time.sleep(0.01)
    with clock:
        with phase("schedule"):
            time.sleep(0.1)
            with phase("forward"):
                time.sleep(0.15)
            with phase("backward"):
                time.sleep(0.25)
            time.sleep(0.1)
        time.sleep(0.05)
        with phase("forward"):
            time.sleep(0.15)
    for name, seconds in {"schedule": 0.2, "forward": 0.3, "backward": 0.25, "optimizer": 0.0}.items():
        assert clock.phase_s[name] == pytest.approx(seconds, abs=0.04), name
    assert sum(clock.phase_s.values()) <= clock.step_time_s - 0.05
    with clock:
        pass
    assert set(clock.phase_s.values()) == {0.0}, "each step starts at nothing"


def test_the_range_of_a_step_lasts_until_the_device_is_done(monkeypatch):
    """A host that runs ahead: what the device does after the last launch is part of the step in a trace too."""
    monkeypatch.setattr("testbed.profiling.step_clock.synchronize", lambda device: time.sleep(0.1))
    with torch.profiler.profile() as profiler, StepClock(CPU) as clock:
        pass
    (step,) = [event for event in profiler.events() if event.name == "train/step"]
    assert clock.step_time_s > 0.1
    assert step.time_range.elapsed_us() > 100_000


def test_a_clock_on_cuda_waits_twice_and_notes_the_second_wait(monkeypatch):
    """With CUDA's events and waits replaced: two waits per step, on the run's device, none between the marks."""
    called, device = [], torch.device("cuda", 1)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            called.append("event")
            self.number = called.count("event")

        def elapsed_time(self, later):
            return 1000.0 * (later.number - self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: called.append(f"wait for {device}"))
    monkeypatch.setattr("testbed.profiling.step_clock.watchdog.enter", called.append)
    with StepClock(device) as clock, phase("forward"):
        pass
    begin = ["wait for cuda:1", "event"]
    assert called == [*begin, "forward", "event", "event", "event", "device", "wait for cuda:1"]
    assert clock.phase_s["forward"] == 1.0 and sum(clock.phase_s.values()) == 1.0


def test_a_step_that_fails_leaves_no_clock_running():
    clock = StepClock(CPU)
    with pytest.raises(RuntimeError, match="planted"), clock, phase("backward"):
        raise RuntimeError("planted")
    with phase("forward"):
        time.sleep(0.01)
    assert clock.phase_s["forward"] == 0.0


def test_the_measured_peak_is_a_rate_this_machine_can_have(monkeypatch):
    """The best of all products, also of those between the steps, which come so seldom that they cost a hundredth."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    peak = PeakRate(CPU, "fp32")
    peak.measure(repeats=2)
    assert 1e9 < peak.flops_per_s() < 1e14
    assert torch.equal(torch.get_rng_state(), before), "dropout goes on as if nothing had been measured"
    monkeypatch.setattr("testbed.profiling.device_limits._seconds_of_product", lambda left, right, device: 1e-9)
    for _ in range(40):
        peak.measure_if_due(1.0)
    assert peak.flops_per_s() < 1e14, "not yet"
    for _ in range(20):
        peak.measure_if_due(1.0)
    assert peak.flops_per_s() == pytest.approx(2 * peak.size**3 * 1e9)
    assert peak.source(2).startswith("measured: best of 3 fp32 products") and "2 ranks" in peak.source(2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert peak.source(1).endswith("between the steps, 1 thread")


def test_a_gpu_is_warm_before_its_peak_is_measured(monkeypatch):
    """An idle GPU runs at a low clock: the first products are slow and do not count."""
    monkeypatch.setattr("testbed.profiling.device_limits.peak_from_table", lambda name, precision: None)
    monkeypatch.setattr("testbed.profiling.device_limits._affordable_size", lambda device, dtype: 16)
    products = []

    def product(left, right, device):
        products.append(now_s[0])
        now_s[0] += 0.1
        return 0.1

    now_s = [0.0]
    monkeypatch.setattr("testbed.profiling.device_limits._seconds_of_product", product)
    monkeypatch.setattr("testbed.profiling.device_limits.time.perf_counter", lambda: now_s[0])
    monkeypatch.setitem(FIRST_MEASUREMENT, "cpu", FIRST_MEASUREMENT["cuda"])
    peak = begin_peak_rate(CPU, "fp32")
    assert len(peak._seconds) == 20 and len(products) > 20 and products[-20] >= 0.3


@pytest.mark.alone
def test_the_sampler_sees_what_this_process_does():
    """About a second of work on one core, and of memory that is held meanwhile."""
    sampler = UtilizationSampler(CPU)
    sampler.start()
    held = torch.ones(25_000_000)  # 100 MB
    clock = StepClock(CPU)
    with clock:
        end_s = time.perf_counter() + 1.3
        while time.perf_counter() < end_s:
            pass
    sampler.add_step(clock.cpu_s, clock.step_time_s)
    found = sampler.stop()
    assert 20 < found["cpu_percent_mean"] < 150, "a busy machine gives less than a core"
    assert found["num_samples"] == 1 and found["rss_bytes_max"] > held.nbytes
    assert found["gpu_percent_mean"] is None and found["gpu_memory_used_bytes_max"] is None


@pytest.fixture
def plant_cpu(monkeypatch):
    """A CPU with these instructions, whose bf16 product takes so many seconds where one in fp32 takes 1."""

    def plant(instructions: dict[str, bool], in_bf16: float | Iterator[float]) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
        times = {torch.float32: itertools.repeat(1.0)}
        times[torch.bfloat16] = itertools.repeat(in_bf16) if isinstance(in_bf16, float) else in_bf16
        monkeypatch.setattr(
            "testbed.profiling.device_limits._seconds_of_product", lambda left, *_: next(times[left.dtype])
        )

    return plant


@pytest.mark.parametrize(
    "instructions, in_bf16, chosen",
    [
        ({"avx512_bf16": True}, 0.3, "bf16"),
        ({"amx_bf16": True}, 0.3, "bf16"),
        ({"architecture": "aarch64", "bf16": True}, 0.3, "bf16"),
        ({"avx512_bf16": True}, 0.7, "fp32"),  # there, but not used
        ({"avx512_f": True, "amx_bf16": False}, 0.3, "fp32"),  # noise: nothing there could make it faster
    ],
)
def test_bf16_takes_instructions_and_time(plant_cpu, instructions, in_bf16, chosen):
    plant_cpu(instructions, in_bf16)
    precision, words = choose_precision(CPU)
    assert precision == chosen and words.startswith(f"precision {chosen}: ")


def test_a_moment_of_other_work_does_not_choose_the_precision(plant_cpu):
    """Three rounds of seven are ten times as slow, or as fast."""
    for off in (10.0, 0.1):
        plant_cpu({"avx512_bf16": True}, iter([1.0, *[0.25] * 4, *[0.25 * off] * 3]))
        assert choose_precision(CPU)[0] == "bf16"
        plant_cpu({"avx512_bf16": True}, iter([1.0, *[5.0] * 4, *[5.0 * off * 0.1] * 3]))
        assert choose_precision(CPU)[0] == "fp32"


@pytest.mark.parametrize("in_bf16, off, chosen", [(0.55, (1, 20), "bf16"), (1.2, (0.05, 1), "fp32")])
def test_the_choice_of_a_precision_is_the_same_every_time_in_noise(plant_cpu, in_bf16, off, chosen):
    """Fifty starts; in each any three rounds of seven are up to twenty times as slow, or as fast."""
    noise = random.Random(7)
    for _ in range(50):
        are_off = noise.sample(range(7), 3)
        rounds = [noise.uniform(0.9, 1.1) * (noise.uniform(*off) if number in are_off else 1) for number in range(7)]
        plant_cpu({"avx512_bf16": True}, iter([1.0, *(in_bf16 * factor for factor in rounds)]))
        assert choose_precision(CPU)[0] == chosen


def test_a_gpu_that_emulates_bf16_computes_in_fp32_without_a_trial(monkeypatch):
    """PyTorch calls bf16 supported on a T4, where it is slower than fp32."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert choose_precision(torch.device("cuda"))[0] == "fp32"


BUSY = "import time\nend_s = time.time() + 300\nwhile time.time() < end_s: pass"
CHOOSE = """
import torch
from testbed.profiling.device_limits import choose_precision
torch.set_num_threads(2)
print({choose_precision(torch.device("cpu"))[0] == "bf16" for _ in range(6)})
"""


@pytest.mark.launches
@pytest.mark.alone
@pytest.mark.skipif(
    not any(torch.cpu.get_capabilities().get(name) for name in BF16_INSTRUCTIONS),
    reason="this CPU has no instructions for bf16, so nothing is timed",
)
def test_the_choice_of_a_precision_is_the_same_every_time_beside_other_work():
    """Two threads beside a busy loop for every core, with oneDNN told to leave the instructions for bf16 out: a CPU on
    which it is slower, and where a trial of short products by wall time took it in every second start."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(max(2, usable_cores()))]
    try:
        said = subprocess.run(
            [sys.executable, "-c", CHOOSE],
            env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
            cwd=REPOSITORY / "src",
            capture_output=True,
            text=True,
            check=True,
            timeout=290,
        )
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert said.stdout == "{False}\n"


def test_peak_memory_counts_bytes():
    block = torch.ones(25_000_000)  # 100 MB
    peaks = peak_memory(CPU)
    assert peaks["peak_rss_bytes"] > block.numel() * 4
    assert peaks["peak_rss_bytes"] < 64e9
    assert peaks["peak_allocated_bytes"] is None


def test_cpu_use_is_that_of_the_steps_and_of_nothing_between_them():
    """Validation and checkpoints use other threads than steps do: a run of many looked like one on a busy machine."""
    sampler = UtilizationSampler(CPU)
    sampler.start()
    for cpu_s, wall_s in ((1.8, 1.0), (2.0, 1.0)):
        sampler.add_step(cpu_s, wall_s)
    assert sampler.stop()["cpu_percent_mean"] == pytest.approx(190)
    unused = UtilizationSampler(CPU)
    unused.start()
    assert unused.stop()["cpu_percent_mean"] is None


def test_the_step_clock_counts_the_cpu_time_inside_only():
    clock = StepClock(CPU)
    end_s = time.process_time() + 0.1
    while time.process_time() < end_s:
        pass
    with clock:
        time.sleep(0.01)
    assert 0 <= clock.cpu_s < 0.05
