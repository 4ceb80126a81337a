"""scripts/evaluate.py: perplexity against a plain loop, the whole program on a tiny checkpoint, and what it refuses."""

from __future__ import annotations

import json
import math
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, write_token_files
from hypothesis import given
from hypothesis import strategies as st

from testbed.analysis.inference import read_inference
from testbed.inference.perplexity import (
    perplexity,
    perplexity_ratio,
    scored_bytes,
    sliding_windows,
    window_nats,
)
from testbed.model import GPT2
from testbed.model_shape import ModelShape
from testbed.token_file import TokenFileWriter
from testbed.tokenizer import train_bpe
from testbed.weights import export_weights

PROGRAM = REPOSITORY / "scripts" / "evaluate.py"
SHAPE = ModelShape(num_layers=2, num_heads=2, embedding_size=32, vocab_size=300, max_position_embeddings=64)
TRAINED = 32  # the sequence length that the run's metrics name


def model_of(seed: int = 0) -> GPT2:
    """Larger weights than a fresh model's: its predictions depend on what stands before."""
    torch.manual_seed(seed)
    model = GPT2(SHAPE).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)
    return model


# perplexity -----------------------------------------------------------------------------------------------------------


@given(st.integers(2, 90), st.integers(1, 12), st.data())
def test_every_target_is_scored_once_with_enough_before_it(num_tokens, window, data):
    stride = data.draw(st.integers(1, window))
    windows = sliding_windows(num_tokens, window, stride)
    scored = [each.start + each.length - back for each in windows for back in range(each.scored, 0, -1)]
    assert scored == list(range(num_tokens - 1))  # input positions whose next token is scored, in order
    assert all(each.start >= 0 and each.start + each.length < num_tokens for each in windows)
    assert all(each.length == min(window, num_tokens - 1) for each in windows)
    assert all(each.length - each.scored >= window - stride for each in windows[1:])
    most = data.draw(st.integers(1, 5))
    assert sliding_windows(num_tokens, window, stride, most) == windows[:most]


