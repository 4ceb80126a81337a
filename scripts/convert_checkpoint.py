#!/usr/bin/env python3
"""Convert a GPT-2 between this program, transformers, nanoGPT, llm.c and DeepSpeed, bit for bit.

    python scripts/convert_checkpoint.py --from nanoGPT/out/ckpt.pt --to checkpoint/from_nanogpt
    python scripts/convert_checkpoint.py --from checkpoint/baseline --to gpt2_124M.bin           # llm.c, fp32
    python scripts/convert_checkpoint.py --from checkpoint/baseline --to ckpt.pt                 # with AdamW's state
    python scripts/convert_checkpoint.py --from llm.c/log124M/model_00010000.bin --to checkpoint/from_llmc
    python scripts/convert_checkpoint.py --from checkpoint/baseline --to further/universal --deepspeed
    python src/gpt2.py --init_from ckpt.pt                                     # trains the weights further, in any form

A .pt is nanoGPT's, a .bin llm.c's, a folder with zero/ a universal checkpoint of DeepSpeed (into one that DeepSpeed
wrote, copy the model's config.json). Any other name is a folder with config.json and model.safetensors, as runs of this
program and transformers write it, or a run's checkpoint, DIR/checkpoints/step_N.

AdamW's state goes with the weights between all forms. A folder keeps it as a checkpoint of this program. llm.c keeps
it beside a model whose name says its step: state_00010000_00000.bin, and one of each further rank, beside
model_00010000.bin. A .bin of another name has the weights alone. Of a run's folder the newest checkpoint is read,
weights and state; for weights alone, those of the run's end.

Exit code: 0 converted; 1 it could not be written; 2 what was typed cannot be used.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.config.initial_file import SUFFIXES, llmc_states, llmc_step
from testbed.config.initial_shape import is_universal
from testbed.errors import Failure, InputError, say
from testbed.program import program
from testbed.run_folder import EFFECTIVE_CONFIG, METRICS


def parse_arguments(words: list[str]) -> argparse.Namespace:
    head, _, examples = __doc__.partition("\n")
    layout = argparse.RawDescriptionHelpFormatter
    parser = FlagParser(description=head, epilog=examples, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("--from", dest="source", type=Path, required=True, metavar="PATH", help="what is read")
    parser.add_argument("--to", type=Path, required=True, metavar="PATH", help="what is written")
    parser.add_argument("--bf16", action="store_true", help="round to bf16, which llm.c trains in; only to a .bin")
    help_deepspeed = (
        "make --to a universal checkpoint, which DeepSpeed loads into transformers' GPT-2 under ZeRO 1 to 3"
    )
    parser.add_argument("--deepspeed", action="store_true", help=help_deepspeed)
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    return parser.parse_args(words)


def check_deepspeed(to: Path, is_asked: bool) -> None:
    """Refuse a universal checkpoint in the place of something else, and the reverse."""
    if is_universal(to) and not is_asked:
        raise InputError(f"--to {to} is a universal checkpoint of DeepSpeed; give --deepspeed, or name another")
    if is_asked and to.suffix.lower() in SUFFIXES:
        raise InputError(f"--deepspeed writes a folder, and --to {to} names a file; leave {to.suffix} out")
    if is_asked and to.exists() and any(to.iterdir()) and not is_universal(to):
        raise InputError(
            f"--to {to} holds no universal checkpoint, and --deepspeed replaces nothing else; name another"
        )


@program
def main() -> int:
    arguments = parse_arguments(sys.argv[1:])
    source, to = arguments.source, arguments.to
    if os.path.realpath(source) == os.path.realpath(to):  # Path.resolve fails at a circle of links
        raise InputError(f"--from and --to are both {source}; name two")
    if any((to / name).exists() for name in (METRICS, EFFECTIVE_CONFIG)):
        raise InputError(f"--to {to} is the folder of a run, whose record is of its own weights; name another")
    there = next((path for path in (to, *llmc_states(to)) if path.exists()), None)
    if there and not arguments.overwrite and not (to.is_dir() and not any(to.iterdir())):
        raise InputError(f"--to {to}: {there} exists; give --overwrite, or another name")
    if not to.absolute().parent.is_dir():
        raise InputError(f"--to {to}: there is no folder {to.absolute().parent}; make it first")
    if arguments.bf16 and to.suffix.lower() != ".bin":
        raise InputError(f"--bf16 is for a .bin of llm.c, and --to {to} is none; leave it out")
    if to.exists() and to.is_dir() == (to.suffix.lower() in (".pt", ".bin")):
        raise InputError(f"--to {to} is not of the kind that its name says; name another")
    check_deepspeed(to, arguments.deepspeed)
    from testbed.checkpoint.formats import kind_of, notes_on, read_checkpoint, write_checkpoint

    step = llmc_step(to)
    found = read_checkpoint(source, f"--from {source}", with_optimizer=to.suffix.lower() != ".bin" or step is not None)
    if found.optimizer and step not in (None, found.optimizer.step):
        way_out = f"name it model_{found.optimizer.step:08d}.bin"
        raise InputError(
            f"--to {to} says step {step}, and --from {source} is of step {found.optimizer.step}; {way_out}"
        )
    try:
        write_checkpoint(to, found, arguments.bf16, arguments.deepspeed)
    except OSError as error:
        fault = error.strerror or error
        raise Failure(f"--to {to} could not be written ({fault}); make room, or name another place") from None
    shape = found.shape
    say(
        f"{to}: {shape.num_parameters:,} parameters ({shape.describe()}, {shape.vocab_size:,} tokens, "
        f"{shape.max_position_embeddings:,} positions), {kind_of(source)} to {kind_of(to)}"
    )
    for note in notes_on(found, to):
        say(f"note: {note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
