"""Groups and meshes of 64 ranks, built as a cluster would build them, without the cluster."""

from __future__ import annotations

import pytest
from support.programs import TINY_MODEL, data_flags

pytestmark = pytest.mark.launches

RANKS = 64
# name -> flags, data ranks, sizes of the groups but those of all ranks and of one
CASES = {
    "allreduce": ("--run_type allreduce", 64, set()),
    "ddp": ("--run_type ddp", 64, set()),
    "fsdp": ("--run_type fsdp", 64, set()),
    "fsdp, hybrid": ("--run_type fsdp --shard_size 8", 64, {8}),
    **{f"ZeRO {stage}": (f"--run_type optimized --zero_stage {stage}", 64, set()) for stage in range(4)},
    # the two ends of a pipeline share the embedding
    "model_parallel": ("--run_type model_parallel --pipeline_stages 4", 16, {2, 4, 16}),
    "pipeline": ("--run_type pipeline --pipeline_stages 8", 8, {2, 8}),
    "tensor": ("--run_type tensor --tensor_parallel_size 4", 16, {4, 16}),
}
SHARDED = ("fsdp", "fsdp, hybrid", "ZeRO 3", "model_parallel", "pipeline", "tensor")


@pytest.fixture(scope="module")
def built(ranks, token_files, tmp_path_factory) -> dict[str, tuple[dict, ...]]:
    """What the first, the second and the last of 64 ranks are made of, by case."""
    work = [*TINY_MODEL, "--num_layers", "14", "--num_heads", "4", "--seq_length", "32", "--precision", "fp32"]
    work += ["--device", "cpu", "--global_batch_size", "64", *data_flags(token_files)]
    tasks = [[*work, *flags.split()] for flags, *_ in CASES.values()]
    of_ranks = []
    for rank in (0, 1, RANKS - 1):
        task = {"rank": rank, "ranks": RANKS, "optimized": tasks}  # under the word for which DeepSpeed is loaded
        of_ranks.append(ranks.run("support.many_ranks_worker", tmp_path_factory.mktemp("many"), task, 1))
    return dict(zip(CASES, zip(*of_ranks, strict=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_strategy_builds_its_groups_for_64_ranks(built, name):
    _, data_ranks, group_sizes = CASES[name]
    for strategy in built[name]:
        assert strategy["data_world_size"] == data_ranks
        assert set(strategy["group_sizes"]) - {1, RANKS} == group_sizes
        whole = built["ddp"][0]["parameter_bytes"]
        assert (strategy["parameter_bytes"] == whole) == (name not in SHARDED)
        assert strategy["parameter_bytes"] < 0.6 * whole or name not in SHARDED
    first, _, last = built[name]
    assert (first["data_rank"], last["data_rank"]) == (0, data_ranks - 1)


def test_64_ranks_are_built_in_a_minute(built):
    for number in range(3):
        assert sum(strategies[number]["seconds"] for strategies in built.values()) < 60
