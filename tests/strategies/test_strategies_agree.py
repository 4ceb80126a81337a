"""Check that every strategy computes what one process computes, and one process what transformers computes.

Losses and unclipped gradient norms are compared over steps that clip and steps that do not. Run types come from the
registry, so a new one is tested without another line here; a sharded one also needs its row in LARGEST_SHARE.
"""

from __future__ import annotations

import functools
import itertools
import re

import numpy as np
import pytest
import torch
from support.agreement import (
    PAIRS,
    TOLERANCE,
    case_flags,
    clipping_limit,
    disagreements,
    distances,
    rounding,
    run_cases,
    write_down,
)
from support.planted_bugs import PLANTED_BUGS, WHERE
from support.programs import SEQUENCE, VOCABULARY, write_token_files
from support.reference import reference_model
from support.settings import typed
from support.variants import BF16, EXACT, MESHES, SMOOTHED, VARIANTS, WHOLE_BATCHES, slow_but
from support.waits import allowed_waits

from testbed.config.run_types import STRATEGIES
from testbed.model.gpt2 import GPT2, to_transformers
from testbed.model.shape import ModelShape
from testbed.optim.lr_schedule import learning_rate_at
from testbed.train.batches import TrainingBatches

pytestmark = pytest.mark.launches

RECIPES = ("--optimizer muon", PAIRS, SMOOTHED, EXACT, WHOLE_BATCHES)  # what the single process has to be trained with
# of the whole model's bytes, this share lies on the fullest rank; 1 where nothing is said
LARGEST_SHARE = {
    **dict.fromkeys((name for name in VARIANTS if name.startswith(("fsdp", "ZeRO 3"))), 0.5),
    **dict.fromkeys(
        (name for name, variant in VARIANTS.items() if variant[0] == "tensor"), 0.53
    ),  # LayerNorms are whole
    # embedding and first block, where both ends hold the embedding; the zero bubble puts both ends on one rank
    **dict.fromkeys((name for name, variant in VARIANTS.items() if variant[0] in ("pipeline", "model_parallel")), 0.68),
    "zero bubble": 0.64,
    "zero bubble x data": 0.64,
    "1f1b on 4": 0.36,
}


def largest_share(variant: str, mesh: str) -> float:
    if VARIANTS[variant][0] != "mesh":
        return LARGEST_SHARE.get(variant, 1.0)
    sizes = {axis: int(size) for axis, size in re.findall(r"(\w+)=(\d+)", mesh)}
    of_axes = (0.68 if sizes["pipeline"] > 1 else 1.0) * (0.53 if sizes["tensor"] > 1 else 1.0)
    return of_axes / sizes.get("shard", 1)


# name -> what the strategy itself says of what it built
BUILT = {
    "allreduce": ["AllReduce"],
    "ddp": ["DDP"],
    "allreduce, compiled": ["AllReduce", "compiled"],
    "ddp, compiled": ["DDP", "compiled"],
    "ddp, blocks compiled and recomputed": ["DDP", "compiled"],
    "fsdp, compiled": ["Mesh", "3 groups on {'fsdp': 2}", "compiled"],
    "fsdp": ["Mesh", "3 groups on {'fsdp': 2}"],
    "fsdp, hybrid": ["Mesh", "3 groups on {'replicate': 2, 'fsdp': 2}"],
    "optimized": ["DeepSpeedZero", "stage 1"],
    "ZeRO 0": ["DeepSpeedZero", "stage 0"],
    "ZeRO 2": ["DeepSpeedZero", "stage 2"],
    "ZeRO 3": ["DeepSpeedZero", "stage 3"],
    "model_parallel": ["ModelParallel", "ScheduleGPipe of 1"],
    "gpipe": ["Pipeline", "ScheduleGPipe of 8"],
    "pipeline": ["Pipeline", "Schedule1F1B of 8"],
    "interleaved": ["Pipeline", "ScheduleInterleaved1F1B of 8"],
    "zero bubble": ["Pipeline", "ScheduleZBVZeroBubble of 8"],
    "stages x copies": ["Pipeline", "Schedule1F1B of 4"],
    "tensor": ["Mesh"],
    "mesh": ["Mesh", "3 groups on {'fsdp': 2, 'tensor': 2}"],
    "stages x shards": ["Pipeline", "Schedule1F1B of 4"],
    "zero bubble x shards": ["Pipeline", "ScheduleZBVZeroBubble of 4"],
}


