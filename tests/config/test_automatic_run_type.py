"""--run_type auto: choice.json where it fits, the run's own type on resume, else the plan; and hostile files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.fuzz import READ, REFUSED, Fuzz, Refused, gpt2_accepts
from support.mutations import broken_json
from support.programs import TINY_RUN, data_flags
from support.settings import checked_run, launch, refusal, settings_of

from testbed.config.automatic_run_type import DEFAULT_CHOICE, Taken, content_of, hash_of, read_choice
from testbed.config.check import check_run
from testbed.config.flags import parse_command_line
from testbed.config.run_types import HOW_AXES_WORK
from testbed.config.settings import CheckedRun
from testbed.distributed.mesh import MeshSizes


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """An empty current folder, whose default choice.json does not exist."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def choice_content(token_files, run_type="optimized", flags=None, ranks=2, **changes) -> dict[str, Any]:
    settings = settings_of(token_files, "--run_type", run_type, world_size=ranks)
    return content_of(run_type, {"zero_stage": 2} if flags is None else flags, ranks, settings, "c" * 40) | changes


def write_choice(content: object, path: str = DEFAULT_CHOICE) -> Path:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, bytes):
        content = (content if isinstance(content, str) else json.dumps(content)).encode()
    Path(path).write_bytes(content)
    return Path(path)


def auto(token_files, *flags: str, ranks: int = 2) -> CheckedRun:
    return checked_run(token_files, "--run_type", "auto", *flags, world_size=ranks)


def test_a_choice_that_fits_is_taken_with_its_flags(place, token_files):
    write_choice(choice_content(token_files, flags={"zero_stage": 2, "micro_batch_size_per_gpu": 8}))
    checked = auto(token_files)
    settings = checked.settings
    assert settings.training.run_type == "optimized" and settings.deepspeed.zero_stage == 2
    assert settings.batch.micro_batch_size_per_gpu == 8
    (note,) = checked.notes
    assert "optimized:zero_stage=2+micro_batch_size_per_gpu=8, the fastest by checkpoint/fastest/choice.json" in note
    assert settings.origin.chosen == {"run_type"}, "recorded as every automatic choice"
    assert settings.checkpointing.checkpoint_path == "checkpoint/auto"
    named = settings_of(token_files, "--run_type", "optimized", "--zero_stage", "2", "--micro_batch_size_per_gpu", "8",
                        "--checkpoint_path", "checkpoint/auto", world_size=2)  # fmt: skip
    assert settings == named, "the run is the one that could have been typed"


def test_a_start_that_names_no_work_takes_the_choice_s(place, token_files):
    content = choice_content(token_files)
    write_choice(content)
    plain = parse_command_line([*data_flags(token_files), "--run_type", "auto", "--device", "cpu"])
    checked = check_run(plain, launch(2))
    assert checked.settings.shape.num_layers == 2 and checked.settings.batch.global_batch_size == 32
    assert "and its work, as no flag names another: --num_layers 2 --num_heads" in checked.notes[0]
    content["work"]["num_layers"] = "two"
    write_choice(content)
    assert "num_layers cannot be 'two'" in check_run(plain, launch(2)).notes[0]


def test_a_start_in_any_precision_takes_that_of_the_choice_and_its_verdict_is_said(place, token_files):
    """A race on a CPU is in fp32; where bf16 is fast, the start would have chosen it and passed the choice over."""
    said = "no detectable difference between zero_stage 2, ddp"
    write_choice(choice_content(token_files, verdict={"kind": "no detectable difference", "sentence": said}))
    words = [word for word in TINY_RUN if word not in ("--precision", "fp32")]
    checked = check_run(parse_command_line([*words, *data_flags(token_files), "--run_type", "auto"]), launch(2))
    assert checked.settings.training.run_type == "optimized" and checked.settings.compute.precision == "fp32"
    assert "its precision, as no flag names another: --precision fp32" in checked.notes[0]
    assert f"not shown to be the fastest ({said}) but first by checkpoint/fastest/choice.json" in checked.notes[0]


def test_what_was_typed_wins_and_is_said(place, token_files):
    write_choice(choice_content(token_files))
    checked = auto(token_files, "--zero_stage", "3")
    assert checked.settings.deepspeed.zero_stage == 3
    assert checked.notes[0].endswith("; --zero_stage 3 stays, as it was given")


def choosing(run_type: str, **flags) -> dict:
    return {"choice": {"run_type": run_type, "flags": flags}}


