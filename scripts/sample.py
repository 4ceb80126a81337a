#!/usr/bin/env python3
"""Continue a prompt with a trained model; the text appears as it is made.

    python scripts/sample.py --checkpoint checkpoint/baseline --prompt "def main("
    python scripts/sample.py --checkpoint checkpoint/baseline --prompt "import " --temperature 0   # greedy
    python scripts/sample.py --checkpoint checkpoint/baseline --prompt "import " --num_samples 5   # seeds 0 to 4
    python scripts/sample.py --from_pretrained gpt2 --prompt "The meaning of life is" --top_p 0.9  # published weights
    python scripts/sample.py --checkpoint checkpoint/baseline                                      # text from nothing

The text goes to the standard output, how long it took to the standard error.

Exit code: 0 the text ended (end-of-text, --max_new_tokens, or the model's last position); 1 it could not be made;
2 what was typed cannot be used; 130 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import not_negative, positive
from testbed.config.trained_run import trained_with, untrained_positions
from testbed.data.pairs import SEPARATOR, encode_prompt
from testbed.data.tokenizer import Tokenizer
from testbed.errors import Failure, InputError, counted, printable
from testbed.inference.loading import (
    add_model_flags,
    is_published,
    load_model,
    named_model,
    naming,
    note_on,
    shape_of_config,
    tokenizer_of,
)
from testbed.inference.sampling import Sampling
from testbed.program import program

DEFAULT_NEW_TOKENS = 200


def parse_arguments(words: list[str]) -> argparse.Namespace:
    head, _, examples = __doc__.partition("\n")
    layout = argparse.RawDescriptionHelpFormatter
    parser = FlagParser(description=head, epilog=examples, formatter_class=layout, allow_abbrev=False)
    add_model_flags(parser)
    flag = parser.add_argument
    begins = "the beginning of the text (default: none; the model begins a text, as after end-of-text or a line feed)"
    flag("--prompt", metavar="TEXT", help=begins)
    pair = "ask in the form of preprocess_small.py --pairs: a line feed ends the prompt, the reference follows"
    flag("--pair", action="store_true", help=pair)
    longest = (
        f"length of the new text at most (default: {DEFAULT_NEW_TOKENS}, or fewer where the length of the training, or "
        "the model's positions end)"
    )
    flag("--max_new_tokens", type=positive, metavar="TOKENS", help=longest)
    temperature = "0 = always the likeliest token; 1 = as the model predicts; above = more surprising (default: 0.8)"
    flag("--temperature", type=float, default=0.8, help=temperature)
    top_k = "draw from this many of the likeliest tokens; 0 = from all (default: 50)"
    flag("--top_k", type=not_negative, default=50, metavar="TOKENS", help=top_k)
    top_p = "of these, draw from the fewest whose probabilities reach this (default: from all)"
    flag("--top_p", type=float, metavar="SHARE", help=top_p)
    several = "continue the prompt so often, each with the next seed, under lines that number them (default: 1)"
    flag("--num_samples", type=positive, default=1, metavar="N", help=several)
    flag("--seed", type=int, default=0, help="the same seed draws the same text (default: 0)")
    return parser.parse_args(words)


@program
def main() -> None:
    try:
        continue_prompt(parse_arguments(sys.argv[1:]))
    except BrokenPipeError:  # as with `| head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (RuntimeError, MemoryError) as error:
        from testbed.profiling.device_limits import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        raise Failure(
            "out of memory: the model and the keys and values of the text do not fit; ask for fewer --max_new_tokens, "
            "or take another --device"
        ) from None


def continue_prompt(arguments: argparse.Namespace) -> None:
    """Check all that was typed, load the model, write the text."""
    with naming("--", between=""):
        sampling = Sampling(arguments.temperature, arguments.top_k or None, arguments.top_p, arguments.seed)
    if arguments.num_samples > 1 and sampling.temperature == 0:
        raise InputError(
            f"--num_samples {arguments.num_samples} with --temperature 0 is one text {arguments.num_samples} times; "
            "raise --temperature, or leave --num_samples out"
        )
    if arguments.pair and arguments.prompt is None:
        raise InputError("--pair asks in the form of a pair, and no --prompt is there to ask; give one")
    flag, source = named_model(arguments)
    with naming(flag):
        positions = shape_of_config(source).max_position_embeddings
        tokenizer = tokenizer_of(source, arguments.tokenizer_file)
        note = note_on(source)
    given = arguments.prompt
    prompt = beginning(tokenizer) if given is None else ids_of_prompt(given, tokenizer, arguments.pair)
    prompt, cropped = cropped_to_fit(prompt, arguments.max_new_tokens, positions)
    trained = None if is_published(source) else trained_with(Path(source)).seq_length
    new_tokens = tokens_to_make(arguments.max_new_tokens, len(prompt), positions, trained)
    warnings = untrained_positions("prompt and text have", len(prompt) + new_tokens, trained)
    for warning in [*filter(None, [note, cropped]), *warnings]:
        print(warning, file=sys.stderr)

    from testbed.autotune.device import device_type  # from here on torch is needed

    device = device_type(arguments.device)
    with naming(flag):
        model = load_model(source, device)

    from testbed.inference.generate import DEFAULT_BATCH, generate, stream
    from testbed.inference.sample import text_of

    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # typeshed: TextIO, which lacks it
    shown = functools.partial(printable, kept="\n\t") if sys.stdout.isatty() else str
    end, lead = tokenizer.end_of_text_id, f"{shown(given or '')}{SEPARATOR if arguments.pair else ''}"

    def written(tokens: Iterable[int]) -> None:
        for piece in text_of((token for token in tokens if token != end), tokenizer):
            print(shown(piece), end="", flush=True)
        print(flush=True)

    if arguments.num_samples > 1:
        start_s, made = time.perf_counter(), 0
        for first in range(0, arguments.num_samples, DEFAULT_BATCH):
            number = min(DEFAULT_BATCH, arguments.num_samples - first)
            drawn = dataclasses.replace(sampling, seed=sampling.seed + first)
            for place, tokens in enumerate(generate(model, [prompt] * number, new_tokens, drawn, end), start=first):
                made += len(tokens)
                print(f"--- {place + 1} of {arguments.num_samples}, seed {sampling.seed + place}\n{lead}", end="")
                written(tokens)
        seconds = time.perf_counter() - start_s
        print(f"[{counted(arguments.num_samples, 'text')}, {made:,} new tokens in {seconds:.3f} s]", file=sys.stderr)
        return
    clock = Clock(stream(model, prompt, new_tokens, sampling, stop_id=end))
    print(lead, end="", flush=True)
    written(clock)
    print(clock.summary(len(prompt)), file=sys.stderr)


def beginning(tokenizer: Tokenizer) -> list[int]:
    """Return what a text without a prompt begins after: the token that ended the text before, or a line feed."""
    if tokenizer.end_of_text_id is not None:
        return [tokenizer.end_of_text_id]
    try:
        return tokenizer.encode("\n")
    except InputError as error:
        raise InputError(
            f"no token of {tokenizer.name} ends a text, and it has no line feed ({error}); give --prompt"
        ) from None


def cropped_to_fit(prompt: list[int], asked: int | None, positions: int) -> tuple[list[int], str | None]:
    """Crop a prompt of `positions` tokens or more to its last ones, leaving room for new tokens.

    Returns:
        The tokens to continue, and a note if it was cropped.
    """
    if len(prompt) < positions:
        return prompt, None
    kept = max(1, positions - (asked or min(DEFAULT_NEW_TOKENS, positions // 2)))
    return prompt[-kept:], (
        f"note: --prompt has {len(prompt):,} tokens, and the model {positions:,} positions for them and the new ones: "
        f"it continues the last {kept:,}"
    )


def ids_of_prompt(text: str, tokenizer: Tokenizer, is_of_a_pair: bool) -> list[int]:
    """Return the prompt's ids. InputError where it is empty or cannot be text."""
    if not text:
        raise InputError("--prompt is empty; leave it out for a text from nothing, or give its beginning")
    try:
        return encode_prompt(tokenizer, text) if is_of_a_pair else tokenizer.encode(text)
    except InputError as error:  # a character that the tokenizer lacks
        raise InputError(f"--prompt: {error}") from None
    except UnicodeEncodeError:  # bytes of the command line that are not UTF-8 arrive as lone surrogates
        raise InputError("--prompt is not UTF-8 text; type it again") from None