@pytest.fixture(scope="module")
def token_files(tmp_path_factory):
    """A whole batch to validate on, and a part of one."""
    return write_token_files(tmp_path_factory.mktemp("tokens"), val_tokens=940)


@pytest.fixture(scope="module")
def train(ranks, token_files, pair_files, tmp_path_factory):
    """Train a run type, once for all tests that ask for it."""

    @functools.cache
    def trained(run_type: str, number: int, flags: str) -> dict:
        words = case_flags(token_files, pair_files, ["--run_type", run_type, *flags.split()])
        (result,) = run_cases(ranks, tmp_path_factory.mktemp(run_type), [(words, None)], number)
        return result

    return trained


@pytest.mark.parametrize("variant", slow_but(STRATEGIES, VARIANTS))
def test_every_strategy_follows_the_single_process(train, variant, request):
    run_type, ranks, flags, mesh = VARIANTS[variant]
    recipe = " ".join(recipe for recipe in RECIPES if recipe in flags)
    expected, actual = train("baseline", 1, recipe), train(run_type, ranks, flags)
    assert 2 <= sum(norm > clipping_limit(recipe) for norm in expected["grad_norms"]) <= 4, (
        "some steps clip, some do not"
    )
    if variant in MESHES:
        line = {"variant": variant, "ranks": actual["world_size"], "mesh": actual["mesh"]}
        write_down("AGREEMENT_FILE", line | distances(expected, actual), request.config)
    assert disagreements(expected, actual) == []
    assert actual["world_size"] == ranks
    assert mesh is None or actual["mesh"] == f"mesh {mesh}"
    assert actual["built"] == BUILT.get(variant, actual["built"])
    whole = expected["parameter_bytes"][0]
    share = max(actual["parameter_bytes"]) / whole
    assert share == pytest.approx(largest_share(variant, actual["mesh"]), abs=0.02)
    assert sum(actual["parameter_bytes"]) >= whole, "no rank holds what is missing"


@pytest.mark.parametrize("variant", slow_but(STRATEGIES, VARIANTS))
def test_nothing_inside_a_step_waits_for_the_device(train, variant):
    run_type, ranks, flags, _ = VARIANTS[variant]
    waits = train(run_type, ranks, flags)["waits"]
    assert waits.keys() <= allowed_waits(variant).keys(), "what the host asks of the device inside a step"


# in what is compiled, the calls that are counted would become part of the graph
RECOMPUTED = [
    name
    for name, (_, _, flags, _) in VARIANTS.items()
    if "--activation_checkpointing" in flags and "--compile" not in flags
]


@pytest.mark.parametrize("variant", slow_but(["ddp, blocks recomputed"], RECOMPUTED))
def test_blocks_are_computed_again_where_that_was_asked_for(train, variant):
    run_type, ranks, flags, _ = VARIANTS[variant]
    passes = 16 // int((flags.partition("--micro_batch_size_per_gpu ")[2].split() or ["2"])[0])
    sharing = 2 ** sum(axis in flags for axis in ("--tensor_parallel_size", "--context_parallel_size"))
    sharing = 2 if run_type == "tensor" else sharing
    once = 2 * passes * sharing  # two blocks, and the micro batches of a step
    plain = (run_type, ranks, flags.partition("--activation_checkpointing")[0].strip())
    if plain in {variant[:3] for variant in VARIANTS.values()}:  # it is trained anyway
        assert train(*plain)["block_passes"] == once
    assert train(run_type, ranks, flags)["block_passes"] == 2 * once


@pytest.mark.parametrize("name", slow_but(["ddp"], BF16))
def test_bf16_is_as_near_to_fp32_as_on_one_process(train, name):
    """bf16 keeps 8 bits, and a rank that rounds its part of a sum rounds elsewhere than one that computes all of it:
    two bf16 runs cannot agree more closely than each does with fp32. So the yardstick is the single process: how far
    its bf16 run is from its fp32 run. Of the losses it is the root mean square: the largest of seven is a draw, which
    another split of the batch moves by 1.9 times in the single process too."""
    run_type, flags = BF16[name]
    recipe = WHOLE_BATCHES if WHOLE_BATCHES in flags else ""
    exact, rounded = (train("baseline", 1, f"{start}{recipe}") for start in ("", "--precision bf16 "))
    ranks = 4 if STRATEGIES[run_type].keeps == "axes" else 2 if STRATEGIES[run_type].is_distributed else 1
    actual = train(run_type, ranks, flags)
    found = rounding(exact, actual)
    for quantity, allowed in rounding(exact, rounded).items():
        assert found[quantity] <= 2 * allowed, quantity
    assert found["losses"] > 2 * TOLERANCE, "something was rounded to bf16"
    assert actual["windows"] == exact["windows"]
    assert ("compiled" in actual["built"]) == ("--compile" in flags)


