#!/usr/bin/env python3
"""Measure what a trained model costs to serve: quality, bytes, latency, throughput under load, what quantizing changes.

    E="python scripts/evaluate.py --checkpoint checkpoint/baseline --data_path val_small.bin"
    $E                                    # fp32: perplexity, bits per byte, latency of one request at a time
    $E --quantize all                     # the same for every scheme that runs here, and what each one changes
    $E --load --wrapped                   # also many requests at once, and the model inside DeepSpeed
    $E --load --wrapped --quick           # whether all of that works, in a minute
    python scripts/evaluate.py --from_pretrained gpt2 --data_path val.bin --max_windows 0 --no-latency

Schemes of --quantize:
SCHEMES
Everything is kept in inference_metrics.json in the checkpoint's folder, raw samples included, after every part.

Exit code: 0 all that was asked for was measured; 1 something failed, or --wrapped without DeepSpeed's training engine,
and the file says what; 2 what was typed cannot be measured; 130 or 143 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import not_negative, positive
from testbed.distributed.launch import usable_cores
from testbed.distributed.openmp import wait_briefly
from testbed.errors import Failure, first_line, say
from testbed.inference.evaluated_model import EvaluatedModel, look
from testbed.inference.loading import PUBLISHED
from testbed.inference.schemes import NONE, SCHEMES, chosen_schemes
from testbed.program import program, recorded_command

if TYPE_CHECKING:
    from testbed.inference.evaluation import Evaluation
    from testbed.model.gpt2 import GPT2

DEFAULTS = {"repeats": 20, "requests": 100, "concurrency": [1, 2, 4, 8, 16], "max_batch": 8}
QUICK = {"max_windows": 6, "repeats": 2, "requests": 12, "concurrency": [1, 4], "max_batch": 3}
NOT_YET = "not measured yet"


def parse_arguments(words: list[str]) -> argparse.Namespace:
    schemes = "\n".join(f"  {name:<18}{scheme.summary}" for name, scheme in SCHEMES.items())
    head, _, rest = __doc__.partition("\n")
    parser = FlagParser(
        description=head, epilog=rest.replace("SCHEMES", schemes), allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    what = parser.add_argument_group("what is measured")
    model = what.add_mutually_exclusive_group(required=True)
    model.add_argument("--checkpoint", metavar="DIR", help="folder of a run that has ended, or its best/")
    model.add_argument(
        "--from_pretrained",
        metavar="NAME|DIR",
        help=f"{', '.join(PUBLISHED)} from the Hugging Face hub, or a folder that transformers saved",
    )
    what.add_argument(
        "--data_path",
        type=Path,
        metavar="FILE.bin",
        help="token file to predict and to take prompts from (default: no perplexity, prompts of random ids)",
    )
    what.add_argument(
        "--tokenizer_file",
        type=Path,
        metavar="FILE.json",
        help="the bpe_N.json of the training data (default: the checkpoint's tokenizer.json, or the data's)",
    )
    what.add_argument(
        "--quantize", default=NONE, metavar="NAMES", help="schemes with commas, or all (default: %(default)s)"
    )
    quality = parser.add_argument_group("perplexity")
    quality.add_argument("--perplexity", action=argparse.BooleanOptionalAction, default=True, help="of --data_path")
    quality.add_argument(
        "--window",
        type=positive,
        metavar="TOKENS",
        help="tokens of a window (default: the sequence length of the training, else the model's positions)",
    )
    quality.add_argument(
        "--stride",
        type=positive,
        metavar="TOKENS",
        help="from window to window; each scores its last so many targets, the first one all (default: half a window)",
    )
    quality.add_argument(
        "--max_windows",
        type=not_negative,
        metavar="N",
        help="read only the first so many; 0 = all (default: 65,536 tokens of them)",
    )
    speed = parser.add_argument_group("one request at a time")
    speed.add_argument(
        "--latency",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="prefill, first token, decode",
    )
    speed.add_argument(
        "--prompt_tokens", type=positive, metavar="TOKENS", help="of a prompt (default: 64, if they fit)"
    )
    speed.add_argument("--new_tokens", type=positive, metavar="TOKENS", help="of an answer, 2 or more (default: 64)")
    speed.add_argument(
        "--repeats",
        type=positive,
        metavar="N",
        help="answers of each scheme, in turn; fewer than 5 make no claim, fewer than 20 have no p95 (default: 20)",
    )
    speed.add_argument(
        "--warmup", type=positive, default=2, metavar="N", help="answers before them, forgotten (default: %(default)s)"
    )
    speed.add_argument(
        "--wrapped", action="store_true", help="also inside DeepSpeed's training engine and init_inference, in turn"
    )
    load = parser.add_argument_group("many requests at once")
    load.add_argument(
        "--load", action="store_true", help="closed loops of each --concurrency, then an open one per rate"
    )
    load.add_argument("--load_scheme", default=NONE, metavar="NAME", help="one of --quantize (default: %(default)s)")
    load.add_argument(
        "--concurrency",
        type=_positives,
        metavar="N,N,...",
        help="requests that are in the engine at a time (default: 1,2,4,8,16)",
    )
    load.add_argument(
        "--rates",
        type=_rates,
        metavar="R,R,...",
        help="requests per second, arriving at random (default: 25, 50, 75, 90, 110 %% of what the closed loops reach)",
    )
    load.add_argument("--requests", type=positive, metavar="N", help="of each loop (default: 100)")
    load.add_argument(
        "--max_batch",
        type=positive,
        metavar="N",
        help="requests that run at once, a quarter of all at most (default: 8)",
    )
    load.add_argument(
        "--max_queue",
        type=positive,
        default=64,
        metavar="N",
        help="requests that may wait; more are rejected (default: %(default)s)",
    )
    text = parser.add_argument_group("text")
    text.add_argument(
        "--bleu", type=Path, metavar="PAIRS.jsonl", help="prompts with references: the corpus score of greedy answers"
    )
    text.add_argument(
        "--bleu_max_new_tokens", type=positive, metavar="TOKENS", help="of an answer at most (default: 64)"
    )
    how = parser.add_argument_group("how")
    how.add_argument("--seed", type=not_negative, default=0, help="of prompts and arrivals (default: %(default)s)")
    how.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto = CUDA where PyTorch finds it (default: %(default)s)",
    )
    how.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: the usable cores)")
    how.add_argument(
        "--quick", action="store_true", help="whether everything works: few and short of all; other flags still hold"
    )
    how.add_argument(
        "--out",
        type=Path,
        metavar="FILE.json",
        help="(default: inference_metrics.json in the checkpoint's folder; with a name of --from_pretrained, here)",
    )
    how.add_argument(
        "--overwrite", action="store_true", help="replace what was measured before, once the first part is new"
    )
    arguments = parser.parse_args(words)
    for name, value in (QUICK if arguments.quick else DEFAULTS).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def _positives(text: str) -> list[int]:
    return [positive(part.strip()) for part in text.split(",")]


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0.001 <= rate <= 1e6 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of requests per second, from 0.001 to 1,000,000")
    return rates


@program
def main() -> int:
    """Check all that was typed, measure part after part, print the tables."""
    wait_briefly()
    arguments = parse_arguments(sys.argv[1:])
    schemes = chosen_schemes(arguments.quantize)
    subject = look(arguments)

    with failing(but=ValueError):
        evaluation, model, runnable = begin(arguments, subject, schemes)
    with failing():  # a ValueError too: what was typed could be measured
        evaluation.run(model, runnable)
    from testbed.inference.report import report

    say(f"\n{report(evaluation.content)}\n\nfile: {subject.out}")
    for sentence in evaluation.failed_parts:
        say(f"evaluate.py: error: {sentence}", file=sys.stderr)
    return 1 if evaluation.failed_parts else 0


@contextlib.contextmanager
def failing(but: type[Exception] = Failure) -> Iterator[None]:
    """Turn what fails inside into one sentence, whatever its kind: the hub, a device without room for the model."""
    try:
        yield
    except (OSError, ArithmeticError, Failure, but):
        raise
    except Exception as error:
        raise Failure(first_line(error)) from error


def begin(
    arguments: argparse.Namespace, subject: EvaluatedModel, schemes: Sequence[str]
) -> tuple[Evaluation, GPT2, list[str]]:
    """Load the model, and write down what will be measured of it."""
    import torch

    from testbed.autotune.device import device_type, keep_freed_memory
    from testbed.inference.evaluation import Evaluation, model_of
    from testbed.inference.first_record import beginning, scheme_entry
    from testbed.inference.quantize import check_scheme

    device = torch.device(device_type(arguments.device))
    torch.set_num_threads(arguments.threads or usable_cores())
    if device.type == "cpu":
        keep_freed_memory()
    unavailable = {}
    for scheme in schemes:
        try:
            check_scheme(scheme, subject.shape, device)
        except ValueError as error:
            if arguments.quantize.strip() != "all" or scheme == arguments.load_scheme:
                raise
            unavailable[scheme] = str(error)
    model = model_of(subject, device)
    content = beginning(recorded_command(__file__, sys.argv[1:]), device, subject, model)
    content["schemes"] = {name: scheme_entry(name, unavailable.get(name, NOT_YET)) for name in schemes}
    evaluation = Evaluation(arguments, subject, device, content)
    return evaluation, model, [scheme for scheme in schemes if scheme not in unavailable]


if __name__ == "__main__":
    sys.exit(main())
