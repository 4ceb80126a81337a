#!/usr/bin/env python3
"""Train GPT-2 with another trainer, with flags and files of src/gpt2.py.

    python scripts/more/train_peer.py transformers --model nano --max_train_steps 50
    python scripts/more/train_peer.py nanogpt=../nanoGPT --model nano --max_train_steps 50

PEER, then flags of src/gpt2.py (docs/flags.md):
  transformers       transformers' Trainer with GPT2LMHeadModel and SDPA attention
  transformers-loop  the same model in a plain PyTorch loop with fused AdamW
  nanogpt=DIR        the model of a clone of nanoGPT in the same loop

All begin with the weights of src/gpt2.py and get its batches. --precision and --compile hold for them too; the compiler
takes the whole model. The run's training_metrics.json compares with those of src/gpt2.py (scripts/compare_runs.py,
scripts/more/compare_peers.py). Exit codes as those of src/gpt2.py.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # this checkout's code, installed or not

from testbed.config.check import check_command_line
from testbed.config.settings import CheckedRun
from testbed.errors import InputError, say
from testbed.program import program

STARTED_S = time.perf_counter()
PEERS = {"transformers": ("transformers", "accelerate"), "transformers-loop": ("transformers",), "nanogpt": ()}
OURS_ALONE = {  # flag -> the value that other trainers know
    "run_type": "baseline",
    "optimizer": "adamw",
    "matmul": "default",
    "activation_checkpointing": "none",
    "save_every": None,
    "save_at_end": "off",
    "stop_at_step": None,
    "eval_only": False,
    "resume": None,
    "profile": False,
    "label_smoothing": 0.0,
}


def check_peer(words: list[str]) -> tuple[str, Path]:
    """Return the peer's name and the folder of its source. InputError for what cannot be trained here."""
    name, _, folder = (words[0] if words else "").partition("=")
    if name not in PEERS:
        raise InputError(f"{name or 'nothing'!r} is not a peer; give {', '.join(PEERS)} (with =DIR) first")
    if absent := [package for package in PEERS[name] if importlib.util.find_spec(package) is None]:
        raise InputError(f"{name} needs the package {absent[0]}; pip install {' '.join(absent)}")
    if name == "nanogpt" and not (Path(folder) / "model.py").is_file():
        raise InputError(
            f"{words[0]} names no clone of nanoGPT, for it has no model.py; clone https://github.com/karpathy/nanoGPT, "
            "and give nanogpt=DIR"
        )
    return name, Path(folder)


def check_work(name: str, checked: CheckedRun) -> None:
    """Raise InputError for work that other trainers do not do."""
    for flag, value in OURS_ALONE.items():
        found = checked.settings.value(flag)
        if found != value and flag in checked.asked.given:
            raise InputError(f"--{flag} {found} is of src/gpt2.py alone, and {name} has no such thing; leave it out")
    if name == "transformers" and (every := checked.settings.value("eval_every")) is not None:
        raise InputError(
            f"--eval_every {every}: transformers' Trainer is validated at the end of its run; leave it out"
        )
    if checked.settings.compute.precision == "fp16":
        raise InputError(f"--precision fp16 needs a loss scale, which is not built for {name}; use bf16 or fp32")
    if checked.train_file.targets is not None:
        raise InputError(f"{checked.train_file.path} holds pairs, of which references alone are learned; give text")


@program
def main() -> int:
    words = sys.argv[1:]
    if words[:1] in ([], ["-h"], ["--help"]):
        say(__doc__)
        return 0 if words else 2
    name, folder = check_peer(words)
    checked, launch = check_command_line(["--save_at_end", "off", *words[1:]])
    if launch.is_distributed:
        raise InputError("it was started as several ranks; start it once, with python")
    check_work(name, checked)
    say(f"starting {name}: loading PyTorch, checking the data ...", flush=True)

    import gpt2
    from testbed.experiments import peers
    from testbed.train.ending import RunEnding
    from testbed.train.run import finish, open_run

    with RunEnding(checked.settings, launch) as ending:
        run = open_run(checked, launch, ending)
        assert run is not None, "--resume is refused above"
        # compare_runs.py then names the trainer among what differs
        run.report.recorder.metrics["settings"]["trainer"] = name
        if name == "nanogpt":
            peers.use_nanogpt(run, folder)
        else:
            peers.use_transformers(run)
        if name == "transformers":
            peers.train_with_trainer(run, time.perf_counter() - STARTED_S)
        else:
            gpt2.do_steps(run)
        finish(run)
    assert ending.exit_code is not None  # leaving the block above sets it
    return ending.exit_code


if __name__ == "__main__":
    sys.exit(main())
