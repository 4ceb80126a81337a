#!/usr/bin/env python3
"""Measure how fast documents become token ids: the way preprocess_small.py does it, and tiktoken's own batch encoder.

    python scripts/measure_tokenizing.py --out tokenizing.json        # needs a corpus and bpe_8192.json (README)
    python scripts/measure_tokenizing.py --table tokenizing.json

Both encode the same documents with the same tokenizer on as many threads, in turns, in one process; which goes first
alternates. Their ids are compared once, so that a faster wrong one is seen. Reading the corpus and writing the token
files is in neither; that preprocess_small.py gets arrays and tiktoken's batch encoder gives Python lists is in both.

Exit code: 0, 1 the ids differ, 2 what was typed cannot be measured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))  # `testbed` lies there, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import positive
from testbed.errors import say

if TYPE_CHECKING:
    from testbed.data.tokenizer import Tokenizer


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="FILE", help="where the seconds are written, as JSON")
    what.add_argument("--table", type=Path, metavar="FILE", help="print the table of such a file, measure nothing")
    parser.add_argument("--input", type=Path, metavar="PATH", help="documents, as preprocess_small.py takes them")
    parser.add_argument(
        "--tokenizer_file",
        type=Path,
        default=Path("bpe_8192.json"),
        metavar="FILE.json",
        help="a BPE of preprocess_small.py, or gpt2 for the published one (default: %(default)s)",
    )
    parser.add_argument("--repeats", type=positive, default=9, help="of each; below 5 no claim (default: %(default)s)")
    parser.add_argument(
        "--num_workers", type=positive, default=os.cpu_count() or 1, help="threads (default: %(default)s)"
    )
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    from testbed.data.corpus import CorpusError

    if arguments.table:
        try:
            say(table(json.loads(arguments.table.read_text(encoding="utf-8"))))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            return refuse(f"--table {arguments.table} cannot be read: {type(error).__name__}: {error}")
        return 0
    try:
        content = measure(arguments)
    except (OSError, ValueError, CorpusError) as error:
        return refuse(str(error))
    say(table(content))
    return 0 if content["ids_are_equal"] else 1


def refuse(sentence: str) -> int:
    say(f"measure_tokenizing.py: error: {sentence}", file=sys.stderr)
    return 2


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both encoders in turns; what is returned is what the file holds."""
    from tqdm import tqdm

    from testbed.data.corpus import find_corpus, read_documents
    from testbed.data.tokenizer import load_bpe, load_gpt2_tokenizer
    from testbed.io import write_text

    is_published = str(arguments.tokenizer_file) == "gpt2"
    tokenizer = load_gpt2_tokenizer() if is_published else load_bpe(arguments.tokenizer_file)
    corpus = find_corpus(arguments.input)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)  # not to fail after the measuring
    texts = list(read_documents(corpus.documents))
    encoders = encoders_of(tokenizer, texts, arguments.num_workers)
    ids = {name: encode() for name, encode in encoders.items()}  # and warm
    seconds: dict[str, list[float]] = {name: [] for name in encoders}
    for repeat in tqdm(range(arguments.repeats), unit="pair"):
        for name in sorted(encoders, reverse=bool(repeat % 2)):
            start_s = time.perf_counter()
            encoders[name]()
            seconds[name].append(time.perf_counter() - start_s)
    import torch

    from testbed.distributed.launch import Launch
    from testbed.metrics.environment import commit, hardware, versions

    sha, is_dirty = commit()
    content = {
        "schema": 1,
        "git_commit": sha,
        "git_dirty": is_dirty,
        "command": ["python", "scripts/measure_tokenizing.py", *sys.argv[1:]],
        "tokenizer": tokenizer.name,
        "documents": corpus.documents.as_posix(),
        "documents_sha256": hashlib.sha256("\0".join(texts).encode()).hexdigest(),
        "num_documents": len(texts),
        "num_bytes": sum(len(text.encode()) for text in texts),
        "num_tokens": sum(map(len, ids["preprocess_small"])),
        "num_workers": arguments.num_workers,
        "ids_are_equal": [list(each) for each in ids["preprocess_small"]] == ids["tiktoken"],
        "seconds": seconds,
        "versions": versions() | {"tiktoken_version": metadata.version("tiktoken")},
        "hardware": hardware(torch.device("cpu"), Launch(0, 0, 1, 1), None),
    }
    write_text(arguments.out, json.dumps(content, indent=1) + "\n")
    return content


def encoders_of(tokenizer: Tokenizer, texts: list[str], num_workers: int) -> dict[str, Callable[[], list]]:
    """Each gives the ids of every text, in order."""
    from testbed.data.preprocess import encode_in_order

    return {
        "preprocess_small": lambda: [
            ids for _, _, ids in encode_in_order(((False, text) for text in texts), tokenizer, num_workers)
        ],
        "tiktoken": lambda: tokenizer._encoding.encode_ordinary_batch(texts, num_threads=num_workers),
    }


def table(content: dict[str, Any]) -> str:
    """In Markdown: megabytes per second of each, and the ratio with its verdict."""
    from testbed.analysis.statistics import compare, median_interval

    rates = {
        name: [content["num_bytes"] / 1e6 / second for second in seconds]
        for name, seconds in content["seconds"].items()
    }
    ratio = compare(rates["preprocess_small"], rates["tiktoken"])
    lines = ["| encoder | MB/s (95 % interval) |", "|---|---|"]
    for name, what in (
        ("preprocess_small", "`preprocess_small.py`"),
        ("tiktoken", "tiktoken's `encode_ordinary_batch`"),
    ):
        median, low, high = median_interval(rates[name])
        lines.append(f"| {what} | {median:.2f}{'' if low is None else f' ({low:.2f} to {high:.2f})'} |")
    interval = "" if ratio.low is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
    ids = "the same ids" if content["ids_are_equal"] else "DIFFERENT ids"
    return "\n".join(
        [
            *lines,
            "",
            f"Ratio {ratio.ratio:.2f}{interval}; verdict on preprocess_small.py: {ratio.verdict}; "
            f"n = {ratio.n_a} each, {ids}, "
            f"{content['num_bytes'] / 1e6:.1f} MB in {content['num_documents']:,} documents, {content['tokenizer']}, "
            f"{content['num_workers']} threads.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
