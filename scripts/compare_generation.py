#!/usr/bin/env python3
"""Generation with the key-value cache against reading the prefix again, and against transformers' generate.

    python scripts/compare_generation.py                              # a model of 2M parameters, a minute on two cores
    python scripts/compare_generation.py --model gpt2 --out gpt2.json # GPT-2 124M, several minutes

Both arms of a comparison have the same random weights and alternate, 7 rounds each. Ratios are of medians over the
rounds with a 95 % interval, as everywhere in this repository (docs/measuring.md).

Exit code: 0 measured; 1 the arms wrote different tokens in fp32 (in bf16, rounding may choose); 2 what was typed cannot
be run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))  # `testbed` lies there, installed or not

from testbed.analysis.statistics import MIN_REPEATS, compare
from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import positive
from testbed.distributed.launch import Launch
from testbed.distributed.openmp import wait_briefly
from testbed.model.shape import MODEL_SIZES, ModelShape

if TYPE_CHECKING:
    from testbed.inference.other_generators import Arms

QUICKSTART_VOCABULARY = 8192  # of nano, as the quickstart trains it


def parse_arguments(words: list[str]) -> argparse.Namespace:
    head, _, examples = __doc__.partition("\n")
    parser = FlagParser(
        description=head, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", choices=list(MODEL_SIZES), default="nano", help="(default: %(default)s)")
    parser.add_argument(
        "--batch", type=positive, default=8, metavar="SEQUENCES", help="against transformers (default: %(default)s)"
    )
    parser.add_argument(
        "--prompt_tokens",
        type=positive,
        default=64,
        metavar="TOKENS",
        help="of each of these sequences (default: %(default)s)",
    )
    parser.add_argument(
        "--new_tokens", type=positive, default=64, metavar="TOKENS", help="that each gets (default: %(default)s)"
    )
    parser.add_argument(
        "--prefix_tokens",
        type=positive,
        default=512,
        metavar="TOKENS",
        help="that are read again, or not (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=positive,
        default=7,
        metavar="N",
        help=f"fewer than {MIN_REPEATS} make no claim (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=["fp32", "bf16"], default="fp32", help="of weights and cache (default: %(default)s)"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="cpu", help="(default: %(default)s)")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: the usable cores)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="every round's rate and where they were measured")
    return parser.parse_args(words)


def main() -> int:
    wait_briefly()
    arguments = parse_arguments(sys.argv[1:])
    shape = MODEL_SIZES[arguments.model]
    if arguments.model == "nano":
        shape = ModelShape(shape.num_layers, shape.num_heads, shape.embedding_size, QUICKSTART_VOCABULARY)
    try:
        check_lengths(arguments, shape)
        content = measure(arguments, shape)
    except ValueError as error:
        print(f"compare_generation.py: error: {error}", file=sys.stderr)
        return 2
    if arguments.out is not None:
        from testbed.io import write_text

        write_text(arguments.out, json.dumps(content, indent=1) + "\n")
    return (
        0
        if arguments.dtype != "fp32" or all(entry["tokens_are_equal"] for entry in content["comparisons"].values())
        else 1
    )


def check_lengths(arguments: argparse.Namespace, shape: ModelShape) -> None:
    for name in ("prompt_tokens", "prefix_tokens"):
        number = getattr(arguments, name)
        if number + arguments.new_tokens >= shape.max_position_embeddings:
            raise ValueError(
                f"--{name} {number} and --new_tokens {arguments.new_tokens} leave nothing of the "
                f"{shape.max_position_embeddings} positions of the model; lower one of them"
            )
    if arguments.out is not None and not arguments.out.resolve().parent.is_dir():
        raise ValueError(f"--out {arguments.out} lies in a folder that does not exist; make it, or name another")


def measure(arguments: argparse.Namespace, shape: ModelShape) -> dict[str, Any]:
    """Make both comparisons, print each as it is there, and return the file's content."""
    import torch

    from testbed.autotune.device import device_type
    from testbed.distributed.launch import usable_cores
    from testbed.inference.other_generators import against_recomputing, against_transformers
    from testbed.io import now_utc
    from testbed.metrics import environment
    from testbed.model.gpt2 import GPT2

    device = device_type(arguments.device)
    torch.set_num_threads(arguments.threads or usable_cores())
    torch.manual_seed(0)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
    model = GPT2(shape).to(device, dtype).eval()
    commit, is_dirty = environment.commit()
    content = {
        "timestamp_utc": now_utc(),
        "command_line": shlex.join(["scripts/compare_generation.py", *sys.argv[1:]]),
        "git_commit": commit,
        "git_dirty": is_dirty,
        "environment": {
            "env": environment.versions(),
            "hardware": environment.hardware(torch.device(device), Launch(0, 0, 1, 1), None),
        },
        "model_size": shape.describe(),
        "vocab_size": shape.vocab_size,
        "dtype": arguments.dtype,
        "comparisons": {},
    }
    print(f"{arguments.model}, {arguments.dtype}, {device}, {torch.get_num_threads()} threads")
    prefix = f"1 sequence, {arguments.prefix_tokens} tokens before and {arguments.new_tokens} new"
    arms = against_recomputing(model, arguments.prefix_tokens, arguments.new_tokens, arguments.rounds)
    content["comparisons"]["recomputing"] = told(prefix, arms)
    batch = f"{arguments.batch} sequences, {arguments.prompt_tokens} tokens before and {arguments.new_tokens} new"
    arms = against_transformers(model, arguments.batch, arguments.prompt_tokens, arguments.new_tokens, arguments.rounds)
    content["comparisons"]["transformers"] = told(batch, arms)
    return content


def told(work: str, arms: Arms) -> dict[str, Any]:
    """Print a comparison; its entry in the file."""
    ratio = compare(*arms.rates)
    medians = map(statistics.median, arms.rates)
    interval = "too few rounds for an interval" if ratio.low is None else f"{ratio.low:.2f} to {ratio.high:.2f}"
    print(f"{work}:")
    for name, median in zip(arms.names, medians, strict=True):
        print(f"  {name:<18}{median:>10,.1f} tokens/s")
    print(f"  ratio {ratio.ratio:.2f} ({interval}), {len(arms.rates[0])} rounds each: {ratio.verdict}", flush=True)
    are_equal = arms.tokens[0] == arms.tokens[1]
    if not are_equal:
        print(f"  {arms.names[0]} and {arms.names[1]} wrote different tokens")
    return {
        "work": work,
        "tokens_per_s": dict(zip(arms.names, arms.rates, strict=True)),
        "ratio": ratio.ratio,
        "low": ratio.low,
        "high": ratio.high,
        "verdict": ratio.verdict,
        "tokens_are_equal": are_equal,
    }


if __name__ == "__main__":
    sys.exit(main())
