"""Check ring attention by itself. Ranks are threads, and what they send goes through queues, so the order of every call
is known, and the result can be held against attention of the whole sequence."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field

import pytest
import torch

from testbed.strategies import context

B, LENGTH, D = 2, 48, 8


@dataclass
class Ring:
    """A place on a ring of threads; a process group for `context`."""

    number: int
    links: list[queue.Queue]
    did: list[tuple[str, int]] = field(default_factory=list)  # what was posted, computed and waited for, in this order
    sent: list[torch.Tensor] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)  # which of them changed on their way

    def size(self) -> int:
        return len(self.links)

    def rank(self) -> int:
        return self.number

    def pass_on(self, tensor: torch.Tensor) -> tuple[torch.Tensor, list[Transfer]]:
        self.did.append(("post", len(self.sent)))
        self.sent.append(tensor)
        arriving = torch.full_like(tensor, float("nan"))  # until it is waited for
        return arriving, [Transfer(self, len(self.sent) - 1, arriving, tensor.clone())]


@dataclass
class Transfer:
    ring: Ring
    number: int
    arriving: torch.Tensor
    posted: torch.Tensor

    def wait(self) -> None:
        """Deliver what is in the sender's memory only now: a real network may read it until then."""
        ring = self.ring
        ring.did.append(("wait", self.number))
        if not torch.equal(ring.sent[self.number], self.posted):
            ring.changed.append(self.number)
        ring.links[(ring.number + 1) % ring.size()].put((self.number, ring.sent[self.number].clone()))
        number, sent = ring.links[ring.number].get(timeout=60)
        assert number == self.number, "all ranks wait in one order"
        self.arriving.copy_(sent)


def inputs(heads: int) -> list[torch.Tensor]:
    """Queries, keys, values of the whole sequence, and the gradient of what attention makes of them."""
    torch.manual_seed(0)
    return [torch.randn(B, heads, LENGTH, D) for _ in range(4)]


def of_rank(whole: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    return whole[:, :, context.order_of_rank(LENGTH, ranks, rank)]


@pytest.fixture
def on_ring(monkeypatch):
    """Run forward and backward on a ring of threads; the result of each rank, and its `Ring` for both passes."""
    here = threading.local()
    monkeypatch.setattr(context, "_pass_on", lambda tensor, group: group.pass_on(tensor))

    def noted(kernel):
        def computed(*tensors, is_causal):
            here.ring.did.append(("compute", 0))
            return kernel(*tensors, is_causal=is_causal)

        return computed

    monkeypatch.setattr(context, "_forward", noted(context._forward))
    monkeypatch.setattr(context, "_backward", noted(context._backward))

    def run(ranks: int, heads: int) -> tuple[list[list[torch.Tensor]], list[Ring], list[Ring]]:
        whole = inputs(heads)
        results: dict[int, list[torch.Tensor]] = {}
        forward, backward = ([Ring(rank, links) for rank in range(ranks)]
                             for links in ([queue.Queue() for _ in range(ranks)] for _ in range(2)))  # fmt: skip

        def rank_of(number: int) -> None:
            *mine, gradient = (of_rank(each, ranks, number) for each in whole)
            mine = [each.clone().requires_grad_() for each in mine]
            here.ring = forward[number]
            out = context.ring_attention(here.ring, *mine, 0.0)
            here.ring = backward[number]
            out.grad_fn.group = here.ring
            out.backward(gradient)
            results[number] = [out.detach(), *(each.grad for each in mine)]

        threads = [threading.Thread(target=rank_of, args=(number,)) for number in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not any(ring.changed for ring in (*forward, *backward)), "what is sent does not change on its way"
        return [results[rank] for rank in range(ranks)], forward, backward

    return run


@pytest.mark.parametrize(("ranks", "heads"), [(2, 4), (2, 1), (3, 3), (4, 2)])
def test_a_ring_computes_attention_of_the_whole_sequence(on_ring, ranks, heads):
    *whole, gradient = inputs(heads)
    whole = [each.requires_grad_() for each in whole]
    out = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
    out.backward(gradient)
    found, _, _ = on_ring(ranks, heads)
    for rank in range(ranks):
        for expected, mine in zip([out.detach(), *(each.grad for each in whole)], found[rank], strict=True):
            torch.testing.assert_close(mine, of_rank(expected, ranks, rank), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("is_changed_in", ["forward", "backward"])
def test_what_changes_while_it_is_sent_is_found(on_ring, monkeypatch, is_changed_in):
    def emptied(tensor, group):
        passed = group.pass_on(tensor)
        if is_changed_in == ("backward" if torch._C._current_graph_task_id() != -1 else "forward"):
            tensor.zero_()
        return passed

    monkeypatch.setattr(context, "_pass_on", emptied)
    with pytest.raises(AssertionError, match="does not change on its way"):
        on_ring(2, 4)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_ring_waits_for_nothing_behind_which_no_block_was_computed(on_ring, ranks):
    """Neither for keys and values, nor for their gradients on the way back."""
    _, forward, backward = on_ring(ranks, 4)
    for ring in (*forward, *backward):
        posts = [number for what, number in ring.did if what == "post"]
        assert posts == sorted(number for what, number in ring.did if what == "wait"), "all that was sent arrives"
        for number in posts:
            between = ring.did[ring.did.index(("post", number)) : ring.did.index(("wait", number))]
            assert ("compute", 0) in between, ring.did


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_ring_sends_what_the_guide_says(on_ring, ranks):
    """Keys and values go round, N - 1 times both; so do their gradients, and a rank's own gradients stay."""
    _, forward, backward = on_ring(ranks, 4)
    one = B * 4 * LENGTH // ranks * D * 4  # bytes of a rank's keys
    for ring, messages in [
        *((ring, 2 * (ranks - 1)) for ring in forward),
        *((ring, 4 * (ranks - 1)) for ring in backward),
    ]:
        assert sum(tensor.nbytes for tensor in ring.sent) == messages * one
