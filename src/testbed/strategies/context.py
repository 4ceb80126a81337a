"""Context parallelism: the sequence is cut over ranks, and attention meets the keys and values of all of them.

A causal sequence that was cut into n pieces would give the last rank most of the work. So it is cut into 2 n chunks,
and rank r has chunks r and 2 n - 1 - r: every rank computes the same. Tokens, targets and positions are cut alike,
before the model; nothing else in it knows.

Two methods: "ring" (Liu et al. 2023, arXiv:2310.01889), in which keys and values go from rank to rank while attention
to the last ones is computed, and "allgather" (Llama 3, arXiv:2407.21783, section 3.3.2), in which every rank gets all
of them at once and needs their memory.

Shapes: B micro batch, H heads, t tokens of a rank, D head size.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional as F

from testbed.distributed.tensors import pass_on

aten = torch.ops.aten


def order_of_rank(seq_length: int, ranks: int, rank: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the (t,) positions of a rank, in the order in which it has them. `seq_length` is a multiple of 2 ranks."""
    chunks = torch.arange(seq_length, device=device).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def ring_attention(
    group: dist.ProcessGroup, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float
) -> torch.Tensor:
    """Return causal attention of this rank's (B, H, t, D) queries to the keys of all ranks of the group."""
    assert dropout == 0.0, "config/compatibility.py refuses it"
    return _Ring.apply(query, key, value, group)


class _Ring(torch.autograd.Function):
    """Attention to one rank's keys after the other's. A part knows the logarithm of its sum of exponents, by which the
    parts are weighed. Backward gets the whole sum's, so that nothing of the parts must be kept.

    Of a rank's own keys, the usual causal mask holds for its two chunks in a row. For others no mask is needed.
    """

    @staticmethod
    def forward(ctx, query, key, value, group):
        ranks, rank, half = group.size(), group.rank(), query.shape[2] // 2
        keys_values = torch.stack([key, value])
        for hop in range(ranks):
            arriving, transfer = _pass_on(keys_values, group) if hop < ranks - 1 else (keys_values, [])
            keys, values = keys_values.unbind()
            if hop == 0:
                out, lse = _forward(query, keys, values, is_causal=True)
                # selective recomputation keeps what the kernel returned, and it must stay as it is
                out, lse = out.to(torch.float32, copy=True), lse.clone()
            else:
                rows, columns = _meeting(hop, rank, half)
                part = _forward(query[:, :, rows], keys[:, :, columns], values[:, :, columns], is_causal=False)
                out[:, :, rows], lse[:, :, rows] = _weighed(out[:, :, rows], lse[:, :, rows], *part)
            _wait(transfer)
            keys_values = arriving
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx, gradient):
        """Nothing is waited for before a block was computed behind it. The gradients of a rank's keys go round one hop
        behind them, and home. Half of the heads meet their own keys first, while the next keys arrive, and half last,
        while the gradients come home. With a single head these are waited for."""
        query, key, value, out, lse = ctx.saved_tensors
        group, ranks, rank, half = ctx.group, ctx.group.size(), ctx.group.rank(), query.shape[2] // 2
        tensors = (gradient.contiguous(), query, key, value, out, lse)
        some = -(-query.shape[1] // 2)  # of the heads
        of_query = torch.zeros_like(query, dtype=torch.float32)
        keys_values, returning = torch.stack([key, value]), []
        of_keys = torch.zeros_like(keys_values, dtype=torch.float32)  # of those that come next
        arriving, transfer = _pass_on(keys_values, group)
        own = [_backward(*(each[:, :some] for each in tensors), is_causal=True)]
        for hop in range(1, ranks):
            _wait(transfer)
            keys_values = arriving
            if hop < ranks - 1:
                arriving, transfer = _pass_on(keys_values, group)
            keys, values = keys_values.unbind()
            rows, columns = _meeting(hop, rank, half)
            mine = [each[:, :, rows] for each in tensors]
            mine[2:4] = keys[:, :, columns], values[:, :, columns]
            parts = _backward(*mine, is_causal=False)
            of_query[:, :, rows] += parts[0]
            _wait(returning)
            of_keys[0, :, :, columns] += parts[1]
            of_keys[1, :, :, columns] += parts[2]
            leaving = of_keys  # lives until it was sent
            of_keys, returning = _pass_on(leaving, group)
        if query.shape[1] > some:
            own.append(_backward(*(each[:, some:] for each in tensors), is_causal=True))
        own_query, *own_keys = (torch.cat(both, 1) for both in zip(*own, strict=True))
        _wait(returning)
        of_key, of_value = of_keys + torch.stack(own_keys)
        return (of_query + own_query).to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None


def _meeting(hop: int, rank: int, half: int) -> tuple[slice, slice]:
    """Return the queries of a rank, and the keys that came `hop` ranks far, that meet. Of an earlier rank: all queries
    come after the first chunk of keys and before the second. Of a later rank: only the second chunk of queries comes
    after them, and after both chunks."""
    return (slice(None), slice(None, half)) if hop <= rank else (slice(half, None), slice(None))


def _weighed(out, lse, more_out, more_lse):
    """Return attention to two sets of keys, of the attention to each and its logarithm of the sum of exponents."""
    both = torch.logaddexp(lse, more_lse)
    weight, more_weight = (lse - both).exp().unsqueeze(-1), (more_lse - both).exp().unsqueeze(-1)
    return out.float() * weight + more_out.float() * more_weight, both


def _pass_on(tensor: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, list[dist.Work]]:
    """Send a tensor round the ring. Returns what the rank before sends, and what to wait for."""
    ranks, rank = group.size(), group.rank()
    return pass_on(tensor, group, to=(rank + 1) % ranks, source=(rank - 1) % ranks)


def _wait(transfer: list[dist.Work]) -> None:
    for work in transfer:
        work.wait()


# The kernels by their own names, as only these return and take the logarithm of the sum of exponents, (B, H, t) fp32.
def _forward(query, key, value, is_causal):
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)
    return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[:2]


