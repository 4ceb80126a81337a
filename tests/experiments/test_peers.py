"""scripts/more/compare_peers.py: what it plans, reads out of other trainers and says, and when it must fail."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from support.peers_examples import NANOGPT, OURS, THREE, TRAINER, example, one_set
from support.programs import REPOSITORY, data_flags, run_here, script

from testbed.analysis.runs.work import WORK_FIELDS
from testbed.config.flags import build_parser
from testbed.config.settings import RunSettings
from testbed.distributed.processes import Stop
from testbed.experiments.peers.chart import plot_peers
from testbed.experiments.peers.nanogpt import arguments as nanogpt_arguments
from testbed.experiments.peers.nanogpt import parse_steps
from testbed.experiments.peers.plan import ONLY_HOW, PeerArm, check_only_ours, make_plan, merged_sets
from testbed.experiments.peers.results_file import PEERS_FILE, beginning, results
from testbed.experiments.peers.running import WORKERS, PeerRunner
from testbed.experiments.peers.table import peers_table

PROGRAM = REPOSITORY / "scripts" / "more" / "compare_peers.py"
LINES = """Overriding: batch_size = 4
step 0: train loss 9.0302, val loss 9.0317
iter 0: loss 9.0299, time 2051.55ms, mfu -100.00%
iter 1: loss 8.8021, time 812.50ms, mfu -100.00%
iter 2: loss 8.5004, time 798.04ms, mfu 0.01%
step 3: train loss 8.2000, val loss 8.2100
saving checkpoint to out
iter 3: loss 8.2312, time 1900.00ms, mfu 0.01%
"""


def compare_peers(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)


def test_what_nanogpt_prints_is_read_step_by_step():
    """The line of the step that it makes beyond the last one, with evaluation and saving in its time, is not read."""
    times, losses = parse_steps(LINES, 3)
    assert times == [2.05155, 0.8125, 0.79804] and losses == [9.0299, 8.8021, 8.5004]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LINES.replace("iter 1:", "iter 7:"), "no line for step 1 of 3"),
        (LINES[: LINES.index("iter 2")], "no line for step 2 of 3"),
        (LINES.replace("iter 0: loss 9.0299", "iter 0: loss what"), "no number"),
    ],
    ids=["wrong number", "ended early", "no number"],
)
def test_what_nanogpt_did_not_print_is_no_measurement(text, said):
    with pytest.raises(ValueError, match=said):
        parse_steps(text, 3)


def test_ratio_interval_verdict_and_share_of_the_ceiling():
    """By hand: 3 steps of 100 tokens in 0.5 s are 600 tokens/s, whatever warm-up took and whatever a trainer's own
    clock says of its steps; 600 x 1e9 FLOPs of 2e12 are 30 %; 600 to 200 is 3."""
    ours, trainer, nanogpt = results(example(THREE, one_set(OURS, TRAINER, NANOGPT)))
    assert ours.median_tokens_per_s == pytest.approx(600) and ours.ratio is ours.verdict is None
    assert ours.median_share_of_ceiling == pytest.approx(0.30)
    assert trainer.median_share_of_ceiling == pytest.approx(0.20)
    assert trainer.ratio == pytest.approx(3.0) and 2.9 < trainer.ratio_low < 3 < trainer.ratio_high < 3.1
    assert trainer.verdict == "faster"
    assert nanogpt.ratio_low < 1 < nanogpt.ratio_high and nanogpt.verdict == "no detectable difference"
    assert ours.median_step_tokens_per_s == pytest.approx(1200)
    assert trainer.step_tokens_per_s == pytest.approx(THREE[TRAINER])


def test_too_few_rounds_make_no_claim():
    rates = {arm: of_arm[:2] for arm, of_arm in THREE.items()}
    content = example(rates, one_set(OURS, TRAINER))
    assert results(content)[1].verdict == "not enough repeats" and results(content)[1].ratio_low is None
    table = peers_table(content)
    assert "| transformers | fp32 | 2 | 201 | 3.00x | not enough repeats | 201 |" in table
    assert "no claim" in table and "the median step is as each trainer times its own, and decides nothing" in table
    assert "10 parameters, a vocabulary of 300 in 384 rows" in table


def test_the_table_shows_a_faster_trainer_that_learns_something_else():
    content = example(THREE, one_set(OURS, TRAINER, NANOGPT))
    assert "LEARNS DIFFERENTLY" not in peers_table(content)
    for run in content["runs"]:
        run["val_loss"] += 0.05 * (run["peer"] != "ours")
    learns = [line for line in peers_table(content).splitlines() if "LEARNS DIFFERENTLY" in line]
    assert len(learns) == 1 and "transformers fp32 ends at 5.3000 and ours at 5.2500" in learns[0], (
        "nanogpt: own batches"
    )


def test_more_than_the_matrix_rate_is_called_impossible():
    content = example(THREE, one_set(OURS, TRAINER))
    assert "above 100 %" not in peers_table(content)
    content["ceilings"] = [{**ceiling, "flops_per_s": 1e11} for ceiling in content["ceilings"]]
    assert "above 100 % of the matrix rate" in peers_table(content)


def test_a_loss_without_weights_is_named_as_such():
    content = example(THREE, one_set(OURS, TRAINER, NANOGPT))
    for run in content["runs"]:
        run["val_loss"] = None if run["peer"] == "nanogpt" else run["val_loss"]
    assert "5.5000 (training) |" in peers_table(content) and "could not be had" in peers_table(content)


def test_the_file_holds_what_follows_from_its_rows_and_is_read_back(tmp_path):
    PEERS_FILE.write(tmp_path / "peers.json", example(THREE, one_set(OURS, TRAINER, NANOGPT)))
    content = PEERS_FILE.read(tmp_path)
    assert [result["peer"] for result in content["results"]] == ["ours", "transformers", "nanogpt"]
    assert content["results"][1]["ratio"] == pytest.approx(3.0)
    plot_peers(content, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 20_000
    done = run_here("scripts/more/compare_peers.py", "--table", tmp_path / "peers.json")
    assert done.returncode == 0 and done.stdout.strip() == peers_table(content)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda content: content["runs"][0].pop("losses"), "runs"),
        (lambda content: content["runs"][0].update(val_loss=float("nan")), "val_loss is nan"),
        (lambda content: content["runs"][0].update(step_times_s=[1.0]), "no step after warm-up"),
        (lambda content: content.update(surprise=1), "surprise"),
        (lambda content: content["ceilings"][0].update(flops_per_s=0), "flops_per_s"),
    ],
    ids=["missing", "nan", "warm-up only", "unknown", "no rate"],
)
def test_a_damaged_file_is_refused(edit, said):
    content = example(THREE, one_set(OURS, TRAINER))
    PEERS_FILE.check(content)
    edit(content)
    with pytest.raises(ValueError, match=said):
        PEERS_FILE.check(content)


def test_sets_of_the_same_arms_are_run_once():
    """Where bf16 is emulated every trainer computes in fp32 of itself: two sets, one measurement."""
    peers = ["ours", "transformers", "nanogpt"]
    plan = make_plan(peers, None, "cpu", is_bf16_fast=False, missing={})
    assert merged_sets(plan.sets) == [(["own", "fp32"], [PeerArm(peer, "fp32") for peer in peers])]
    assert [str(arm) for arm in plan.arms] == ["ours fp32", "transformers fp32", "nanogpt fp32", "matrix product fp32"]
    assert "bf16" in plan.skipped and not plan.not_measured
    runs = plan.rounds(5)
    assert len(runs) == 20 and all(len({arm for number, arm in runs if number == n}) == 4 for n in range(1, 6))
    assert [arm for number, arm in runs if number == 1] != [arm for number, arm in runs if number == 2]


def test_each_trainer_has_its_own_precision_where_bf16_is_fast():
    peers = ["ours", "transformers", "nanogpt", "nanogpt-bf16"]
    cpu = make_plan(peers, None, "cpu", is_bf16_fast=True, missing={})
    assert list(map(str, cpu.sets["own"])) == ["ours bf16", "transformers fp32", "nanogpt fp32", "nanogpt-bf16 bf16"]
    assert list(map(str, cpu.sets["bf16"])) == ["ours bf16", "transformers bf16", "nanogpt-bf16 bf16"]
    assert list(map(str, cpu.sets["fp32"])) == ["ours fp32", "transformers fp32", "nanogpt fp32"]
    assert not cpu.not_measured and not cpu.skipped
    cuda = make_plan(peers, None, "cuda", is_bf16_fast=True, missing={})
    assert "nanogpt bf16" in map(str, cuda.sets["own"]) and "nanogpt bf16" in map(str, cuda.sets["bf16"])


def test_bf16_that_would_be_emulated_is_measured_only_when_asked_for():
    peers = ["ours", "nanogpt-bf16"]
    plan = make_plan(peers, None, "cpu", is_bf16_fast=False, missing={})
    assert "no fast bf16" in plan.not_measured["nanogpt-bf16 bf16"]
    asked = make_plan(peers, ["bf16"], "cpu", is_bf16_fast=False, missing={})
    assert list(map(str, asked.sets["bf16"])) == ["ours bf16", "nanogpt-bf16 bf16"] and not asked.not_measured


@pytest.mark.launches
@pytest.mark.slow
def test_it_cannot_pass_with_a_trainer_missing(tmp_path, token_files):
    words = ["--quick", "--dry_run", "--device", "cpu", *data_flags(token_files), "--out_dir", tmp_path]
    done = compare_peers(*words, "--peers", "ours,transformers,nanogpt")
    assert done.returncode == 1
    assert "could not measure nanogpt: no --nanogpt_dir was given; clone https://github.com/" in done.stderr
    assert "ours fp32, transformers fp32" in done.stdout and "Traceback" not in done.stderr
    assert compare_peers(*words, "--peers", "ours,transformers").returncode == 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--peers", "ours,llm.c"], "'llm.c' is not one of ours, transformers"),
        (["--peers", "transformers"], "compares nothing"),
        (["--precision", "fp8"], "'fp8' is not one of own, fp32, bf16"),
        (["--nanogpt_dir", "."], "has no train.py"),
        (["--", "--optimiser", "x"], "--optimiser"),
        (["--", "--compile", "--vocab_size", "500"], "--vocab_size after `--` would change the work of our runs alone"),
        (["--train_data_path", "nowhere.bin"], "--train_data_path nowhere.bin does not exist"),
    ],
)
def test_what_is_typed_wrong_is_refused_before_anything_runs(tmp_path, token_files, flags, sentence):
    words = ["--quick", "--device", "cpu", *data_flags(token_files), "--out_dir", tmp_path / "out"]
    done = run_here("scripts/more/compare_peers.py", *words, *flags)
    assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


FLAG_OF_FIELD = {"seq_len": "seq_length", "lr": "learning_rate", "min_lr": "min_learning_rate",
                 "total_steps": "max_train_steps", "math_changes": "matmul", "train_data_sha256": "train_data_path",
                 "optimizer_steps": "stop_at_step", "tokens": "epochs"}  # fmt: skip


def test_nothing_after_the_dashes_changes_the_work():
    """Every field of equal work has a flag that is refused; what is let through are flags, and none of these."""
    flags = {action.dest for action in build_parser()._actions}
    work = {FLAG_OF_FIELD.get(field, field) for field in WORK_FIELDS}
    assert work <= flags and set(ONLY_HOW) <= flags and not work & set(ONLY_HOW)
    for words in ("--seq_length 64", "--precision bf16", "--matmul fp8", "--config x.json", "--run_type ddp",
                  "--micro_batch_size_per_gpu 1", "--checkpoint_path x", "--threads_per_rank 9"):  # fmt: skip
        with pytest.raises(ValueError, match=r"would change|does not exist"):
            check_only_ours(words.split())
    check_only_ours("--compile off --attention math --activation_checkpointing block --num_workers 2".split())


def test_gpt2_has_its_whole_vocabulary_whatever_the_tokens_are(token_files):
    """The tokens know 300 words; GPT-2 small has 50,257 of them, and nanoGPT's head as many rows as ours."""
    program = script("more/compare_peers.py")

    def settings_of(*words: str) -> RunSettings:
        arguments = program.parse_arguments([*data_flags(token_files), "--seq_length", "32", *words])
        return program.gpt2_run(arguments, "cpu")[1].settings

    settings = settings_of()
    assert settings.shape.num_parameters == 124_439_808
    flags = nanogpt_arguments(settings, "fp32", "cpu", REPOSITORY, REPOSITORY)
    assert settings.shape.padded_vocab_size == 50304 and "--n_layer=12" in flags
    assert settings_of("--model", "gpt2-medium").model.vocab_size == 50257
    assert settings_of("--model", "nano").model.vocab_size == settings_of("--quick").model.vocab_size == 300