MISFITS = {
    "ranks": ({"ranks": 4}, "", "for ranks 4, not 2"),
    "device": ({"device": "NVIDIA H100"}, "", "for the device NVIDIA H100, not "),
    "torch": ({"torch": "1.13.1"}, "", "for PyTorch 1.13.1, not "),
    "batch": ({}, "--global_batch_size 16", "for --global_batch_size 32, not 16"),
    "precision": ({}, "--precision bf16", "for --precision fp32, not bf16"),
    "flag": ({}, "--bucket_cap_mb 5", "--bucket_cap_mb belongs to --run_type ddp, not to optimized"),
    "schema": ({"schema": 2}, "", "not a choice of find_fastest.py with schema 1"),
    "lacks": ({"torch": None}, "", "torch is None, it must be text"),
    "run type": (choosing("magic"), "", "'magic' is not a run type"),
    "its flag": (choosing("ddp", zero_stage=1), "", "which is not for a choice of ddp"),
    "other flag": (choosing("ddp", learning_rate=1), "", "'learning_rate'"),
    "value": (choosing("optimized", zero_stage=9), "", "zero_stage 9 is not one of 0, 1, 2, 3"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_stale_or_foreign_choice_is_passed_over_with_the_reason_and_refused_if_typed(place, token_files, name):
    changes, typed, words = MISFITS[name]
    flags, path = typed.split(), write_choice(choice_content(token_files) | changes)
    checked = auto(token_files, *flags)
    assert checked.settings.training.run_type == "ddp"
    assert words in checked.notes[0] and str(path) in checked.notes[0]
    said = refusal(token_files, "--run_type", "auto", "--choice", str(path), *flags, world_size=2)
    assert said.startswith(f"--choice {path}: ") and said.endswith("or leave --choice out") and words in said


def test_without_a_choice_the_plan_says(place, token_files):
    arguments = parse_command_line([*TINY_RUN, *data_flags(token_files), "--run_type", "auto"])
    asked = []

    def planner(asked_flags, started):
        asked.append((asked_flags.values["seq_length"], started.world_size))
        return Taken("fsdp", {"reshard_after_forward": "off"}, "the plan's fastest of 12")

    checked = check_run(arguments, launch(2), planner)
    assert asked == [(32, 2)] and checked.settings.data_parallel.reshard_after_forward == "off"
    assert "fsdp:reshard_after_forward=off, the plan's fastest of 12; no choice was taken: " in checked.notes[0]
    assert "checkpoint/fastest/choice.json" in checked.notes[0]


@pytest.mark.parametrize("ranks, run_type", [(1, "baseline"), (2, "ddp")])
def test_without_choice_and_plan_the_plain_type_runs(place, token_files, ranks, run_type):
    assert auto(token_files, ranks=ranks).settings.training.run_type == run_type


def test_a_choice_without_auto_is_refused(place, token_files):
    assert "--choice is for --run_type auto" in refusal(token_files, "--choice", "choice.json")
    said = refusal(token_files, "--run_type", "auto", "--choice", "nowhere.json")
    assert said.startswith("--choice nowhere.json: ") and "does not exist" in said


def test_a_resumed_run_keeps_the_type_that_it_recorded(place, token_files):
    folder = Path("checkpoint/auto")
    folder.mkdir(parents=True)
    recorded = settings_of(token_files, "--run_type", "optimized", "--zero_stage", "3", world_size=2)
    (folder / "effective_config.json").write_text(json.dumps(recorded.as_config()))
    write_choice(choice_content(token_files, run_type="ddp", flags={}))
    checked = auto(token_files, "--resume")
    assert (checked.settings.training.run_type, checked.settings.deepspeed.zero_stage) == ("optimized", 3)
    assert "optimized, with the flags of checkpoint/auto/effective_config.json" in checked.notes[0]
    assert auto(token_files, "--resume", "--checkpoint_path", "new").settings.training.run_type == "ddp", "not begun"


@pytest.mark.parametrize("axis", HOW_AXES_WORK)
def test_a_run_resumed_with_one_rank_on_an_axis_forgets_how_that_worked(place, token_files, axis):
    how = {
        "sequence_parallel": "on",
        "context_parallel_method": "allgather",
        "pipeline_schedule": "interleaved_1f1b",
        "stages_per_rank": "2",
    }
    folder, mesh = Path("run"), ("--run_type", "mesh")
    folder.mkdir()
    typed = [word for flag in HOW_AXES_WORK[axis] for word in (f"--{flag}", how[flag])]
    cut = settings_of(token_files, *mesh, f"--{axis}", "2", *typed, world_size=4)
    (folder / "effective_config.json").write_text(json.dumps(cut.as_config()))
    resumed = (*mesh, "--resume", "--checkpoint_path", "run")
    assert settings_of(token_files, *resumed, world_size=4).plan.mesh.flags()[axis] == 2
    assert settings_of(token_files, *resumed, f"--{axis}", "1", world_size=4).plan.mesh == MeshSizes(data=4, shard=4)


@pytest.mark.parametrize("content", ["{}", '{"run_type": ["ddp"]}', '{"run_type": "ddp", "bucket_cap_mb": {}}', "x"])
def test_a_broken_record_of_a_resumed_run_is_one_sentence(place, token_files, content):
    Path("run").mkdir()
    (Path("run") / "effective_config.json").write_text(content)
    said = refusal(token_files, "--run_type", "auto", "--resume", "--checkpoint_path", "run", world_size=2)
    assert "run/effective_config.json" in said


def test_ranks_that_take_different_choices_have_different_hashes(place, token_files):
    one = auto(token_files, "--choice", str(write_choice(choice_content(token_files), "one.json")))
    spaced = write_choice(json.dumps(choice_content(token_files), indent=4), "one.json")
    same = auto(token_files, "--choice", str(spaced))
    assert read_choice(spaced).sha256 == hash_of(choice_content(token_files)), "of the content"
    other = choice_content(token_files, flags={"zero_stage": 1})
    two = auto(token_files, "--choice", str(write_choice(other, "one.json")))
    assert one.flags_sha256 == same.flags_sha256 != two.flags_sha256


def test_no_choice_file_breaks_a_start(place, token_files):
    fuzz = Fuzz("choice.json", (Refused,), place / "data")
    words = [*data_flags(token_files), *TINY_RUN, "--run_type", "auto", "--choice", "choice.json"]

    def start(text: str | bytes) -> None:
        write_choice(text, "choice.json")
        fuzz.case(lambda: gpt2_accepts(words, 2), text)

    good = choice_content(token_files)
    start(json.dumps(good))
    fuzz.draw(broken_json(good), 150, start)
    fuzz.check(READ, REFUSED)


@pytest.mark.launches
def test_two_ranks_train_with_the_choice_and_record_it(ranks, place, token_files):
    write_choice(choice_content(token_files, run_type="ddp", flags={"bucket_cap_mb": 5.0}))
    words = [*TINY_RUN, *data_flags(token_files), "--run_type", "auto", "--max_train_steps", "6", "--sample_tokens=0"]
    done = ranks.run_program(words, place / "ranks", 2, cwd=place)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "--run_type auto: ddp:bucket_cap_mb=5.0, the fastest by checkpoint/fastest/choice.json" in done.stdout
    metrics = json.loads((place / "checkpoint/auto/training_metrics.json").read_text())
    assert metrics["training_config"]["automatic_choices"]["run_type"] == "ddp"
    assert metrics["settings"]["run_type"] == "ddp" and metrics["settings"]["bucket_cap_mb"] == 5.0


def test_ranks_with_other_choices_are_refused_on_every_rank(monkeypatch):
    from testbed.train import run as setup

    monkeypatch.setattr(setup.process_group, "gather_objects", lambda mine: ["a" * 64, "a" * 64, "b" * 64])
    with pytest.raises(setup.Refused, match="rank 2 takes other flags than rank 0"):
        setup.check_same_flags("a" * 64)
    monkeypatch.setattr(setup.process_group, "gather_objects", lambda mine: [mine, mine])
    setup.check_same_flags("a" * 64)


def test_what_deepspeeds_file_decides_counts_as_given(place, token_files):
    """The choice's other values were refused as contradictions of the file, in sentences about flags nobody typed."""
    write_choice(choice_content(token_files, "ddp", {"micro_batch_size_per_gpu": 8}))
    file = place / "ds.json"
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": "auto"}}))
    checked = auto(token_files, "--deepspeed_config", str(file))
    assert (checked.settings.training.run_type, checked.settings.batch.micro_batch_size_per_gpu) == ("ddp", 4)
    assert checked.notes[0].endswith("; --micro_batch_size_per_gpu 4 stays, as it was given")


def test_a_deepspeed_file_with_keys_of_zero_takes_the_run_type_that_does_them(place, token_files):
    write_choice(choice_content(token_files, "ddp", {}))
    file = place / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2, "overlap_comm": True}}))
    checked = auto(token_files, "--deepspeed_config", str(file))
    assert (checked.settings.training.run_type, checked.settings.deepspeed.zero_stage) == ("optimized", 2)
    assert checked.notes[0].endswith("says zero_optimization.overlap_comm = true, zero_optimization.stage = 2")
    said = refusal(
        token_files, "--run_type", "auto", "--deepspeed_config", str(file), "--bucket_cap_mb", "5", world_size=2
    )
    assert "--bucket_cap_mb belongs to --run_type ddp" in said and "(--run_type auto took optimized, as" in said
