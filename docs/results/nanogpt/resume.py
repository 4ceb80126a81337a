"""Let nanoGPT's own train.py go on from a run of this program, and a run from what that train.py saves.

    python docs/results/nanogpt/resume.py NANOGPT_CLONE EMPTY_FOLDER

The clone has the data of its data/shakespeare_char/prepare.py.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))

from testbed.config.check import check_run
from testbed.config.flags import parse_command_line
from testbed.distributed.launch import Launch
from testbed.train.batches import TrainingBatches

REPOSITORY = Path(__file__).resolve().parents[3]
CLONE, FOLDER = (Path(word).resolve() for word in sys.argv[1:])
DATA = CLONE / "data" / "shakespeare_char"
STEPS, OURS_SAVES, THEIRS_SAVES = 20, 8, 14
MODEL = "--num_layers 2 --num_heads 2 --embedding_size 64 --max_position_embeddings 64"
WORK = (
    f"--train_data_path {DATA}/train.bin --val_data_path {DATA}/val.bin --seq_length 64 --global_batch_size 8 "
    "--micro_batch_size_per_gpu 8 --precision fp32 --device cpu --max_val_steps 0 --sample_tokens 0 --dropout 0 "
    f"--learning_rate 1e-3 --lr_schedule constant --warmup_steps 0 --weight_decay 0.1 --adam_beta2 0.95 "
    f"--max_train_steps {STEPS} --gelu exact"
)
OF_NANOGPT = (
    "config/train_shakespeare_char.py --init_from=resume --device=cpu --compile=False --dtype=float32 --log_interval=1 "
    "--block_size=64 --batch_size=8 --dropout=0.0 --decay_lr=False --learning_rate=1e-3 --beta2=0.95 --eval_iters=0 "
    f"--always_save_checkpoint=True --max_iters={STEPS - 1} --eval_interval={THEIRS_SAVES}"
)
PATCHES = {  # to a copy of nanoGPT: the same batches in the same order; losses with all digits
    "train.py": {
        "def get_batch(split):": "def get_batch(split, places=[]):\n"
        "    places.append(places[-1] + 1 if places else iter_num)\n"
        "    batch = torch.from_numpy(np.load(os.environ['BATCHES'])[places[-1]])\n"
        "    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()",
        "loss {lossf:.4f}": "loss {lossf!r}",
    },
}


def ours(words: str, name: str) -> dict[int, float]:
    """Train. Returns the loss of each step, from 1."""
    command = [sys.executable, REPOSITORY / "src" / "gpt2.py", *WORK.split(), *words.split()]
    subprocess.run([*command, "--checkpoint_path", FOLDER / name], check=True, stdout=subprocess.DEVNULL)
    rows = json.loads((FOLDER / name / "training_metrics.json").read_text())["steps"]
    return {row["step"]: row["loss"] for row in rows}


def convert(source: Path, to: Path) -> None:
    program = REPOSITORY / "scripts" / "convert_checkpoint.py"
    subprocess.run([sys.executable, program, "--from", source, "--to", to], check=True, stdout=subprocess.DEVNULL)


def theirs() -> dict[int, float]:
    """Let train.py go on from out/ckpt.pt, and save on its way. Returns the loss of each step, from 1."""
    command = [sys.executable, "train.py", *OF_NANOGPT.split(), f"--out_dir={FOLDER / 'out'}"]
    environment = os.environ | {"BATCHES": str(FOLDER / "batches.npy")}
    done = subprocess.run(
        command, cwd=FOLDER / "nanoGPT", check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    return {int(step) + 1: float(loss) for step, loss in re.findall(r"iter (\d+): loss ([\d.e-]+)", done.stdout)}


def compare(title: str, before: dict[int, float], after: dict[int, float]) -> None:
    shared = sorted(before.keys() & after.keys())
    for step in shared:
        print(f"  step {step}: {before[step]:.9f} {after[step]:.9f}")
    farthest = max(abs(before[step] - after[step]) for step in shared)
    print(f"{title}: steps {shared[0]} to {shared[-1]}, losses at most {farthest:.1e} apart")
    assert farthest < 1e-5


checked = check_run(parse_command_line([*WORK.split(), *MODEL.split()]), Launch(0, 0, 1, 1))
batches = TrainingBatches(checked.train_file, checked.settings, 0, torch.device("cpu"))
micros = [batches.of_step(step)[0] for step in range(STEPS + 1)]  # nanoGPT fetches one ahead
np.save(FOLDER / "batches.npy", np.stack([np.concatenate([m.inputs, m.targets[:, -1:]], 1) for m in micros]))
subprocess.run(["git", "clone", "-q", CLONE, FOLDER / "nanoGPT"], check=True)
for file, changes in PATCHES.items():
    text = (FOLDER / "nanoGPT" / file).read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, (file, old)
        text = text.replace(old, new)
    (FOLDER / "nanoGPT" / file).write_text(text)
(FOLDER / "nanoGPT" / "data" / DATA.name / "meta.pkl").write_bytes((DATA / "meta.pkl").read_bytes())
(FOLDER / "out").mkdir()

whole = ours(f"{MODEL} --save_every {OURS_SAVES} --keep_last 3", "whole")
convert(FOLDER / "whole" / "checkpoints" / f"step_{OURS_SAVES:06d}", FOLDER / "out" / "ckpt.pt")
resumed = theirs()
compare("nanoGPT from our checkpoint, against our uninterrupted run", whole, resumed)
convert(FOLDER / "out" / "ckpt.pt", FOLDER / "converted")
further = ours(f"--resume {FOLDER / 'converted'}", "further")
compare("ours from nanoGPT's checkpoint, against its uninterrupted run", resumed, further)
