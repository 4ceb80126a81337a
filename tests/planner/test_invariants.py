"""What holds of every answer: questions are drawn at random, and each answer is followed as a reader would."""

from __future__ import annotations

import math
import random
import re

import pytest
from support.plans import asked, mostly_slow, read_back

from testbed.analysis.plan.tables import plan_text
from testbed.config.run_types import STRATEGIES
from testbed.config.table import FLAGS
from testbed.errors import InputError
from testbed.planner import advice
from testbed.planner.advice import answered
from testbed.planner.near import STAYS, WORTH_SAYING
from testbed.planner.plan import GIVEN_UP, PlannedRun, best_of_each
from testbed.planner.question import OF_OTHERS, Question

SEED, QUESTIONS = 29, 30
MODELS = ("--model gpt2", "--model gpt2-large", "--model gpt2-xl", "--model llama3-8b", "--model gpt2-medium --untied")
DEVICES = {"t4": 0.5, "v100-32gb": 0.62, "a10g": 0.7, "rtx4090": 0.65, "a100-40gb": 0.7, "h100-sxm": 0.62}
DEVICES |= {"b200": 0.6, "gb200": 0.6, "mi300x": 0.5}  # share of the peak that nobody has published more than
OTHER_FLAGS = ("--top", "--gpus", "--gpus_per_node", "--global_batch_size", "--run_type", "--sweep", "--deadline")
CHANGES = (
    *("--precision fp32", "--precision fp16", "--precision bf16", "--mixed_precision native", "--matmul fp8"),
    *("--attention math", "--activation_checkpointing block", "--activation_checkpointing none", "--compile off"),
    *("--micro_batch_size_per_gpu 2", "--offload optimizer", "--zero_stage 3", "--tensor_parallel_size 2"),
    *("--run_type fsdp", "--run_type optimized", "--run_type pipeline", "--run_type mesh --context_parallel_size 2"),
)


def drawn(number: int) -> str:
    """Return a question's flags."""
    draw = random.Random(1000 * SEED + number)
    words = [draw.choice(MODELS), f"--gpu {draw.choice(list(DEVICES))} --gpus {draw.choice((1, 4, 7, 8, 12))}"]
    words += ["--gpus_per_node 4"] if words[1].endswith(" 12") else []
    words += [f"--seq_length {draw.choice((1024, 2048, 8192))}"]
    words += [f"--network {draw.choice(('100mbit', '10gbit', '400gbit'))}"] if draw.random() < 0.5 else []
    words += [f"--global_batch_size {draw.choice((8, 60, 64, 256))}"] if draw.random() < 0.6 else []
    changes = draw.sample(CHANGES, draw.choice((0, 1, 1, 2)))
    return " ".join([*words, *changes, "--tokens 3B --price_per_gpu_hour 1.5 --deadline 5d"])


@pytest.mark.parametrize("number", mostly_slow(range(QUESTIONS)))
def test_an_answer_is_true_and_can_be_followed(number: int):
    words = drawn(number)
    print(words)
    try:
        question = asked(words)
        runs, refused = answered(question)
    except InputError as error:
        follow_refusal(words, str(error))
        return
    each = best_of_each(runs)
    hints = advice.hints(question)
    text = plan_text(each, question.budget, refused, question.work, None, question.vocabulary, hints)
    print(text[:1500])
    check_numbers(question, each, text)
    check_flags(text)
    for run in each if question.work is not None else ():
        assert read_back(run.job, run.machine, question.work) == run.job
    check_best(question, runs[0], hints)
    check_ties(each)
    for hint in hints:
        follow_hint(words, hint, runs[0])


def number_of(text: str) -> float:
    return float(text.replace(",", ""))


