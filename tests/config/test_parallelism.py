"""The mesh, flags of run types, and the cut into stages: all known before torch is loaded."""

from __future__ import annotations

import itertools
import json

import pytest
from support.programs import TINY_RUN, data_flags
from support.settings import settings_of, typed

from testbed.config.run_types import STRATEGIES
from testbed.memory_model.job import DenseModel
from testbed.memory_model.stages import balanced_stages, piece_costs
from testbed.model.shape import MODEL_SIZES, ModelShape


@pytest.mark.parametrize(
    ("flags", "ranks", "mesh"),
    [
        ("ddp", 4, "mesh data=4 pipeline=1 tensor=1"),
        ("fsdp", 4, "mesh data=4 (replicate=1 x shard=4) pipeline=1 tensor=1"),
        ("fsdp --shard_size 2", 4, "mesh data=4 (replicate=2 x shard=2) pipeline=1 tensor=1"),
        ("pipeline", 4, "mesh data=1 pipeline=4 tensor=1"),
        ("pipeline --pipeline_stages 2", 4, "mesh data=2 pipeline=2 tensor=1"),
        ("tensor", 2, "mesh data=1 pipeline=1 tensor=2"),
        ("tensor --tensor_parallel_size 2", 8, "mesh data=4 pipeline=1 tensor=2"),
        ("baseline", 1, "mesh data=1 pipeline=1 tensor=1"),
        ("mesh", 4, "mesh data=4 (replicate=1 x shard=4) pipeline=1 tensor=1"),
        (
            "mesh --shard_size 4 --tensor_parallel_size 2 --context_parallel_size 2 --pipeline_stages 2",
            32,
            "mesh data=4 (replicate=2 x shard=4) pipeline=2 tensor=2 context=2",
        ),
        ("mesh --context_parallel_size 4", 4, "mesh data=1 (replicate=1 x shard=4) pipeline=1 tensor=1 context=4"),
        ("mesh --context_parallel_size 4 --shard_size 1", 8, "mesh data=2 pipeline=1 tensor=1 context=4"),
    ],
)
def test_the_mesh_multiplies_to_the_world_size(token_files, flags, ranks, mesh):
    settings = settings_of(token_files, "--run_type", *flags.split(), world_size=ranks)
    assert str(settings.plan.mesh) == mesh
    assert settings.plan.data_world_size == settings.plan.mesh.data
    assert settings.plan.mesh.num_ranks == ranks


@pytest.mark.parametrize(
    ("flags", "micro_batch", "accumulation"),
    [
        ("ddp", 4, 4),
        ("ddp --global_batch_size 6", 3, 1),
        ("pipeline", 4, 8),
        ("pipeline --global_batch_size 4", 2, 2),  # a micro batch for each stage
        ("model_parallel", 32, 1),  # the whole batch passes through at once
        ("ddp --micro_batch_size_per_gpu auto", None, None),  # until it is found
    ],
)
def test_the_default_micro_batch_is_what_the_run_type_is_about(token_files, flags, micro_batch, accumulation):
    batch = settings_of(token_files, "--run_type", *flags.split(), world_size=2).batch
    assert (batch.micro_batch_size_per_gpu, batch.grad_accum_steps) == (micro_batch, accumulation)


@pytest.mark.parametrize("run_type", STRATEGIES)
def test_a_flag_that_belongs_elsewhere_is_none_and_its_own_has_a_value(token_files, run_type):
    ranks = 2 if STRATEGIES[run_type].is_distributed else 1
    settings = settings_of(token_files, "--run_type", run_type, world_size=ranks)
    own = STRATEGIES[run_type].options
    for name in {name for entry in STRATEGIES.values() for name in entry.options} - {"skip_gradient_sync"}:
        assert (settings.value(name) is not None) == (name in own), name  # that one is None unless typed


def test_the_config_of_one_run_type_repeats_its_work_under_another(token_files, tmp_path):
    """Typed, a foreign flag is an error; from a file it only describes the other run."""
    first = settings_of(token_files, "--run_type", "pipeline", "--pipeline_schedule", "gpipe", world_size=2)
    path = tmp_path / "effective_config.json"
    path.write_text(json.dumps(first.as_config()))
    arguments = ["--config", str(path), *TINY_RUN, *data_flags(token_files), "--run_type", "ddp"]
    again = typed(arguments, world_size=4).settings
    assert again.model_parallel.pipeline_schedule is None
    assert again.batch.global_batch_size == first.batch.global_batch_size
    pipeline = typed([*arguments, "--run_type", "pipeline"], world_size=4).settings
    assert pipeline.model_parallel.pipeline_schedule == "gpipe"
    assert pipeline.plan.mesh.pipeline == 4, "the stages follow the ranks again"


def test_what_changes_the_mathematics_is_recorded(token_files):
    def changes(*flags: str) -> tuple[str, ...]:
        return settings_of(token_files, *flags, world_size=2).plan.math_changes

    assert changes("--run_type", "ddp") == ()
    assert "bf16" in changes("--run_type", "ddp", "--gradient_compression", "bf16")[0]
    native = ["--precision", "bf16", "--mixed_precision", "native"]
    assert len(changes("--run_type", "fsdp", *native)) == 1
    assert len(changes("--run_type", "optimized", *native)) == 1
    assert changes("--run_type", "optimized", *native) != changes("--run_type", "fsdp", *native)
    assert "fp16" in changes("--run_type", "optimized", "--precision", "fp16")[0]
    assert changes("--run_type", "ddp", "--precision", "fp16") == ()
    skips = [changes("--run_type", "ddp", "--skip_gradient_sync", steps) for steps in ("all", "alternate")]
    assert [said for (said,) in skips] == [
        "gradients are not synchronised: this is not training",
        "gradients of every even step are not synchronised: this is not training",
    ]


@pytest.mark.parametrize("num_stages", range(1, 15))
@pytest.mark.parametrize("size", ["nano", "gpt2"])
def test_every_piece_lies_in_one_stage_in_order(size, num_stages):
    shape = MODEL_SIZES[size]
    if num_stages > shape.num_layers + 2:
        num_stages = shape.num_layers + 2
    stages = balanced_stages(shape, 512, num_stages)
    assert len(stages) == num_stages
    assert [block for stage in stages for block in stage.blocks] == list(range(shape.num_layers))
    assert [stage.embeds for stage in stages] == [True] + [False] * (num_stages - 1)
    assert [stage.predicts for stage in stages] == [False] * (num_stages - 1) + [True]
    assert all(str(stage) for stage in stages)


@pytest.mark.parametrize("num_stages", [2, 3, 5])
@pytest.mark.parametrize("vocab_size", [300, 50257])
def test_the_most_expensive_stage_is_as_cheap_as_any_cut_allows(num_stages, vocab_size):
    shape = ModelShape(num_layers=6, num_heads=4, embedding_size=128, vocab_size=vocab_size)
    costs = piece_costs(DenseModel.of_gpt2(shape, 128))

    def largest(begins: tuple[int, ...]) -> int:
        return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *begins, len(costs))))

    best = min(largest(begins) for begins in itertools.combinations(range(1, len(costs)), num_stages - 1))
    stages = balanced_stages(shape, 128, num_stages)
    block, head = costs[1], costs[-1]
    found = [costs[0] * stage.embeds + block * len(stage.blocks) + head * stage.predicts for stage in stages]
    assert max(found) == best
