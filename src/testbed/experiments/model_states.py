"""Count the model states that a strategy holds on this rank just before an update, with the formulas of
`testbed.autotune.memory_model`.

tests/autotune/test_memory_model.py runs this for strategies on ranks.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from testbed.autotune.memory_model import UPDATE_COPY, model_state_bytes, published_zero_bytes, update_copy_bytes
from testbed.optim.optimizer import local_tensor
from testbed.strategies.stages import balanced_stages

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings
    from testbed.strategies import Strategy

SMALLEST_LISTED = 64 * 1024  # bytes; what is smaller and no model state is not worth a line
TRANSIENT = "transient"  # what is alive and no model state
Storages = dict[int, tuple[int, str]]  # address -> bytes, what it is


def count_before_updates(strategy: Strategy, not_counted: list[torch.Tensor]) -> dict[str, Storages]:
    """Count in the optimizer's pre-hook whenever the dictionary that is returned is empty.

    ZeRO calls it once for each parameter group. At the first call, the matrices', nothing is updated yet: that one
    counts, and it finds the fp32 gradients of that group.
    """
    count: dict[str, Storages] = {}

    def before_update(optimizer: torch.optim.Optimizer, *_) -> None:
        if count:
            return
        states = strategy.model_states()
        buffers = states.pop("buffers", [])  # DeepSpeed's, listed apart; some are held where the walk does not see them
        count.update({kind: storages(tensors) for kind, tensors in states.items()})
        apart = {
            UPDATE_COPY: (p.grad for group in optimizer.param_groups for p in group["params"]),
            TRANSIENT: [*buffers, *live_tensors()],
        }
        for kind, tensors in apart.items():
            known = storages(not_counted).keys() | {address for found in count.values() for address in found}
            count[kind] = {address: what for address, what in storages(tensors).items() if address not in known}

    strategy.optimizer.register_step_pre_hook(before_update)
    return count


def storages(tensors: Iterable[torch.Tensor | None]) -> Storages:
    """Return each allocation once, whatever number of tensors are views of it."""
    found = {}
    for tensor in tensors:
        if tensor is None:
            continue
        storage = local_tensor(tensor).untyped_storage()
        if storage.nbytes() > 0:
            elements = storage.nbytes() // tensor.element_size()
            found[storage.data_ptr()] = (storage.nbytes(), f"{elements:,} {str(tensor.dtype).removeprefix('torch.')}")
    return found


def live_tensors() -> list[torch.Tensor]:
    """Return every CPU tensor that Python knows. What C++ alone holds (saved for a backward pass, say) is not among
    them."""
    gc.collect()  # what only a cycle keeps is not alive
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    # the local part of a DTensor is a tensor of its own
    return [tensor for tensor in tensors if not isinstance(tensor, DTensor) and tensor.device.type == "cpu"]


def beside_formulas(count: dict[str, Storages], settings: RunSettings, rank: int) -> dict[str, Any]:
    """Return a rank's counts in rows with their formulas, and what is transient by description."""
    shape, mesh = settings.shape, settings.plan.mesh
    formulas = model_state_bytes(
        shape,
        mesh,
        zero_stage=settings.deepspeed.zero_stage,
        has_16_bit_weights=settings.compute.mixed_precision == "native",
        optimizer=settings.optimizer.name,
        data_rank=rank,  # only ZeRO asks, and there every rank is a data rank
        # 1F1B has one stage on each rank, and here all ranks are pipeline ranks
        stages=[balanced_stages(shape, settings.data.seq_length, mesh.pipeline)[rank]] if mesh.pipeline > 1 else None,
    )
    paper = {}
    if settings.compute.mixed_precision == "native":
        paper = published_zero_bytes(shape, mesh.data, zero_stage=settings.deepspeed.zero_stage or 3)
    if settings.deepspeed.zero_stage:
        formulas[UPDATE_COPY], paper[UPDATE_COPY] = (
            update_copy_bytes(shape, mesh.data, settings.deepspeed.zero_stage),
            0,
        )
    rows = []
    for kind, formula in formulas.items():
        measured = sum(size for size, _ in count[kind].values())
        row = {"kind": kind, "measured_bytes": measured, "formula_bytes": formula, "paper_bytes": paper.get(kind)}
        rows.append(row)
    transient: dict[str, int] = {}
    for size, what in sorted(count[TRANSIENT].values(), reverse=True):
        if size >= SMALLEST_LISTED:
            transient[what] = transient.get(what, 0) + size
    return {"rows": rows, "transient": transient}


def difference(row: dict[str, Any]) -> float:
    """Return how far a count is off its formula, relative to the formula."""
    return row["measured_bytes"] / row["formula_bytes"] - 1


def table(results: list[dict]) -> list[str]:
    """Return the lines of a table: the rank with the most model states of each run, a line per kind, and what else is
    alive on it."""
    lines = [
        f"{'strategy':<10}{'ranks':>5} {'rank':>5}  "
        f"{'kind':<21}{'measured bytes':>15}{'formula bytes':>15}{'off by':>9}{'ZeRO paper':>13}"
    ]
    for result in results:
        totals = [sum(row["measured_bytes"] for row in of["rows"]) for of in result["per_rank"]]
        rank = totals.index(max(totals))
        of_rank = result["per_rank"][rank]
        lines.append("")
        for row in of_rank["rows"]:
            numbers = f"{row['measured_bytes']:>15,}{row['formula_bytes']:>15,}{difference(row):>+9.2%}"
            numbers += "" if row["paper_bytes"] is None else f"{row['paper_bytes']:>13,}"
            lines.append(f"{result['strategy']:<10}{result['ranks']:>5} {rank:>5}  {row['kind']:<21}{numbers}")
        apart = f"{sum(of_rank['transient'].values()):>15,}"
        named = ", ".join(f"{what} {size:,}" for what, size in of_rank["transient"].items())
        lines.append(f"{'':<23}{'transient and other':<21}{apart}  {named}".rstrip())
    return lines
