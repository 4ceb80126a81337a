"""Count the bytes that the forward pass of a dense transformer keeps for its backward pass. No torch.

Korthikanti et al. 2022 (arXiv:2205.05198, section 4) count 34 bytes per token and channel for a layer of GPT in 16 bits
with dropout, 5 per score of an attention that is not fused; dropout's two masks of the residual stream are 2 of the 34.
The same count is made here tensor by tensor, for the precisions and layers that they do not have.
tests/memory_model/test_activations.py holds it against the tensors that autograd saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from testbed.memory_model.job import Job
from testbed.memory_model.model_states import FP32, engine_of, shards_weights

LSE = 4  # the log of a query's softmax sum, fp32, all that fused attention keeps of its scores
# bytes of what a matrix product keeps of its input, where the program quantises it first (Transformer Engine)
QUANTISED = {"fp8": 1.0, "mxfp8": 1.0, "nvfp4": 0.5625, "fp4": 0.5625}


@dataclass(frozen=True)
class Saved:
    """A tensor that waits for the backward pass."""

    name: str
    bytes_per_token: float
    is_cut: bool = False  # over the tensor ranks; what is not, sequence parallelism cuts


@dataclass(frozen=True)
class Head:
    """Bytes per token and token of the vocabulary that the logits and what follows from them take."""

    saved: float
    forward_peak: float
    backward_peak: float


def keeps_16_bits(job: Job) -> bool:
    """Return whether the residual stream is in 16 bits, and not fp32 as under autocast.

    Sharded programs gather their weights in the precision of the products (FSDP's mixed precision).
    """
    if job.product_bytes == FP32:
        return False
    is_gathered = job.run_type is None and shards_weights(job)
    return job.has_16_bit_weights or is_gathered


def casts_weights(job: Job) -> bool:
    """Return whether autocast makes copies of fp32 weights in 16 bits."""
    return job.product_bytes != FP32 and not keeps_16_bits(job) and not job.has_16_bit_weights


def keeps_casts(job: Job) -> bool:
    """Return whether casts stay for all micro batches of a step, as most strategies of src/gpt2.py keep them."""
    keeps = casts_weights(job) and job.accumulation > 1 and job.recompute == "none" and not job.compiled
    is_in_shards = job.sends == "shards"
    return keeps and job.strategy is not None and not is_in_shards and job.strategy.keeps != "shards"


def residual_bytes(job: Job) -> int:
    """Return the bytes of an element of the residual stream."""
    return 2 if keeps_16_bits(job) else FP32


def _input_bytes(job: Job) -> float:
    """Return the bytes of an element that a linear layer keeps of its input."""
    return QUANTISED.get(job.precision, 2.0) if engine_of(job) == "megatron" else job.product_bytes


def block_tensors(job: Job) -> Iterator[Saved]:
    """Yield what one block keeps without recomputation.

    With h channels 36 h bytes per token under autocast, 32 h in 16 bits and 64 h in fp32, for GELU and fused attention.
    """
    model, product, residual, linear = job.model, job.product_bytes, residual_bytes(job), _input_bytes(job)
    hidden, ffn, queries = model.hidden, model.ffn, model.heads * model.head_dim
    statistics = 4 if model.gated else 8
    is_joined = linear == product  # one tensor is both what attention made and what the projection reads
    yield Saved("norm 1 input", residual * hidden)
    yield Saved("norm statistics", 2 * statistics)
    yield Saved("qkv input", linear * hidden)
    yield Saved("qkv", _score_bytes(job) * (queries + 2 * model.kv_heads * model.head_dim), is_cut=True)
    if job.gathers_keys:
        ranks, chunk = job.layout.context, model.seq_length / (2 * job.layout.context)
        keys = 2 * model.kv_heads * model.head_dim
        yield Saved("keys and values of all ranks", _score_bytes(job) * ranks * keys, is_cut=True)
        if not job.on_cpu or job.attention == "eager":  # two masks, each of a chunk by all keys up to its end
            mask = chunk * (2 * ranks + 1) / 2 / job.micro_batch
            yield Saved("masks", _score_bytes(job) * mask, is_cut=False)
    yield from _scores(job)
    yield Saved("attention output", product * queries, is_cut=True)
    if not is_joined:
        yield Saved("projection input", linear * queries, is_cut=True)
    yield Saved("norm 2 input", residual * hidden)
    yield Saved("mlp input", linear * hidden)
    if model.gated:
        yield Saved("gate", product * ffn, is_cut=True)
        yield Saved("up", product * ffn, is_cut=True)
        if not (job.compiled or engine_of(job) == "megatron"):
            yield Saved("silu of gate", product * ffn, is_cut=True)  # a fused kernel computes it again
    else:
        yield Saved("gelu input", product * ffn, is_cut=True)
    yield Saved("mlp output input", linear * ffn, is_cut=True)
    if job.dropout:
        yield Saved("dropout masks", 2 * hidden * (product if job.on_cpu else 1))


def _scores(job: Job) -> Iterator[Saved]:
    """Yield what attention keeps of its scores.

    Not fused: the softmax, with dropout its mask and what it leaves. PyTorch's own attention without a fused kernel
    computes in fp32 whatever it is given; elsewhere the softmax is fp32 under autocast, and passed on in 16 bits.
    """
    model = job.model
    if job.attention != "eager":
        yield Saved("attention sums", LSE * model.heads, is_cut=True)
        return
    product = _score_bytes(job)
    softmax = product if keeps_16_bits(job) else FP32
    goes_on = product if job.dropout or softmax != product else 0
    mask = (product if job.on_cpu else 1) if job.dropout else 0
    yield Saved("scores", (softmax + goes_on + mask) * model.heads * model.seq_length, is_cut=True)


def _score_bytes(job: Job) -> int:
    """Return the bytes of an element of queries, keys, values and what becomes of the scores."""
    is_in_fp32 = job.attention == "eager" and job.run_type is not None
    return FP32 if is_in_fp32 else job.product_bytes


def gradients_inside(job: Job) -> float:
    """Bytes per token of the gradients of what is widest in a block, on both sides of a function."""
    model = job.model
    scores = 2 * _score_bytes(job) * model.heads * model.seq_length if job.attention == "eager" else 0
    return max(2 * job.product_bytes * model.ffn, scores) + 2 * residual_bytes(job) * model.hidden


def kept_tensors(job: Job) -> list[Saved]:
    """Return what one block keeps with the job's recomputation."""
    tensors = {tensor.name: tensor for tensor in block_tensors(job)}
    if job.recompute.startswith("full"):
        return [Saved("block input", residual_bytes(job) * job.model.hidden)]
    if job.recompute == "selective_attention":  # Korthikanti et al., section 5: all that depends on scores
        return [tensor for name, tensor in tensors.items() if name not in ("scores", "attention sums")]
    if job.recompute == "selective_op":
        return list(_of_expensive_operations(job, tensors))
    return list(tensors.values())


def _of_expensive_operations(job: Job, tensors: dict[str, Saved]) -> Iterator[Saved]:
    """Yield what torch.utils.checkpoint keeps where outputs of matrix products and of attention are kept.

    src/gpt2.py keeps all of them. torchtitan keeps every second product: queries, values, the gate's and the last,
    which nothing reads again and which a compiler therefore leaves out.
    """
    model, product = job.model, job.product_bytes
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield Saved("block input", residual_bytes(job) * model.hidden)
    yield tensors["attention output"]
    if "attention sums" in tensors:
        yield tensors["attention sums"]
    if job.run_type is not None:
        yield tensors["qkv"]
        yield Saved("projection output", product * model.hidden)
        yield Saved("mlp inside", product * model.ffn * (2 if model.gated else 1), is_cut=True)
    else:
        yield Saved("queries and values", product * (queries + keys), is_cut=True)
        yield Saved("mlp inside", product * model.ffn, is_cut=True)
    if not job.compiled:
        yield Saved("mlp output", product * model.hidden)


def head_of(job: Job) -> Head:
    """Return what the logits take, in bytes per token and vocabulary entry.

    PyTorch: logits, their fp32 copy and its log-softmax in the forward pass; log-softmax, its gradient and the loss's
    in the backward pass. Compiled, no log-softmax is written down; fused losses turn the logits into their gradient in
    place.
    """
    logits, engine = job.product_bytes, engine_of(job)
    if engine == "megatron":  # Transformer Engine's loss works in place on the logits
        return Head(logits, logits, logits)
    if engine == "deepspeed" and job.run_type is None and keeps_16_bits(job):
        # models of transformers: the logits and their shifted copy stay, and the log-softmax is in 16 bits too
        return Head(3 * logits, 3 * logits, 4 * logits)
    if "llm-foundry" in job.stack or (job.compiled and job.run_type is not None):  # a fused loss in 16 bits
        return Head(logits, logits, 2 * logits)
    cast = logits if logits != FP32 else 0
    if job.strategy is not None and job.layout.tensor > 1:  # of logits that are cut over ranks: less their maximum
        return Head(FP32, 3 * FP32 + cast, 2 * FP32 + cast)
    return Head(FP32, 2 * FP32 + cast, 3 * FP32)
