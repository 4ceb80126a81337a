"""Step time: what must hold of any job, and the parts worked out by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from testbed.memory_model.devices import device_named, devices, network
from testbed.memory_model.job import RECOMPUTE, DenseModel, Job, Layout, Machine
from testbed.memory_model.model_states import held_by_rank
from testbed.model.gpt2 import GPT2
from testbed.model.shape import MODEL_SIZES
from testbed.planner.collectives import Traffic, data_traffic, far_boundaries, pipeline_traffic
from testbed.planner.fit import Fit, Measured, Nominal, conformal_quantile
from testbed.planner.rates import Rates, link_seconds, orthogonalisation_flops, weight_bytes
from testbed.planner.step_time import (
    BETWEEN,
    BUBBLE,
    PARTS,
    WITHIN,
    bubble_seconds,
    exposed_hops_seconds,
    nominal_of,
    published_constants,
    repeated_shares,
    step_parts,
    step_time,
)

MODEL = DenseModel(layers=24, hidden=2048, heads=16, kv_heads=16, head_dim=128, ffn=8192, vocab=50304, seq_length=1024)


def machine(devices: int, kind: str = "h100-sxm") -> Machine:
    device = device_named(kind)
    assert device.within_node and device.between_nodes
    return Machine(
        device=device,
        devices=devices,
        per_node=device.per_node,
        within_node=device.within_node,
        between_nodes=device.between_nodes,
    )


def job(micro_batch: float = 4, accumulation: float = 2, **layout: object) -> Job:
    return Job(model=MODEL, layout=Layout(**layout), micro_batch=micro_batch, accumulation=accumulation)  # type: ignore[arg-type]


def nominal(of: Job) -> Nominal:
    """Return the job on one H100 before any factor."""
    there = machine(1)
    parts, idle, _ = step_parts(of, there, Rates(there.device))
    return nominal_of(parts, idle, of, there)


def predicted(of: Job, kind: str = "h100-sxm"):
    return step_time(of, machine(of.layout.devices, kind), published_constants())


LAYOUTS = st.builds(
    lambda data, stage, tensor, pipeline, context, sequence, pieces: Layout(
        data=data,
        zero_stage=stage,
        shard=data * context if stage else 1,
        tensor=tensor,
        sequence_parallel=sequence and tensor > 1,
        pipeline=pipeline,
        virtual_stages=pieces if pipeline > 1 else 1,
        context=context,
    ),
    st.sampled_from([1, 2, 8, 64, 512]),
    st.integers(0, 3),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.integers(1, 3),
)
JOBS = st.builds(
    lambda layout, micro, accumulation, precision, recompute, compiled, schedule, gated, width, length: Job(
        model=replace(MODEL, gated=gated, hidden=128 * width, heads=width, kv_heads=width, seq_length=length),
        layout=layout,
        micro_batch=micro,
        accumulation=accumulation,
        precision=precision,
        recompute=recompute,
        compiled=compiled,
        schedule=schedule,
    ),
    LAYOUTS,
    st.floats(0.5, 512),
    st.floats(1, 1000),
    st.sampled_from(["fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4", "int3"]),
    st.sampled_from(["none", "full", "selective_attention", "selective_op", "words"]),
    st.booleans(),
    st.sampled_from([None, "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]),
    st.booleans(),
    st.integers(1, 160),
    st.sampled_from([128, 1024, 8192, 2**20]),
)


@settings(max_examples=200, deadline=None)
@given(of=JOBS, kind=st.sampled_from(sorted(devices())))
def test_any_job_takes_a_positive_time_that_its_parts_add_up_to(of: Job, kind: str):
    time = predicted(of, kind)
    assert 0 < time.low < time.seconds < time.high < math.inf
    assert all(seconds > 0 for seconds in time.parts.values())
    assert sum(time.parts.values()) == pytest.approx(time.seconds)
    assert time.label.startswith("uncalibrated")


@settings(max_examples=100, deadline=None)
@given(of=JOBS, kind=st.sampled_from(["a100-80gb", "h100-sxm", "b200"]), times=st.sampled_from([2, 4]))
def test_more_devices_never_compute_longer(of: Job, kind: str, times: int):
    """The same global batch on more data ranks: products, attention, elementwise and head of each rank shrink."""
    assert of.accumulation > 0
    more = replace(of, layout=replace(of.layout, data=of.layout.data * times), accumulation=of.accumulation / times)
    before, after = (
        step_parts(one, machine(one.layout.devices, kind), Rates(device_named(kind)))[0] for one in (of, more)
    )
    for part in ("matrix products", "operands", "attention", "elementwise", "head"):
        assert after[part] <= before[part] * (1 + 1e-9)


def test_matrix_products_take_their_flops_over_the_share_of_the_peak():
    parts, idle, uneven = step_parts(job(), machine(1), Rates(device_named("h100-sxm")))
    flops = 6 * 24 * 12 * 2048**2 * 4 * 2 * 1024
    assert parts["matrix products"] == pytest.approx(flops / (0.72 * 989.4e12))
    assert idle == uneven == 0
    assert parts[WITHIN] == parts[BETWEEN] == 0


def test_autocast_of_this_program_gathers_weights_and_sends_activations_in_fp32():
    """No MixedPrecisionPolicy under autocast; --mixed_precision native gathers 16 bits and reduces in fp32."""
    own = replace(job(data=8, zero_stage=3, shard=8), run_type="fsdp")

    def sent(of: Job, kind: str) -> float:
        return sum(one.size for one in data_traffic(of) if one.kind == kind)

    native = replace(own, has_16_bit_weights=True)
    assert sent(own, "all_gather") == 2 * sent(native, "all_gather")
    assert sent(own, "reduce_scatter") == sent(native, "reduce_scatter") == pytest.approx(4 * MODEL.parameters)
    assert sent(replace(own, reshards=False), "all_gather") == pytest.approx(4 * MODEL.parameters)
    stages = replace(job(pipeline=4), schedule="1f1b")
    (other, _), (own_hop, _) = pipeline_traffic(stages), pipeline_traffic(replace(stages, run_type="pipeline"))
    assert own_hop.size == 2 * other.size


def products_of_a_step(checkpointing: str, kernel: SDPBackend = SDPBackend.FLASH_ATTENTION) -> dict[object, float]:
    """Return the FLOPs of a step of src/gpt2.py's own model by operation, counted by PyTorch."""
    model = GPT2(dataclasses.replace(MODEL_SIZES["nano"], vocab_size=64), 0.0, checkpointing)
    ids = torch.zeros(1, 32, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(kernel):
        model(ids, ids).backward()
    return counter.get_flop_counts()["Global"]


@pytest.mark.parametrize("checkpointing", ["selective", "block"])
def test_what_is_computed_again_is_what_the_model_computes_again(checkpointing: str):
    """Forward is a third of the products. PyTorch's math kernel is made of batched ones, which no checkpointing of
    src/gpt2.py keeps."""
    plain, again = (
        sum(flops for kind, flops in products_of_a_step(each).items() if "attention" not in str(kind))
        for each in ("none", checkpointing)
    )
    of_blocks = plain - 6 * 32 * MODEL_SIZES["nano"].embedding_size * 128  # the head, 64 tokens padded to 128
    own = replace(job(), run_type="ddp", recompute=RECOMPUTE[checkpointing])
    found = repeated_shares(own)
    assert found.get("matrix products", 0.0) == pytest.approx((again - plain) / (of_blocks / 3), abs=0.01)
    assert found.get("attention", 0.0) == (checkpointing == "block")
    plain, again = (products_of_a_step(each, SDPBackend.MATH)[torch.ops.aten.bmm] for each in ("none", checkpointing))
    eager = repeated_shares(replace(own, attention="eager"))["attention"]
    assert eager == pytest.approx((again - plain) / (plain / 3), abs=0.01) and eager == 1


@pytest.mark.parametrize("name", sorted(devices()))
def test_no_attention_is_faster_than_matrix_products(name: str):
    rates = Rates(devices()[name])
    of = replace(job(), precision="bf16" if "bf16" in devices()[name].peak_flops else "fp32")
    size = 8192
    (product, _), _ = rates.layer_seconds(size, size, size, of)
    forward, _ = rates.attention_seconds(of)
    flops = 2 * of.micro_batch * MODEL.heads * MODEL.seq_length**2 * MODEL.head_dim
    assert flops / forward < 2 * size**3 / product


def test_two_devices_without_a_switch_use_the_link_between_them():
    """An MI300X has seven links of 64 GB/s, one to each other of its node, and an H100 all of its own by a switch."""
    for kind, slower in (("mi300x", 448 / 64), ("h100-sxm", 1.0)):
        two, eight = (Traffic(kind="all_reduce", size=1e12, ranks=ranks) for ranks in (2, 8))
        there = machine(8, kind)
        assert (two.moved() / eight.moved()) * link_seconds(eight, there) * slower == pytest.approx(
            link_seconds(two, there), rel=0.01
        )


def test_each_micro_batch_casts_the_weights_and_adds_up_their_gradients():
    """24 bytes for each element of a block: 6 to cast it, 6 to cast its gradient, 12 to add that to the others'."""
    own = replace(job(accumulation=64), run_type="ddp", compiled=True)
    assert weight_bytes(1.0, 0.0, own) == pytest.approx(24, rel=0.01)
    assert weight_bytes(1.0, 0.0, replace(own, accumulation=1)) == 12
    assert weight_bytes(1.0, 0.0, replace(own, precision="fp32", accumulation=1)) == 0
    fewer = predicted(replace(own, micro_batch=16, accumulation=4))
    assert predicted(replace(own, micro_batch=1, accumulation=64)).seconds > 1.1 * fewer.seconds


def test_a_pipeline_idles_for_the_other_stages_and_waits_for_the_slowest():
    of = replace(job(pipeline=4, accumulation=8), schedule="1f1b")
    assert bubble_seconds(of, [1.0, 1.0, 1.0, 2.0]) == 3.0
    assert bubble_seconds(replace(of, schedule=None), [1.0, 1.0, 1.0, 2.0]) == 24.0
    time = predicted(of)
    assert time.parts[BUBBLE] / time.seconds == pytest.approx(3 / 11, rel=0.3)
    assert sum(share.blocks for share in held_by_rank(of)) == 24


@pytest.mark.parametrize("schedule", [None, "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"])
def test_a_pipeline_over_several_nodes_waits_for_the_network(schedule: str | None):
    """However little of a node a stage fills: two stages of eight devices each, on two nodes."""
    of = replace(job(micro_batch=1, accumulation=16, pipeline=2, data=8), schedule=schedule, run_type="pipeline")
    there = machine(16)
    times = [
        step_time(of, replace(there, between_nodes=network(speed)), published_constants()).seconds
        for speed in ("400gbit", "10gbit", "1gbit", "10mbit")
    ]
    assert times == sorted(times)
    assert times[-1] > 100 * times[0] and times[2] > 2 * times[0]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("hop", [0.01, 0.3, 1.5, 5.0, 100.0])  # a forward pass takes 1, a backward pass 2
@pytest.mark.parametrize("of_node", [1, 2, 4])
@pytest.mark.parametrize("passes", [1, 8, 64])
def test_a_pipeline_waits_for_its_hops_as_one_played_through_does(
    schedule: str, ranks: int, hop: float, of_node: int, passes: int
):
    """Stages of one node reach each other at once."""
    of = replace(job(pipeline=ranks, accumulation=passes), schedule=schedule)
    there = replace(machine(8 * ranks), per_node=of_node)
    hops = [hop if is_far else 0.0 for is_far in far_boundaries(of, there)]
    assert sum(hops) == hop * (ranks // of_node if ranks > of_node else 0)
    computing = (passes + ranks - 1) * 3
    whole = computing + exposed_hops_seconds(of, hops, 3.0)
    assert whole == pytest.approx(played_through(schedule, ranks, passes, hops), rel=0.1)


@pytest.mark.parametrize(
    ("ranks", "devices", "of_node", "crosses", "fewest"),
    [(3, 12, 4, True, 1), (2, 12, 4, False, 2), (6, 24, 8, True, 2), (3, 3, 4, False, 3), (8, 16, 8, False, 8)],
)
def test_groups_that_nodes_cut_are_not_within_one(ranks: int, devices: int, of_node: int, crosses: bool, fewest: int):
    of = Traffic(kind="all_reduce", size=1.0, ranks=ranks)
    there = replace(machine(devices), per_node=of_node)
    assert (of.crosses_nodes(there), of.neighbours(there)) == (crosses, fewest)


def played_through(schedule: str, ranks: int, micro_batches: int, hops: Sequence[float]) -> float:
    """Return the end of a step, each pass begun when its input is there. A rank's messages leave one after the other,
    and its passes do not wait for them."""
    orders = []
    for rank in range(ranks):
        ahead = micro_batches if schedule == "gpipe" else min(micro_batches, ranks - 1 - rank)
        order = [("forward", number) for number in range(ahead)]
        for number in range(micro_batches):
            order += [("forward", ahead + number)] * (ahead + number < micro_batches) + [("backward", number)]
        orders.append(order)
    free, link_free = [0.0] * ranks, [0.0] * ranks
    arrived = {(0, "forward", number): 0.0 for number in range(micro_batches)}
    arrived |= {(ranks - 1, "backward", number): 0.0 for number in range(micro_batches)}
    while any(orders):
        starts = [
            (max(free[rank], arrived[rank, *order[0]]), rank)
            for rank, order in enumerate(orders)
            if order and (rank, *order[0]) in arrived
        ]
        start, rank = min(starts)
        way, number = orders[rank].pop(0)
        free[rank] = start + (1.0 if way == "forward" else 2.0)
        to = rank + (1 if way == "forward" else -1)
        if 0 <= to < ranks:
            link_free[rank] = max(free[rank], link_free[rank]) + hops[min(rank, to)]
            arrived[to, way, number] = link_free[rank]
    return max(free)


def test_a_ring_grows_with_its_ranks_and_a_tree_with_their_logarithm():
    """A byte: rings of 512 and 4,096 ranks have 8 times as many hops; an all-reduce may take a tree."""

    def seconds(kind: str, ranks: int) -> float:
        return link_seconds(Traffic(kind=kind, size=1.0, ranks=ranks), machine(ranks))

    rings = [seconds("all_gather", ranks) for ranks in (512, 4096)]
    trees = [seconds("all_reduce", ranks) for ranks in (512, 4096)]
    assert rings[1] / rings[0] == pytest.approx(8, rel=0.05) and trees[1] / trees[0] < 1.5
    assert trees[1] < rings[1]


def test_a_switch_joins_the_hosts_of_a_rack():
    """72 GB200 of 18 hosts reach each other by NVLink, and a host's launcher starts 4."""
    rack = machine(72, "gb200")
    assert (rack.per_node, rack.joined) == (4, 72)
    assert BETWEEN not in predicted(job(data=72), "gb200").parts
    assert BETWEEN in predicted(job(data=144), "gb200").parts


def test_a_fit_is_the_posterior_mode():
    """The gradient of the negative log posterior vanishes where the fit stops, by finite differences."""
    of = [replace(job(micro_batch=size), stack=stack) for size in (1, 4, 16) for stack in ("a", "b")]
    rows = [
        Measured(before := nominal(one), math.log(before.seconds.sum()) + 0.1 * number, 0.04)
        for number, one in enumerate(of)
    ]
    fit = Fit(rows, PARTS)

    def posterior() -> float:
        misfit = sum(
            2.5 * math.log1p(((row.log_time - fit.predict(row.nominal)[1]) / row.noise) ** 2 / 4) for row in rows
        )
        return misfit + float((fit.values**2 / fit.variances).sum()) / 2

    for place in range(0, len(fit.values), 7):
        slopes = []
        for step in (1e-5, -1e-5):
            fit.values[place] += step
            slopes.append(posterior())
            fit.values[place] -= step
        assert (slopes[0] - slopes[1]) / 2e-5 == pytest.approx(0, abs=1e-2)


def test_the_conformal_quantile_counts_the_new_score_as_the_largest():
    assert conformal_quantile(list(range(1, 22))) == 20  # 0.9 x 22 is 19.8
    assert conformal_quantile([3.0]) == 3.0
    assert math.isinf(conformal_quantile([]))
    heavy = np.array([1.0] * 9 + [0.01])
    assert conformal_quantile(list(range(10)), heavy) == 8


def test_offloaded_states_take_the_way_to_the_host_and_its_memory():
    """fp32 gradients go down and weights up at 25 GB/s; AdamW reads and writes 28 bytes per element at 100 GB/s."""
    seconds = {
        offload: step_parts(replace(job(), offload=offload), machine(1), Rates(device_named("h100-sxm")))[0]
        for offload in ("none", "optimizer", "parameters")
    }
    assert seconds["none"]["offload"] == seconds["optimizer"]["optimizer"] == 0
    assert seconds["none"]["optimizer"] < seconds["optimizer"]["offload"] < seconds["parameters"]["offload"]
    elements = job().model.parameters
    assert seconds["optimizer"]["offload"] == pytest.approx(elements * (8 / 25e9 + 28 / 100e9))


def test_muon_multiplies_matrices_where_adamw_moves_memory():
    """Five rounds of 4 m m n + 2 m m m FLOPs for each matrix of a block, on every rank."""
    muon = replace(job(), optimizer="muon")
    h = 2048
    one_block = 5 * ((4 * h * h * 3 * h + 2 * h**3) + (6 * h**3) + 2 * (4 * h * h * 4 * h + 2 * h**3))
    assert orthogonalisation_flops(muon) == pytest.approx(24 * one_block)
    sheet = Rates(device_named("h100-sxm"))
    more = sheet.optimizer_seconds(1e9, muon) - sheet.optimizer_seconds(1e9, job())
    assert more == pytest.approx(24 * one_block / (0.72 * 989.4e12))