def check_numbers(question: Question, each: list[PlannedRun], text: str) -> None:
    """The sentence is arithmetic, and no run is faster than anybody's."""
    best, found = each[0], re.search(r"a step of ([\d,]+) x ([\d,]+) tokens takes (\S+) \((\S+) to (\S+)\) s;", text)
    assert found
    batch, length, seconds, low, high = map(number_of, found.groups())
    assert (batch, length) == (question.global_batch, question.seq_length) and low <= seconds <= high
    said = re.search(r"3B tokens take (\S+) \(.*?\) (\w+) and cost (\S+) .*?, (longer than|within) --deadline", text)
    assert said
    of_day = {"seconds": 86400, "minutes": 1440, "hours": 24, "days": 1}[said[2]]
    days = math.ceil(3e9 / batch / length) * best.time.seconds / 86400
    assert number_of(said[1]) / of_day == pytest.approx(days, rel=0.01)
    assert number_of(said[3]) == pytest.approx(days * 24 * 1.5 * question.machine.devices, rel=0.01)
    assert (said[4] == "within") == (days <= 5)
    for run in each:
        model = run.job.model
        computed = model.flops_per_token() / model.flops_per_token(is_whole=True)  # the metrics count attention whole
        share = 0.95 if run.job.precision == "fp32" else DEVICES[question.machine.device.name]
        assert run.mfu * computed < share, run


def check_flags(text: str) -> None:
    """A sentence names no flag that is not there."""
    known = {option for flag in FLAGS.values() for option in flag.option_strings} | {f"--{name}" for name in OF_OTHERS}
    known |= {*OTHER_FLAGS, "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--num_gpus"}
    assert {*re.findall(r"(?<![\w-])--[a-z][\w-]*", text)} <= known | {"--price_per_gpu_hour", "--mtbf_hours"}


def check_best(question: Question, best: PlannedRun, hints: list[str]) -> None:
    """Nothing that was not named is much faster: another run type, or a question with a flag less."""
    said, layout = " ".join(hints), best.job.layout
    sizes = {"tensor_parallel_size": layout.tensor, "pipeline_stages": layout.pipeline, "zero_stage": layout.zero_stage}
    own = {name: size for name, size in sizes.items() if name in STRATEGIES[best.job.run_type].options}
    of_others = {name for entry in STRATEGIES.values() for name in entry.options} - {
        *STRATEGIES[best.job.run_type].options
    }
    same = question.without(*of_others).asked(run_type=best.job.run_type, **own).fitting()
    assert same and 1 / GIVEN_UP <= same.tokens_per_s / best.tokens_per_s <= GIVEN_UP
    for name in question.given:
        other = question.without(name).fitting() if name not in STAYS else None
        if other and not other.is_tight and other.tokens_per_s > 1.001 * WORTH_SAYING * best.tokens_per_s:
            assert f"--{name}" in said


def check_ties(each: list[PlannedRun]) -> None:
    """By the ratios that the table prints, the first run may be as fast as every other one that has as much room."""
    for run in each:
        assert run.is_tight or not run.fits or each[0].is_tight or run.ratio_to(each[0])[2] >= 1


def follow_hint(words: str, hint: str, best: PlannedRun) -> None:
    """What a hint promises is what the question that it names is answered."""
    found = re.match(r"(With.*?): ([\d.,]+) times", hint)
    if found is None:
        return
    changed = replaced(words, found[1])
    run = answered(asked(changed))[0][0]
    assert run.tokens_per_s / best.tokens_per_s == pytest.approx(number_of(found[2]), rel=0.02), changed


def follow_refusal(words: str, refusal: str) -> None:
    """What a refusal promises is so."""
    check_flags(refusal)
    print(refusal)
    for change in re.findall(r"(With[^.]*?) there is room", refusal):
        assert answered(asked(replaced(words, change)))[0][0].fits, change
    enough = re.findall(r"(?:(Without [^:]*) it does not fit either: [^;]*)?; (\d+) of them would do", refusal)
    enough += re.findall(r", and (without .*?) (\d+) of them would do", refusal)
    for change, number in enough:
        assert answered(asked(f"{replaced(words, change)} --gpus {number}"))[0][0].fits, change


def replaced(words: str, change: str) -> str:
    """Return the flags with those of a change: after `without` they go, else they come."""
    goes, flags = False, change.lower().replace(",", "").split()
    for place, word in enumerate(flags):
        goes = goes or word == "without"
        if not word.startswith("--"):
            continue
        words = re.sub(rf" {word}(?: (?!--)\S+)?(?= |$)", "", words)
        value = flags[place + 1] if place + 1 < len(flags) else ""
        words += "" if goes else f" {word} {value}"
    return words
