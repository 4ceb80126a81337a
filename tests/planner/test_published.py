"""Published rows: what follows from them, what is refused and why, and that no row ends the file."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import InputError
from testbed.memory_model.devices import device_named, devices, network
from testbed.planner.published import OWN_COPY, ImpossibleRow, Row, own_rows, row_of, rows_of

RAW: list[dict[str, Any]] = json.loads(OWN_COPY.read_text(encoding="utf-8"))["rows"]
BY_ID = {row["id"]: row for row in RAW}
LLAMA = "mb/25.11/gb200/llama-3-8b/fp8/n8/gbs128"


def changed(id: str, **changes: Any) -> dict[str, Any]:
    """Return a row with other values: model__layers=3 sets row["model"]["layers"]."""
    row = copy.deepcopy(BY_ID[id])
    for name, value in changes.items():
        *parts, last = name.split("__")
        place = row
        for part in parts:
            place = place[part]
        place[last] = value
    return row


def reason(row: Any) -> str:
    (one,) = rows_of([row])
    assert isinstance(one, ImpossibleRow), one
    return one.reason


def test_every_own_row_is_read_and_its_arithmetic_is_the_files():
    rows = own_rows()
    assert [row.id for row in rows] == [raw["id"] for raw in RAW]
    for row, raw in zip(rows, RAW, strict=True):
        checks = raw["checks"]
        assert row.job.model.parameters == checks["parameters"]
        assert row.job.model.flops_per_token() == checks["flops_per_token"]
        assert row.machine.device.peak_of(row.job.precision) == pytest.approx(1e12 * checks["peak_tflops_used"])
        assert row.job.layout.devices == raw["hardware"]["gpus"]
        assert row.device_is_known
        if row.step_time_s:
            done = row.model_flops_per_device / row.step_time_s / 1e12
            assert done == pytest.approx(checks["model_tflops_per_gpu"], rel=2e-3, abs=0.06)


def test_what_a_row_does_not_state_follows_from_the_rest():
    row = row_of(changed(LLAMA, batch__micro_batch=None, strategy__dp=None), "x")
    assert (row.job.micro_batch, row.job.accumulation, row.job.layout.data) == (2, 8, 8)
    row = row_of(changed(LLAMA, batch__grad_accumulation=None), "x")
    assert row.job.accumulation == 8
    row = row_of(changed(LLAMA, batch__global_batch=None, batch__grad_accumulation=2.5), "x")
    assert row.job.global_batch == 40
    row = row_of(changed(LLAMA, batch__grad_accumulation=2.67, batch__micro_batch=6), "x")
    assert row.job.global_batch == pytest.approx(128, rel=2e-3)
    row = row_of(changed(LLAMA, batch={}, strategy__vp=3), "x")
    assert (row.job.micro_batch, row.job.accumulation, row.job.layout.virtual_stages) == (1, 1, 1)
    row = row_of(changed(LLAMA, hardware__gpus=None), "x")
    assert row.machine.devices == 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch__global_batch": 100}, "not the global batch 100"),
        ({"batch__global_batch": 12801, "batch__grad_accumulation": 800}, "not the global batch 12801"),
        ({"hardware__gpus": 12}, "not 12 GPUs"),
        ({"strategy__tp": 3}, "8 GPUs do not divide by tp 3"),
        ({"strategy__tp": 64, "hardware__gpus": 512}, "64 tensor ranks cannot share 32 heads"),
        ({"strategy__tp": 5, "hardware__gpus": 40}, "5 tensor ranks cannot share 32 heads"),
        ({"strategy__cp": 3, "hardware__gpus": 24}, "3 context ranks cannot share sequences of 8192"),
        ({"model__head_dim": None, "model__hidden": 4097}, "32 heads cannot share a width of 4097"),
        ({"batch__micro_batch": 32, "batch__grad_accumulation": None}, "is more than the global batch 128"),
        ({"claimed_step_time_s": 0.5}, "above its peak of 5000 in fp8"),
        ({"measured__claimed_step_time_s": 0.5}, "above its peak"),
        ({"claimed_step_time_s": -1}, "no positive number"),
        ({"model__layers": 2000}, "the weights alone take"),
        ({"model__layers": None}, "states no layers"),
        ({"model__kv_heads": 5}, "cannot share 5 heads of keys"),
        ({"model__hidden": float("nan")}, "no positive number"),
        ({"batch__global_batch": 4, "batch__grad_accumulation": None}, "some of 8 data ranks without a sequence"),
        ({"flags": 5}, "the row cannot be read"),
    ],
)
def test_a_row_that_cannot_be_true_is_refused_with_the_reason(changes: dict[str, Any], words: str):
    assert words in reason(changed(LLAMA, **changes))


def test_a_claimed_time_below_the_peak_is_believed():
    assert row_of(changed(LLAMA, claimed_step_time_s=BY_ID[LLAMA]["measured"]["step_time_s"]), "x")


def test_full_recomputation_counts_as_work_of_a_claim():
    """At 0.8 of the peak without the second forward pass, it is above it with that."""
    ideal = row_of(BY_ID[LLAMA], "x").model_flops_per_device / 5000e12
    assert row_of(changed(LLAMA, claimed_step_time_s=ideal / 0.8), "x")
    assert "above its peak" in reason(changed(LLAMA, claimed_step_time_s=ideal / 0.8, activation_checkpointing="full"))


def test_a_device_of_another_memory_size_keeps_its_kind():
    row = row_of(changed(LLAMA, hardware__gpu="H100-64", hardware__gpu_memory_gb_nominal=64), "x")
    assert row.machine.device.name == "h100-sxm"
    assert row.machine.device.memory_bytes == pytest.approx(64 * 2**30, rel=0.03)


def test_of_two_memory_sizes_a_row_has_the_one_that_it_states():
    for name in ("A100", "A100-SXM"):
        hardware = {"gpu": name, "gpu_family": "A100", "gpu_memory_gb_nominal": 40, "gpus": 8}
        assert row_of(changed(LLAMA, hardware=hardware, measured={}), "x").machine.device.name == "a100-40gb"


def test_an_unknown_device_is_made_from_what_the_row_states():
    unknown = {"gpu": "Quux 9000", "gpu_family": None, "gpu_memory_gb_nominal": 80, "gpus": 8, "nodes": 1}
    row = row_of(changed(LLAMA, hardware=unknown), "x")
    assert not row.device_is_known
    assert row.machine.device.name == "Quux 9000"


def test_recomputation_of_some_layers_is_a_share():
    row = row_of(changed(LLAMA, activation_checkpointing="full on 5 of 32 layers"), "x")
    assert (row.job.recompute, row.job.recompute_share) == ("full", 5 / 32)


def test_devices_are_found_however_they_are_spelled():
    spellings = {
        "NVIDIA H100 80GB": "h100-sxm",
        "A100-SXM4-40GB": "a100-40gb",
        "tesla t4": "t4",
        "RTX 4090": "rtx4090",
        "GB200": "gb200",
    }
    assert {spelled: device_named(spelled).name for spelled in spellings} == spellings
    with pytest.raises(InputError, match=r"h1000.*h100-sxm"):
        device_named("h1000")
    for device in devices().values():
        assert device.source and device.architecture
        assert all(peak > 1e12 for peak in device.peak_flops.values())


def test_a_network_needs_a_speed():
    assert network("400gbit").bytes_per_s == 50e9
    assert network("100 Mbit/s").bytes_per_s == 12.5e6
    for text in ("0", "0gbit", "fast", "", "9" * 400 + "gbit"):
        with pytest.raises(InputError, match="needs a speed above 0"):
            network(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**6) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PLACES = [
    (part, key)
    for part in ("model", "batch", "strategy", "hardware", "precision", "extra")
    for key in [None, *BY_ID[LLAMA][part]]
]


@settings(max_examples=150, deadline=None)
@given(changes=st.lists(st.tuples(st.sampled_from(PLACES), JSON), min_size=1, max_size=4), whole=JSON)
def test_no_row_ends_the_file(changes: list[tuple[tuple[str, str | None], Any]], whole: Any):
    row = copy.deepcopy(BY_ID[LLAMA])
    for (part, key), value in changes:
        if key is None or not isinstance(row[part], dict):
            row[part] = value
        else:
            row[part][key] = value
    found = list(rows_of([row, whole, BY_ID[LLAMA]]))
    assert len(found) == 3
    assert isinstance(found[1], ImpossibleRow)
    assert isinstance(found[2], Row)


def test_suspect_rows_teach_nothing_and_weak_ones_are_not_scored():
    fitted = {row.id: row.is_fitted for row in own_rows()}
    scored = {row.id: row.is_scored for row in own_rows()}
    for raw in RAW:
        suspect = any(flag.startswith(("suspect_", "tokens_per_step_uncertain")) for flag in raw["flags"])
        assert fitted[raw["id"]] == (raw["kind"] == "run" and not suspect)
        assert scored[raw["id"]] == (raw["kind"] == "run" and raw["grade"] != "weak" and not raw["flags"])