@pytest.mark.parametrize("bug", PLANTED_BUGS)
def test_a_planted_bug_is_found(train, ranks, token_files, pair_files, tmp_path, bug):
    flags, number = WHERE[bug]
    (broken,) = run_cases(ranks, tmp_path, [(case_flags(token_files, pair_files, flags), bug)], number)
    assert disagreements(train("baseline", 1, PAIRS if PAIRS in flags else ""), broken) != []


def test_the_single_process_follows_transformers(train, token_files):
    """The same initial weights in GPT2LMHeadModel, its own loss, the whole batch at once, PyTorch's plain AdamW and
    clipping: no part of the step is ours. This is what a broken tie, scale or data order fails on."""
    checked = typed(case_flags(token_files, None, ["--run_type", "baseline"]))
    settings = checked.settings
    shape = ModelShape(2, 2, 32, VOCABULARY, 64)
    model = reference_model(shape).train()
    torch.manual_seed(settings.training.seed)
    model.load_state_dict(to_transformers(GPT2(shape).state_dict(), shape), strict=False)
    decaying = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": decaying, "weight_decay": settings.optimizer.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False)
    batches = TrainingBatches(checked.train_file, settings, 0, torch.device("cpu"))
    expected = train("baseline", 1, "")
    for step in range(settings.last_step):
        tokens = checked.train_file.tokens[:].astype(np.int64)
        windows = batches.windows_of_step(step)
        rows = torch.from_numpy(np.stack([tokens[w * SEQUENCE : w * SEQUENCE + SEQUENCE + 1] for w in windows]))
        logits = model(rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.optimizer.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, settings)
        optimizer.step()
        assert loss.item() == pytest.approx(expected["losses"][step], abs=TOLERANCE), f"loss of step {step}"
        assert norm.item() == pytest.approx(expected["grad_norms"][step], abs=TOLERANCE), f"norm of step {step}"


def test_pairs_follow_transformers_pair_by_pair(train, pair_files):
    """The first step: each pair goes through GPT2LMHeadModel by itself, without filling, and every token behind its
    prompt counts once. So filling changes nothing, and no pair sees another."""
    checked = typed(case_flags(None, pair_files, ["--run_type", "baseline", PAIRS]))
    shape = ModelShape(2, 2, 32, VOCABULARY, 64)
    model = reference_model(shape)
    torch.manual_seed(checked.settings.training.seed)
    model.load_state_dict(to_transformers(GPT2(shape).state_dict(), shape), strict=False)
    tokens = np.fromfile(pair_files[0], "<u2").astype(np.int64)
    is_target = np.fromfile(pair_files[0].with_suffix(".targets.bin"), np.uint8).astype(bool)
    ends = [0, *(np.flatnonzero(tokens == VOCABULARY - 1) + 1)]
    fitting = [slice(a, b) for a, b in itertools.pairwise(ends) if b - a <= SEQUENCE + 1]
    assert 0 < len(ends) - 1 - len(fitting) < 40, "some pairs are too long"
    losses = []
    for window in TrainingBatches(checked.train_file, checked.settings, 0, torch.device("cpu")).windows_of_step(0):
        ids, learned = torch.from_numpy(tokens[fitting[window]]), torch.from_numpy(is_target[fitting[window]])
        log_probabilities = model(ids[None, :-1]).logits[0].log_softmax(-1)
        losses.append(-log_probabilities.gather(1, ids[1:, None])[learned[1:], 0])
    loss = torch.cat(losses).mean()
    loss.backward()
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters()))
    expected = train("baseline", 1, PAIRS)
    assert loss.item() == pytest.approx(expected["losses"][0], abs=TOLERANCE)
    assert norm.item() == pytest.approx(expected["grad_norms"][0], abs=TOLERANCE)