def _backward(gradient, query, key, value, out, lse, is_causal):
    lse = lse.contiguous()
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, lse, 0.0, is_causal
        )
    lengths = query.shape[2], key.shape[2]
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the random state of a dropout that is 0
    return aten._scaled_dot_product_flash_attention_backward(
        gradient, query, key, value, out, lse, None, None, *lengths, 0.0, is_causal, unused, unused
    )


def gathered_attention(
    group: dist.ProcessGroup, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float
) -> torch.Tensor:
    """Return causal attention of this rank's (B, H, t, D) queries to the keys of all ranks, which are gathered."""
    assert dropout == 0.0, "config/compatibility.py refuses it"
    ranks, rank, chunk = group.size(), group.rank(), query.shape[2] // 2
    keys, values = _Gathered.apply(torch.stack([key, value]), group)
    if query.device.type == "cpu" and torch.backends.cuda.flash_sdp_enabled():  # --attention; of the CPU's kernels too
        return _OfChunks.apply(query, keys, values, rank, ranks)
    parts = []
    for queries, number in zip(query.chunk(2, 2), (rank, 2 * ranks - 1 - rank), strict=True):
        end = (number + 1) * chunk  # the keys up to the last of these queries
        is_seen = torch.ones(chunk, end, dtype=torch.bool, device=query.device).tril(end - chunk)
        parts.append(F.scaled_dot_product_attention(queries, keys[:, :, :end], values[:, :, :end], attn_mask=is_seen))
    return torch.cat(parts, 2)


class _OfChunks(torch.autograd.Function):
    """Attention of a rank's two chunks of queries to the whole sequence: causal to the keys of the same chunk, and to
    all keys before it. A mask of chunk x sequence, which one call would need, is kept for backward in fp32."""

    @staticmethod
    def forward(ctx, query, keys, values, rank, ranks):
        ctx.begins = [number * (query.shape[2] // 2) for number in (rank, 2 * ranks - 1 - rank)]
        found = []
        for queries, begin in zip(query.chunk(2, 2), ctx.begins, strict=True):
            (out, lse), *earlier = (
                _forward(queries, keys[:, :, part], values[:, :, part], is_causal)
                for part, is_causal in _parts_of_keys(begin, queries.shape[2])
            )
            for part in earlier:
                out, lse = _weighed(out, lse, *part)
            found.append((out.to(query.dtype), lse))
        out, lse = (torch.cat(both, 2) for both in zip(*found, strict=True))
        ctx.save_for_backward(query, keys, values, out, lse)
        return out

    @staticmethod
    def backward(ctx, gradient):
        query, keys, values, out, lse = ctx.saved_tensors
        of_query, of_keys, of_values = (torch.zeros_like(each, dtype=torch.float32) for each in (query, keys, values))
        half = query.shape[2] // 2
        for number, begin in enumerate(ctx.begins):
            rows = slice(number * half, (number + 1) * half)
            mine = [each[:, :, rows].contiguous() for each in (gradient, query, out, lse)]
            for part, is_causal in _parts_of_keys(begin, half):
                found = _backward(*mine[:2], keys[:, :, part], values[:, :, part], *mine[2:], is_causal)
                of_query[:, :, rows] += found[0]
                of_keys[:, :, part] += found[1]
                of_values[:, :, part] += found[2]
        return of_query.to(query.dtype), of_keys.to(keys.dtype), of_values.to(values.dtype), None, None


def _parts_of_keys(begin: int, length: int) -> list[tuple[slice, bool]]:
    """Return the keys that a chunk of queries meets: those of the same chunk, causally, and those before it."""
    own = (slice(begin, begin + length), True)
    return [own, (slice(0, begin), False)] if begin else [own]


class _Gathered(torch.autograd.Function):
    """(2, B, H, t, D) of each rank -> the whole sequence in its own order. Backward adds up and cuts."""

    @staticmethod
    def forward(ctx, mine, group):
        ranks, seq_length = group.size(), mine.shape[3] * group.size()
        order = [order_of_rank(seq_length, ranks, rank, mine.device) for rank in range(ranks)]
        ctx.group, ctx.order = group, torch.cat(order)
        everyone = mine.new_empty(ranks * mine.shape[0], *mine.shape[1:])
        dist.all_gather_into_tensor(everyone, mine.contiguous(), group=group)
        return torch.cat(everyone.chunk(ranks), dim=3).index_select(3, ctx.order.argsort())

    @staticmethod
    def backward(ctx, gradient):
        pieces = gradient.index_select(3, ctx.order).chunk(ctx.group.size(), dim=3)
        mine = torch.empty_like(pieces[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter_tensor(mine, torch.cat(pieces), group=ctx.group)
        return mine, None


METHODS = {"ring": ring_attention, "allgather": gathered_attention}
