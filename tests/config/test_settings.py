"""What a user types, a file holds or a run recorded becomes settings, or one sentence with the rule and way out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.programs import TINY_RUN, VOCABULARY, data_flags, write_token_files
from support.settings import checked_run, launch, refusal, settings_of, typed

from testbed.config.check import check_run
from testbed.config.flags import build_parser, parse_command_line
from testbed.config.mesh import batch_arithmetic
from testbed.data.token_file import TokenFileWriter
from testbed.distributed.launch import Launch, command_of_start
from testbed.errors import InputError


def batch(**given) -> dict:
    names = ("global_batch_size", "micro_batch_size_per_gpu", "grad_accum_steps", "enforce_global_batch_size")
    return {**dict.fromkeys(names), **given}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 32])
def test_the_global_batch_is_32_whatever_the_world_size_or_follows_from_the_accumulation(ranks):
    worked_out = batch_arithmetic(batch(), data_world_size=ranks)
    assert worked_out["global_batch_size"] == 32
    assert worked_out["micro_batch_size_per_gpu"] * worked_out["grad_accum_steps"] * ranks == 32
    assert worked_out["micro_batch_size_per_gpu"] <= 4
    worked_out = batch_arithmetic(batch(grad_accum_steps=3, micro_batch_size_per_gpu=2), data_world_size=ranks)
    assert worked_out["global_batch_size"] == 6 * ranks


@pytest.mark.parametrize(
    ("given", "ranks", "said"),
    [
        ({"global_batch_size": 30, "micro_batch_size_per_gpu": 4}, 1, ["--global_batch_size 30", "= 4", ": 32"]),
        ({"global_batch_size": 31, "micro_batch_size_per_gpu": 4}, 2, ["2 data ranks = 8", ": 32"]),
        ({"global_batch_size": 3}, 8, ["8 data ranks", ": 8"]),
        (
            {"global_batch_size": 32, "micro_batch_size_per_gpu": 4, "grad_accum_steps": 2},
            2,
            ["--global_batch_size 32", "--grad_accum_steps 2", "= 16"],
        ),
        ({"enforce_global_batch_size": 64}, 2, ["--enforce_global_batch_size 64", "is 32"]),
    ],
)
def test_batches_that_do_not_fit_are_refused_with_the_numbers(given, ranks, said):
    with pytest.raises(ValueError) as caught:
        batch_arithmetic(batch(**given), data_world_size=ranks)
    for part in said:
        assert part in str(caught.value)


def test_the_schedule_follows_the_data(token_files):
    """20,000 tokens are 624 windows of 32 (19,999 // 32): 19 steps of 32. --max_train_steps wins over --epochs."""
    settings = settings_of(token_files, "--epochs", "3")
    assert (settings.plan.steps_per_epoch, settings.plan.total_steps, settings.optimizer.warmup_steps) == (19, 57, 5)
    assert settings.optimizer.lr_decay_steps == 57 and settings.optimizer.min_learning_rate == pytest.approx(6e-5)
    assert settings_of(token_files, "--max_train_steps", "7", "--epochs", "3").plan.total_steps == 7
    assert settings_of(token_files, "--max_train_steps", "400").plan.total_steps == 400
    stopped = settings_of(token_files, "--stop_at_step", "7")
    assert (stopped.plan.total_steps, stopped.last_step) == (19, 7), "stopping early keeps the schedule"


def test_files_of_two_tokenizers_are_refused(token_files, tmp_path):
    from testbed.data.token_file import TokenFileWriter

    with TokenFileWriter(tmp_path / "val.bin", 400, "bpe:400", 399) as writer:
        writer.append_document(range(200))
    message = refusal((token_files[0], tmp_path / "val.bin"))
    assert "bpe:300" in message and "bpe:400" in message
    with TokenFileWriter(tmp_path / "val.bin", VOCABULARY, f"bpe:{VOCABULARY}", 7) as writer:
        writer.append_document(range(200))
    assert "end_of_text_id" in refusal((token_files[0], tmp_path / "val.bin"))


def test_a_config_file_gives_settings_and_flags_win(token_files, tmp_path):
    first = settings_of(token_files, "--learning_rate", "0.003", "--dropout", "0.1", "--eval_only")
    path = tmp_path / "effective_config.json"
    path.write_text(json.dumps(first.as_config()))
    again = typed(["--config", str(path)]).settings
    assert again == first
    changed = typed(["--config", str(path), "--learning_rate", "0.001"]).settings
    assert changed.optimizer.learning_rate == 0.001 and changed.model.dropout == 0.1
    other_ranks = ["--config", str(path), "--run_type", "optimized"]
    assert typed(other_ranks, 2).settings.batch.grad_accum_steps == 4
    assert typed(other_ranks, 16).settings.batch.micro_batch_size_per_gpu == 2
    slower = typed(["--config", str(path), "--learning_rate", "1e-5"]).settings
    assert slower.optimizer.min_learning_rate == pytest.approx(1e-6), "what followed follows again"
    longer = ["--config", str(path), "--epochs", "2"]
    assert typed(longer).settings.optimizer.lr_decay_steps == 38


def test_other_data_under_a_config_files_vocabulary_are_called_so(tmp_path):
    """To pass another --vocab_size would be another run than the one that the file describes."""
    from testbed.data.token_file import TokenFileWriter
    from testbed.train.run import check_data

    path, token_files = tmp_path / "effective_config.json", write_token_files(tmp_path)
    path.write_text(json.dumps(settings_of(token_files).as_config()))
    for file in token_files:
        with TokenFileWriter(file, 400, "bpe:400", 399) as writer:
            writer.append_document([*range(390)] * 100)
    with pytest.raises(InputError) as caught:
        check_data(typed(["--config", str(path)]))
    assert f"it is not the data of the run that --config {path} describes" in str(caught.value)
    with pytest.raises(InputError, match="; pass --vocab_size 400 or make the file again"):
        check_data(typed([*data_flags(token_files), "--vocab_size", "300"]))


def test_the_learning_rate_follows_the_size_unless_given(token_files, tmp_path):
    def rates(*flags: str) -> tuple:
        settings = settings_of(token_files, *flags)
        return settings.optimizer.learning_rate, settings.optimizer.muon_learning_rate

    assert rates() == (6e-4, None) and rates("--model", "gpt2-xl") == (2e-4, None)
    assert rates("--model", "nano") == (4e-3, None) and rates("--model", "nano", "--learning_rate", "1e-4")[0] == 1e-4
    assert rates("--model", "nano", "--optimizer", "muon") == (2e-2, 2e-2)
    assert rates("--optimizer", "muon") == (6e-4, 6e-4)
    small = ["--num_layers", "12", "--num_heads", "12", "--embedding_size", "768"]
    assert rates("--model", "nano", *small)[0] == 6e-4, "the size is what the model has, not what it was called"
    assert rates("--model", "nano", "--num_layers", "3")[0] == 4e-3, "no size has three layers"
    path = tmp_path / "effective_config.json"
    path.write_text(json.dumps(settings_of(token_files, "--model", "nano").as_config()))
    other = typed(["--config", str(path), "--model", "gpt2-medium"]).settings
    assert other.optimizer.learning_rate == 3e-4, "it follows again"


def test_weights_in_the_folder_of_the_run_are_not_overwritten(token_files, tmp_path):
    (tmp_path / "run" / "best").mkdir(parents=True)
    for start in ("run", "run/best"):
        message = refusal(
            token_files, "--init_from", str(tmp_path / start), "--checkpoint_path", str(tmp_path / "run"), "--overwrite"
        )
        assert "--init_from" in message and "another --checkpoint_path" in message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"learning_rat": 1}', r"learning_rat.*is not a setting \(did you mean --learning_rate "),
        ('{"overwrite": true}', "overwrite is for one start alone; type it as --overwrite"),
        ('{"epochs": "many"}', "epochs"),
        ('{"keep_best": "yes"}', "keep_best"),
        ("[1]", "object"),
    ],
)
def test_a_bad_config_file_is_refused(tmp_path, content, said):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=said):
        parse_command_line(["--config", str(path)])


