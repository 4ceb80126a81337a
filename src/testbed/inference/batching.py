"""Continuous batching: requests arrive, join the running batch and leave it between two steps.

A step emits one token of every request in the batch: requests that join get their first token from one padded prefill,
those that run already from one decode step over the cache (iteration-level scheduling, Yu et al. 2022, "Orca").

Running requests fill the cache's slots from 0 on without a gap, so a decode step reads views of the cache and copies
nothing. When one leaves, the last one moves into its slot.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from testbed.errors import InputError
from testbed.inference.cached_model import CachedModel
from testbed.inference.kv_cache import KVCache
from testbed.inference.sampling import GREEDY, NOT_A_TOKEN, Sampling, next_tokens
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape

WAITING, RUNNING, FINISHED, CANCELLED, FAILED = "waiting", "running", "finished", "cancelled", "failed"
PADDING_ID = 0  # any id will do: no sequence's own tokens see what stands behind them


@dataclass(eq=False)
class GenerationRequest:
    """A sequence to be continued. The engine fills in the fields below `stop_id`.

    Attributes:
        stop_id: the token that ends it, usually end-of-text; it is the last of `tokens` then.
        id: given by `submit`, in order of arrival.
        tokens: new token ids so far.
        state: "waiting", "running", "finished", "cancelled", or "failed": its logits were not numbers.
    """

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    stop_id: int | None = None
    id: int | None = field(default=None, init=False)
    tokens: list[int] = field(default_factory=list, init=False)
    state: str = field(default=WAITING, init=False)
    random: random.Random = field(init=False, repr=False)
    uniform: float = field(init=False, repr=False)  # the next random number, kept until a token was drawn with it

    def __post_init__(self) -> None:
        self.random = random.Random(self.sampling.seed)
        self.uniform = self.random.random()

    @property
    def length(self) -> int:
        """Tokens of the prompt and new ones."""
        return len(self.prompt) + len(self.tokens)


class QueueFull(Exception):
    """The queue holds max_queue requests; submit it again later."""


def shape_of(module: nn.Module) -> ModelShape:
    """Return the shape of a GPT2 or a CachedModel."""
    shape = module.shape
    assert isinstance(shape, ModelShape), "a wrapper hides the shape of its model"
    return shape


class BatchingEngine:
    """Run requests in one batch. Not for several threads at once.

    The same calls in the same order give the same tokens. A request's tokens do not depend on its neighbours, but for
    rounding: a matrix product of other sizes may sum in another order, and where two tokens are equally likely to the
    last digits, that decides.

    Args:
        module: a GPT2, a CachedModel, or a wrapper with a `shape` that passes a CachedModel's call on.
        max_batch: slots, thus requests that run at a time.
        max_queue: requests that may wait for a slot.
        max_length: positions of a slot: of a prompt and its new tokens together (default: all of the model's).
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        max_batch: int = 8,
        max_queue: int = 64,
        max_length: int | None = None,
    ):
        self.module = CachedModel(module) if isinstance(module, GPT2) else module
        self.shape = shape_of(self.module)
        positions = self.shape.max_position_embeddings
        self.max_length = positions if max_length is None else max_length
        for name, number in {"max_batch": max_batch, "max_queue": max_queue, "max_length": self.max_length}.items():
            if number < 1:
                raise InputError(f"{name} {number} must be at least 1")
        if self.max_length > positions:
            raise InputError(f"max_length {self.max_length} is more than the {positions} positions of the model")
        parameter = next(self.module.parameters())
        self.max_batch, self.max_queue = max_batch, max_queue
        self.cache = KVCache(self.shape, max_batch, self.max_length, parameter.device, parameter.dtype)
        self._waiting: deque[GenerationRequest] = deque()
        self._running: list[GenerationRequest] = []  # the request in slot i stands at place i
        self._ids = itertools.count()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_free_slots(self) -> int:
        return self.max_batch - len(self._running)

    def submit(self, request: GenerationRequest) -> GenerationRequest:
        """Put a new request into the queue, and return it.

        Raises:
            InputError: it can never run here: an empty prompt, too long, an id that the model does not know.
            QueueFull: not now.
        """
        self._check(request)
        if len(self._waiting) >= self.max_queue:
            raise QueueFull(f"{self.max_queue} requests wait already; submit it again later")
        request.id = next(self._ids)
        self._waiting.append(request)
        return request

    def _check(self, request: GenerationRequest) -> None:
        prompt, new = request.prompt, request.max_new_tokens
        if request.id is not None:
            raise InputError(f"request {request.id} was submitted before; make a new one")
        if not prompt:
            raise InputError("the prompt is empty; give at least one token, for example end-of-text")
        if new < 1:
            raise InputError(f"max_new_tokens {new} must be at least 1")
        unknown = next((token for token in prompt if not 0 <= token < self.shape.vocab_size), None)
        if unknown is not None:
            raise InputError(
                f"the prompt holds token id {unknown}, but the model knows 0 to {self.shape.vocab_size - 1}; it was "
                "made with another tokenizer"
            )
        if len(prompt) + new > self.max_length:
            limit, whole = self.max_length, self.max_length == self.shape.max_position_embeddings
            raise InputError(
                f"{len(prompt)} tokens of prompt and {new} new ones are {len(prompt) + new}, more than the {limit} "
                f"positions of {'the model' if whole else 'a slot of the cache'}; shorten the prompt or ask for fewer"
            )

    def cancel(self, request: GenerationRequest) -> bool:
        """End a request that waits or runs; its slot is free at once. False: it had ended before, or is not known."""
        if request in self._running:
            self._leave(self._running.index(request), CANCELLED)
        elif request in self._waiting:
            self._waiting.remove(request)
            request.state = CANCELLED
        else:
            return False
        return True

    @torch.inference_mode()
    def step(self) -> list[tuple[GenerationRequest, int]]:
        """Admit waiting requests into free slots, and emit one token of every request that now runs.

        The host waits for the device once, for the tokens. When a step fails, every request stays where it was, and the
        next step does the same again, random draws included.

        Returns:
            Each request with its new token, in the order of the slots. Those that end with it have left already.

        Raises:
            ArithmeticError: the logits of some requests are not numbers. These have ended (state "failed"); the others
                go on with the next step.
        """
        joining = list(itertools.islice(self._waiting, self.num_free_slots))
        batch = self._running + joining
        if not batch:
            return []
        logits = []
        if self._running:
            logits.append(self._forward([request.tokens[-1:] for request in self._running], 0, self._running))
        if joining:
            logits.append(self._forward([request.prompt for request in joining], len(self._running), joining))
        samplings = [request.sampling for request in batch]
        chosen = next_tokens(torch.cat(logits), samplings, [request.uniform for request in batch])
        tokens = chosen.tolist()  # the only wait for the device
        if NOT_A_TOKEN in tokens:
            self._fail([slot for slot, token in enumerate(tokens) if token == NOT_A_TOKEN], batch)
            raise ArithmeticError(
                "the model's logits are not numbers: its training diverged, or its weights are damaged"
            )
        for request in joining:
            self._waiting.popleft()
            request.state = RUNNING
        self._running += joining
        for request, token in zip(batch, tokens, strict=True):
            request.tokens.append(token)
            request.uniform = request.random.random()
        for slot in reversed(range(len(batch))):  # from the end: what moves into a slot was looked at before
            request = batch[slot]
            if request.tokens[-1] == request.stop_id or len(request.tokens) == request.max_new_tokens:
                self._leave(slot, FINISHED)
        return list(zip(batch, tokens, strict=True))

    def _forward(
        self, rows: Sequence[Sequence[int]], first_slot: int, requests: Sequence[GenerationRequest]
    ) -> torch.Tensor:
        """Return the (R, V) logits after the tokens of `rows`, which are filled up to the longest one."""
        longest = max(map(len, rows))
        ids = torch.tensor([[*row, *[PADDING_ID] * (longest - len(row))] for row in rows])
        lengths = [request.length for request in requests]
        return self.module(ids.to(self.cache.data.device, non_blocking=True), self.cache, first_slot, lengths)

    def _fail(self, slots: Sequence[int], batch: Sequence[GenerationRequest]) -> None:
        """End the requests in these slots of a step whose tokens are not taken, and leave nothing of theirs there."""
        for slot in reversed(slots):  # from the end: what moves into a slot is not among them
            self.cache.clear_slot(slot)
            if slot < len(self._running):
                self._leave(slot, FAILED)
            else:
                self._waiting.remove(batch[slot])
                batch[slot].state = FAILED

    def _leave(self, slot: int, state: str) -> None:
        """End the request in a slot; the last running one takes its place."""
        request, last = self._running[slot], self._running.pop()
        if last is not request:
            self.cache.copy_slot(len(self._running), slot, last.length - 1)  # its newest token is not read yet
            self._running[slot] = last
        request.state = state
