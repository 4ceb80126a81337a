"""Be one rank that compares and saves states which ranks hold alike, and not alike."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from support.agreement_worker import all_tasks_done
from testbed.distributed import process_group
from testbed.distributed.launch import read_launch
from testbed.distributed.tensors import RanksDiffer
from testbed.strategies import state_files


def main(folder: Path) -> None:
    with all_tasks_done(folder, is_needed=True) as results:
        rank, group = read_launch().rank, state_files.file_group()
        weights = torch.linspace(-1, 1, 2**20 + 7)  # more than one chunk
        one_bit = weights.clone()
        one_bit.view(torch.int32)[-1] ^= rank
        swapped = weights.clone()
        swapped[:2] = weights[:2].flip(0) if rank else weights[:2]
        for model in (
            {"a": weights, "half": weights.bfloat16()[:3], "step": torch.tensor(3.0), "empty": torch.ones(0)},
            {"a": one_bit},
            {"a": weights, "b": swapped},
            {f"stage {rank}": one_bit, "b": weights},
        ):
            results.append(process_group.gather_objects(refusal({"model": model})))
        own = {"model": {"a": weights + rank}}
        if rank == 0:
            (folder / "state").mkdir()
        process_group.wait_for_everyone()
        state_files.save(state_files.of_rank(own, rank), folder / "state", group)
        read = {"model": {"a": torch.zeros_like(weights)}}
        state_files.load(state_files.of_rank(read, rank), folder / "state", group)
        results.append(process_group.gather_objects(torch.equal(read["model"]["a"], own["model"]["a"])))
        results.append(refusals_while_saving(folder / "background", rank, group))


def refusals_while_saving(folder: Path, rank: int, group) -> list:
    """Compare weights while rank 0's disk still writes a checkpoint in the background, and rank 1's is done."""
    process_group.limit_waiting(20.0)
    write_data = state_files._Writer.write_data

    def slowly(*arguments):
        time.sleep(1.0 - rank)
        return write_data(*arguments)

    state_files._Writer.write_data = slowly
    process_group.by_rank_0(folder.mkdir)
    state = {"model": {"a": torch.ones(8)}}
    written = state_files.save(state, folder, group, state_files.HostCopy())
    refused = process_group.gather_objects(refusal(state))
    written.result()
    return refused


def refusal(state: state_files.State) -> str | None:
    try:
        state_files.check_replicated(state)
    except RanksDiffer as error:
        return str(error)
    return None
