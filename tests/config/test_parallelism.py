"""The mesh, what goes together, and the cut into stages: all known before torch is loaded."""

from __future__ import annotations

import itertools
import json
import os

import pytest
from support.programs import TINY_RUN, data_flags, python_command, run_program
from support.settings import refusal, settings_of

from testbed.config.check import check_run
from testbed.config.flags import parse_command_line
from testbed.config.run_types import STRATEGIES
from testbed.distributed.launch import Launch
from testbed.model.shape import MODEL_SIZES, ModelShape
from testbed.strategies.stages import balanced_stages, piece_costs


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
    ],
)
def test_the_mesh_multiplies_to_the_world_size(token_files, flags, ranks, mesh):
    settings = settings_of(token_files, "--run_type", *flags.split(), world_size=ranks)
    assert str(settings.plan.mesh) == mesh
    assert settings.plan.data_world_size == settings.plan.mesh.data
    assert settings.plan.mesh.data * settings.plan.mesh.pipeline * settings.plan.mesh.tensor == ranks


REFUSED = {
    "stages that do not divide the ranks": (
        "pipeline --pipeline_stages 3",
        4,
        ["--pipeline_stages 3", "4 ranks", "3 "],
    ),
    "tensor size that does not divide the ranks": (
        "tensor --tensor_parallel_size 2",
        3,
        ["size 2", "3 ranks", "2 ranks"],
    ),
    "tensor size that does not divide the heads": ("tensor", 4, ["--tensor_parallel_size 4", "--num_heads 2"]),
    "shards that do not divide the ranks": ("fsdp --shard_size 3", 4, ["--shard_size 3", "4 ranks", "1, 2, 4"]),
    "more stages than pieces": ("pipeline", 8, ["--pipeline_stages 8", "--num_layers 2", "4 pieces"]),
    "two stages per rank, too many": ("pipeline --pipeline_schedule zero_bubble", 4, ["= 8 stages", "--num_layers 2"]),
    "too few micro batches": (
        *("pipeline --micro_batch_size_per_gpu 4 --global_batch_size 4", 2),
        ["1f1b", "pipeline ranks, 2", "has 1", "--micro_batch_size_per_gpu"],
    ),
    "an uneven number of micro batches": (
        *("pipeline --pipeline_schedule interleaved_1f1b --micro_batch_size_per_gpu 2 --global_batch_size 10", 2),
        ["interleaved_1f1b", "2 equal rounds", "has 5"],
    ),
    "1f1b with two stages per rank": (
        "pipeline --stages_per_rank 2",
        2,
        ["--stages_per_rank 2", "1f1b", "interleaved_1f1b"],
    ),
    "zero bubble with one": (
        *("pipeline --pipeline_schedule zero_bubble --stages_per_rank 1", 2),
        ["--stages_per_rank 1", "exactly two"],
    ),
    "offload without DeepSpeed": ("ddp --offload optimizer", 2, ["--offload", "optimized", "not to ddp"]),
    "offload of what is not sharded": (
        "optimized --zero_stage 0 --offload optimizer",
        2,
        ["--offload optimizer", "1, 2 or 3"],
    ),
    "weights offloaded below stage 3": (
        "optimized --zero_stage 2 --offload parameters",
        2,
        ["--zero_stage 2", "stage 3"],
    ),
    "buckets that DeepSpeed cannot halve": ("optimized --allgather_bucket_size 7", 2, ["size 7", "give 8"]),
    "native without saying bf16": ("fsdp --mixed_precision native", 2, ["native", "--precision bf16"]),
    "a schedule without a pipeline": ("ddp --pipeline_schedule 1f1b", 2, ["--pipeline_schedule", "pipeline"]),
    "dropout cut over ranks": ("tensor --dropout 0.1", 2, ["--dropout 0.1", "--dropout 0"]),
    "fp16 over stages": ("pipeline --precision fp16", 2, ["fp16", "bf16"]),
    "fp16 over one stage": ("pipeline --precision fp16 --pipeline_stages 1", 2, ["fp16", "bf16"]),
    "fp16 over one tensor rank": ("tensor --precision fp16 --tensor_parallel_size 1", 2, ["fp16", "bf16"]),
    "a pipeline without ranks": ("pipeline", 1, ["pipeline", "torchrun", "baseline"]),
    "a tensor without ranks": ("tensor", 1, ["tensor", "torchrun", "baseline"]),
    "a bucket that is no number": ("ddp --bucket_cap_mb abc", 2, ["--bucket_cap_mb", "'abc'", "above 0"]),
    "dropout on copies": ("dp --dropout 0.1", 1, ["--dropout 0.1", "dp", "ddp"]),
    "compiled, recomputed and cut": (
        *("tensor --compile --activation_checkpointing block", 2),
        ["--compile", "tensor", "block", "selective"],
    ),
    "fp16 over shards": ("fsdp --precision fp16", 2, ["fp16", "bf16"]),
    "native without bf16": ("fsdp --precision fp32 --mixed_precision native", 2, ["native", "fp32", "bf16"]),
    "native without shards": (
        "optimized --zero_stage 0 --precision bf16 --mixed_precision native",
        2,
        ["native", "stage 1"],
    ),
    "compiled copies": ("dp --compile", 1, ["--compile", "dp", "ddp"]),
    "compiled in two halves": (
        "pipeline --pipeline_schedule zero_bubble --compile --num_layers 4",
        2,
        ["--compile", "1f1b"],
    ),
    "kept and gathered inside": (
        *("optimized --zero_stage 3 --activation_checkpointing selective", 2),
        ["selective", "--zero_stage 3", "block"],
    ),
    "compiled and gathered inside": ("optimized --zero_stage 3 --compile", 2, ["--compile", "--zero_stage 3"]),
    "computed again in two halves": (
        *("pipeline --pipeline_schedule zero_bubble --activation_checkpointing block", 2),
        ["--activation_checkpointing block", "zero_bubble", "1f1b"],
    ),
    "ranks without a use": ("dp", 2, ["dp", "one process", "2 ranks", "ddp"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together_is_refused_in_a_sentence(token_files, case):
    flags, ranks, said = REFUSED[case]
    message = refusal(token_files, "--run_type", *flags.split(), world_size=ranks)
    assert all(part in message for part in said), message


SAID_BY_A_RANK = (
    *("stages that do not divide the ranks", "tensor size that does not divide the heads", "too few micro batches"),
    *("tensor size that does not divide the ranks", "offload without DeepSpeed"),
)


@pytest.mark.parametrize("case", SAID_BY_A_RANK)
def test_a_rank_says_it_and_exits_with_2_before_any_process_group(token_files, tmp_path, case):
    """One rank alone: had it begun to look for the others, it would wait for them."""
    flags, ranks, said = REFUSED[case]
    command = [*python_command(), *TINY_RUN, *data_flags(token_files), "--checkpoint_path", str(tmp_path / "run")]
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
    done = run_program([*command, "--run_type", *flags.split()], timeout_s=30, env=environment)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and all(part in done.stderr for part in said)
    assert not (tmp_path / "run").exists()


def test_data_parallel_without_two_devices_is_refused(token_files, tmp_path):
    flags = ["--run_type", "dp", "--checkpoint_path", str(tmp_path / "run")]
    done = run_program([*python_command(), *TINY_RUN, *data_flags(token_files), *flags])
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert "--run_type dp" in done.stderr and "needs two" in done.stderr and "ddp" in done.stderr


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
    again = check_run(parse_command_line(arguments), Launch(0, 0, 4, 4)).settings
    assert (
        again.model_parallel.pipeline_schedule is None
        and again.batch.global_batch_size == first.batch.global_batch_size
    )
    pipeline = check_run(parse_command_line([*arguments, "--run_type", "pipeline"]), Launch(0, 0, 4, 4)).settings
    assert pipeline.model_parallel.pipeline_schedule == "gpipe" and pipeline.plan.mesh.pipeline == 4, (
        "the stages follow the ranks again"
    )


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


@pytest.mark.parametrize("num_stages", [2, 3, 4, 5])
@pytest.mark.parametrize("vocab_size", [300, 8192, 50257])
def test_the_most_expensive_stage_is_as_cheap_as_any_cut_allows(num_stages, vocab_size):
    shape = ModelShape(num_layers=6, num_heads=4, embedding_size=128, vocab_size=vocab_size)
    costs = piece_costs(shape, 128)

    def largest(begins: tuple[int, ...]) -> int:
        return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *begins, len(costs))))

    best = min(largest(begins) for begins in itertools.combinations(range(1, len(costs)), num_stages - 1))
    stages = balanced_stages(shape, 128, num_stages)
    block, head = costs[1], costs[-1]
    found = [costs[0] * stage.embeds + block * len(stage.blocks) + head * stage.predicts for stage in stages]
    assert max(found) == best


def test_a_heavy_head_gets_fewer_blocks():
    """124M on two stages: the head costs as much as 4.9 blocks, so 8 blocks stand against 4 and the head."""
    first, last = balanced_stages(MODEL_SIZES["gpt2"], 1024, 2)
    assert (str(first), str(last)) == ("embedding + blocks 0-7", "blocks 8-11 + head")
