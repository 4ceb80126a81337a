#!/usr/bin/env python3
"""Tokenize downloaded documents into train_small.bin and val_small.bin, each with a sidecar .json; with --pairs,
prompts and references into train_pairs.bin and val_pairs.bin, of which only the references are learned.
See docs/data.md."""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import positive, thread_count, token_count
from testbed.errors import InputError, say
from testbed.io import cannot_become_a_folder
from testbed.program import program

if TYPE_CHECKING:
    from testbed.data.preprocess import Documents
    from testbed.data.tokenizer import Tokenizer


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flag = parser.add_argument_group("documents").add_argument
    documents = (
        'a folder that download_data.py made, its manifest.json, or a .jsonl with a "text" in every line '
        "(default: the newest manifest under dataset/)"
    )
    flag("--input", type=Path, metavar="PATH", help=documents)
    pairs = (
        'instead of documents: a {"prompt": TEXT, "reference": TEXT} in every line, or a list of texts as the '
        "reference, of which the first is learned"
    )
    flag("--pairs", type=Path, metavar="FILE.jsonl", help=pairs)
    for side, name, most in (("train", "training", 50_000), ("val", "validation", 5_000)):
        limit = f"{name} documents or pairs at most (default: {most})"
        flag(f"--max_{side}_docs", type=positive, default=most, metavar="DOCUMENTS", help=limit)
    share = (
        "share of the documents set aside for validation, chosen by a hash of the text, of pairs by one of the prompt; "
        "at least one (default: 0.1)"
    )
    flag("--val_fraction", type=float, default=0.1, metavar="SHARE", help=share)
    flag = parser.add_argument_group("tokens").add_argument
    tokenizer = (
        "gpt2; bpe:N (trained on the training documents, N tokens with end-of-text); a tokenizer.json, for example "
        "checkpoint/baseline/tokenizer.json, to train those weights further; or auto: gpt2 where its files are at hand "
        "or reachable, else bpe:8192 (default: auto)"
    )
    flag("--tokenizer", default="auto", metavar="NAME", help=tokenizer)
    shards = "write the training side to shards of about so many tokens, such as 100M, to be read by a pattern"
    flag("--shard_tokens", type=token_count, metavar="TOKENS", help=shards)
    flag("--output_dir", type=Path, default=Path(), metavar="DIR", help="folder of the files (default: .)")
    flag("--overwrite", action="store_true", help="replace token files that hold other data")
    threads = "threads that tokenize (default: %(default)s, the cores of this machine)"
    flag("--num_workers", type=thread_count, default=os.cpu_count() or 1, metavar="THREADS", help=threads)
    return parser.parse_args(arguments)


def preprocess(settings: argparse.Namespace) -> None:
    from tqdm import tqdm

    from testbed.data.preprocess import encode_in_order, write_token_files
    from testbed.io import replacing

    check(settings)
    documents = documents_of(settings) if settings.pairs is None else pairs_of(settings)
    output_dir, name = settings.output_dir, documents.name
    with contextlib.ExitStack() as stack:  # at its end all files that were made with each other get their names
        tokenizer, bpe_file = chosen_tokenizer(settings, documents, stack)
        held_out = None
        if settings.pairs is not None:
            held_out = output_dir / f"val_{name}.jsonl"
            with stack.enter_context(replacing(held_out)).open("w", encoding="utf-8") as file:
                file.writelines(pair.line for validation, pair in documents.assigned() if validation)
        encoding = encode_in_order(documents.assigned(), tokenizer, settings.num_workers)
        # closed here: the collector might end it in one of its own threads, which cannot wait for itself
        with contextlib.closing(encoding) as encoded, tqdm(unit="B", unit_scale=True, desc="tokenize") as bar:
            train, val = write_token_files(
                encoded,
                output_dir / f"train_{name}.bin",
                output_dir / f"val_{name}.bin",
                tokenizer,
                None if bpe_file is None else bpe_file.name,
                documents.facts,
                progress=bar.update,
                has_targets=settings.pairs is not None,
                overwrite=settings.overwrite,
                shard_tokens=settings.shard_tokens,
            )
            text_bytes = bar.n
    unit = "documents" if settings.pairs is None else "pairs"
    for side, facts in (("train", train), ("val", val)):
        targets = f", {facts['num_target_tokens']:,} of the tokens to be learned" if settings.pairs is not None else ""
        is_sharded = "num_shards" in facts
        files = f"_*.bin, {facts['num_shards']} shards" if is_sharded else ".bin"
        sidecar = "a sidecar each" if is_sharded else f"sidecar {side}_{name}.json"
        say(
            f"{output_dir / f'{side}_{name}'}{files}: {facts['num_tokens']:,} tokens, {facts['num_documents']:,} "
            f"{unit}, {facts['dtype']}{targets}, {sidecar}"
        )
    if bpe_file is not None:
        say(f"{bpe_file}: the tokenizer")
    if held_out is not None:
        say(f"{held_out}: the pairs held out for validation, as text")
    text_tokens = sum(side["num_tokens"] - side["num_documents"] for side in (train, val))  # without end-of-text
    say(f"{text_bytes / text_tokens:.2f} bytes per token")


