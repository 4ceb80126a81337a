"""scripts/evaluate.py: perplexity against a plain loop, the whole program on a tiny checkpoint, and what it refuses."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import sacrebleu
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.evaluate_cases import BLEU_TOKENS, PROGRAM, TRAINED, model_of
from support.programs import REPOSITORY

from testbed.analysis.statistics import compare
from testbed.data.tokenizer_file import train_bpe
from testbed.inference.perplexity import (
    perplexity,
    perplexity_ratio,
    scored_bytes,
    sliding_windows,
    window_nats,
)
from testbed.inference.quantize import quantize
from testbed.inference.report import decode_rates, read_inference


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
    # all but the first token, which nothing predicts; end-of-text is not text
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
