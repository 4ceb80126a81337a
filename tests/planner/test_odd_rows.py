"""Published rows as people spell them: what can be true is predicted, whatever it leaves out."""

from __future__ import annotations

from typing import Any

import pytest
from planner.test_published import BY_ID, LLAMA, changed, reason

from testbed.memory_model.devices import device_named
from testbed.memory_model.memory import fits, memory_of
from testbed.planner.constants import published_constants
from testbed.planner.predict import _tried
from testbed.planner.published import ImpossibleRow, Row, row_of, rows_of
from testbed.planner.spellings import half_a_digit

SHARDED = {"dp": None, "zero_stage": None, "fsdp": None, "tp": 1, "pp": 1, "vp": 1, "cp": 1, "family": None}


def read(**changes: Any) -> Row:
    """Return the row, which must be one that can be true and be predicted."""
    row = row_of(changed(LLAMA, **{"measured": {}, **changes}), "x")
    assert "rejected" not in _tried(row, published_constants())
    return row


def on(gpu: str, gpus: int, memory: int | None = None) -> dict[str, Any]:
    return {"gpu": gpu, "gpu_family": None, "gpu_memory_gb_nominal": memory, "gpus": gpus, "nodes": None}


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("FP8-CS", "fp8"),
        ("fp8_e4m3", "fp8"),
        ("fp8 hybrid", "fp8"),
        ("bf16+fp8", "fp8"),
        ("FP8-MX", "mxfp8"),
        ("NVFP4", "nvfp4"),
        ("bfloat16", "bf16"),
        ("bf16-mixed", "bf16"),
        ("fp32 (tf32)", "tf32"),
        ("amp", "bf16"),
    ],
)
def test_a_precision_is_known_however_it_is_spelled(spelled: str, name: str):
    """A claim at 0.6 of the right units' peak is possible, and one at 1.1 is not."""
    row = read(precision={"class": spelled})
    assert row.job.precision == name
    ideal = row.model_flops_per_device / row.machine.device.peak_of(name)
    read(precision={"class": spelled}, claimed_step_time_s=ideal / 0.6)
    if spelled != "amp":  # may be any
        assert "above its peak" in reason(
            changed(LLAMA, precision={"class": spelled}, claimed_step_time_s=ideal / 1.1, measured={})
        )