def check(settings: argparse.Namespace) -> None:
    """Raise InputError where flags cannot hold, before anything is read."""
    from testbed.data.tokenizer import bpe_vocab_size

    if fault := cannot_become_a_folder(settings.output_dir):
        raise InputError(f"--output_dir {settings.output_dir} {fault}; name a folder for the token files")
    if not 0 < settings.val_fraction < 1:
        raise InputError(f"--val_fraction {settings.val_fraction} must lie between 0 and 1, for example 0.1")
    if settings.pairs is not None and settings.shard_tokens is not None:
        raise InputError("--shard_tokens is for documents: pairs are not read in shards; leave it out")
    if settings.pairs is not None and settings.input is not None:
        raise InputError("--pairs takes the place of --input; give one of them")
    if settings.tokenizer.startswith("bpe:"):
        bpe_vocab_size(settings.tokenizer)


def documents_of(settings: argparse.Namespace) -> Documents:
    from testbed.data.corpus import find_corpus, read_documents
    from testbed.data.preprocess import Documents, split_documents

    corpus = find_corpus(settings.input)
    say(f"documents: {corpus.documents}")
    read = functools.partial(read_documents, corpus.documents)
    split = split_documents(read(), settings.val_fraction, settings.max_train_docs, settings.max_val_docs)
    manifest = corpus.manifest
    facts = None if manifest is None else {field: manifest[field] for field in ("name", "revision", "sha256")}
    return Documents("small", facts, read, split)


def pairs_of(settings: argparse.Namespace) -> Documents:
    from testbed.data.pairs import read_pairs
    from testbed.data.preprocess import Documents, split_documents

    path = settings.pairs
    check_is_not_written(path, settings.output_dir)
    split = split_documents(
        (pair.prompt for pair in read_pairs(path)),
        *(settings.val_fraction, settings.max_train_docs, settings.max_val_docs),
        too_few="--pairs holds {} different prompts, but training and validation need one each; add some",
    )
    with path.open("rb") as file:
        facts = {"name": path.name, "revision": None, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    return Documents("pairs", facts, functools.partial(read_pairs, path), split)


def check_is_not_written(pairs: Path, output_dir: Path) -> None:
    """Raise InputError where the pairs lie in a file that is replaced once they are read."""
    names = [f"{side}_pairs{suffix}" for side in ("train", "val") for suffix in (".bin", ".json", ".targets.bin")]
    for written in (*(output_dir / name for name in (*names, "val_pairs.jsonl")), *output_dir.glob("*_pairs_*.json")):
        if written.exists() and pairs.exists() and written.samefile(pairs):
            raise InputError(
                f"--pairs {pairs} lies where the program writes its own {written.name}; rename it, or give another "
                "--output_dir"
            )


def chosen_tokenizer(
    settings: argparse.Namespace, documents: Documents, stack: contextlib.ExitStack
) -> tuple[Tokenizer, Path | None]:
    """Return the tokenizer of --tokenizer, and the file that it gets when `stack` ends without an exception (None: it
    is GPT-2's)."""
    from tqdm import tqdm

    from testbed.data import tokenizer, tokenizer_file
    from testbed.data.preprocess import training_texts
    from testbed.io import replacing

    given = Path(settings.tokenizer) if settings.tokenizer.endswith(".json") else None
    if given is None:
        name, reason = tokenizer.resolve_tokenizer(settings.tokenizer)
    else:
        own = tokenizer_file.load_tokenizer_file(given)
        if own.end_of_text_id is None:
            raise InputError(
                f"--tokenizer {given} has single characters and no token that ends a document; train on the files that "
                "nanoGPT's prepare.py makes, or name another tokenizer"
            )
        name, reason = own.name, f"from {given}"
    say(f"tokenizer: {name} ({reason})")
    settings.output_dir.mkdir(parents=True, exist_ok=True)
    if name == "gpt2":
        return tokenizer.load_gpt2_tokenizer(), None
    # one that is trained on pairs must not take the place of the corpus's
    file = settings.output_dir / tokenizer_file.tokenizer_file_name(name, of_pairs=settings.pairs is not None)
    new_file = stack.enter_context(replacing(file))
    if given is not None:
        new_file.write_bytes(given.read_bytes())
        return tokenizer_file.load_tokenizer_file(new_file), file
    with tqdm(unit="B", unit_scale=True, desc=f"train {name}") as bar:
        texts = counted(training_texts(documents.assigned()), bar.update)
        return tokenizer_file.train_bpe(texts, tokenizer.bpe_vocab_size(name), new_file), file


def counted(texts: Iterable[str], count: Callable[[int], object]) -> Iterator[str]:
    for text in texts:
        count(len(text.encode()))
        yield text


@program
def main() -> None:
    preprocess(parse_arguments())


if __name__ == "__main__":
    sys.exit(main())