def test_every_flag_has_help_with_its_default():
    for action in build_parser()._actions:
        if action.dest in ("help", "local_rank"):
            continue
        is_switch = action.nargs == 0
        assert action.help and (is_switch or "(default: " in action.help), action.dest


def test_every_flag_of_the_older_programs_is_still_there():
    kept = """
    vocab_size embedding_size num_layers num_heads dropout max_position_embeddings seq_length use_flash_attention
    epochs train_micro_batch_size_per_gpu steps_per_print checkpoint_path resume train_data_path val_data_path
    deepspeed_config local_rank run_type profile micro_batch_size_per_gpu grad_accum_steps global_batch_size
    enforce_global_batch_size quiet_nccl_monitor profile_mode max_train_steps max_val_steps timing_warmup_steps
    timing_sample_every num_workers""".split()
    known = {option for action in build_parser()._actions for option in action.option_strings}
    assert {f"--{name}" for name in kept} <= known


RECIPE = ("--learning_rate", "0.003", "--dropout", "0.1", "--save_every", "5", "--global_batch_size", "8")


@pytest.fixture
def recorded(token_files, tmp_path):
    """Return a function that leaves the record of a run."""

    def record(*flags: str, folder: Path = tmp_path / "run", world_size: int = 1) -> Path:
        settings = settings_of(token_files, "--checkpoint_path", str(folder), *flags, world_size=world_size)
        folder.mkdir(exist_ok=True)
        config = settings.as_config() | {"data_sha256": {"train": "0" * 64, "val": "1" * 64}, "of_another_version": 1}
        (folder / "effective_config.json").write_text(json.dumps(config))
        return folder

    return record


