"""Context ranks, and tensor ranks with a cut stream, share the activations of a sequence: counted, and by formula."""

from __future__ import annotations

import pytest
from support.programs import data_flags

pytestmark = [pytest.mark.launches, pytest.mark.slow]
# many blocks and a small vocabulary, so that the blocks decide; no activation has the shape of a weight
WORK = (
    "--num_layers 6 --num_heads 4 --embedding_size 64 --seq_length 160 --max_position_embeddings 256 --device cpu "
    "--threads_per_rank 1 --precision fp32 --micro_batch_size_per_gpu 2 --global_batch_size 2"
)
_GATHERED = "--shard_size 1 --context_parallel_method allgather"
AXES = {
    "context": "--run_type mesh --context_parallel_size {ranks} --shard_size 1",
    "context, gathered": f"--run_type mesh --context_parallel_size {{ranks}} {_GATHERED}",
    "context, gathered, long": f"--run_type mesh --context_parallel_size {{ranks}} {_GATHERED} "
    "--seq_length 320 --max_position_embeddings 320",
    "cut stream": "--run_type tensor --tensor_parallel_size {ranks} --sequence_parallel on",
}


@pytest.fixture(scope="module")
def kept(ranks, token_files, tmp_path_factory):
    def of(axis: str, number: int) -> dict[str, float]:
        flags = AXES[axis].format(ranks=number) if number > 1 else "--run_type ddp"
        arguments = [*WORK.split(), *data_flags(token_files), *flags.split()]
        folder = tmp_path_factory.mktemp("kept")
        return ranks.run("support.activation_worker", folder, [arguments], number)[0]

    return of


@pytest.mark.parametrize("axis", ["context", "cut stream"])
def test_each_rank_keeps_its_share_of_the_activations(kept, axis):
    alone, on_two, on_four = (kept(axis, number) for number in (1, 2, 4))
    assert alone["counted"] / on_two["counted"] >= 1.8
    assert alone["counted"] / on_four["counted"] >= 3.5
    for found in (alone, on_two, on_four):
        assert found["counted"] == pytest.approx(found["formula"], rel=0.12)


@pytest.mark.parametrize("number", [2, 4])
def test_gathered_keys_and_values_are_kept_whole(kept, number):
    """Those of the whole sequence, and no mask, whose size would grow with the square of the length."""
    found, ring = kept("context, gathered", number), kept("context", number)["counted"]
    assert found["counted"] == pytest.approx(found["formula"], rel=0.12)
    assert 1.05 < found["counted"] / ring < 1.9
    assert kept("context, gathered, long", number)["counted"] < 2.2 * found["counted"]
