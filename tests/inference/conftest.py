"""Share fixtures among the tests of this room."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.evaluate_cases import BLEU_TOKENS, PROGRAM, model_of, save_checkpoint
from support.programs import REPOSITORY, run_here

from testbed.data.pairs import encode_prompt
from testbed.data.token_file import TokenFileWriter
from testbed.data.tokenizer_file import train_bpe
from testbed.inference.bleu import answer_text
from testbed.inference.generate import generate


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """run/: a checkpoint with its tokenizer; theirs/: without; data.bin: text in that one; other.bin: in another."""
    folder = tmp_path_factory.mktemp("evaluate")
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    tokenizer = train_bpe(iter([text]), 300, folder / "bpe_300.json")
    with TokenFileWriter(folder / "data.bin", 300, "bpe:300", 299, "bpe_300.json") as writer:
        for start in range(0, 2000, 500):
            writer.append_document(tokenizer.encode(text[start : start + 500]))
    with TokenFileWriter(folder / "other.bin", 400, "bpe:400", 399) as writer:
        writer.append_document(range(300))
    with TokenFileWriter(folder / "pairs.bin", 300, "bpe:300", 299, "bpe_300.json", has_targets=True) as writer:
        writer.append_document(range(40), 20)
    prompts = ["one two", "a model", "an answer"]
    asked = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    answers = [answer_text(tokenizer, ids) for ids in generate(model_of(), asked, BLEU_TOKENS, stop_id=299)]
    pairs = [{"prompt": prompt, "reference": answer} for prompt, answer in zip(prompts, answers, strict=True)]
    pairs[2]["reference"] = "something else"
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (folder / "answers.json").write_text(json.dumps(answers))
    (folder / "long.jsonl").write_text(json.dumps(pairs[0]) + "\n" + json.dumps(pairs[1] | {"prompt": "w " * 70}))
    (folder / "empty.jsonl").write_text("\n")
    train_bpe(iter([text]), 290, folder / "bpe_290.json")
    save_checkpoint(folder / "run", model_of(), folder / "bpe_300.json")
    (folder / "theirs").mkdir()
    shutil.copy(folder / "run" / "model.safetensors", folder / "theirs")
    config = json.loads((folder / "run" / "config.json").read_text())
    del config["tokenizer"]  # which is ours
    (folder / "theirs" / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def evaluate(files):
    """Run the program in this process: (exit code, standard output, standard error)."""

    def run(*words: object) -> tuple[int, str, str]:
        done = run_here(PROGRAM, *words, "--threads", "1", cwd=files)
        return done.returncode, done.stdout, done.stderr

    return run