def resumed(folder: Path, *flags: str, world_size: int = 1):
    return typed(["--checkpoint_path", str(folder), "--resume", *flags], world_size)


def refused_resume(folder: Path, *flags: str) -> str:
    with pytest.raises(InputError) as caught:
        resumed(folder, *flags)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_resume_alone_is_the_recorded_run(recorded, token_files):
    folder = recorded(*RECIPE, "--run_type", "ddp", world_size=2)
    checked = resumed(folder, world_size=2)
    words = [*TINY_RUN, *data_flags(token_files), "--checkpoint_path", str(folder), "--run_type", "ddp", *RECIPE]
    assert checked.settings.as_dict() == typed(words, 2).settings.as_dict()
    assert str(folder / "effective_config.json") in checked.notes[0]


def test_what_is_typed_wins_and_another_run_type_drops_what_only_the_first_has(recorded):
    folder = recorded(*RECIPE, "--run_type", "optimized", "--zero_stage", "2", world_size=2)
    checked = resumed(folder, "--run_type", "ddp", "--learning_rate", "0.5", world_size=2)
    settings, asked = checked.settings, checked.asked
    assert not asked.typed & asked.configured and "dropout" in asked.configured
    assert (settings.training.run_type, settings.deepspeed.zero_stage) == ("ddp", None)
    assert (settings.optimizer.learning_rate, settings.model.dropout) == (0.5, 0.1)


def test_where_to_stop_and_what_measured_are_of_one_start(recorded):
    settings = resumed(recorded("--stop_at_step", "12", "--profile", "--max_train_steps", "16")).settings
    assert (settings.training.stop_at_step, settings.measuring.profile) == (None, False)
    assert settings.last_step == 16


def test_a_run_that_was_moved_or_is_named_by_a_checkpoint(recorded, tmp_path):
    folder = recorded(*RECIPE)
    moved = tmp_path / "moved"
    shutil.move(folder, moved)
    assert resumed(moved).settings.checkpointing.checkpoint_path == str(moved)
    step = moved / "checkpoints" / "step_000005"
    step.mkdir(parents=True)
    begun = typed(["--resume", str(step), "--checkpoint_path", str(tmp_path / "new")]).settings
    assert (begun.model.dropout, begun.checkpointing.checkpoint_path) == (0.1, str(tmp_path / "new"))


def test_a_run_that_has_not_begun_takes_the_defaults(token_files, tmp_path):
    words = [*TINY_RUN, *data_flags(token_files), "--checkpoint_path", str(tmp_path / "new")]
    assert typed([*words, "--resume"]).settings.as_dict() == typed(words).settings.as_dict()


def test_a_refusal_says_that_the_flag_was_recorded(recorded, tmp_path, monkeypatch):
    folder = recorded(*RECIPE)
    config = json.loads((folder / "effective_config.json").read_text())
    (folder / "effective_config.json").write_text(json.dumps(config | {"train_data_path": "gone.bin"}))
    said = refused_resume(folder)
    assert "--train_data_path gone.bin" in said and f"from {folder / 'effective_config.json'}" in said
    (folder / "effective_config.json").write_text(json.dumps(config | {"dropout": "much"}))
    assert "effective_config.json: dropout cannot be 'much'" in refused_resume(folder)


def test_ranks_that_see_another_record_are_told_apart(recorded, tmp_path):
    one, two = recorded(*RECIPE), recorded("--dropout", "0.2", folder=tmp_path / "two")
    words = parse_command_line(["--checkpoint_path", str(one), "--resume"])
    assert check_run(words, launch()).flags_sha256 == check_run(words, launch()).flags_sha256
    assert check_run(words, launch()).flags_sha256 != resumed(two).flags_sha256


@pytest.mark.parametrize(
    ("variables", "place", "start"),
    [
        ({}, Launch(0, 0, 1, 1), "python"),
        ({"TORCHELASTIC_RUN_ID": "x"}, Launch(0, 0, 2, 2), "torchrun --nproc-per-node 2"),
        ({"CROSS_RANK": "0"}, Launch(0, 0, 4, 4), "deepspeed --num_gpus 4"),
        (
            {"RANK": "0", "MASTER_ADDR": "n1"},
            Launch(0, 0, 8, 4),
            "torchrun --nproc-per-node 4 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint n1:29500",
        ),
    ],
)
def test_the_recorded_command_can_be_pasted(variables, place, start):
    words = ["src/gpt2.py", "--local_rank=0", "--checkpoint_path", "a b"]
    assert command_of_start(place, words, variables) == f"{start} src/gpt2.py --checkpoint_path 'a b'"