@pytest.mark.parametrize(
    "strategy",
    [
        {"fsdp": "FULL_SHARD"},
        {"fsdp": "FSDP2"},
        {"fsdp": True},
        {"family": "FSDP"},
        {"family": "zero3"},
        {"family": "ZeRO-3"},
        {"zero_stage": "3"},
    ],
)
def test_sharded_weights_are_seen_whichever_way_they_are_named(strategy: dict[str, Any]):
    large = {**BY_ID[LLAMA]["model"], "layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672}
    row = read(model=large, strategy={**SHARDED, **strategy}, hardware=on("H100-80", 64), batch={"global_batch": 64})
    assert (row.job.layout.zero_stage, row.job.layout.shard) == (3, 64)


def test_a_guess_rejects_no_row():
    """Each of these was rejected for what the row does not say."""
    gpt2 = {"layers": 12, "hidden": 768, "vocab": 50304, "seq_len": 1024}
    row = read(model=gpt2, strategy={"pp": 8}, hardware=on("A100-80", 8), batch={"global_batch": 16})
    assert row.job.layout.virtual_stages == 1
    xl = {**gpt2, "hidden": 1600, "layers": 48}
    assert read(model=xl, hardware=on("A100-80", 8), strategy={}).job.model.heads == 25
    assert read(model={**xl, "kv_heads": 4}, hardware=on("A100-80", 8), strategy={}).job.model.heads % 4 == 0
    assert read(model=xl, strategy={"tp": 8}, hardware=on("A100-80", 8), batch={}).job.layout.tensor == 8
    # one sequence on each rank takes that little time; 8,192 tokens would not
    read(model=gpt2, strategy={}, hardware=on("H100-80", 8), batch={}, claimed_step_time_s=0.002)
    # as fast as the fastest units known
    read(hardware=on("Quux 9000", 8, 288), precision={"class": "bf16"}, claimed_step_time_s=20.0)
    assert "above its peak" in reason(changed(LLAMA, hardware=on("Quux", 8, 288), claimed_step_time_s=0.5, measured={}))
    # 24 GiB of weights on a V100 that may be either
    wide = {**gpt2, "layers": 32, "hidden": 5120}
    read(model=wide, strategy={}, hardware=on("V100", 1), batch={"global_batch": 1}, precision={"class": "fp16"})


@pytest.mark.parametrize("schedule", ["zero bubble", "ZB-H1", "gpipe", "1f1b", "DualPipe", None])
def test_a_pipeline_may_be_uneven_and_have_any_schedule(schedule: str | None):
    strategy = {**SHARDED, "dp": 1, "pp": 5, "schedule": schedule}
    assert read(strategy=strategy, hardware=on("H100-80", 5), batch={"global_batch": 40}).job.layout.pipeline == 5


@pytest.mark.parametrize(("accumulation", "whole"), [(2.7, 128), (2.67, 128), (2.6667, 128), (1.3, 64), (8 / 3, 128)])
def test_accumulation_may_be_rounded(accumulation: float, whole: int):
    batch = {"micro_batch": 6, "grad_accumulation": accumulation, "global_batch": whole}
    assert read(batch=batch).job.micro_batch == 6
    assert "not the global batch" in reason(changed(LLAMA, batch={**batch, "global_batch": 1.5 * whole}))


def test_half_a_digit_is_what_rounding_may_hide():
    assert half_a_digit(2.5) == pytest.approx(0.02)
    assert half_a_digit(1e-300) == 0
    assert half_a_digit(1e300) == 0


def test_what_is_null_is_as_such_models_have_it():
    null = dict.fromkeys(("tied", "bias", "norm", "positions"))
    llama = read(model={**BY_ID[LLAMA]["model"], **null, "mlp": "SwiGLU"}).job.model
    assert (llama.tied, llama.bias, llama.norm, llama.positions, llama.mlp) == (
        False,
        False,
        "rmsnorm",
        "rope",
        "swiglu",
    )
    gpt = read(model={**BY_ID[LLAMA]["model"], **null, "mlp": None}).job.model
    assert (gpt.tied, gpt.bias, gpt.norm, gpt.positions) == (True, True, "layernorm", "learned")
    assert not read(compile="no").job.compiled


def test_what_is_unstated_is_guessed_so_that_the_run_fits():
    h100, strategy = device_named("h100"), {"dp": 8, "zero_stage": 3, "fsdp": "FSDP2"}
    asked = {"strategy": strategy, "hardware": on("H100-80", 8), "batch": {"global_batch": 512, "micro_batch": 8}}
    unknown = read(**asked, activation_checkpointing=None)
    assert (unknown.job.recompute, fits(memory_of(unknown.job), h100)) == ("full", True)
    assert read(**asked, activation_checkpointing="none").job.recompute == "none"
    assert read(**asked, activation_checkpointing=True).job.recompute == "full"
    free = read(strategy={}, hardware=on("H100-80", 64), batch={"global_batch": 512})
    assert fits(memory_of(free.job), h100)
    assert free.job.global_batch == 512


def test_weights_in_host_memory_need_no_device_memory():
    large = {**BY_ID[LLAMA]["model"], "layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672}
    asked = {"model": large, "strategy": {"dp": 1}, "hardware": on("A100-80", 1), "batch": {"global_batch": 8}}
    assert "weights alone" in reason(changed(LLAMA, **asked, extra={"cpu_offload": False}, strategy__zero_stage=0))
    assert read(**asked, extra={"offload_param": "nvme"}).job.offload == "parameters"
    assert read(extra={"offload_optimizer": "cpu"}).job.offload == "optimizer"


@pytest.mark.parametrize("gbit", [1e-7, 1e-4, 0.5, 400.0])
def test_a_slow_link_is_a_link(gbit: float):
    row = read(hardware={**on("GB200", 8, 186), "interconnect": {"per_gpu_gbit_s": gbit}})
    assert row.machine.between_nodes.bytes_per_s == pytest.approx(max(gbit, 1e-9) * 1e9 / 8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": {"global_batch": 100}}, "does not divide among 8 data ranks"),
        ({"batch__micro_batch": 2.5, "batch__grad_accumulation": 6.4}, "no whole number of sequences"),
        ({"hardware__nodes": 16}, "16 nodes are more than the 8 GPUs"),
        ({"model__layers": 20_000}, "more than any model"),
        ({"hardware__gpus": 2**21, "strategy__dp": 2**21, "batch": {}}, "more than any machine"),
        ({"measured__step_time_s": 1e-6}, "above its peak"),
        (
            {"batch__micro_batch": 1e300, "batch__grad_accumulation": 1e8, "batch__global_batch": None, "measured": {}},
            "nothing can be",
        ),
    ],
)
def test_what_cannot_be_is_rejected(changes: dict[str, Any], words: str):
    (one,) = rows_of([changed(LLAMA, **changes)])
    found = one.reason if isinstance(one, ImpossibleRow) else _tried(one, published_constants())["rejected"]
    assert words in found


def test_a_name_of_many_words_is_looked_at_in_part():
    assert not read(hardware=on("x " * 100_000, 8, 80)).device_is_known