def test_perplexity_is_that_of_a_plain_loop():
    """Token by token, each from a context that is written down here as the definition has it."""
    model, window, stride = model_of(), 12, 5
    tokens = np.random.default_rng(0).integers(0, 300, 60).astype(np.uint16)
    total, per_window = 0.0, []
    for target in range(1, len(tokens)):
        step = max(0, -(-(target - window) // stride))  # the window whose scored part holds it
        end = min(window + step * stride, len(tokens) - 1)
        context = torch.from_numpy(tokens[end - window : target].astype(np.int64))
        with torch.no_grad():
            nats = -float(model(context[None])[0, -1].double().log_softmax(0)[int(tokens[target])])
        per_window += [0.0] * (step + 1 - len(per_window))
        per_window[step] += nats
        total += nats
    windows = sliding_windows(len(tokens), window, stride)
    found = window_nats(model, tokens, windows)
    assert found == pytest.approx(per_window, abs=1e-4)  # float32 sums, other order
    assert perplexity(found, windows, None)["value"] == pytest.approx(math.exp(total / 59), rel=1e-5)
    assert window_nats(model, tokens, windows[:1]) == pytest.approx(per_window[:1], abs=1e-4)


def test_bits_per_byte_count_the_text_of_the_scored_tokens(tmp_path):
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    tokenizer = train_bpe(iter([text]), 300, tmp_path / "bpe_300.json")
    tokens = np.array([*tokenizer.encode(text[:400]), tokenizer.end_of_text_id, *tokenizer.encode(text[400:500])])
    windows = sliding_windows(len(tokens), 16, 8)
    # all but the first token, which nothing predicts; end-of-text is no text
    expected = len(text[:500].encode()) - len(tokenizer.decode([tokens[0]]).encode())
    assert scored_bytes(tokens, windows, tokenizer) == expected
    found = perplexity([float(window.scored) for window in windows], windows, 123)
    assert found["bits_per_byte"] == pytest.approx((len(tokens) - 1) / math.log(2) / 123)
    assert perplexity([1.0] * len(windows), windows, None)["bits_per_byte"] is None


def test_the_interval_of_a_ratio_pairs_windows():
    """Windows differ by far more than the two models do: only in pairs is a difference of one per cent seen."""
    random, windows = np.random.default_rng(0), sliding_windows(3201, 100, 100)
    nats = random.normal(500, 60, len(windows))
    more = nats + 100 * math.log(1.01) + random.normal(0, 0.2, len(windows))
    one, other = perplexity(nats.tolist(), windows, None), perplexity(more.tolist(), windows, None)
    found = perplexity_ratio(other, one)
    assert found["value"] == pytest.approx(1.01, abs=0.002)
    assert 1.005 < found["low"] < found["value"] < found["high"] < 1.015
    assert one["low"] < other["value"] < one["high"]  # unpaired, nothing could be said
    few = sliding_windows(400, 100, 100)
    assert perplexity([500.0] * len(few), few, None)["low"] is None


# the program ----------------------------------------------------------------------------------------------------------


def save_checkpoint(folder: Path, model: GPT2, tokenizer_file: Path | None = None) -> Path:
    """A run's folder, as far as evaluate.py looks at it."""
    settings = SimpleNamespace(shape=model.shape, dropout=0.0)
    export_weights(folder, model.state_dict(), settings, 299, "bpe:300", tokenizer_file)
    (folder / "training_metrics.json").write_text(json.dumps({"training_config": {"seq_len": TRAINED}}))
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """run/: a checkpoint with its tokenizer; data.bin: text in that tokenizer; other.bin: in another one."""
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
    (folder / "pairs.jsonl").write_text('{"prompt": "one two", "reference": "three"}\n' * 3)
    save_checkpoint(folder / "run", model_of(), folder / "bpe_300.json")
    return folder


@pytest.fixture
def evaluate(files, monkeypatch, capfd):
    """Run the program in this process: (exit code, standard output, standard error)."""
    main = runpy.run_path(str(PROGRAM))["main"]

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.chdir(files)
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, words), "--threads", "1"])
        capfd.readouterr()
        try:
            code = main()
        except SystemExit as end:  # argparse
            code = end.code
        return code, *capfd.readouterr()

    return run


