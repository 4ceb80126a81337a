"""scripts/evaluate.py: perplexity against a plain loop, the whole program on a tiny checkpoint, and what it refuses."""

from __future__ import annotations

import json
import math
import runpy
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.programs import REPOSITORY, write_token_files
from support.settings import stand_in

from testbed.analysis.statistics import compare
from testbed.checkpoint.weights import export_weights
from testbed.data.pairs import encode_prompt
from testbed.data.token_file import TokenFileWriter
from testbed.data.tokenizer import train_bpe
from testbed.inference import evaluation, wrapped
from testbed.inference.bleu import answer_text
from testbed.inference.evaluation import Evaluation
from testbed.inference.generate import generate
from testbed.inference.perplexity import (
    perplexity,
    perplexity_ratio,
    scored_bytes,
    sliding_windows,
    window_nats,
)
from testbed.inference.quantize import quantize
from testbed.inference.report import decode_rates, read_inference
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape

PROGRAM = REPOSITORY / "scripts" / "evaluate.py"
SHAPE = ModelShape(num_layers=2, num_heads=2, embedding_size=32, vocab_size=300, max_position_embeddings=64)
BLEU_TOKENS = 16
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
    few = sliding_windows(2901, 100, 100)
    assert len(few) == 29 and perplexity([500.0] * 29, few, None)["low"] is None
    assert perplexity_ratio(perplexity([500.0] * 29, few, None), perplexity([501.0] * 29, few, None))["low"] is None


