"""Check what stages and tensor ranks send each other, and in which precision. The figures are docs/strategies.md's."""

from __future__ import annotations

import pytest
import torch
from support.programs import SEQUENCE, TINY_RUN, VOCABULARY, data_flags

from testbed.model.gpt2 import GPT2, token_loss_sum
from testbed.model.shape import ModelShape

BYTES, CHANNELS, SEQUENCES, STEP = 4, 32, 2, 16  # of a number; of the model; of a micro batch; of a step
ACTIVATIONS = BYTES * SEQUENCES * SEQUENCE * CHANNELS  # A of docs/strategies.md
MICRO_BATCHES = STEP // SEQUENCES
LAYERS = 2
ROWS = -(-VOCABULARY // 128) * 128  # of the embedding
KINDS = ("model_parallel", "pipeline", "pipeline --pipeline_schedule gpipe", "tensor")


@pytest.fixture(scope="module")
def sent(ranks, token_files, tmp_path_factory):
    """What two ranks send in a step and in a validation, by rank."""
    work = ["--global_batch_size", str(STEP), "--micro_batch_size_per_gpu", str(SEQUENCES), "--max_train_steps", "1"]
    cases = [(kind, precision) for kind in KINDS for precision in ("fp32", "bf16")]
    tasks = [
        [*TINY_RUN, *data_flags(token_files), *work, "--precision", precision, "--run_type", *kind.split()]
        for kind, precision in cases
    ]
    return dict(zip(cases, ranks.run("support.traffic", tmp_path_factory.mktemp("traffic"), tasks, 2), strict=True))


@pytest.mark.launches
@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stages_send_each_activation_and_gradient_once_in_fp32(sent, kind, precision):
    """M A forward and M A back at a cut, in bf16 as in fp32, and the gradient of the tied embedding; in a validation M
    A forward."""
    trained, validated = sent[kind, precision]
    each_way = [ACTIVATIONS] * MICRO_BATCHES
    with_tied = [*each_way, BYTES * ROWS * CHANNELS]
    assert trained == [with_tied, with_tied], "rank 0 sends activations, rank 1 their gradients"
    assert validated == [each_way, []]


@pytest.mark.launches
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tensor_ranks_add_blocks_in_the_precision_of_their_products(sent, precision):
    """4 L + 2 sums of A for a micro batch, of which the 2 L of forward are 16 bits wide under autocast."""
    for sizes in sent["tensor", precision][0]:
        assert len(sizes) == MICRO_BATCHES * (4 * LAYERS + 2)
        narrow = LAYERS * ACTIVATIONS if precision == "bf16" else 0
        assert sum(sizes) == MICRO_BATCHES * ((4 * LAYERS + 2) * ACTIVATIONS - narrow)


def test_the_residual_stream_is_fp32_under_autocast_so_a_cast_at_the_cut_would_be_other_mathematics():
    """Autocast computes products in bf16, and adds them to a stream in fp32. Cut anywhere, the loss has the same bits;
    with activations rounded for the way it has others."""
    torch.manual_seed(0)
    model = GPT2(ModelShape(num_layers=2, num_heads=2, embedding_size=32, vocab_size=50, max_position_embeddings=16))
    first, last = model.part([0], embeds=True, predicts=False), model.part([1], embeds=False, predicts=True)
    tokens, targets = torch.randint(50, (2, 2, 16)).unbind(0)
    with torch.autocast("cpu", torch.bfloat16):
        whole = model(tokens, targets)
        sent = first.run_layers(tokens)
        received = sent.detach().requires_grad_()
        cut = token_loss_sum(last.run_layers(received), targets)
        rounded = token_loss_sum(last.run_layers(received.detach().to(torch.bfloat16).float()), targets)
    cut.backward()
    assert sent.dtype == torch.float32 and received.grad.dtype == torch.float32
    assert cut == whole and rounded != whole
    assert not torch.equal(received.grad, received.grad.to(torch.bfloat16).float()), "gradients are not bf16 numbers"
