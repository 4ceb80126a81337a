#!/usr/bin/env python3
"""Measure what a trained model costs to serve: quality, bytes, latency, throughput under load, what quantizing changes.

    E="python scripts/evaluate.py --checkpoint checkpoint/baseline"
    $E                                    # fp32: perplexity, bits per byte, latency of one request at a time
    $E --quantize all                     # the same for every scheme that runs here, and what each one changes
    $E --load --wrapped                   # also many requests at once, and the model inside DeepSpeed
    $E --load --wrapped --quick           # a trial of all of that, in a minute
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
from testbed.distributed.launch import limit_gomp_spinning, usable_cores
from testbed.errors import Failure, first_line, say
from testbed.inference.evaluated_model import EvaluatedModel, look
from testbed.inference.loading import add_model_flags
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
    layout = argparse.RawDescriptionHelpFormatter
    epilog = rest.replace("SCHEMES", schemes)
    parser = FlagParser(description=head, epilog=epilog, allow_abbrev=False, formatter_class=layout)
    for add_flags in (add_flags_of_the_subject, add_flags_of_one_request, add_flags_of_the_load, add_flags_of_the_run):
        add_flags(parser)
    arguments = parser.parse_args(words)
    for name, value in (QUICK if arguments.quick else DEFAULTS).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def add_flags_of_the_subject(parser: FlagParser) -> None:
    what = parser.add_argument_group("model and data")
    add_model_flags(what)
    data = (
        "token file to predict and to take prompts from (default: the run's validation file, if it still has the "
        "recorded SHA-256; else no perplexity, random prompts)"
    )
    what.add_argument("--data_path", type=Path, metavar="FILE.bin", help=data)
    what.add_argument("--quantize", default=NONE, metavar="NAMES", help="schemes with commas, or all (default: none)")
    flag = parser.add_argument_group("quality").add_argument
    flag("--perplexity", action=argparse.BooleanOptionalAction, default=True, help="perplexity of --data_path")
    window = "length of a window (default: the training's sequence length, else the model's positions)"
    flag("--window", type=positive, metavar="TOKENS", help=window)
    stride = "targets that each window but the first scores, its last ones (default: half a window)"
    flag("--stride", type=positive, metavar="TOKENS", help=stride)
    windows = "windows to read, from the first on; 0 = all (default: 65,536 tokens of them)"
    flag("--max_windows", type=not_negative, metavar="N", help=windows)
    flag("--bleu", type=Path, metavar="PAIRS.jsonl", help="prompts with references: corpus score of greedy answers")
    choice = 'accuracy on {"ctx": TEXT, "endings": [TEXT, ...], "label": N} per line, as HellaSwag has them'
    flag("--multiple_choice", type=Path, metavar="FILE.jsonl", help=choice)
    flag("--bleu_max_new_tokens", type=positive, metavar="TOKENS", help="longest answer (default: 64)")


def add_flags_of_one_request(parser: FlagParser) -> None:
    flag = parser.add_argument_group("one request at a time").add_argument
    flag("--latency", action=argparse.BooleanOptionalAction, default=True, help="prefill, first token, decode")
    flag("--prompt_tokens", type=positive, metavar="TOKENS", help="length of a prompt (default: 64, if they fit)")
    flag("--new_tokens", type=positive, metavar="TOKENS", help="length of an answer, 2 or more (default: 64)")
    repeats = "answers of each scheme, in turn; 5 or more for a verdict, 20 for a p95 (default: 20)"
    flag("--repeats", type=positive, metavar="N", help=repeats)
    flag("--warmup", type=positive, default=2, metavar="N", help="answers before them, not counted (default: 2)")
    flag("--wrapped", action="store_true", help="also inside DeepSpeed's training engine and init_inference")


def add_flags_of_the_load(parser: FlagParser) -> None:
    flag = parser.add_argument_group("many requests at once").add_argument
    flag("--load", action="store_true", help="a closed loop for each --concurrency, then an open one per rate")
    flag("--load_scheme", default=NONE, metavar="NAME", help="one of --quantize (default: none)")
    at_once = "requests in the engine at a time (default: 1,2,4,8,16)"
    flag("--concurrency", type=_positives, metavar="N,N,...", help=at_once)
    rates = "requests/s, arriving at random (default: 25, 50, 75, 90, 110 %% of what the closed loops reach)"
    flag("--rates", type=_rates, metavar="R,R,...", help=rates)
    flag("--requests", type=positive, metavar="N", help="requests of each loop (default: 100)")
    flag("--max_batch", type=positive, metavar="N", help="requests that run at once (default: 8)")
    flag("--max_queue", type=positive, default=64, metavar="N", help="requests that may wait (default: 64)")


def add_flags_of_the_run(parser: FlagParser) -> None:
    flag = parser.add_argument_group("run").add_argument
    flag("--seed", type=not_negative, default=0, help="seed of prompts and arrivals (default: 0)")
    flag("--threads", type=positive, metavar="N", help="CPU threads (default: the usable cores)")
    flag("--quick", action="store_true", help="few and short of everything; other flags still hold")
    out = "(default: inference_metrics.json in the checkpoint's folder; here for a model of the hub)"
    flag("--out", type=Path, metavar="FILE.json", help=out)
    flag("--overwrite", action="store_true", help="replace an earlier file, once the first part is measured")


def _positives(text: str) -> list[int]:
    return [positive(part.strip()) for part in text.split(",")]


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0.001 <= rate <= 1e6 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of requests per second, from 0.001 to 1,000,000")
    return rates


@program
def main() -> int:
    """Check all that was typed, measure part after part, print the tables."""
    limit_gomp_spinning()
    arguments = parse_arguments(sys.argv[1:])
    schemes = chosen_schemes(arguments.quantize)
    subject = look(arguments)

    with failing(but=ValueError):
        evaluation, model, runnable = begin(arguments, subject, schemes)
    with failing():  # a ValueError too: what was typed could be measured
        evaluation.run(model, runnable)
    from testbed.inference.report import report_for_terminal

    say(f"\n{report_for_terminal(evaluation.content)}\n\nfile: {subject.out}")
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
    """Load the model and begin the file. Return the schemes that run here, too.

    Raises:
        InputError: a scheme that was asked for by name does not run here, or the model's file is damaged.
        OSError: the hub cannot be reached.
    """
    import torch

    from testbed.autotune.device import device_type, keep_freed_memory
    from testbed.inference.evaluation import Evaluation, first_record, scheme_entry
    from testbed.inference.loading import load_model, naming
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
    with naming(subject.flag):
        model = load_model(subject.source, device)
    content = first_record(recorded_command(__file__, sys.argv[1:]), device, subject, model)
    content["schemes"] = {name: scheme_entry(name, unavailable.get(name, NOT_YET)) for name in schemes}
    runnable = [scheme for scheme in schemes if scheme not in unavailable]
    return Evaluation(arguments, subject, device, content), model, runnable


if __name__ == "__main__":
    sys.exit(main())
