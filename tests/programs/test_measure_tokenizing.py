"""scripts/measure_tokenizing.py: the same ids by both encoders, wrong ones are told, the page says what it measured."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
from support.corpus_cases import write_jsonl
from support.programs import REPOSITORY

from testbed.analysis.statistics import compare
from testbed.data.tokenizer import train_bpe

SCRIPT = REPOSITORY / "scripts" / "measure_tokenizing.py"
MEASURED = REPOSITORY / "docs" / "results" / "performance" / "tokenizing.json"
TEXTS = [f"def f{number}(x):\n    return x + {number}  # é\n" * 20 for number in range(12)]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("measure_tokenizing", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.launches
def test_both_encoders_are_measured_on_the_same_ids(tmp_path):
    corpus = write_jsonl(tmp_path / "documents.jsonl", TEXTS)
    train_bpe(iter(TEXTS), 280, tmp_path / "bpe_280.json")
    out = tmp_path / "tokenizing.json"
    flags = ["--input", str(corpus), "--tokenizer_file", str(tmp_path / "bpe_280.json"), "--repeats", "2"]
    done = subprocess.run([sys.executable, SCRIPT, "--out", out, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text())
    assert content["ids_are_equal"] is True and content["num_documents"] == 12
    assert content["num_bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert {name: len(seconds) for name, seconds in content["seconds"].items()} == {
        "preprocess_small": 2,
        "tiktoken": 2,
    }
    assert "not enough repeats" in done.stdout, "two make no claim"
    again = subprocess.run([sys.executable, SCRIPT, "--table", out], capture_output=True, text=True)
    assert again.stdout == done.stdout


def test_the_table_gives_the_ratio_of_rates_and_cries_out_when_ids_differ(script):
    content = {
        "num_bytes": 6_000_000, "num_documents": 3, "tokenizer": "bpe:280", "num_workers": 2, "ids_are_equal": False,
        "seconds": {"preprocess_small": [2.0, 2.1, 1.9, 2.0, 2.0], "tiktoken": [3.0, 3.1, 2.9, 3.0, 3.0]},
    }  # fmt: skip
    text = script.table(content)
    assert "| `preprocess_small.py` | 3.00 (" in text and "| tiktoken's `encode_ordinary_batch` | 2.00 (" in text
    assert "Ratio 1.50 (" in text and "preprocess_small.py: faster" in text and "DIFFERENT ids" in text


@pytest.mark.launches
def test_what_cannot_be_measured_is_one_sentence(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--out", tmp_path / "a.json", "--tokenizer_file", tmp_path / "none.json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "none.json" in done.stderr


def test_the_page_says_what_the_file_says(script):
    """Within a tenth of tiktoken's own batch encoder, or faster, on the machine that the file is of."""
    content = json.loads(MEASURED.read_text())
    assert script.table(content) in (REPOSITORY / "docs" / "performance.md").read_text()
    assert content["ids_are_equal"] is True and content["git_dirty"] is False
    ours, theirs = ([1 / second for second in content["seconds"][name]] for name in ("preprocess_small", "tiktoken"))
    assert compare(ours, theirs).low > 0.9
