"""Look at an evaluation's checkpoint, data and flags, and refuse what cannot be, before torch is loaded."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.config.trained_run import TrainedRun, trained_with, untrained_positions
from testbed.data.sidecar import GPT2_VOCAB_SIZE
from testbed.data.token_file import TokenFile, open_token_file, scan_token_file
from testbed.data.tokenizer import Tokenizer
from testbed.data.tokenizer_file import load_tokenizer
from testbed.errors import InputError
from testbed.inference.loading import (
    folder_of,
    is_published,
    named_model,
    naming,
    note_on,
    shape_of_config,
    tokenizer_name,
    tokenizer_of,
)
from testbed.inference.prompts import prompts_of_pairs
from testbed.inference.questions import Question, read_questions
from testbed.inference.schemes import chosen_schemes
from testbed.model.shape import ModelShape
from testbed.run_folder import INFERENCE

REQUESTS_PER_SLOT = 4  # of each loop at least: fewer fill the batch and are over before a queue could grow
TOKENS_READ = 1 << 16  # by default, windows that overlap counted twice: minutes for GPT-2 124M on a few cores


@dataclass(frozen=True)
class EvaluatedModel:
    """The subject of an evaluation, as far as files tell without torch."""

    flag: str  # that names the model
    source: Path | str  # as of load_model
    shape: ModelShape
    data: TokenFile | None
    data_sha256: str | None
    tokenizer: Tokenizer | None
    window: int
    stride: int
    max_windows: int | None  # None: all
    out: Path
    questions: Sequence[Question] = ()

    @property
    def directory(self) -> Path | None:
        """The model's folder; None for published weights."""
        return None if is_published(self.source) else Path(self.source)

    @property
    def name(self) -> str:
        return str(self.source) if self.directory is None else self.directory.resolve().name


