#!/usr/bin/env python3
"""Continue a prompt with a trained model; the text appears as it is made.

    python scripts/sample.py --checkpoint checkpoint/baseline --prompt "def main("
    python scripts/sample.py --checkpoint checkpoint/baseline --prompt "import " --temperature 0   # greedy
    python scripts/sample.py --from_pretrained gpt2 --prompt "The meaning of life is" --top_p 0.9  # published weights

The text goes to the standard output, how long it took to the standard error.

Exit code: 0 the text ended (end-of-text, --max_new_tokens, or the model's last position); 1 it could not be made;
2 what was typed cannot be used; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
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
from testbed.errors import Failure, printable
from testbed.inference.loading import PUBLISHED, is_published, load_model, shape_of_config, tokenizer_of
from testbed.inference.sampling import Sampling
from testbed.program import program

DEFAULT_NEW_TOKENS = 200


def parse_arguments(words: list[str]) -> argparse.Namespace:
    head, _, examples = __doc__.partition("\n")
    parser = FlagParser(
        description=head, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--checkpoint", type=Path, metavar="DIR", help="folder of a run that has ended, or its best/")
    model.add_argument(
        "--from_pretrained",
        metavar="NAME|DIR",
        help=f"{', '.join(PUBLISHED)} from the Hugging Face hub, or a folder that transformers saved",
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what the text begins with")
    parser.add_argument(
        "--pair",
        action="store_true",
        help="ask as a model was taught that learned pairs (preprocess_small.py --pairs): a line feed ends the prompt, "
        "encoded apart, and what follows is the reference",
    )
    parser.add_argument(
        "--max_new_tokens",
        type=positive,
        metavar="TOKENS",
        help=f"end after so many (default: {DEFAULT_NEW_TOKENS}, or fewer where the length of the training, "
        "or the model's positions end)",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 = always the likeliest token; 1 = as the model predicts; "
        "more = more surprising (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--top_k",
        type=not_negative,
        default=50,
        metavar="TOKENS",
        help="draw from the so many likeliest tokens; 0 = from all (default: %(default)s)",
    )
    parser.add_argument(
        "--top_p",
        type=float,
        metavar="SHARE",
        help="of these, draw from the fewest whose probabilities reach this (default: from all)",
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same text (default: %(default)s)")
    parser.add_argument(
        "--tokenizer_file",
        type=Path,
        metavar="FILE.json",
        help="the bpe_N.json of the training data (default: the folder's tokenizer.json, or GPT-2's tokenizer)",
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto = CUDA where PyTorch finds it (default: %(default)s)",
    )
    return parser.parse_args(words)


@program
def main() -> None:
    try:
        continue_prompt(parse_arguments(sys.argv[1:]))
    except BrokenPipeError:  # as with `| head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (RuntimeError, MemoryError) as error:
        from testbed.train.ending import is_out_of_memory

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
    flag, source = "--checkpoint", arguments.checkpoint
    if source is None:
        flag, source = "--from_pretrained", arguments.from_pretrained
    with naming(flag):
        positions = shape_of_config(source).max_position_embeddings
        tokenizer = tokenizer_of(source, arguments.tokenizer_file)
    prompt = ids_of_prompt(arguments.prompt, tokenizer, arguments.pair)
    trained = None if is_published(source) else trained_with(Path(source)).seq_length
    new_tokens = tokens_to_make(arguments.max_new_tokens, len(prompt), positions, trained)
    for warning in untrained_positions("prompt and text have", len(prompt) + new_tokens, trained):
        print(warning, file=sys.stderr)

    from testbed.autotune.device import device_type  # from here on torch is needed

    device = device_type(arguments.device)
    with naming(flag):
        model = load_model(source, device)

    from testbed.inference.generate import stream
    from testbed.inference.sample import text_of

    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # typeshed: TextIO, which lacks it
    shown = functools.partial(printable, kept="\n\t") if sys.stdout.isatty() else str
    clock = Clock(stream(model, prompt, new_tokens, sampling, stop_id=tokenizer.end_of_text_id))
    texts = text_of(without(clock, tokenizer.end_of_text_id), tokenizer)
    print(shown(arguments.prompt), end=SEPARATOR if arguments.pair else "", flush=True)
    for piece in texts:
        print(shown(piece), end="", flush=True)
    print(flush=True)
    print(clock.summary(len(prompt)), file=sys.stderr)


@contextlib.contextmanager
def naming(flag: str, between: str = " ") -> Iterator[None]:
    """Put the flag before the sentence that says what is wrong with its value."""
    try:
        yield
    except (ValueError, OSError) as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"{flag}{between}{error}") from None


def ids_of_prompt(text: str, tokenizer: Tokenizer, is_of_a_pair: bool) -> list[int]:
    """ValueError where there is nothing to begin with, or what cannot be text."""
    if not text:
        raise ValueError('--prompt is empty; give some text to begin with, for example --prompt "import "')
    try:
        return encode_prompt(tokenizer, text) if is_of_a_pair else tokenizer.encode(text)
    except UnicodeEncodeError:  # bytes of the command line that are not UTF-8 arrive as lone surrogates
        raise ValueError("--prompt is not UTF-8 text; type it again") from None


def tokens_to_make(asked: int | None, prompt_tokens: int, positions: int, trained: int | None) -> int:
    """New tokens that were asked for, or that have room within the length of the training. ValueError where they have
    none in the model."""
    if prompt_tokens >= positions:
        raise ValueError(
            f"--prompt has {prompt_tokens} tokens, and the model has {positions} positions for them and the new ones; "
            "shorten it"
        )
    room = positions - prompt_tokens
    if asked is None:
        in_training = (trained or positions) - prompt_tokens
        return min(DEFAULT_NEW_TOKENS, room, in_training if in_training > 0 else room)
    if not 1 <= asked <= room:
        raise ValueError(
            f"--max_new_tokens {asked} must be from 1 to {room}: the model has {positions} positions, and --prompt "
            f"takes {prompt_tokens}"
        )
    return asked


def without(tokens: Iterable[int], end_of_text_id: int) -> Iterator[int]:
    """The tokens but for end-of-text, which ends a text and is no part of it."""
    return (token for token in tokens if token != end_of_text_id)


class Clock:
    """Passes tokens on and notes when they came."""

    def __init__(self, tokens: Iterable[int]):
        self._tokens = tokens
        self._start_s = time.perf_counter()
        self._came_s: list[float] = []

    def __iter__(self) -> Iterator[int]:
        for token in self._tokens:
            self._came_s.append(time.perf_counter() - self._start_s)
            yield token

    def summary(self, prompt_tokens: int) -> str:
        """One line: how many tokens, the first one's time, the others' rate."""
        first_s, last_s, number = self._came_s[0], self._came_s[-1], len(self._came_s)
        rate = f", then {(number - 1) / (last_s - first_s):,.0f} tokens/s" if number > 1 else ""
        return f"[{prompt_tokens} + {number} tokens; the first after {first_s:.3f} s{rate}]"


if __name__ == "__main__":
    sys.exit(main())