def test_the_interval_of_a_large_file_takes_no_gigabytes():
    """4,999 resamples of 5,000 windows are 200 MB for each array that is made of them at once."""
    windows = sliding_windows(50_001, 10, 10)
    nats = np.random.default_rng(0).normal(20, 1, len(windows)).tolist()
    perplexity(nats[:30], windows[:30], None)  # scipy is loaded
    tracemalloc.start()
    found = perplexity(nats, windows, None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found["low"] < found["value"] < found["high"] and peak < 200e6


# the program ----------------------------------------------------------------------------------------------------------


def save_checkpoint(folder: Path, model: GPT2, tokenizer_file: Path | None = None) -> Path:
    """A run's folder, as far as evaluate.py looks at it."""
    settings = stand_in(shape=model.shape, dropout=0.0)
    text = tokenizer_file and tokenizer_file.read_text()
    export_weights(folder, model.state_dict(), settings, 299, "bpe:300", text)
    (folder / "training_metrics.json").write_text(json.dumps({"training_config": {"seq_len": TRAINED}}))
    return folder


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


@pytest.mark.launches
@pytest.mark.slow
def test_the_whole_program(files):
    """All parts of it, as a user starts it; what the file says is computed a second time from what it holds."""
    words = "--checkpoint run --data_path data.bin --quantize all --load --wrapped --quick --threads 1 --device cpu"
    command = [sys.executable, PROGRAM, *words.split(), "--repeats", "5", "--bleu", "pairs.jsonl"]
    command += ["--bleu_max_new_tokens", str(BLEU_TOKENS)]
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
    dynamic, windows = quantize(model_of(), "torch_dynamic").model, sliding_windows(len(tokens), 32, 16, 6)
    alone = [window_nats(dynamic, tokens, [window])[0] for window in windows]  # whatever its neighbours are
    assert schemes["torch_dynamic"]["perplexity"]["window_nats"] == pytest.approx(alone, abs=1e-3)
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
        rates = {of: decode_rates(schemes[of]["latency"]) for of in (name, "bf16")}
        if name == "bf16":
            assert scheme["speed_ratio_bf16"] is None
        else:
            assert scheme["speed_ratio_bf16"]["ratio"] == pytest.approx(compare(rates[name], rates["bf16"]).ratio)

    load = content["load"]
    assert [point["concurrency"] for point in load["closed"]] == [1, 4] and len(load["open"]) == 5
    assert load["cache_bytes"] == 2 * 2 * 3 * 16 * 32 * 4  # layers, keys and values, slots, positions, channels, bytes
    for point in load["closed"] + load["open"]:
        assert point["completed"] + point["rejected"] == 12 and len(point["samples"]) == point["completed"]

    answers = json.loads((files / "answers.json").read_text())
    expected = sacrebleu.corpus_bleu(answers, [[*answers[:2], "something else"]]).score
    assert content["bleu"]["pairs"] == 3 and content["bleu"]["score"] == pytest.approx(expected) and 0 < expected < 100

    arms = content["wrapped"]["arms"]
    assert set(arms) == {"plain", "training_engine", "init_inference"}
    for name, arm in arms.items():
        assert arm["unavailable"] is None and arm["same_tokens"] is True and len(arm["latency_s"]) == 5, name
    assert set(content["wrapped"]["comparisons"]) == {"training_engine", "init_inference"}
    for said in ("int4_weight_only", "requests/s", "training engine", "inference_metrics.json"):
        assert said in ended.stdout


CHECKPOINT = ("--checkpoint", "run", "--data_path", "data.bin", "--out", "new.json")
REFUSED = {
    "no checkpoint": (("--checkpoint", "nowhere"), "--checkpoint: nowhere does not exist (looked for in "),
    "no model": ((), "one of the arguments --checkpoint --from_pretrained is required"),
    "no data": (("--checkpoint", "run", "--data_path", "no.bin"), "--data_path no.bin does not exist"),
    "another vocabulary": (("--checkpoint", "run", "--data_path", "other.bin"), "other.bin is written with bpe:400"),
    "pairs": (("--checkpoint", "run", "--data_path", "pairs.bin"), "pairs.bin is a file of pairs"),
    "unknown scheme": ((*CHECKPOINT, "--quantize", "none,int3"), "'int3' is not one of all, none"),
    "a long window": ((*CHECKPOINT, "--window", "65"), "--window 65 is longer than the 64 positions"),
    "a long stride": ((*CHECKPOINT, "--window", "8", "--stride", "9"), "--stride 9 is longer than the window"),
    "a long prompt": ((*CHECKPOINT, "--prompt_tokens", "60", "--new_tokens", "9"), "more than the 64 positions"),
    "one new token": ((*CHECKPOINT, "--new_tokens", "1"), "nothing to decode"),
    "a negative number": ((*CHECKPOINT, "--max_windows", "-3"), "'-3' is not a whole number from 0 upwards"),
    "no rate": ((*CHECKPOINT, "--load", "--rates", "1,nan"), "'1,nan' is no list of requests per second"),
    "more at once than may wait": (
        (*CHECKPOINT, "--load", "--concurrency", "1,9", "--max_queue", "8"),
        "--concurrency 9 begins with as many requests at once",
    ),
    "more at once than there are": (
        (*CHECKPOINT, "--load", "--requests", "40", "--concurrency", "1,41"),
        "--concurrency 41 is more than there are --requests, 40",
    ),
    "fewer requests than fill the batch": (
        (*CHECKPOINT, "--load", "--requests", "31"),
        "--requests 31 are too few for --max_batch 8: they would be over before a queue could grow; give --requests 32",
    ),
    "a large batch": ((*CHECKPOINT, "--load", "--max_batch", "64"), "--requests 100 are too few for --max_batch 64"),
    "load of nothing": ((*CHECKPOINT, "--load", "--load_scheme", "bf16"), "--load_scheme bf16 is not among"),
    "a damaged pair": ((*CHECKPOINT, "--bleu", "data.json"), "--bleu data.json line 1"),
    "no pairs": ((*CHECKPOINT, "--bleu", "no.jsonl"), "--bleu no.jsonl cannot be read"),
    "a file without pairs": ((*CHECKPOINT, "--bleu", "empty.jsonl"), "--bleu empty.jsonl holds no pairs"),
    "a long pair": ((*CHECKPOINT, "--bleu", "long.jsonl"), "--bleu long.jsonl: the prompt of pair 2 has"),
    "another tokenizer": (
        ("--from_pretrained", "theirs", "--tokenizer_file", "bpe_290.json", *CHECKPOINT[2:]),
        "data.bin is written with bpe:300 of 300 tokens, but the tokenizer of --from_pretrained theirs is bpe:290",
    ),
    "out is a folder": ((*CHECKPOINT[:-1], "run", "--overwrite"), "--out run is a folder; name a file in it"),
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


def test_weights_that_are_no_numbers_are_refused(evaluate, files):
    model = model_of()
    with torch.no_grad():
        model.h["0"].mlp.c_fc.weight[0, 0] = math.nan
    save_checkpoint(files / "diverged", model, files / "bpe_300.json")
    code, _, error = evaluate("--checkpoint", "diverged", "--data_path", "data.bin", "--quick")
    assert code == 2 and "NaN or infinite" in error and "Traceback" not in error


def test_what_ends_early_says_so_in_the_file(evaluate, files):
    """Weights so large that the losses are not numbers: neither are they hidden."""
    model = model_of()
    with torch.no_grad():
        model.h["0"].mlp.c_fc.weight[0, 0] = 3e38
        model.h["0"].mlp.c_proj.weight.fill_(3e38)
    save_checkpoint(files / "diverged", model, files / "bpe_300.json")
    code, _, error = evaluate("--checkpoint", "diverged", "--data_path", "data.bin", "--quick")
    assert code == 1 and "losses are not finite numbers" in error and "Traceback" not in error
    content = json.loads((files / "diverged" / "inference_metrics.json").read_text())
    assert content["status"] == "failed" and "not finite" in content["failure"]


ALL = ("--checkpoint", "run", "--data_path", "data.bin", "--quick")


@pytest.mark.parametrize(
    ("part", "error", "code", "said"),
    [
        ("measure_latency", torch.OutOfMemoryError("CUDA out of memory\nmore of it"), 1, "CUDA out of memory"),
        ("measure_perplexity", ValueError("a bug"), 1, "ValueError: a bug"),
        ("measure_latency", KeyboardInterrupt(), 130, "interrupted"),
        ("measure_latency", SystemExit(143), 143, "interrupted"),
    ],
    ids=["out of memory", "ValueError", "Ctrl-C", "SIGTERM"],
)
def test_whatever_ends_a_part_is_in_the_file_and_no_traceback(evaluate, files, monkeypatch, part, error, code, said):
    def end(*_):
        raise error

    monkeypatch.setattr(Evaluation, part, end)
    out = files / "ended.json"
    found, _, printed = evaluate(*ALL, "--out", out, "--overwrite")
    content = read_inference(out)
    assert found == code and content["status"] == "failed" and said in content["failure"]
    assert content["schemes"]["none"]["bytes_in_memory"] > 0  # what was complete is kept
    assert "Traceback" not in printed and printed.count("error: ") == (code == 1)


def test_a_model_that_does_not_fit_is_one_line(evaluate, files, monkeypatch):
    def load_model(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(evaluation, "load_model", load_model)
    code, _, printed = evaluate(*ALL, "--out", "unfit.json")
    assert code == 1 and printed == "evaluate.py: error: OutOfMemoryError: CUDA out of memory\n"
    assert not (files / "unfit.json").exists()


def test_a_number_that_the_file_may_not_hold_is_said_in_the_file(evaluate, files, monkeypatch):
    real = evaluation.latency_fields
    monkeypatch.setattr(evaluation, "latency_fields", lambda *of: real(*of) | {"decode_tokens_per_s": math.nan})
    code, _, printed = evaluate(*ALL, "--out", "nan.json")
    content = read_inference(files / "nan.json")
    assert code == 1 and "not finite" in printed and "Traceback" not in printed
    assert content["status"] == "failed" and "not finite" in content["failure"]
    assert content["schemes"]["none"]["latency"] is None and content["schemes"]["none"]["perplexity"] is not None


def test_an_earlier_evaluation_outlives_one_that_fails_at_once(evaluate, files, monkeypatch):
    def end(*_):
        raise RuntimeError("no room")

    monkeypatch.setattr(Evaluation, "measure_sizes", end)
    earlier = files / "kept.json"
    earlier.write_text("{}")
    code, _, printed = evaluate(*ALL, "--out", earlier, "--overwrite")
    assert code == 1 and "no room" in printed and earlier.read_text() == "{}"
    assert evaluate(*ALL, "--out", "fresh.json")[0] == 1
    assert read_inference(files / "fresh.json")["failure"] == "RuntimeError: no room"


def test_a_training_engine_that_does_not_run_is_a_failure(evaluate, files, monkeypatch):
    """The comparison that was asked for is missing; what init_inference can do depends on the version."""

    def unavailable(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(wrapped, "_training_engine", unavailable)
    monkeypatch.setattr(wrapped, "_init_inference", lambda model, _: model)
    words = (*ALL, "--no-latency", "--wrapped", "--out", "unwrapped.json")
    code, said, printed = evaluate(*words)
    assert code == 1 and "--wrapped: DeepSpeed's training engine does not run here" in printed
    content = read_inference(files / "unwrapped.json")
    assert content["status"] == "complete" and "NOT MEASURED, DeepSpeed's training engine" in said
    assert content["wrapped"]["arms"]["training_engine"]["unavailable"] == "RuntimeError: no compiler"
    monkeypatch.setattr(wrapped, "_training_engine", lambda model, _: model)
    assert evaluate(*words, "--overwrite")[0] == 0


def test_without_a_tokenizer_there_are_no_bits_per_byte(evaluate, tmp_path):
    _, data = write_token_files(tmp_path)
    folder = save_checkpoint(tmp_path / "run", model_of())
    code, said, _ = evaluate("--checkpoint", folder, "--data_path", data, "--quick", "--no-latency")
    content = read_inference(folder)
    assert code == 0 and "no bits per byte" in said
    assert content["data"]["num_bytes"] is None and content["schemes"]["none"]["perplexity"]["bits_per_byte"] is None


def test_a_folder_of_transformers_needs_no_run_around_it(evaluate, files, tmp_path):
    """Only config.json and model.safetensors; without data, prompts are random ids and there is no perplexity."""
    folder = shutil.copytree(files / "theirs", tmp_path / "theirs")
    code, said, error = evaluate("--from_pretrained", folder, "--quick")
    assert "no bits per byte" not in said  # nothing was lost that could have been had
    content = read_inference(folder)
    assert code == 0, error
    assert content["data"] is None and content["schemes"]["none"]["perplexity"] is None
    assert content["schemes"]["none"]["latency"]["repeats"] == 2
    assert content["checkpoint"]["num_parameters"] == SHAPE.num_parameters