def test_the_first_record_is_a_whole_file(tmp_path, token_files):
    """Before any run is made, as an interrupted comparison leaves it."""
    program = script("more/compare_peers.py")
    arguments = program.parse_arguments([*data_flags(token_files), "--quick"])
    words, checked = program.gpt2_run(arguments, "cpu")
    runner = PeerRunner(
        PROGRAM, PROGRAM, tmp_path, tmp_path, 1, "cpu", Stop(), 1.0, 2, gpt2_arguments=words, checked=checked
    )
    peers = ["ours", "transformers", "nanogpt"]
    plan = make_plan(peers, None, "cpu", is_bf16_fast=False, missing={"nanogpt": "no clone"})
    shared = ("git_commit", "git_dirty", "env", "host", "hardware", "is_bf16_fast")
    facts = {name: value for name, value in example(THREE, []).items() if name in shared}
    PEERS_FILE.write(tmp_path / "peers.json", beginning("a test", facts, plan, runner, peers, 2))
    assert PEERS_FILE.read(tmp_path)["not_measured"] == {"nanogpt": "no clone"}


def test_on_cuda_the_other_trainer_is_compiled_too():
    plan = make_plan(["ours", "transformers-compiled"], None, "cuda", is_bf16_fast=True, missing={})
    assert list(map(str, plan.sets["own"])) == ["ours bf16", "transformers-compiled bf16"]
    assert WORKERS["transformers-compiled"] == ("transformers", {"attention": "sdpa", "compile": True})
    assert not WORKERS["transformers"][1]["compile"]


