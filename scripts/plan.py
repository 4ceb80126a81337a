#!/usr/bin/env python3
"""Say which strategy trains a GPT-2 fastest on given devices, whether it fits, how long it takes and what it costs.

    python scripts/plan.py --model gpt2-xl --gpus 8 --gpu h100-sxm --tokens 10B --price_per_gpu_hour 3
    python scripts/plan.py --model gpt2 --here                        # this machine's GPUs, or its cores
    python scripts/plan.py --model gpt2-large --gpu a100-80 --sweep gpus=8,16,...,256 --mtbf_hours 5000
    python scripts/plan.py --model llama3-8b --gpu a100-80,h100-sxm --price_per_gpu_hour 1.8,3 --sweep gpus=64,128 \
        --tokens 100B --deadline 14d                              # the fastest, and the cheapest in time
    python scripts/plan.py --model gpt2-large --gpu a100-80 --gpus 1024 --check   # build it, without devices
    python scripts/plan.py --calibrate --out calibration.json         # measure this machine, at most 10 minutes

Every strategy and mesh that src/gpt2.py accepts is estimated: memory by kind, step time with a 90 % interval and its
parts. Without a calibration of the machine the numbers come from data sheets and published runs, and the answer says
`uncalibrated`. Nothing is trained but by --calibrate. See docs/planner.md.

Exit code: 0; 1 where --calibrate fails or --check finds what would fail; 2 what was typed cannot be planned, or
nothing fits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import not_negative, not_negative_number, positive, positive_number, token_count
from testbed.config.flags import add_flag
from testbed.config.run_types import STRATEGIES
from testbed.config.table import FLAGS
from testbed.errors import Failure, InputError, counted, say
from testbed.planner.calibration import CALIBRATION
from testbed.planner.question import OF_OTHERS, OTHER_MODELS
from testbed.program import program, recorded_command

if TYPE_CHECKING:
    from testbed.memory_model.job import Job
    from testbed.planner.question import Question


ANY_DEVICE = "h100-sxm"
# flags of src/gpt2.py that a plan takes as they are, and passes on to the commands
OF_THE_MODEL = ("num_layers", "num_heads", "embedding_size", "vocab_size", "max_position_embeddings", "dropout")
OF_THE_RUN = (
    *("optimizer", "precision", "activation_checkpointing", "mixed_precision", "matmul", "compile", "attention"),
    *("zero_stage", "offload", "shard_size", "pipeline_stages", "pipeline_schedule", "tensor_parallel_size"),
    *("sequence_parallel", "context_parallel_size", "context_parallel_method", "stages_per_rank"),
)


def parse_arguments(words: list[str]) -> tuple[argparse.Namespace, frozenset[str]]:
    """Return the flags, and the names of those that were typed."""
    parser = build_parser()
    arguments = parser.parse_args(words)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return arguments, frozenset(vars(parser.parse_args(words)))


def build_parser() -> FlagParser:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    _add_work(parser.add_argument_group("the work of a step, as in src/gpt2.py"))
    _add_machine(parser.add_argument_group("the devices"))
    _add_budget(parser.add_argument_group("the whole run"))
    _add_answer(parser.add_argument_group("the answer"))
    _add_calibrate(parser.add_argument_group("measuring"))
    fixed = parser.add_argument_group("flags of src/gpt2.py that all candidates have whose run type knows them")
    fixed.add_argument("--run_type", choices=list(STRATEGIES), help="this strategy alone (default: all)")
    for name in OF_THE_RUN:
        add_flag(fixed, name)
    return parser


def _add_work(work: argparse._ArgumentGroup) -> None:
    sizes = [*(FLAGS["model"].choices or ()), *OTHER_MODELS]
    text = "a size of GPT-2, or a model that src/gpt2.py does not train (default: gpt2; with --here on a CPU nano)"
    work.add_argument("--model", choices=sizes, help=text)
    for name in OF_THE_MODEL:
        add_flag(work, name)
    text = "inner width of the MLP (default: 4 x width); this and the next three make another model than GPT-2"
    work.add_argument("--ffn", type=positive, metavar="WIDTH", help=text)
    text = "heads of keys and values, which query heads share (default: as many)"
    work.add_argument("--kv_heads", type=positive, metavar="N", help=text)
    work.add_argument("--gated", action="store_true", help="SwiGLU, RoPE, RMSNorm, no biases and --untied, as in Llama")
    work.add_argument("--untied", action="store_true", help="the head has a matrix of its own")
    text = "tokens per sequence (default: 1024, on a CPU 128)"
    work.add_argument("--seq_length", type=positive, metavar="TOKENS", help=text)
    text = "sequences per optimizer step of all ranks (default: about 512, a multiple of the devices; on a CPU 32)"
    work.add_argument("--global_batch_size", type=positive, metavar="SEQUENCES", help=text)
    text = (
        "sequences of a forward pass on one rank (default: the fastest that fits; of those as fast, the least memory)"
    )
    work.add_argument("--micro_batch_size_per_gpu", type=positive, metavar="SEQUENCES", help=text)


def _add_machine(machine: argparse._ArgumentGroup) -> None:
    text = "kind of device, such as h100-sxm, a100-80, rtx-4090; several, with commas, are compared"
    machine.add_argument("--gpu", type=_names, metavar="NAME[,NAME]", help=text)
    machine.add_argument("--here", action="store_true", help="this machine's GPUs, or its cores, one for each rank")
    machine.add_argument("--gpus", type=positive, metavar="N", help="devices in all (default: one node)")
    machine.add_argument("--gpus_per_node", type=positive, metavar="N", help="(default: as such nodes are sold)")
    text = "network between nodes, per device and direction, such as 400gbit (default: the usual one of such nodes)"
    machine.add_argument("--network", metavar="SPEED", help=text)
    machine.add_argument("--calibration", type=Path, metavar="FILE.json", help="what was measured on this machine")


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _prices(text: str) -> tuple[float, ...]:
    return tuple(not_negative_number(price.strip()) for price in text.split(","))


def _add_budget(budget: argparse._ArgumentGroup) -> None:
    budget.add_argument("--tokens", type=token_count, metavar="N", help="tokens to train on, such as 10B or 300e9")
    text = "price of a device and hour, in any currency; with several --gpu one for each"
    budget.add_argument("--price_per_gpu_hour", type=_prices, metavar="PRICE[,PRICE]", help=text)
    text = "time that the whole run may take, such as 3d or 36h; the answer says what costs least within it"
    budget.add_argument("--deadline", metavar="TIME", help=text)
    text = "mean hours between failures of one node (default: nothing fails)"
    budget.add_argument("--mtbf_hours", type=positive_number, metavar="HOURS", help=text)
    text = "time that a checkpoint stops training (default: its size at 1 GB/s from each node)"
    budget.add_argument("--save_seconds", type=positive_number, metavar="S", help=text)


def _add_answer(answer: argparse._ArgumentGroup) -> None:
    text = "strategies and meshes shown; 0 = all (default: %(default)s)"
    answer.add_argument("--top", type=not_negative, default=12, metavar="N", help=text)
    answer.add_argument("--json", type=Path, metavar="FILE.json", help="write the plan as a file")
    answer.add_argument("--picture", type=Path, metavar="FILE.png", help="draw memory and step time")
    text = "the best run on each number of devices: gpus=8,16,...,4096 doubles, gpus=8,16,24 lists"
    answer.add_argument("--sweep", metavar="gpus=LIST", help=text)
    text = "build the strategies as every kind of rank would, without devices, and say what would fail"
    answer.add_argument("--check", action="store_true", help=text)
    text = "predict rows with measured times, each from others, and print how far off; plans nothing"
    answer.add_argument("--score", type=Path, metavar="FILE.json", help=text)
    text = "predict the rows of this file (docs/planner.md) into the file of --out; plans nothing"
    answer.add_argument("--predict", type=Path, metavar="ROWS.json", help=text)
    text = f"where --predict writes, and --calibrate (default of the latter: {CALIBRATION})"
    answer.add_argument("--out", type=Path, metavar="FILE.json", help=text)


def _add_calibrate(calibrate: argparse._ArgumentGroup) -> None:
    text = "measure this machine, and plan nothing; started by torchrun on several nodes: the links between them"
    calibrate.add_argument("--calibrate", action="store_true", help=text)
    text = "to measure in, about (default: %(default)g)"
    calibrate.add_argument("--minutes", type=positive_number, default=10.0, metavar="MINUTES", help=text)
    text = "a trial with sizes that say nothing"
    calibrate.add_argument("--quick", action="store_true", help=text)


@program
def main() -> int:
    arguments, typed = parse_arguments(sys.argv[1:])
    if arguments.calibrate:
        return calibrate(arguments)
    if arguments.score:
        return score(arguments.score)
    if arguments.predict:
        return predict(arguments.predict, arguments.out)
    _check_answer(arguments)
    questions, numbers = questions_of(arguments, typed)
    if arguments.check:
        return check(questions[0])
    if arguments.sweep is not None or len(questions) > 1:
        return compare(questions, numbers)
    return answer(questions[0], arguments)


def _check_answer(arguments: argparse.Namespace) -> None:
    """Refuse flags that would say nothing. InputError names them."""
    kinds, prices = arguments.gpu or (), arguments.price_per_gpu_hour or ()
    several = f"--gpu {','.join(kinds)}" if len(kinds) > 1 else None
    here = "--here" if arguments.here else f"--calibration {arguments.calibration}" if arguments.calibration else None
    if here and kinds:
        raise InputError(f"{here} is of this machine, and --gpu {','.join(kinds)} of another; give one of them")
    if not (here or kinds or arguments.check):
        raise InputError("--gpu is missing; give a kind of device such as --gpu h100-sxm, or --here for this machine")
    other = "--check" if arguments.check else "--sweep" if arguments.sweep else several
    if several and arguments.check:
        raise InputError(f"--check with {several}: it builds for one kind of device; give one")
    if len(prices) > 1 and len(prices) != len(kinds):
        raise InputError(
            f"--price_per_gpu_hour has {counted(len(prices), 'price')} and --gpu {counted(len(kinds), 'kind')}; give "
            "one price for all, or one for each"
        )
    for name in ("json", "picture", *(("sweep",) if arguments.check else ())):
        if other and getattr(arguments, name) is not None:
            raise InputError(f"--{name} with {other}: {other} prints a table and nothing else; leave one of them out")
    for name in ("price_per_gpu_hour", "deadline"):
        if getattr(arguments, name) is not None and arguments.tokens is None:
            raise InputError(f"--{name} is about a whole run; give --tokens, such as 10B")


def questions_of(arguments: argparse.Namespace, typed: frozenset[str]) -> tuple[list[Question], list[int]]:
    """Return the question for each kind of device, and numbers of devices. InputError names a flag that cannot be."""
    from testbed.memory_model.devices import device_named
    from testbed.planner.machines import as_measured, machine_here, machine_of
    from testbed.planner.measured_rates import constants_here
    from testbed.planner.plan import Budget
    from testbed.planner.question import deadline_of, numbers_of_sweep, question
    from testbed.planner.step_time import published_constants

    budget = Budget(
        tokens=arguments.tokens,
        mtbf_hours=arguments.mtbf_hours,
        save_s=arguments.save_seconds,
        deadline=None if arguments.deadline is None else deadline_of(arguments.deadline),
    )
    here = arguments.here or arguments.calibration is not None
    nodes = (arguments.gpus, arguments.gpus_per_node, arguments.network)
    kinds = arguments.gpu or (ANY_DEVICE,)  # for --check, which builds the same for all of them
    machines = [machine_here(*nodes)] if here else [machine_of(device_named(kind), *nodes) for kind in kinds]
    constants = constants_here(arguments.calibration) if here else published_constants()
    machines = [as_measured(machine, constants.calibration) for machine in machines]
    flags = {name: getattr(arguments, name) for name in (*FLAGS, *OF_OTHERS) if name in typed}
    numbers = sorted({machine.devices for machine in machines})
    if arguments.sweep is not None:
        numbers = numbers_of_sweep(arguments.sweep)
    prices = arguments.price_per_gpu_hour or (None,)
    prices = prices * len(machines) if len(prices) == 1 else prices

    return [
        question(flags, machine, replace(budget, price=price), constants, numbers)
        for machine, price in zip(machines, prices, strict=True)
    ], numbers


def calibrate(arguments: argparse.Namespace) -> int:
    """Measure this machine into --out."""
    from testbed.experiments.calibration.calibrate import calibrate_here

    def show(line: str) -> None:
        say(line, flush=True)

    precision = arguments.precision if arguments.precision in ("fp32", "bf16", "fp16") else None
    return calibrate_here(arguments.out or CALIBRATION, arguments.minutes, precision, arguments.quick, show)


def answer(question: Question, arguments: argparse.Namespace) -> int:
    """Print the plan; write and draw it where asked to."""
    from testbed.analysis.plan.tables import plan_text
    from testbed.io import write_json
    from testbed.planner.advice import answered, hints
    from testbed.planner.plan import best_of_each, headline, plan_record

    runs, refused = answered(question)
    each = best_of_each(runs)
    if arguments.json:
        command_line = recorded_command(__file__, sys.argv[1:])
        record = plan_record(each, question.budget, question.work, command_line)
        write_json(arguments.json, record, f"--json {arguments.json}")
    if arguments.picture:
        from testbed.analysis.charts.style import save_png
        from testbed.analysis.plan.picture import plan_figure

        title = f"{question.model_name} on {question.machine.devices} x {question.machine.device.name}"
        notes = [f"Best: {headline(each, question.budget)}", f"Estimates, {each[0].time.label}."]
        try:
            save_png(plan_figure(each[: arguments.top or None], title, notes), arguments.picture)
        except OSError as error:
            raise Failure(f"--picture {arguments.picture} cannot be written: {error.strerror}") from None
    top = arguments.top or None
    say(plan_text(each, question.budget, refused, question.work, top, question.vocabulary, hints(question)))
    return 0


def compare(questions: Sequence[Question], numbers: Sequence[int]) -> int:
    """Print the best run of each kind and number of devices, and which to take."""
    from testbed.analysis.document.terminal import table_lines
    from testbed.analysis.plan.tables import NOT_TRAINED, choices_table
    from testbed.planner.advice import answers_of, caveats_of

    first = questions[0]
    several = len(questions) > 1
    choices = [question.on(devices) for question in questions for devices in numbers]
    batch = f"{first.global_batch:,} x {first.seq_length:,} tokens a step, {first.vocabulary}"
    runs = [choice.fitting() for choice in choices]
    label = next((best.time.label for best in runs if best is not None), "no run is possible")
    on = "every kind and number of devices" if several else "every number of devices"
    lead = first.model_name if several else f"{first.model_name} on {first.machine.device.name}"
    say(f"{lead}, {batch} on {on} ({label})\n")
    if answers := answers_of(choices):
        say("\n".join([*answers, ""]))
    if caveats := caveats_of(choices):
        say("\n".join([*caveats, ""]))
    say("\n".join(table_lines(choices_table(choices))))
    if first.work is None:
        say(f"\n{NOT_TRAINED}")
    return 0 if any(runs) else 2


def check(question: Question) -> int:
    """Build every strategy of the plan as its ranks would, and say what fails."""
    if question.work is None:
        raise InputError(f"--check builds what src/gpt2.py trains, and {question.model_name} is another model")
    from testbed.analysis.plan.tables import check_text
    from testbed.autotune.check_mesh import check_jobs
    from testbed.planner.advice import refusal

    runs, refused = question.runs
    # where none fits they build all the same, and a plan has the most frugal one alone
    found = [run.job for run in runs] if question.fitting() else question.jobs()[0]
    first: dict[object, Job] = {}
    for job in found:
        first.setdefault((job.run_type, job.layout.zero_stage, job.schedule), job)
    jobs = list(first.values())
    if not jobs:
        raise InputError(refusal(question))
    say(
        f"building {counted(len(jobs), 'run')} for {counted(question.machine.devices, 'rank')}, without devices ...",
        flush=True,
    )
    checked = check_jobs(jobs, question.machine, question.work)
    say(check_text([(each.job, [vars(built) for built in each.ranks], each.faults) for each in checked], refused))
    return 1 if any(each.faults for each in checked) else 0


def score(path: Path) -> int:
    """Print how well the planner predicts runs that it did not see."""
    from testbed.planner.score import score_file

    say(score_file(path)[0])
    return 0


def predict(path: Path, out: Path | None) -> int:
    """Write a prediction of every row."""
    from testbed.planner.score import predict_file

    if out is None:
        raise InputError(f"--predict {path} needs --out FILE.json, where the predictions go")
    predictions = predict_file(path, out)
    rejected = sum("rejected" in each for each in predictions.values())
    say(f"{len(predictions)} rows, {rejected} of them rejected: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