def look(arguments: argparse.Namespace) -> EvaluatedModel:
    """Look at the files that scripts/evaluate.py was given, and at all its flags.

    Raises:
        InputError: one sentence, for whatever can be refused without torch.
    """
    flag, source = named_model(arguments)
    with naming(flag):
        shape, reads, note = shape_of_config(source), tokenizer_name(source), note_on(source)
    if note is not None:
        print(note, flush=True)
    model, positions = f"{flag} {source}", shape.max_position_embeddings
    run = TrainedRun() if is_published(source) else trained_with(Path(source))
    trained = run.seq_length
    out = _output(arguments, Path() if is_published(source) else folder_of(source))  # before data is read
    _settle_lengths(arguments, positions, trained)
    _check_numbers(arguments, shape, model)
    data, sha256 = None, None
    if arguments.data_path is not None:
        data = open_token_file(arguments.data_path, "--data_path")
        sha256 = _check_data(data, shape, reads, model)
        _check_use(data, arguments)
    elif arguments.perplexity:
        try:
            data, sha256 = _validation_data(run, model, arguments)
            print(f"data: {data.path}, the validation file of the run", flush=True)
        except InputError as error:
            print(f"no perplexity: {error}; name a token file with --data_path", flush=True)
    others = ("latency", "load", "wrapped", "bleu", "multiple_choice")
    if data is None and not any(getattr(arguments, name) for name in others):
        raise InputError("nothing is left to measure; give --data_path, or leave --no-latency out")
    window = arguments.window or min(trained or positions, positions)
    if data is not None or arguments.multiple_choice is not None:
        for warning in untrained_positions(f"--window {window} reads", window, trained):
            print(warning, flush=True)
    stride = arguments.stride or max(1, window // 2)
    if stride > window:
        raise InputError(
            f"--stride {stride} is longer than the window of {window} tokens, so targets would be left out"
        )
    max_windows = max(1, TOKENS_READ // window) if arguments.max_windows is None else arguments.max_windows or None
    tokenizer = _tokenizer_for(arguments, source, data)
    if data is not None and tokenizer is not None:
        _check_tokenizer(tokenizer, data, model)
        if arguments.perplexity and not tokenizer.is_bytewise:
            print(f"no bits per byte: a token of {tokenizer.name} has no bytes of its own", flush=True)
    if arguments.bleu is not None:  # whatever is wrong with a line is said now
        assert tokenizer is not None
        prompts_of_pairs(tokenizer, arguments.bleu, arguments.bleu_max_new_tokens, positions)
    questions: Sequence[Question] = ()
    if arguments.multiple_choice is not None:
        assert tokenizer is not None
        questions = read_questions(arguments.multiple_choice, tokenizer, window)
    return EvaluatedModel(flag, source, shape, data, sha256, tokenizer, window, stride, max_windows, out, questions)


def _validation_data(run: TrainedRun, model: str, arguments: argparse.Namespace) -> tuple[TokenFile, str]:
    """Return the run's own validation file and its sha256. InputError where it is not at hand as the run read it."""
    if "val_data_path" not in run.flags:
        raise InputError(f"{model} has no record of a run that names its validation file")
    data = open_token_file(run.flags["val_data_path"], "the run's --val_data_path")
    sha256 = scan_token_file(data).sha256
    if data.targets is None and sha256 != run.val_sha256:
        recorded = "was not recorded" if run.val_sha256 is None else f"is {run.val_sha256[:12]}…"
        raise InputError(
            f"the run's --val_data_path {data.path} holds other data now (sha256 {sha256[:12]}…, the run's {recorded})"
        )
    _check_use(data, arguments)
    return data, sha256


def _output(arguments: argparse.Namespace, folder: Path) -> Path:
    """Return the file to write. InputError where it cannot be written, or holds an earlier evaluation."""
    out = arguments.out or folder / INFERENCE
    if out.is_dir():
        raise InputError(f"--out {out} is a folder; name a file in it")
    if out.exists() and not arguments.overwrite:
        names = (out.with_stem(f"{out.stem}_{number}") for number in itertools.count(2))
        beside = next(name for name in names if not os.path.lexists(name))
        raise InputError(f"{out} holds an earlier evaluation; give --overwrite, or to keep both --out {beside}")
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise InputError(f"{out.parent} is not a folder that can be written into; name a file elsewhere with --out")
    return out


def _check_use(data: TokenFile, arguments: argparse.Namespace) -> None:
    """Raise InputError where a token file is not what the parts that read it need."""
    if data.targets is not None and arguments.perplexity:
        raise InputError(
            f"--data_path {data.path} is a file of pairs, and windows would slide over prompts and references "
            "alike; give a file of text, or --no-perplexity and the pairs themselves with --bleu"
        )
    shortest = max(arguments.prompt_tokens, 2)
    if len(data.tokens) < shortest:
        raise InputError(f"--data_path {data.path} holds {len(data.tokens)} tokens, and {shortest} are needed")


def _settle_lengths(arguments: argparse.Namespace, positions: int, trained: int | None) -> None:
    """Fill lengths that were not given: 64 tokens, with --quick 8, or what the model's positions have room for. An
    answer that is scored ends where training did."""
    usual = 8 if arguments.quick else 64
    arguments.prompt_tokens = arguments.prompt_tokens or min(usual, positions // 2)
    arguments.new_tokens = arguments.new_tokens or min(usual, positions - positions // 2)
    arguments.bleu_max_new_tokens = arguments.bleu_max_new_tokens or min(usual, max(1, (trained or positions) // 2))


def _check_numbers(arguments: argparse.Namespace, shape: ModelShape, model: str) -> None:
    """Raise InputError where flags contradict each other or the model."""
    positions, prompt, new = shape.max_position_embeddings, arguments.prompt_tokens, arguments.new_tokens
    if (arguments.window or 0) > positions:
        raise InputError(f"--window {arguments.window} is longer than the {positions} positions of {model}; shorten it")
    if new < 2:
        raise InputError(f"--new_tokens {new} leaves nothing to decode after the first token; give at least 2")
    if prompt + new > positions:
        raise InputError(
            f"--prompt_tokens {prompt} and --new_tokens {new} are {prompt + new} together, more than the {positions} "
            f"positions of {model}; shorten them"
        )
    if arguments.load and max(arguments.concurrency) > arguments.max_queue:
        raise InputError(
            f"--concurrency {max(arguments.concurrency)} begins with as many requests at once, and --max_queue "
            f"{arguments.max_queue} would reject some; raise it"
        )
    fewest = max(REQUESTS_PER_SLOT * arguments.max_batch, *arguments.concurrency)
    if arguments.load and arguments.requests < fewest:
        raise InputError(
            f"--requests {arguments.requests} are too few for --max_batch {arguments.max_batch} and --concurrency "
            f"{max(arguments.concurrency)}: they would be over before a queue could grow; give --requests {fewest}"
        )
    if arguments.load_scheme not in chosen_schemes(arguments.quantize):
        raise InputError(f"--load_scheme {arguments.load_scheme} is not among --quantize {arguments.quantize}; add it")
    if arguments.bleu is not None and arguments.bleu_max_new_tokens >= positions:
        raise InputError(
            f"--bleu_max_new_tokens {arguments.bleu_max_new_tokens} leaves no room for a prompt in the {positions} "
            f"positions of {model}; ask for fewer"
        )


def _check_data(data: TokenFile, shape: ModelShape, reads: str | None, model: str) -> str:
    """Return the sha256 of a token file. InputError where the model cannot read it."""
    if data.vocab_size > shape.vocab_size or (None not in (reads, data.tokenizer) and reads != data.tokenizer):
        raise InputError(
            f"--data_path {data.path} is written with {data.tokenizer or 'a tokenizer'} of {data.vocab_size} tokens, "
            f"but {model} reads {reads or 'another'} of {shape.vocab_size}; tokenize the text with its tokenizer "
            "(preprocess_small.py --tokenizer FILE.json, such as a run's tokenizer.json)"
        )
    scan = scan_token_file(data)
    if scan.max_token_id >= shape.vocab_size:
        raise InputError(
            f"--data_path {data.path} holds token id {scan.max_token_id}, but {model} knows 0 to "
            f"{shape.vocab_size - 1}; it was made with another tokenizer"
        )
    if data.sha256 not in (None, scan.sha256):
        raise InputError(
            f"--data_path {data.path} is not what its sidecar was written for; make both again with: python "
            "preprocess_small.py"
        )
    return scan.sha256


def _check_tokenizer(tokenizer: Tokenizer, data: TokenFile, model: str) -> None:
    """Raise InputError unless the tokenizer is the data's, for bytes of text are counted with it."""
    same = (data.tokenizer, f"bpe:{GPT2_VOCAB_SIZE}") if data.tokenizer == "gpt2" else (data.tokenizer,)
    if tokenizer.vocab_size < data.vocab_size or (data.tokenizer is not None and tokenizer.name not in same):
        raise InputError(
            f"--data_path {data.path} is written with {data.tokenizer or 'a tokenizer'} of {data.vocab_size} tokens, "
            f"but the tokenizer of {model} is {tokenizer.name}; give the one that made the data with --tokenizer_file, "
            "or data that the model's own tokenizer made"
        )


def _tokenizer_for(arguments: argparse.Namespace, source: Path | str, data: TokenFile | None) -> Tokenizer | None:
    """Return the model's tokenizer, else the data's. None, with a line, where no part that was asked for by name needs
    one and neither is available."""
    given = arguments.tokenizer_file
    needing = next((name for name in ("bleu", "multiple_choice") if getattr(arguments, name) is not None), None)
    if needing is None and given is None and (data is None or not arguments.perplexity):
        return None
    try:
        return tokenizer_of(source, given)
    except (OSError, ValueError) as error:
        reason = str(error)
    if given is None and data is not None and data.tokenizer is not None:
        with contextlib.suppress(OSError, ValueError):
            return load_tokenizer(data.tokenizer, data.tokenizer_file)
    if needing is not None or given is not None:
        raise InputError(f"--{needing if given is None else 'tokenizer_file'}: {reason}")
    print(f"no bits per byte: {reason}", flush=True)
    return None