@pytest.mark.launches
@pytest.mark.alone
def test_a_quick_comparison_from_beginning_to_end(tmp_path, token_files):
    """The same weights and batches: the losses of both trainers agree step by step, which no table could promise."""
    words = ["--quick", "--device", "cpu", *data_flags(token_files), "--out_dir", tmp_path, "--threads", "1"]
    done = compare_peers(*words, "--peers", "ours,transformers", "--micro_batch_size", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    content = PEERS_FILE.read(tmp_path)
    assert content["status"] == "complete" and not content["not_measured"]
    assert [(run["peer"], run["round"]) for run in content["runs"]].count(("transformers", 2)) == 1
    assert len(content["runs"]) == 4 and len(content["ceilings"]) == 2
    ours, trainer = (next(run for run in content["runs"] if run["peer"] == peer) for peer in ("ours", "transformers"))
    assert trainer["losses"] == pytest.approx(ours["losses"], abs=2e-5)  # six updates of float32 in another order
    assert trainer["val_loss"] == pytest.approx(ours["val_loss"], abs=2e-5)
    assert all(share > 0 for result in results(content) for share in result.share_of_ceiling)
    assert peers_table(content) in done.stdout and "not enough repeats" in done.stdout
    assert (tmp_path / "peers.png").exists() and not list(tmp_path.glob(".scratch-*"))
    assert "holds a comparison" in compare_peers(*words).stderr


PRETENDS = """
import os, sys, pickle
flags = dict(word[2:].split("=") for word in sys.argv[1:])
rows = len(open(flags["dataset"] + "/train.bin", "rb").read()) // 2
vocabulary = pickle.load(open(flags["dataset"] + "/meta.pkl", "rb"))["vocab_size"]
print("it saw", rows, vocabulary, flags["device"], flags["compile"], flags["dtype"], flags["batch_size"])
for step in range(int(flags["max_iters"])):
    print(f"iter {step}: loss 5.0000, time 10.00ms, mfu -100.00%")
raise ValueError("it fell over before it saved")
"""


@pytest.mark.launches
@pytest.mark.alone
def test_a_trainer_that_fails_is_named_with_its_last_words_and_the_rest_goes_on(tmp_path, token_files):
    """A stand-in for nanoGPT that looks at what it is given, and dies."""
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("train.py", "model.py", "configurator.py"):
        (clone / name).write_text(PRETENDS)
    words = ["--quick", "--device", "cpu", *data_flags(token_files), "--out_dir", tmp_path / "out", "--repeats", "1"]
    done = compare_peers(*words, "--peers", "ours,nanogpt", "--nanogpt_dir", clone)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "could not measure nanogpt fp32: round 1: exit code 1: ValueError: it fell over" in done.stderr
    log = (tmp_path / "out" / "logs" / "nanogpt_fp32_1.log").read_text()
    tokens = token_files[0].stat().st_size // 2
    assert f"it saw {tokens} 384 cpu False float32 4" in log  # the vocabulary of 300 padded as ours pads it
    content = json.loads((tmp_path / "out" / "peers.json").read_text())
    assert [run["peer"] for run in content["runs"]] == ["ours"] and content["status"] == "complete"
    assert re.search(r"NOT MEASURED, nanogpt fp32: round 1", done.stdout)
    assert not list((tmp_path / "clone").glob("__pycache__"))
