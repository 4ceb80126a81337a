#!/usr/bin/env python3
"""Tokenize downloaded documents into train_small.bin and val_small.bin, each with a sidecar .json; with --pairs,
prompts and references into train_pairs.bin and val_pairs.bin, of which only the references are learned.
See docs/data.md."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import positive
from testbed.errors import say
from testbed.io import cannot_become_a_folder
from testbed.program import program

if TYPE_CHECKING:
    from testbed.data.preprocess import Encoded
    from testbed.data.tokenizer import Tokenizer


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_argument_group("documents")
    source.add_argument(
        "--input",
        type=Path,
        metavar="PATH",
        help='a folder that download_data.py made, its manifest.json, or a .jsonl with a "text" in every line '
        "(default: the newest manifest under dataset/)",
    )
    source.add_argument(
        "--pairs",
        type=Path,
        metavar="FILE.jsonl",
        help='instead of documents: a {"prompt": TEXT, "reference": TEXT} in every line, or a list of texts as the '
        "reference, of which the first is learned",
    )
    source.add_argument(
        "--max_train_docs",
        type=positive,
        default=50_000,
        metavar="DOCUMENTS",
        help="training documents or pairs at most (default: %(default)s)",
    )
    source.add_argument(
        "--max_val_docs",
        type=positive,
        default=5_000,
        metavar="DOCUMENTS",
        help="validation documents or pairs at most (default: %(default)s)",
    )
    source.add_argument(
        "--val_fraction",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="share of the documents set aside for validation, chosen by a hash of the text, of pairs by one of the "
        "prompt; at least one (default: %(default)s)",
    )
    tokens = parser.add_argument_group("tokens")
    tokens.add_argument(
        "--tokenizer",
        default="auto",
        metavar="NAME",
        help="gpt2; bpe:N (trained on the training documents, N tokens with end-of-text); a .json file that holds such "
        "a BPE, for example checkpoint/baseline/tokenizer.json, to train those weights further; or auto: gpt2 where "
        "its files are at hand or reachable, else bpe:8192 (default: %(default)s)",
    )
    tokens.add_argument(
        "--output_dir", type=Path, default=Path(), metavar="DIR", help="folder of the files (default: .)"
    )
    tokens.add_argument(
        "--num_workers",
        type=positive,
        default=os.cpu_count() or 1,
        metavar="THREADS",
        help="threads that tokenize (default: %(default)s, the cores of this machine)",
    )
    return parser.parse_args(arguments)


def check(settings: argparse.Namespace) -> None:
    if fault := cannot_become_a_folder(settings.output_dir):
        raise ValueError(f"--output_dir {settings.output_dir} {fault}; name a folder for the token files")
    if not 0 < settings.val_fraction < 1:
        raise ValueError(f"--val_fraction {settings.val_fraction} must lie between 0 and 1, for example 0.1")
    if settings.pairs is not None and settings.input is not None:
        raise ValueError("--pairs takes the place of --input; give one of them")


@dataclass(frozen=True)
class Source:
    """Where the text comes from, and what becomes of it.

    Attributes:
        name: the files are train_NAME.bin and val_NAME.bin.
        unit: what is counted.
        facts: name, revision and sha256 of the text, for the sidecars; None where they are not known.
        texts: (is for validation, text) of everything that is written, anew at each call.
        encode: the same as tokens.
        held_out: the lines of val_NAME.jsonl; None: there is no such file.
    """

    name: str
    unit: str
    facts: dict[str, Any] | None
    texts: Callable[[], Iterable[tuple[bool, str]]]
    encode: Callable[[Tokenizer], Iterator[Encoded]]
    held_out: Callable[[], Iterator[str]] | None = None


def documents_of(settings: argparse.Namespace) -> Source:
    from testbed.data import preprocess
    from testbed.data.corpus import find_corpus, read_documents

    corpus = find_corpus(settings.input)
    say(f"documents: {corpus.documents}")
    split = preprocess.split_documents(
        read_documents(corpus.documents), settings.val_fraction, settings.max_train_docs, settings.max_val_docs
    )
    manifest = corpus.manifest
    facts = None if manifest is None else {field: manifest[field] for field in ("name", "revision", "sha256")}

    def assigned() -> Iterator[tuple[bool, str]]:
        return split.assign(read_documents(corpus.documents))

    return Source(
        *("small", "documents", facts, assigned),
        lambda tokenizer: preprocess.encode_in_order(assigned(), tokenizer, settings.num_workers),
    )


def check_is_not_written(pairs: Path, output_dir: Path) -> None:
    """ValueError where the pairs lie in a file that is replaced once they are read."""
    names = [f"{side}_pairs{suffix}" for side in ("train", "val") for suffix in (".bin", ".json", ".targets.bin")]
    for written in (*(output_dir / name for name in (*names, "val_pairs.jsonl")), *output_dir.glob("bpe_pairs_*.json")):
        if written.exists() and pairs.exists() and written.samefile(pairs):
            raise ValueError(
                f"--pairs {pairs} lies where the program writes its own {written.name}; rename it, or give another "
                "--output_dir"
            )


def pairs_of(settings: argparse.Namespace) -> Source:
    import hashlib

    from testbed.data import preprocess
    from testbed.data.pairs import Pair, read_pairs

    path = settings.pairs
    check_is_not_written(path, settings.output_dir)
    split = preprocess.split_documents(
        (pair.prompt for pair in read_pairs(path)),
        *(settings.val_fraction, settings.max_train_docs, settings.max_val_docs),
        too_few="--pairs holds {} different prompts, but training and validation need one each; add some",
    )
    with path.open("rb") as file:
        facts = {"name": path.name, "revision": None, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}

    def assigned() -> Iterator[tuple[bool, Pair]]:
        return split.assign(read_pairs(path))

    def held_out() -> Iterator[str]:
        for validation, pair in assigned():
            if validation:
                content = {"prompt": pair.prompt, "reference": list(pair.references)}
                yield json.dumps(content, ensure_ascii=False) + "\n"

    return Source(
        *("pairs", "pairs", facts, lambda: ((side, pair.text) for side, pair in assigned())),
        lambda tokenizer: preprocess.encode_pairs(assigned(), tokenizer),
        held_out,
    )


def preprocess(settings: argparse.Namespace) -> None:
    from tqdm import tqdm

    from testbed.data import preprocess, tokenizer
    from testbed.io import put_in_place, replacing

    check(settings)
    if settings.tokenizer.startswith("bpe:"):
        tokenizer.bpe_vocab_size(settings.tokenizer)  # one that cannot be made is refused before anything is read
    source = documents_of(settings) if settings.pairs is None else pairs_of(settings)
    given_bpe = Path(settings.tokenizer) if settings.tokenizer.endswith(".json") else None
    if given_bpe is None:
        name, reason = tokenizer.resolve_tokenizer(settings.tokenizer)
    else:
        chosen = tokenizer.load_bpe(given_bpe)
        name, reason = chosen.name, f"from {given_bpe}"
    say(f"tokenizer: {name} ({reason})")
    output_dir = settings.output_dir
    output_dir.mkdir(parents=True, exist_ok=True)

    # The BPE gets its name when the tokens are written: files of an earlier run never meet a tokenizer they do not fit.
    new_bpe_file = bpe_file = None
    try:
        if name == "gpt2":
            chosen = tokenizer.load_gpt2_tokenizer()
        else:
            vocab_size = tokenizer.bpe_vocab_size(name)
            # one that is trained on pairs must not take the place of the corpus's
            stem = "bpe" if settings.pairs is None else "bpe_pairs"
            bpe_file = output_dir / tokenizer.bpe_file_name(vocab_size, stem)
            new_bpe_file = bpe_file.with_name(f".{bpe_file.name}.{os.getpid()}.new")
            if given_bpe is not None:
                new_bpe_file.write_bytes(given_bpe.read_bytes())
            else:
                with tqdm(unit="B", unit_scale=True, desc=f"train {name}") as bar:
                    texts = counted(preprocess.training_texts(source.texts()), bar.update)
                    chosen = tokenizer.train_bpe(texts, vocab_size, new_bpe_file)

        def before_commit() -> None:
            if source.held_out is not None:
                with (
                    replacing(output_dir / f"val_{source.name}.jsonl") as temporary,
                    temporary.open("w", encoding="utf-8") as file,
                ):
                    file.writelines(source.held_out())
            if new_bpe_file is not None and bpe_file is not None:
                put_in_place(new_bpe_file, bpe_file)

        with tqdm(unit="B", unit_scale=True, desc="tokenize") as bar:
            train, val = preprocess.write_token_files(
                source.encode(chosen),
                output_dir / f"train_{source.name}.bin",
                output_dir / f"val_{source.name}.bin",
                chosen,
                None if bpe_file is None else bpe_file.name,
                source.facts,
                progress=bar.update,
                before_commit=before_commit,
                has_targets=settings.pairs is not None,
            )
            text_bytes = bar.n
    finally:
        if new_bpe_file is not None:
            new_bpe_file.unlink(missing_ok=True)
    report(output_dir, source, train, val, text_bytes, bpe_file)


def counted(texts, count):
    for text in texts:
        count(len(text.encode()))
        yield text


def report(output_dir: Path, source: Source, train: dict, val: dict, text_bytes: int, bpe_file: Path | None) -> None:
    text_tokens = sum(side["num_tokens"] - side["num_documents"] for side in (train, val))  # without end-of-text
    for name, side in ((f"train_{source.name}", train), (f"val_{source.name}", val)):
        targets = f", {side['num_target_tokens']:,} of the tokens to be learned" if "num_target_tokens" in side else ""
        say(
            f"{output_dir / name}.bin: {side['num_tokens']:,} tokens, {side['num_documents']:,} {source.unit}, "
            f"{side['dtype']}{targets}, sidecar {name}.json"
        )
    if bpe_file is not None:
        say(f"{bpe_file}: the tokenizer")
    if source.held_out is not None:
        say(f"{output_dir / f'val_{source.name}'}.jsonl: the {source.unit} held out for validation, as text")
    say(f"{text_bytes / text_tokens:.2f} bytes per token")


@program
def main() -> None:
    preprocess(parse_arguments())


if __name__ == "__main__":
    sys.exit(main())