def test_the_whole_program(files):
    """All parts of it, as a user starts it; what the file says is computed a second time from what it holds."""
    words = "--checkpoint run --data_path data.bin --quantize all --load --wrapped --quick --threads 1 --device cpu"
    command = [sys.executable, PROGRAM, *words.split(), "--repeats", "5", "--bleu", "pairs.jsonl"]
    ended = subprocess.run(command, cwd=files, capture_output=True, text=True, timeout=170, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    content = read_inference(files / "run")  # checks it against the schema
    assert content["status"] == "complete" and content["threads"] == 1

    data, schemes = content["data"], content["schemes"]
    assert (data["window"], data["stride"], data["num_windows"]) == (TRAINED, TRAINED // 2, 6)
    assert data["num_target_tokens"] == TRAINED + 5 * TRAINED // 2
    tokens = np.fromfile(files / "data.bin", dtype=np.uint16)
    expected = window_nats(model_of(), tokens, sliding_windows(len(tokens), TRAINED, TRAINED // 2, 6))
    assert schemes["none"]["perplexity"]["window_nats"] == pytest.approx(expected, abs=1e-3)
    bits = sum(expected) / math.log(2)
    assert schemes["none"]["perplexity"]["bits_per_byte"] == pytest.approx(bits / data["num_bytes"])

    assert next(iter(schemes)) == "none"
    assert schemes["none"]["perplexity_ratio"] is schemes["none"]["speed_ratio"] is None
    for name, scheme in schemes.items():
        assert scheme["unavailable"] is None, name
        assert scheme["bytes_in_memory"] == pytest.approx(scheme["bytes_expected"], rel=0.05)
        assert [len(row) for row in scheme["latency"]["per_token_s"]] == [7] * 5
        if name != "none":
            assert scheme["perplexity_ratio"]["value"] == pytest.approx(
                scheme["perplexity"]["value"] / schemes["none"]["perplexity"]["value"]
            )
            assert 0.5 < scheme["perplexity_ratio"]["value"] < 2
            assert scheme["speed_ratio"]["low"] is not None

    load = content["load"]
    assert [point["concurrency"] for point in load["closed"]] == [1, 4] and len(load["open"]) == 5
    for point in load["closed"] + load["open"]:
        assert point["completed"] + point["rejected"] == 12 and len(point["samples"]) == point["completed"]

    assert content["bleu"]["pairs"] == 3 and 0 <= content["bleu"]["score"] <= 100

    arms = content["wrapped"]["arms"]
    assert set(arms) == {"plain", "training_engine", "init_inference"}
    for name, arm in arms.items():
        assert arm["unavailable"] is None and arm["same_tokens"] is True and len(arm["latency_s"]) == 5, name
    assert set(content["wrapped"]["comparisons"]) == {"training_engine", "init_inference"}
    for said in ("int4_weight_only", "requests/s", "training engine", "inference_metrics.json"):
        assert said in ended.stdout


CHECKPOINT = ("--checkpoint", "run", "--data_path", "data.bin", "--out", "new.json")
REFUSED = {
    "no checkpoint": (("--checkpoint", "nowhere"), "--checkpoint: nowhere has no model.safetensors"),
    "no model": ((), "one of the arguments --checkpoint --from_pretrained is required"),
    "no data": (("--checkpoint", "run", "--data_path", "no.bin"), "--data_path no.bin does not exist"),
    "another vocabulary": (("--checkpoint", "run", "--data_path", "other.bin"), "other.bin is written with bpe:400"),
    "pairs": (("--checkpoint", "run", "--data_path", "pairs.bin"), "pairs.bin is a file of pairs"),
    "unknown scheme": ((*CHECKPOINT, "--quantize", "none,int3"), "'int3' is not one of all, none"),
    "a long window": ((*CHECKPOINT, "--window", "65"), "--window 65 is longer than the 64 positions"),
    "a long stride": ((*CHECKPOINT, "--window", "8", "--stride", "9"), "--stride 9 is longer than the window"),
    "a long prompt": ((*CHECKPOINT, "--prompt_tokens", "60", "--new_tokens", "9"), "more than the 64 positions"),
    "one new token": ((*CHECKPOINT, "--new_tokens", "1"), "nothing to decode"),
    "a negative number": ((*CHECKPOINT, "--max_windows", "-3"), "'-3' is not a positive whole number"),
    "no rate": ((*CHECKPOINT, "--load", "--rates", "1,nan"), "'1,nan' is no list of requests per second"),
    "more at once than may wait": (
        (*CHECKPOINT, "--load", "--concurrency", "1,9", "--max_queue", "8"),
        "--concurrency 9 begins with as many requests at once",
    ),
    "load of nothing": ((*CHECKPOINT, "--load", "--load_scheme", "bf16"), "--load_scheme bf16 is not among"),
    "a damaged pair": ((*CHECKPOINT, "--bleu", "data.json"), "--bleu data.json line 1"),
    "no pairs": ((*CHECKPOINT, "--bleu", "no.jsonl"), "--bleu no.jsonl cannot be read"),
    "no folder": ((*CHECKPOINT[:-1], "no/where.json"), "no is no folder that can be written into"),
    "nothing to do": (("--checkpoint", "run", "--no-latency", "--out", "new.json"), "nothing is left to measure"),
    "another device": (
        (*CHECKPOINT, "--device", "cuda", "--quantize", "torch_dynamic"),
        "runs on cpu only" if torch.cuda.is_available() else "no CUDA device",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_sentence(evaluate, files, case):
    words, sentence = REFUSED[case]
    code, said, error = evaluate(*words)
    lines = [line for line in error.splitlines() if "error:" in line]
    assert code == 2 and len(lines) == 1 and sentence in lines[0], (code, said, error)
    assert "Traceback" not in error and not (files / "new.json").exists()


def test_a_scheme_that_does_not_run_here(evaluate, files, monkeypatch):
    """Asked for by name it is refused; under "all" the others are measured and the file says why it is missing."""
    monkeypatch.setattr(torch.ao.quantization, "quantize_dynamic", None)
    words = ("--checkpoint", "run", "--data_path", "data.bin", "--no-latency", "--quick", "--out", "without.json")
    code, _, error = evaluate(*words, "--quantize", "torch_dynamic")
    assert code == 2 and "--quantize torch_dynamic does not run here" in error
    assert not (files / "without.json").exists()
    code, said, _ = evaluate(*words, "--quantize", "all")
    content = read_inference(files / "without.json")
    assert code == 0 and content["status"] == "complete" and "torch_dynamic" in said
    assert "does not run here" in content["schemes"]["torch_dynamic"]["unavailable"]
    assert content["schemes"]["torch_dynamic"]["bytes_in_memory"] is None
    assert content["schemes"]["bf16"]["perplexity"]["value"] > 1


def test_an_earlier_evaluation_is_kept_unless_asked(evaluate, files):
    earlier = files / "earlier.json"
    earlier.write_text("{}")
    words = ("--checkpoint", "run", "--data_path", "data.bin", "--quick", "--no-latency", "--out", earlier)
    code, _, error = evaluate(*words)
    assert code == 2 and "give --overwrite" in error and earlier.read_text() == "{}"
    assert evaluate(*words, "--overwrite")[0] == 0
    assert read_inference(earlier)["status"] == "complete"


def test_what_ends_early_says_so_in_the_file(evaluate, files):
    """A diverged run's weights: the losses are not numbers, and neither are they hidden."""
    model = model_of()
    with torch.no_grad():
        model.h["0"].mlp.c_fc.weight[0, 0] = math.nan
    save_checkpoint(files / "diverged", model, files / "bpe_300.json")
    code, _, error = evaluate("--checkpoint", "diverged", "--data_path", "data.bin", "--quick")
    assert code == 1 and "losses are not finite numbers" in error and "Traceback" not in error
    content = json.loads((files / "diverged" / "inference_metrics.json").read_text())
    assert content["status"] == "failed" and "not finite" in content["failure"]


def test_without_a_tokenizer_there_are_no_bits_per_byte(evaluate, tmp_path):
    _, data = write_token_files(tmp_path)
    folder = save_checkpoint(tmp_path / "run", model_of())
    code, said, _ = evaluate("--checkpoint", folder, "--data_path", data, "--quick", "--no-latency")
    content = read_inference(folder)
    assert code == 0 and "no bits per byte" in said
    assert content["data"]["num_bytes"] is None and content["schemes"]["none"]["perplexity"]["bits_per_byte"] is None


def test_a_folder_of_transformers_needs_no_run_around_it(evaluate, files, tmp_path):
    """Only config.json and model.safetensors; without data, prompts are random ids and there is no perplexity."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(files / "run" / name, folder)
    code, said, error = evaluate("--from_pretrained", folder, "--quick")
    assert "no bits per byte" not in said  # nothing was lost that could have been had
    content = read_inference(folder)
    assert code == 0, error
    assert content["data"] is None and content["schemes"]["none"]["perplexity"] is None
    assert content["schemes"]["none"]["latency"]["repeats"] == 2
    assert content["checkpoint"]["num_parameters"] == SHAPE.num_parameters
