"""Break every file that a run reads when it starts, but for its data (tests/data/test_fuzz_data.py).

Each is read, or refused in one sentence, and left as it is.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.checkpoint_files_cases import look_at_checkpoint, write_checkpoint
from support.fuzz import READ, REFUSED, Reader, Refused, break_in_every_way, gpt2_accepts
from support.mutations import broken_bytes, broken_safetensors
from support.programs import REPOSITORY, TINY_RUN, VOCABULARY, write_token_files
from torch.distributed.checkpoint.api import CheckpointException

from testbed.checkpoint import folders as checkpoint
from testbed.checkpoint.weights import read_initial_weights, write_weights
from testbed.config.initial_shape import shape_of_folder
from testbed.distributed import watchdog
from testbed.distributed.process_group import root_cause
from testbed.errors import InputError
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape
from testbed.strategies import state_files
from testbed.strategies.deepspeed_config import effective_config, sha256_of

STEP = "checkpoints/step_000020"
SHAPE = ModelShape(num_layers=1, num_heads=2, embedding_size=8, vocab_size=VOCABULARY, max_position_embeddings=64)


def data_in(folder: Path) -> list[str]:
    return ["--train_data_path", str(folder / "train.bin"), "--val_data_path", str(folder / "val.bin")]


def tiny_tokens(folder: Path) -> None:
    write_token_files(folder, train_tokens=2000, val_tokens=400)


def config_file(folder: Path) -> None:
    tiny_tokens(folder)
    checked = gpt2_accepts([*TINY_RUN, *data_in(folder), "--optimizer", "muon", "--lr_schedule", "wsd", "--seed", "7"])
    (folder / "run.json").write_text(json.dumps(checked.settings.as_config()))


def deepspeed_file(folder: Path) -> None:
    tiny_tokens(folder)
    content = json.loads((REPOSITORY / "src" / "deepspeed_config.json").read_text())
    content |= {"train_batch_size": 32, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}}}
    content["zero_optimization"] = {
        **content.get("zero_optimization", {}), "stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    }  # fmt: skip
    content["bf16"], content["fp16"] = {"enabled": "auto"}, {"enabled": False, "loss_scale": 0}
    (folder / "ds.json").write_text(json.dumps(content))


def accept_deepspeed(folder: Path) -> None:
    words = ["--run_type", "optimized", "--deepspeed_config", str(folder / "ds.json"), *TINY_RUN[:-4]]
    checked = gpt2_accepts([*words, *data_in(folder)])
    sha256_of(effective_config(checked.settings))


def weights_folder(folder: Path) -> None:
    tiny_tokens(folder)
    write_weights(folder / "start", GPT2(SHAPE).state_dict(), SHAPE, 0.0, VOCABULARY - 1, f"bpe:{VOCABULARY}")


def accept_weights(folder: Path) -> None:
    words = ["--init_from", str(folder / "start"), "--seq_length", "16", "--checkpoint_path", str(folder / "run")]
    gpt2_accepts([*words, *data_in(folder)])


def load_weights(folder: Path) -> None:
    GPT2(SHAPE).load_state_dict(read_initial_weights(str(folder / "start"), shape_of_folder(folder / "start")))


def state_folder(folder: Path) -> None:
    state_files.save({"model": {"w": torch.ones(2, 3)}}, folder, None)


def load_state(folder: Path) -> None:
    try:
        state_files.load({"model": {"w": torch.zeros(2, 3)}}, folder, None)
    except CheckpointException as error:  # no Exception
        raise InputError(root_cause(error)) from None


def describe_checkpoint(folder: Path) -> None:
    checkpoint.read_description(folder / STEP)


def stranger_in_checkpoint(folder: Path) -> None:
    (write_checkpoint(folder) / "more").write_bytes(b"x")


READERS = {
    "progress of a rank": Reader(
        lambda folder: (folder / ".rank0.progress").write_bytes(bytes(64)),
        ".rank0.progress",
        watchdog.steps_done,
        broken_bytes,
        outcomes=(READ,),
    ),
    "--config": Reader(
        config_file,
        "run.json",
        lambda folder: gpt2_accepts(["--config", str(folder / "run.json")]),
        errors=(Refused,),
        is_named=False,
    ),
    "--deepspeed_config": Reader(deepspeed_file, "ds.json", accept_deepspeed, errors=(Refused,), is_named=False),
    "config.json of --init_from": Reader(
        weights_folder, "start/config.json", accept_weights, errors=(Refused,), is_named=False
    ),
    "model.safetensors of --init_from": Reader(
        weights_folder, "start/model.safetensors", load_weights, broken=broken_safetensors
    ),
    "manifest.json of a checkpoint": Reader(
        write_checkpoint, f"{STEP}/manifest.json", look_at_checkpoint, is_named=False
    ),
    "tensors of a checkpoint": Reader(
        write_checkpoint, f"{STEP}/__0_0.distcp", look_at_checkpoint, broken_bytes, is_named=False, outcomes=(REFUSED,)
    ),
    "a file beside them": Reader(
        stranger_in_checkpoint, f"{STEP}/more", look_at_checkpoint, broken_bytes, is_named=False, outcomes=(READ,)
    ),
    "tensors.json of a checkpoint": Reader(state_folder, "tensors.json", load_state, is_named=False),
    "checkpoint.json of a checkpoint": Reader(write_checkpoint, f"{STEP}/checkpoint.json", describe_checkpoint),
}


@pytest.mark.parametrize("name", READERS)
def test_no_file_breaks_its_reader(tmp_path, name):
    break_in_every_way(name, READERS[name], tmp_path / "files")
