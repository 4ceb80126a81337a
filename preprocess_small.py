#!/usr/bin/env python3
"""Tokenize downloaded documents into train_small.bin and val_small.bin, each with a sidecar .json. See docs/data.md."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_argument_group("documents")
    source.add_argument(
        "--input",
        type=Path,
        metavar="PATH",
        help='a folder that download_data.py made, its manifest.json, or a .jsonl with a "text" in every line '
        "(default: the newest manifest under dataset/)",
    )
    source.add_argument(
        "--max_train_docs",
        type=int,
        default=50_000,
        metavar="DOCUMENTS",
        help="training documents at most (default: %(default)s)",
    )
    source.add_argument(
        "--max_val_docs",
        type=int,
        default=5_000,
        metavar="DOCUMENTS",
        help="validation documents at most (default: %(default)s)",
    )
    source.add_argument(
        "--val_fraction",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="share of the documents set aside for validation, chosen by a hash of the text; at least one document "
        "(default: %(default)s)",
    )
    tokens = parser.add_argument_group("tokens")
    tokens.add_argument(
        "--tokenizer",
        default="auto",
        metavar="NAME",
        help="gpt2, bpe:N (trained on the training documents, N tokens with end-of-text), or auto: gpt2 where its "
        "files are at hand or reachable, else bpe:8192 (default: %(default)s)",
    )
    tokens.add_argument(
        "--output_dir", type=Path, default=Path(), metavar="DIR", help="folder of the files (default: .)"
    )
    tokens.add_argument(
        "--num_workers",
        type=int,
        default=os.cpu_count() or 1,
        metavar="THREADS",
        help="threads that tokenize (default: %(default)s, the cores of this machine)",
    )
    return parser.parse_args(arguments)


def check(settings: argparse.Namespace) -> None:
    for flag in ("max_train_docs", "max_val_docs", "num_workers"):
        if getattr(settings, flag) < 1:
            raise ValueError(f"--{flag} {getattr(settings, flag)} must be 1 or more")
    if not 0 < settings.val_fraction < 1:
        raise ValueError(f"--val_fraction {settings.val_fraction} must lie between 0 and 1, for example 0.1")


def preprocess(settings: argparse.Namespace) -> None:
    from tqdm import tqdm

    from testbed import preprocess, tokenizer
    from testbed.atomic_file import put_in_place
    from testbed.corpus import find_corpus, read_documents

    check(settings)
    corpus = find_corpus(settings.input)
    name, reason = tokenizer.resolve_tokenizer(settings.tokenizer)
    print(f"documents: {corpus.documents}")
    print(f"tokenizer: {name} ({reason})")
    split = preprocess.split_documents(
        read_documents(corpus.documents), settings.val_fraction, settings.max_train_docs, settings.max_val_docs
    )
    output_dir = settings.output_dir
    output_dir.mkdir(parents=True, exist_ok=True)
    manifest = corpus.manifest
    source = None if manifest is None else {field: manifest[field] for field in ("name", "revision", "sha256")}

    # The BPE gets its name when the tokens are written: files of an earlier run never meet a tokenizer they do not fit.
    new_bpe_file = bpe_file = None
    try:
        if name == "gpt2":
            chosen = tokenizer.load_gpt2_tokenizer()
        else:
            vocab_size = tokenizer.bpe_vocab_size(name)
            bpe_file = output_dir / tokenizer.bpe_file_name(vocab_size)
            new_bpe_file = bpe_file.with_name(f".{bpe_file.name}.{os.getpid()}.new")
            texts = preprocess.training_texts(split.assign(read_documents(corpus.documents)))
            with tqdm(unit="B", unit_scale=True, desc=f"train {name}") as bar:
                chosen = tokenizer.train_bpe(counted(texts, bar.update), vocab_size, new_bpe_file)
        with tqdm(unit="B", unit_scale=True, desc="tokenize") as bar:
            encoded = preprocess.encode_in_order(
                split.assign(read_documents(corpus.documents)), chosen, settings.num_workers
            )
            train, val = preprocess.write_token_files(
                encoded,
                output_dir / "train_small.bin",
                output_dir / "val_small.bin",
                chosen,
                None if bpe_file is None else bpe_file.name,
                source,
                progress=bar.update,
                before_commit=None if bpe_file is None else lambda: put_in_place(new_bpe_file, bpe_file),
            )
            text_bytes = bar.n
    finally:
        if new_bpe_file is not None:
            new_bpe_file.unlink(missing_ok=True)
    report(output_dir, train, val, text_bytes, bpe_file)


def counted(texts, count):
    for text in texts:
        count(len(text.encode()))
        yield text


def report(output_dir: Path, train: dict, val: dict, text_bytes: int, bpe_file: Path | None) -> None:
    text_tokens = sum(side["num_tokens"] - side["num_documents"] for side in (train, val))  # without end-of-text
    for name, side in (("train_small", train), ("val_small", val)):
        print(
            f"{output_dir / name}.bin: {side['num_tokens']:,} tokens, {side['num_documents']:,} documents, "
            f"{side['dtype']}, sidecar {name}.json"
        )
    if bpe_file is not None:
        print(f"{bpe_file}: the tokenizer")
    print(f"{text_bytes / text_tokens:.2f} bytes per token")


def main() -> int:
    settings = parse_arguments()
    # SIGTERM ends the program as Ctrl-C does: through the clauses that remove temporary files.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from testbed.corpus import CorpusError

    try:
        preprocess(settings)
    except ValueError as error:
        print(f"preprocess_small.py: {error}", file=sys.stderr)
        return 2
    except (CorpusError, OSError) as error:
        print(f"preprocess_small.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("preprocess_small.py: interrupted; earlier token files are unchanged, run it again", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
