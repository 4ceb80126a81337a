"""What validation decides and measures besides the loss: --early_stop_patience and --eval_multiple_choice."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.programs import REPOSITORY, TINY_RUN, data_flags, run_here

from testbed.checkpoint.decide import _since_best
from testbed.checkpoint.weights import read_initial_weights
from testbed.config.initial_shape import shape_of_folder
from testbed.data.tokenizer_file import load_tokenizer_file
from testbed.distributed import process_group
from testbed.inference import multiple_choice
from testbed.inference.multiple_choice import accuracies, ending_nats
from testbed.inference.questions import Question, read_questions
from testbed.metrics.file import read_metrics
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape
from testbed.train.multiple_choice import answer

# too high a rate for the loss to fall for long
RESTLESS = (
    "--max_train_steps 60 --eval_every 2 --max_val_steps 1 --sample_tokens 0 --learning_rate 0.3 --warmup_steps 1 "
    "--max_grad_norm 0 --timing_warmup_steps 1 --global_batch_size 8 --resume auto"
).split()


def run(ranks, files, folder: Path, *flags: str, number: int = 1):
    command = [*TINY_RUN, *data_flags(files), "--checkpoint_path", str(folder), *flags]
    return ranks.run_program(command, folder.with_name(f"{folder.name}.{len(list(folder.parent.iterdir()))}"), number)


@pytest.mark.parametrize(
    ("losses", "expected"), [([], 0), ([3.0], 0), ([3.0, 2.0], 0), ([2.0, 3.0, 2.0], 2), ([3.0, 2.0, 2.5, 2.1], 2)]
)
def test_validations_count_from_the_first_of_the_lowest_loss(losses, expected):
    assert _since_best([{"val_loss": loss} for loss in losses]) == expected


@pytest.mark.launches
def test_a_run_out_of_patience_ends_there_and_is_complete(ranks, files, tmp_path):
    """Interrupted and resumed, on two ranks, it ends at the same step; with more patience it goes on."""
    folder = tmp_path / "run"
    done = run(ranks, files, folder, *RESTLESS, "--early_stop_patience", "3", "--keep_best")
    assert done.returncode == 0, done.stderr
    metrics = read_metrics(folder / "training_metrics.json")
    last, losses = metrics["steps"][-1]["step"], [row["val_loss"] for row in metrics["evaluations"]]
    assert last == 2 * len(losses) < 60 and losses.index(min(losses)) == len(losses) - 4
    assert f"training ends after step {last}, as 3 validations in a row brought no loss below" in done.stdout
    assert metrics["status"] == "complete" and metrics["segments"][-1]["ended"] == "stopped"
    assert (folder / "checkpoints" / f"step_{last:06d}").is_dir() and (folder / "best").is_dir()

    parts = tmp_path / "parts"
    flags = [*RESTLESS, "--early_stop_patience", "3", "--run_type", "ddp"]
    assert run(ranks, files, parts, *flags, "--stop_at_step", str(last - 2), number=2).returncode == 0
    assert run(ranks, files, parts, *flags, number=2).returncode == 0
    again = read_metrics(parts / "training_metrics.json")
    assert [row["step"] for row in again["evaluations"]] == [row["step"] for row in metrics["evaluations"]]

    third = run(ranks, files, folder, *RESTLESS, "--early_stop_patience", "3")
    assert third.returncode == 0 and "is already complete; nothing is left to do" in third.stdout
    assert run(ranks, files, folder, *RESTLESS, "--early_stop_patience", "4").returncode == 0
    assert read_metrics(folder / "training_metrics.json")["steps"][-1]["step"] > last


@pytest.fixture(scope="module")
def text_files(tmp_path_factory) -> tuple[Path, Path]:
    """Token files with their tokenizer, and questions beside them."""
    folder = tmp_path_factory.mktemp("text")
    pages = (REPOSITORY / "README.md", REPOSITORY / "docs" / "data.md", REPOSITORY / "docs" / "faults.md")
    texts = [part for page in pages for part in page.read_text(encoding="utf-8").split("\n\n")]
    (folder / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    made = run_here(REPOSITORY / "preprocess_small.py", "--input", folder / "docs.jsonl", "--tokenizer", "bpe:300",
                    "--output_dir", folder)  # fmt: skip
    assert made.returncode == 0, made.stderr
    words = [text.split() for text in texts if len(text.split()) > 15][:20]
    rows = [{"ctx": " ".join(w[:6]), "endings": [" ".join(w[6:10]), " ".join(w[11:14])], "label": 0} for w in words]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder / "train_small.bin", folder / "val_small.bin"


@pytest.mark.launches
def test_questions_are_answered_at_each_validation_and_training_is_the_same(ranks, text_files, tmp_path):
    """With shards on two ranks too; the answers are those of the exported weights."""
    questions = text_files[0].with_name("questions.jsonl")
    flags = (
        "--max_train_steps 4 --eval_every 2 --max_val_steps 1 --sample_tokens 0 --timing_warmup_steps 1 "
        "--global_batch_size 8 --vocab_size 301"
    ).split()
    asked = ["--eval_multiple_choice", str(questions)]
    for name, more, number in (
        ("plain", ["--dropout", "0.1"], 1),
        ("asked", ["--dropout", "0.1", *asked], 1),
        ("shards", ["--run_type", "fsdp", *asked], 2),
    ):
        done = run(ranks, text_files, tmp_path / name, *flags, *more, number=number)
        assert done.returncode == 0, done.stdout + done.stderr
    plain, with_questions = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "asked"))
    assert plain == with_questions
    for folder in (tmp_path / "asked", tmp_path / "shards"):
        shape = shape_of_folder(folder, "the run")
        model = GPT2(shape)
        model.load_state_dict(read_initial_weights(str(folder), shape))
        read = questions_for(text_files, longest=32)  # as TINY_RUN trains; the model has positions for more
        longest = max(len(each.token_ids) for one in questions_for(text_files, 64) for each in one.endings)
        assert min(shape.max_position_embeddings, longest) > 33
        rows = read_metrics(folder / "training_metrics.json")["evaluations"]
        assert [row["step"] for row in rows] == [2, 4]
        assert rows[-1]["multiple_choice"]["accuracy"] == accuracies(read, ending_nats(model, read))
        assert rows[-1]["multiple_choice"]["num_questions"] == len(read) == 20


def questions_for(text_files, longest: int) -> list[Question]:
    tokenizer = load_tokenizer_file(text_files[0].with_name("bpe_300.json"))
    return read_questions(text_files[0].with_name("questions.jsonl"), tokenizer, longest)


def test_questions_are_left_where_the_run_is_to_stop(text_files):
    shape = ModelShape(num_layers=1, num_heads=1, embedding_size=8, vocab_size=301, max_position_embeddings=64)
    questions = questions_for(text_files, 64)
    weights, cpu = GPT2(shape).state_dict(), torch.device("cpu")
    assert answer(weights, SimpleNamespace(shape=shape), questions, cpu, is_stopped=lambda: 15) is None
    found = answer(weights, SimpleNamespace(shape=shape), questions, cpu)
    assert found["num_questions"] == 20 and set(found["accuracy"]) == {"by_sum", "by_character", "by_token"}


def test_each_rank_answers_a_share_of_them(text_files, monkeypatch):
    shape = ModelShape(num_layers=1, num_heads=1, embedding_size=8, vocab_size=301, max_position_embeddings=64)
    questions = questions_for(text_files, 64)
    monkeypatch.setattr(multiple_choice, "LOGITS_BYTES", 3 * 64 * 301 * 4)  # three endings at once, or some more
    weights, shares, number_of_rounds = GPT2(shape).state_dict(), [], []

    def rounds(number: int) -> range:
        number_of_rounds.append(number)
        return range(number)

    def gathered(mine: dict) -> list[dict]:
        shares.append(mine)
        return shares

    monkeypatch.setattr(process_group, "gather_objects", gathered)
    for rank in range(3):
        monkeypatch.setattr(process_group, "place", lambda rank=rank: (rank, 3))
        with contextlib.suppress(KeyError):  # until the last rank has answered, some are missing
            found = answer(weights, SimpleNamespace(shape=shape), questions, torch.device("cpu"), rounds)
    assert sum(map(len, shares)) == 40 == len({place for share in shares for place in share})
    assert len(set(number_of_rounds)) == 1 and min(map(len, shares)) > 5
    model = GPT2(shape)
    model.load_state_dict(weights)
    assert found["accuracy"] == accuracies(questions, ending_nats(model, questions))


@pytest.mark.launches
def test_questions_that_cannot_be_read_are_refused_before_the_folder_is_made(ranks, files, text_files, tmp_path):
    for data, said in ((text_files, "cannot be read (No such file"), (files, "needs the tokenizer of ")):
        done = run(ranks, data, tmp_path / "run", "--eval_multiple_choice", "none.jsonl")
        assert done.returncode == 2 and f"--eval_multiple_choice none.jsonl {said}" in done.stderr
        assert not (tmp_path / "run").exists()
