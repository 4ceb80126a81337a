"""What peers.json says before the first run: the machine, the work, who is compared, and what cannot be. No torch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from testbed.data.windows import num_windows
from testbed.experiments.peers import PEERS, nanogpt
from testbed.experiments.peers.plan import Plan, merged_sets
from testbed.experiments.peers.running import PeerRunner
from testbed.io import result_head
from testbed.model.flops import flops_per_token_palm
from testbed.model.shape import size_name

PEERS_FILE, SCHEMA_VERSION = "peers.json", "1.1"


def beginning(
    command_line: str, facts: Mapping[str, Any], plan: Plan, runner: PeerRunner, peers: Sequence[str], repeats: int
) -> dict[str, Any]:
    """The file without runs; `facts` are those of PeerRunner.facts."""
    settings = runner.settings
    return {
        **result_head(SCHEMA_VERSION, command_line),
        "status": "running",
        **facts,
        "threads": runner.threads,
        "nanogpt": None if runner.nanogpt_dir is None else nanogpt.identity(runner.nanogpt_dir),
        "work": {
            "model_name": size_name(settings.shape),
            "model_size": settings.shape.describe(),
            "num_parameters": settings.shape.num_parameters,
            "vocab_size": settings.model.vocab_size,
            "padded_vocab_size": settings.shape.padded_vocab_size,
            "batch_size": settings.batch.global_batch_size,
            "micro_batch_size": settings.batch.micro_batch_size_per_gpu,
            "seq_length": settings.data.seq_length,
            "steps": settings.last_step,
            "warmup_steps": runner.warmup_steps,
            "learning_rate": settings.optimizer.learning_rate,
            "seed": settings.training.seed,
            "val_sequences": _val_sequences(runner),
            "flops_per_token_palm": flops_per_token_palm(settings.shape, settings.data.seq_length),
            "repeats": repeats,
            "only_ours": list(runner.only_ours),
        },
        "peers": {peer: _peer(peer, plan, runner) for peer in peers},
        "sets": [
            {"names": names, "arms": [{"peer": arm.peer, "precision": arm.precision} for arm in arms]}
            for names, arms in merged_sets(plan.sets)
        ],
        "not_measured": dict(plan.not_measured),
        "skipped": dict(plan.skipped),
        "runs": [],
        "ceilings": [],
    }


def _val_sequences(runner: PeerRunner) -> int:
    """Windows that every trainer is validated on."""
    settings = runner.settings
    assert runner.checked is not None and settings.training.max_val_steps is not None
    windows = num_windows(runner.checked.val_file, settings.data.seq_length)
    return min(windows, settings.training.max_val_steps * settings.batch.global_batch_size)


def _peer(peer: str, plan: Plan, runner: PeerRunner) -> dict[str, Any]:
    entry = PEERS[peer]
    commands = {arm.precision: shlex.join(runner.command(arm)) for arm in plan.arms if arm.peer == peer}
    return {
        "summary": entry.summary,
        "differs": list(entry.differs),
        "has_our_batches": entry.has_our_batches,
        "commands": commands,
    }