NANO = {"model_type": "gpt2", "n_layer": 4, "n_head": 4, "n_embd": 128, "vocab_size": 300, "n_positions": 1024}


@pytest.fixture
def weights(tmp_path) -> Path:
    """A folder as far as a start looks at it before torch."""
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(NANO))
    (folder / "model.safetensors").write_bytes(bytes(8))
    return folder


def start(token_files, weights, *flags: str):
    return typed(
        ["--device", "cpu", "--seq_length", "32", *data_flags(token_files), "--init_from", str(weights), *flags]
    )


def test_weights_decide_the_size(token_files, weights):
    assert start(token_files, weights).settings.model.size == "nano"
    same = ("--model", "gpt2", "--num_layers", "4", "--num_heads", "4", "--embedding_size", "128")
    assert start(token_files, weights, *same).settings.model.size == "nano"
    for model in ("gpt2", "gpt2-xl"):
        with pytest.raises(InputError, match=rf"^--model {model} does not fit the weights of .* \(nano\); leave"):
            start(token_files, weights, "--model", model)
    with pytest.raises(
        InputError, match=r"^--seq_length 4096 is longer than the \d+ positions of --init_from .* or less$"
    ):
        start(token_files, weights, "--seq_length", "4096")
    (weights / "config.json").write_text(json.dumps(NANO | {"n_layer": 3}))
    assert start(token_files, weights, "--model", "nano", "--num_layers", "3").settings.shape.num_layers == 3
    with pytest.raises(InputError, match=r"^--model nano does not fit .* \(n_layer=3, n_head=4, n_embd=128\)"):
        start(token_files, weights, "--model", "nano")


def test_a_new_model_has_the_positions_of_its_sequences(token_files):
    flags = ["--device", "cpu", *data_flags(token_files), "--global_batch_size", "2", "--micro_batch_size_per_gpu", "1"]
    for length, positions in ((32, 1024), (2048, 2048)):
        settings = typed([*flags, "--model", "nano", "--seq_length", str(length)]).settings
        assert settings.shape.max_position_embeddings == positions
    with pytest.raises(InputError, match="--seq_length 2048 is longer than the 1024 positions"):
        typed([*flags, "--seq_length", "2048", "--max_position_embeddings", "1024"])


def test_runs_of_before_recorded_the_default_size(token_files, weights, tmp_path):
    now = start(token_files, weights).settings
    (tmp_path / "effective_config.json").write_text(json.dumps(now.as_config() | {"model": "gpt2"}))
    assert typed(["--config", str(tmp_path / "effective_config.json")]).settings.model.size == "nano"


def test_the_peak_from_scratch_is_said_unless_one_was_given(token_files, weights):
    (note,) = start(token_files, weights).notes
    assert "peak learning rate is 0.004, the default for training from scratch" in note
    assert "--learning_rate 0.0004" in note
    assert start(token_files, weights, "--learning_rate", "0.004").notes == ()
    assert start(token_files, weights, "--eval_only").notes == ()
    assert typed(["--model", "nano", "--seq_length", "32", *data_flags(token_files)]).notes == ()


def test_a_run_that_validates_on_what_it_trains_on_says_so(token_files, tmp_path):
    (tmp_path / "same.bin").symlink_to(token_files[0])
    (tmp_path / "same.json").symlink_to(token_files[0].with_suffix(".json"))
    for path in (token_files[0], tmp_path / "same.bin"):
        (note,) = checked_run((token_files[0], path)).notes
        assert note == f"warning: --val_data_path {path} is the training file: its loss is of text that was learned"
    assert checked_run((token_files[0], token_files[0]), "--max_val_steps", "0").notes == ()


def test_other_tokens_lead_to_the_weights_own_tokenizer(weights, tmp_path):
    """`--tokenizer bpe:300` would train another BPE of that size."""
    files = tmp_path / "train.bin", tmp_path / "val.bin"
    for path in files:
        with TokenFileWriter(path, 400, "bpe:400", 399) as writer:
            writer.append_document([*range(390)] * 40)
    unknown = (
        f"; tokenize the text with their tokenizer's file, which {weights} lacks: preprocess_small.py --tokenizer FILE"
    )
    own = f"; tokenize the text with preprocess_small.py --tokenizer {weights}/tokenizer.json"
    for name in ("bpe:300", None):
        (weights / "config.json").write_text(json.dumps(NANO | {"tokenizer": name}))
        for ending in (unknown, own):
            with pytest.raises(InputError) as caught:
                start(files, weights)
            assert str(caught.value).endswith(ending)
            (weights / "tokenizer.json").write_text("{}")
        (weights / "tokenizer.json").unlink()
