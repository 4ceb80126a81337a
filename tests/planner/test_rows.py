"""Rows of any program: what follows from them, what is refused and why, and that no row ends the file."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import InputError
from testbed.memory_model.devices import device_named, devices, network
from testbed.memory_model.memory import fits, memory_of
from testbed.planner.rows import OWN_COPY, Row, own_rows, rows_of
from testbed.planner.score import predict_file

RAW: list[dict[str, Any]] = json.loads(OWN_COPY.read_text(encoding="utf-8"))["rows"]
LLAMA = next(row for row in RAW if row["id"] == "mb/25.11/gb200/llama-3-8b/fp8/n8/gbs128")
GPT2 = {"hidden": 768, "layers": 12, "seq_length": 1024}


def changed(**changes: Any) -> dict[str, Any]:
    """Return a row with other values: model__layers=3 sets row["model"]["layers"]."""
    row = copy.deepcopy(LLAMA)
    for name, value in changes.items():
        *parts, last = name.split("__")
        place = row
        for part in parts:
            place = place[part]
        place[last] = value
    return row


def read(**changes: Any) -> Row:
    ((_, one),) = rows_of([changed(**changes)])
    assert isinstance(one, Row), one
    return one


def asked(**values: Any) -> Row:
    """Return a row that states little."""
    ((_, one),) = rows_of([{"id": "x", "device": "h100-sxm", "devices": 8, "model": GPT2, **values}])
    assert isinstance(one, Row), one
    return one


def test_every_own_row_is_read():
    rows = own_rows()
    assert [row.id for row in rows] == [raw["id"] for raw in RAW]
    for row in rows:
        assert row.job.layout.devices == row.form.devices == row.machine.devices
        assert row.form.global_batch in (None, row.job.global_batch)
        assert row.form.source and row.form.source["where"] and row.form.program
    llama = read().job.model
    assert llama.parameters == pytest.approx(8.03e9, rel=2e-3)  # as its authors count


def test_what_a_row_does_not_state_follows_from_the_rest():
    row = read(micro_batch=None, layout__data=None)
    assert (row.job.micro_batch, row.job.accumulation, row.job.layout.data) == (1, 16, 8)
    plain = asked().job
    assert (plain.model.heads, plain.model.ffn, plain.model.vocab, plain.model.tied) == (12, 3072, 50304, True)
    assert (plain.precision, plain.recompute, plain.offload, plain.compiled) == ("bf16", "none", "none", False)
    gated = asked(model={**GPT2, "gated": True}).job.model
    assert (gated.tied, gated.gated, gated.position_parameters, gated.norm_parameters) == (False, True, 0, gated.hidden)
    sharded = asked(layout={"shard": 8}).job.layout
    assert (sharded.zero_stage, sharded.shard) == (3, 8)
    assert asked(layout={"pipeline": 4, "virtual_stages": 2}).job.schedule == "interleaved_1f1b"
    assert asked(devices_per_node=4, network_gbit=0.1).machine.between_nodes.bytes_per_s == pytest.approx(12.5e6)


def test_what_is_unstated_is_guessed_so_that_the_run_fits():
    h100, xl = device_named("h100"), {"hidden": 8192, "layers": 32, "seq_length": 2048}
    free = asked(model=xl, devices=64, global_batch=512)
    assert fits(memory_of(free.job), h100) and free.job.global_batch == 512
    stated = asked(model=xl, devices=64, global_batch=512, micro_batch=4, recompute="none", layout={"zero_stage": 0})
    assert stated.job.recompute == "none" and not fits(memory_of(stated.job), h100)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"unknown": 1}, "unknown field `unknown`"),
        ({"model__layers": 20_000}, "$.model.layers"),
        ({"model__hidden": float("nan")}, "$.model.hidden"),
        ({"device": "Quux 9000"}, "no such device"),
        ({"precision": "int3"}, "precision is 'int3', and can be"),
        ({"recompute": "some"}, "recompute is 'some', and can be none, full"),
        ({"global_batch": 100}, "does not divide among 8 data ranks"),
        ({"micro_batch": 3}, "micro batch 3 x 8 data ranks does not divide the global batch 128"),
        ({"devices": 12}, "is 8, not 12 devices"),
        ({"layout__tensor": 64, "devices": 512}, "64 tensor ranks cannot share 32 heads"),
        ({"layout__context": 3, "devices": 24}, "3 context ranks cannot share sequences of 8192"),
        ({"layout__pipeline": 64, "devices": 512}, "64 x 1 pipeline stages are more than the 32 layers"),
        ({"layout__shard": 3}, "shards of 3 ranks do not divide 8"),
        ({"model__hidden": 4097}, "32 heads cannot share a width of 4097"),
        ({"model__kv_heads": 5}, "cannot share 5 heads of keys"),
        ({"model__layers": 2000, "layout__zero_stage": 1}, "the weights alone take"),
        ({"measured__step_time_s": 1e-3}, "above its peak of 5000 in fp8"),
        ({"measured__peak_reserved_gib": 900.0}, "more than the device has"),
    ],
)
def test_a_row_that_cannot_be_is_refused_with_the_reason(changes: dict[str, Any], words: str):
    ((_, one),) = rows_of([changed(**changes)])
    assert isinstance(one, str) and words in one, one


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
NUMBERS = st.sampled_from([1, 2, 3, 8, 64, 1023, 2**20, 2**31, 2**40])
PLACES = [(key, None) for key in LLAMA] + [(part, key) for part in ("model", "layout") for key in LLAMA[part]]


@settings(max_examples=150, deadline=None)
@given(changes=st.lists(st.tuples(st.sampled_from(PLACES), JSON | NUMBERS), min_size=1, max_size=4), whole=JSON)
def test_no_row_ends_the_file(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[tuple[str, str | None], Any]], whole: Any
):
    """Neither reading nor predicting: each row has a prediction or a reason."""
    row = copy.deepcopy(LLAMA)
    for (part, key), value in changes:
        if key is None or not isinstance(row[part], dict):
            row[part] = value
        else:
            row[part][key] = value
    row["id"] = "changed"
    folder = tmp_path_factory.mktemp("rows")
    (folder / "rows.json").write_text(json.dumps({"rows": [row, whole, LLAMA]}))
    found = predict_file(folder / "rows.json", folder / "out.json")
    assert len(found) == 3
    assert json.loads((folder / "out.json").read_text()) == found
    for prediction in found.values():
        assert list(prediction) == ["rejected"] or prediction["low"] < prediction["step_time_s"] < prediction["high"]
    assert "rejected" not in found[LLAMA["id"]]


def test_a_prediction_has_what_is_asked_of_it(tmp_path: Path):
    rows = [{key: value for key, value in row.items() if key != "measured"} for row in RAW]
    (tmp_path / "rows.json").write_text(json.dumps({"rows": rows}))
    found = predict_file(tmp_path / "rows.json", tmp_path / "out.json")
    assert found.keys() == {row["id"] for row in rows}
    for prediction in found.values():
        assert set(prediction) == {"step_time_s", "low", "high", "peak_allocated_gib", "peak_reserved_gib", "fits"}
        assert prediction["fits"] and prediction["peak_reserved_gib"] > prediction["peak_allocated_gib"] > 0
    errors = sorted(
        abs(found[row.id]["step_time_s"] / row.step_time_s - 1)
        for row in own_rows()
        if row.is_scored and row.step_time_s
    )
    assert errors[len(errors) // 2] < 0.06
    for content in ("[]", '{"rows": {}}', "{"):
        (tmp_path / "rows.json").write_text(content)
        with pytest.raises(InputError, match="--predict"):
            predict_file(tmp_path / "rows.json", tmp_path / "out.json")


def test_two_rows_of_one_id_are_not_one_prediction(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps({"rows": [LLAMA, LLAMA]}))
    found = predict_file(tmp_path / "rows.json", tmp_path / "out.json")
    assert found["row 1"] == {"rejected": f"id '{LLAMA['id']}' is an earlier row's too"} and len(found) == 2