def tokens_to_make(asked: int | None, prompt_tokens: int, positions: int, trained: int | None) -> int:
    """Return the new tokens that were asked for, or that have room within the length of the training.

    Raises:
        InputError: the model has no room for them.
    """
    room = positions - prompt_tokens
    if not 1 <= (asked or 1) <= room:
        raise InputError(
            f"--max_new_tokens {asked or 1} must be from 1 to {room}: the model has {positions} positions, and "
            f"--prompt takes {prompt_tokens}"
        )
    in_training = (trained or positions) - prompt_tokens
    return asked or min(DEFAULT_NEW_TOKENS, room, in_training if in_training > 0 else room)


class Clock:
    """Pass tokens on and note when they came."""

    def __init__(self, tokens: Iterable[int]):
        self._tokens = tokens
        self._start_s = time.perf_counter()
        self._came_s: list[float] = []

    def __iter__(self) -> Iterator[int]:
        for token in self._tokens:
            self._came_s.append(time.perf_counter() - self._start_s)
            yield token

    def summary(self, prompt_tokens: int) -> str:
        """Return one line: how many tokens, the first one's time, the others' rate."""
        first_s, last_s, number = self._came_s[0], self._came_s[-1], len(self._came_s)
        rate = f", then {(number - 1) / (last_s - first_s):,.0f} tokens/s" if number > 1 else ""
        return f"[{prompt_tokens} + {number} tokens; the first after {first_s:.3f} s{rate}]"


if __name__ == "__main__":
    sys.exit(main())
