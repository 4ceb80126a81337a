"""Every strategy computes what one process computes, and one process computes what transformers does.

Loss and unclipped gradient norm, with clipping active and inactive: AdamW hides a wrong gradient scale while clipping
is active, and a wrong norm does nothing while it is not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SEQUENCE, TINY_RUN, VOCABULARY, data_flags
from test_model import reference_model

from testbed.data import TrainingBatches
from testbed.flags import parse_command_line
from testbed.launch import Launch
from testbed.model import GPT2, to_transformers
from testbed.model_shape import ModelShape
from testbed.optimizer import learning_rate_at
from testbed.settings import check_run

WORKER = Path(__file__).parent / "agreement_worker.py"
CLIPPING = {"clipping": "0.25", "not_clipping": "1e9"}  # the norms of these runs lie between 0.4 and 3
STEPS = 6
TOLERANCE = 5e-6  # float32 sums in another order
WEIGHT_TOLERANCE = 1e-5  # relative, of the weights as one vector

# run type -> the flags of each of its variants
VARIANTS = {
    "zero_0": ["--run_type", "optimized", "--zero_stage", "0"],
    "zero_1": ["--run_type", "optimized", "--zero_stage", "1"],
    "zero_2": ["--run_type", "optimized", "--zero_stage", "2"],
    "zero_3": ["--run_type", "optimized", "--zero_stage", "3"],
}


def case_flags(token_files, variant_flags: list[str], max_grad_norm: str) -> list[str]:
    """Accumulation on every rank: 16 = 2 x 8 on one rank, 2 x 4 x 2 on two."""
    return [
        *TINY_RUN,
        *data_flags(token_files),
        *["--global_batch_size", "16", "--micro_batch_size_per_gpu", "2", "--max_train_steps", str(STEPS)],
        *["--learning_rate", "0.01", "--warmup_steps", "2", "--max_grad_norm", max_grad_norm],
        *variant_flags,
    ]


def run_cases(folder: Path, cases: list[list[str]], ranks: int) -> list[dict]:
    """Start the worker; a rank that fails shows what it said."""
    (folder / "cases.json").write_text(json.dumps(cases))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, str(WORKER), str(folder / "out.json"), str(folder / "cases.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "out.json").read_text())


@pytest.fixture(scope="module")
def single_process(token_files, tmp_path_factory) -> dict[str, dict]:
    """The baseline, for each way of clipping."""
    cases = [case_flags(token_files, ["--run_type", "baseline"], limit) for limit in CLIPPING.values()]
    return dict(zip(CLIPPING, run_cases(tmp_path_factory.mktemp("baseline"), cases, 1), strict=True))


@pytest.fixture(scope="module")
def two_ranks(request, token_files, tmp_path_factory) -> dict[str, dict]:
    """One launch of two ranks for a variant, which trains once for each way of clipping."""
    cases = [case_flags(token_files, VARIANTS[request.param], limit) for limit in CLIPPING.values()]
    return dict(zip(CLIPPING, run_cases(tmp_path_factory.mktemp(request.param), cases, 2), strict=True))


@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize("two_ranks", VARIANTS, indirect=True)
def test_two_ranks_follow_the_single_process(single_process, two_ranks, clipping):
    expected, actual = single_process[clipping], two_ranks[clipping]
    assert (expected["world_size"], actual["world_size"]) == (1, 2)
    for windows in actual["first_windows"]:
        assert windows[0] != windows[1], "ranks train on different data"
    limit = float(CLIPPING[clipping])
    assert (min(expected["grad_norms"]) > limit) == (clipping == "clipping"), "the case tests what it says"
    assert actual["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
    assert actual["grad_norms"] == pytest.approx(expected["grad_norms"], abs=TOLERANCE)
    assert actual["val_tokens"] == expected["val_tokens"]
    assert actual["val_loss"] == pytest.approx(expected["val_loss"], abs=TOLERANCE)
    weights, reference = np.array(actual["weights"]), np.array(expected["weights"])
    assert np.linalg.norm(weights - reference) / np.linalg.norm(reference) < WEIGHT_TOLERANCE


@pytest.mark.parametrize("clipping", CLIPPING)
def test_the_single_process_follows_transformers(single_process, token_files, clipping):
    """The same initial weights in GPT2LMHeadModel, its own loss, the whole batch at once, PyTorch's plain AdamW and
    clipping: no part of the step is ours. This is what a broken tie, scale or data order fails on."""
    flags = case_flags(token_files, ["--run_type", "baseline"], CLIPPING[clipping])
    checked = check_run(parse_command_line(flags), Launch(0, 0, 1, 1))
    settings = checked.settings
    shape = ModelShape(2, 2, 32, VOCABULARY, 64)
    model = reference_model(shape).train()
    torch.manual_seed(settings.seed)
    model.load_state_dict(to_transformers(GPT2(shape).state_dict(), shape), strict=False)
    decaying = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decaying, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False)
    batches = TrainingBatches(checked.train_file, settings, 0, torch.device("cpu"))
    expected = single_process[clipping]
    for step in range(STEPS):
        tokens = checked.train_file.tokens.astype(np.int64)
        windows = batches.windows_of_step(step)
        rows = torch.from_numpy(np.stack([tokens[w * SEQUENCE : w * SEQUENCE + SEQUENCE + 1] for w in windows]))
        logits = model(rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), float(CLIPPING[clipping]))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, settings)
        optimizer.step()
        assert loss.item() == pytest.approx(expected["losses"][step], abs=TOLERANCE), f"loss of step {step}"
        assert norm.item() == pytest.approx(expected["grad_norms"][step], abs=TOLERANCE), f"norm of step {step}"
