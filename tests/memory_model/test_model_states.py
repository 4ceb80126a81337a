"""The bytes of model states: formulas against numbers worked out by hand, and against live tensors of real runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.model_states import (
    TRANSIENT,
    UPDATE_COPY,
    count_before_updates,
    counts_of,
    live_tensors,
    published_zero_bytes,
)

from testbed.memory_model.job import DenseModel, Job, Layout
from testbed.memory_model.model_states import (
    Held,
    model_state_bytes,
    update_copy_bytes,
    whole,
)
from testbed.memory_model.stages import Stage
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape

# C = 4. Matrices: wte 128 rows (100 tokens, padded) x 4 = 512, wpe 8 x 4 = 32, c_attn 48, c_proj 16, c_fc 64,
# c_proj 64: 736. Vectors: ln_1 4 + 4, c_attn 12, c_proj 4, ln_2 4 + 4, c_fc 16, c_proj 4, ln_f 4 + 4: 60. Together 796.
SHAPE = ModelShape(num_layers=1, num_heads=1, embedding_size=4, vocab_size=100, max_position_embeddings=8)
MODEL = DenseModel.of_gpt2(SHAPE, 8)


def states(stages=None, data_rank: int = 0, persistent: int = 0, **values) -> dict[str, int]:
    """Formulas of a run of the model; values of a Job, and `layout` as a dictionary."""
    layout = Layout(**values.pop("layout", {}))
    run_type = "optimized" if layout.zero_stage > 0 and not values.pop("is_fsdp", False) else "fsdp"
    job = Job(model=MODEL, layout=layout, micro_batch=1, accumulation=1, run_type=run_type, **values)
    held = Held(MODEL, tuple(stages)) if stages else None
    return model_state_bytes(job, held, data_rank=data_rank, persistent=persistent)


def zero(stage: int, ranks: int = 2) -> dict[str, int]:
    return {"data": ranks, "zero_stage": stage, "shard": ranks}


def bytes_of(parameters: int, gradients: int, optimizer: int) -> dict[str, int]:
    return {"parameters": parameters, "gradients": gradients, "optimizer": optimizer}


def test_the_whole_model_is_counted_with_its_padding():
    assert whole(MODEL).elements == 796 == sum(parameter.numel() for parameter in GPT2(SHAPE).parameters())
    assert states() == bytes_of(4 * 796, 4 * 796, 8 * 796)
    assert states(layout={"data": 2}) == bytes_of(4 * 796, 4 * 796, 8 * 796)


def test_fsdp_shards_everything_over_the_ranks_of_a_shard_group():
    expected = bytes_of(4 * 398, 4 * 398, 8 * 398)
    fsdp = {"data": 4, "zero_stage": 3, "shard": 2}
    assert states(layout=fsdp, is_fsdp=True) == expected
    assert states(layout=fsdp, is_fsdp=True, has_16_bit_weights=True) == expected


def test_fsdp_never_cuts_a_row():
    """On 8 ranks each holds a row of every tensor of 4 rows: 4 elements of c_proj in place of 2."""
    # wte 64, wpe 4, c_attn 2 x 4, c_proj 4, c_fc 2 x 4, c_proj 16; vectors 1 + 1 + 2 + 1 + 1 + 1 + 2 + 1 + 1 + 1
    rows = 64 + 4 + 8 + 4 + 8 + 16 + 12
    assert states(layout=zero(3, 8), is_fsdp=True)["parameters"] == 4 * rows


def test_zero_3_with_bf16_weights_is_the_published_formula_and_a_copy():
    expected = bytes_of(2 * 398, 2 * 398, 12 * 398)
    assert states(layout=zero(3), has_16_bit_weights=True) == expected
    assert published_zero_bytes(MODEL, 2, 3) == expected
    assert update_copy_bytes(MODEL, 2, 3) == 4 * 736 // 2
    assert states(layout=zero(3)) == bytes_of(4 * 398, 4 * 398, 12 * 398)


def test_zero_3_holds_small_tensors_whole_besides_their_parts():
    """Below 64 elements: the vectors, 60, wpe's 32 and the projections' 48 and 16; not the two of 64, nor wte."""
    assert states(layout=zero(3), persistent=64)["parameters"] == 4 * (398 + 60 + 32 + 48 + 16)


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2_keep_gradients_of_whole_tensors(stage):
    """The matrices are cut at 368, inside wte, which ends at 512; the vectors at 30, inside ln_2's bias at 28 to 32."""
    of_rank = [states(layout=zero(stage), has_16_bit_weights=True, data_rank=rank) for rank in (0, 1)]
    assert of_rank[0] == bytes_of(2 * 796, 2 * (512 + 32), 12 * 398)
    assert of_rank[1] == bytes_of(2 * 796, 2 * (736 + 32), 12 * 398)
    assert published_zero_bytes(MODEL, 2, 1) == bytes_of(2 * 796, 2 * 796, 12 * 398)
    assert published_zero_bytes(MODEL, 2, 2) == bytes_of(2 * 796, 2 * 398, 12 * 398)


def test_muon_keeps_one_moment_of_the_matrices_inside_the_blocks():
    inside, elements = 48 + 16 + 64 + 64, 796
    assert states(optimizer="muon")["optimizer"] == 8 * (elements - inside) + 4 * inside
    half = states(layout=zero(3), is_fsdp=True, optimizer="muon")
    assert half == bytes_of(4 * 398, 4 * 398, (8 * (elements - inside) + 4 * inside) // 2)
    assert states(layout={"tensor": 2}, optimizer="muon")["optimizer"] == 8 * 430 - 4 * inside // 2
    last = Stage(range(0), embeds=False, predicts=True)
    assert states([last], layout={"pipeline": 2}, optimizer="muon")["optimizer"] == 8 * 520


def difference(row: dict) -> float:
    """How far a count is off its formula, relative to the formula."""
    return row["measured_bytes"] / row["formula_bytes"] - 1


@pytest.mark.launches
@pytest.mark.slow
def test_live_tensors_of_two_ranks_are_what_the_formulas_say(ranks, tmp_path):
    """The default model, of 10 million parameters. The test would fail with the paper's gradients of ZeRO 1 and 2."""
    names = ["ZeRO 1", "ZeRO 2", "ZeRO 3", "FSDP", "FSDP Muon"]
    results = counts_of(ranks, tmp_path, 2, names)
    assert [(result["strategy"], len(result["per_rank"])) for result in results] == [(name, 2) for name in names]
    differs = 0
    for result in results:
        for of_rank in result["per_rank"]:
            kinds = [row["kind"] for row in of_rank["rows"]]
            assert kinds[:3] == ["parameters", "gradients", "optimizer"]
            moments = 4 if "Muon" in result["strategy"] else 8
            assert of_rank["rows"][2]["formula_bytes"] >= moments * 10_000_000 / 2, "fp32 moments of half the model"
            for row in of_rank["rows"]:
                assert abs(difference(row)) <= 0.005, (result, row)
            gradients = of_rank["rows"][1]
            if gradients["paper_bytes"] is not None:
                differs += abs(gradients["measured_bytes"] / gradients["paper_bytes"] - 1) > 0.02
        assert all(of_rank["transient"].keys() <= {"500,000 bfloat16"} for of_rank in result["per_rank"]), "the bucket"
    assert differs > 0


@pytest.mark.launches
@pytest.mark.slow
def test_live_tensors_of_four_ranks_are_what_the_formulas_say(ranks, tmp_path):
    results = counts_of(ranks, tmp_path, 4, ["ZeRO 1", "ZeRO 2", "ZeRO 3", "FSDP", "pipeline", "tensor"])
    assert [len(result["per_rank"]) for result in results] == [4] * 6
    rows = [(result["strategy"], row) for result in results for rank in result["per_rank"] for row in rank["rows"]]
    assert not [(name, row) for name, row in rows if abs(difference(row)) > 0.01]


def test_the_count_finds_what_is_alive_and_counts_an_allocation_once():
    earlier = live_tensors()
    weight = torch.nn.Parameter(torch.zeros(1000)[:10])  # a view that keeps all of its 4,000 bytes alive
    weight.grad = torch.ones(10)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    states = {"parameters": [weight, weight.detach()], "gradients": [weight.grad], "optimizer": []}
    strategy = SimpleNamespace(optimizer=optimizer, model_states=lambda: dict(states))
    count = count_before_updates(strategy, not_counted=earlier)
    forgotten = torch.zeros(1 << 18)
    optimizer.step()
    assert [size for size, _ in count["parameters"].values()] == [4000]
    assert [size for size, _ in count["gradients"].values()] == [40]
    assert count[UPDATE_COPY] == {}
    assert count[TRANSIENT][forgotten.data_ptr()] == (1 << 20, "262,144 float32")
