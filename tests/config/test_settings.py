"""What a user types becomes settings, or one sentence that names the flag, the rule and the way out."""

from __future__ import annotations

import json

import pytest
from support.programs import VOCABULARY, data_flags, write_token_files
from support.settings import checked_run, refusal, settings_of, typed

from testbed.config.flags import build_parser, parse_command_line
from testbed.config.mesh import batch_arithmetic
from testbed.errors import InputError
from testbed.strategies.deepspeed_config import effective_config


def batch(**given) -> dict:
    names = ("global_batch_size", "micro_batch_size_per_gpu", "grad_accum_steps", "enforce_global_batch_size")
    return {**dict.fromkeys(names), **given}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16, 32])
def test_the_default_global_batch_is_32_whatever_the_world_size(ranks):
    worked_out = batch_arithmetic(batch(), data_world_size=ranks)
    assert worked_out["global_batch_size"] == 32
    assert worked_out["micro_batch_size_per_gpu"] * worked_out["grad_accum_steps"] * ranks == 32
    assert worked_out["micro_batch_size_per_gpu"] <= 4


def test_accumulation_decides_the_global_batch_when_it_is_given():
    worked_out = batch_arithmetic(batch(grad_accum_steps=3, micro_batch_size_per_gpu=2), data_world_size=4)
    assert worked_out["global_batch_size"] == 24


@pytest.mark.parametrize(
    ("given", "ranks", "said"),
    [
        ({"global_batch_size": 30, "micro_batch_size_per_gpu": 4}, 1, ["--global_batch_size 30", "= 4", ": 28"]),
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


def test_the_vocabulary_comes_from_the_sidecar_and_may_be_larger(token_files):
    assert settings_of(token_files).model.vocab_size == VOCABULARY
    assert settings_of(token_files, "--vocab_size", "512").model.vocab_size == 512


def test_the_schedule_follows_the_data(token_files):
    """20,000 tokens are 624 windows of 32 (19,999 // 32): 19 steps of 32."""
    settings = settings_of(token_files, "--epochs", "3")
    assert (settings.plan.steps_per_epoch, settings.plan.total_steps, settings.optimizer.warmup_steps) == (19, 57, 5)
    assert settings.optimizer.lr_decay_steps == 57 and settings.optimizer.min_learning_rate == pytest.approx(6e-5)
    assert settings_of(token_files, "--max_train_steps", "7").plan.total_steps == 7
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
    from testbed.train.setup import check_data

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


def test_the_config_of_an_optimized_run_serves_a_baseline(token_files, tmp_path):
    first = settings_of(token_files, "--run_type", "optimized", "--zero_stage", "2")
    path = tmp_path / "effective_config.json"
    path.write_text(json.dumps(first.as_config()))
    baseline = typed(["--config", str(path), "--run_type", "baseline"]).settings
    assert baseline.deepspeed.zero_stage is None


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
        ('{"learning_rat": 1}', "learning_rat"),
        ('{"epochs": "many"}', "epochs"),
        ('{"run_type": "warp"}', "warp"),
        ('{"keep_best": "yes"}', "keep_best"),
        ("[1]", "object"),
        ("{", "JSON"),
    ],
)
def test_a_bad_config_file_is_refused(tmp_path, content, said):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=said):
        parse_command_line(["--config", str(path)])


def deepspeed_file(tmp_path, **content) -> str:
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_a_deepspeed_value_that_contradicts_a_flag_is_refused_and_both_are_named(token_files, tmp_path):
    path = deepspeed_file(tmp_path, gradient_clipping=0.5)
    flags = ["--run_type", "optimized", "--deepspeed_config", path]
    message = refusal(token_files, *flags, "--max_grad_norm", "1.0")
    assert "--max_grad_norm 1.0" in message and "gradient_clipping = 0.5" in message
    assert settings_of(token_files, *flags, "--max_grad_norm", "0.5").optimizer.max_grad_norm == 0.5


def test_a_deepspeed_value_without_a_flag_is_taken_over_by_both_run_types(token_files, tmp_path):
    """The seed's two commands name the same file: a baseline must do the same work as the optimized run."""
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.8, 0.9], "weight_decay": "auto"}}
    path = deepspeed_file(
        tmp_path,
        train_micro_batch_size_per_gpu=2,
        gradient_accumulation_steps=3,
        optimizer=optimizer,
        zero_optimization={"stage": 2},
        fp16={"enabled": "auto"},
    )
    for run_type in ("baseline", "optimized"):
        settings = settings_of(token_files, "--run_type", run_type, "--deepspeed_config", path)
        assert (settings.batch.global_batch_size, settings.optimizer.learning_rate) == (6, 1e-4)
        assert (settings.optimizer.adam_beta1, settings.optimizer.adam_beta2) == (0.8, 0.9)
        assert settings.optimizer.weight_decay == 0.1
        assert settings.deepspeed.zero_stage == (2 if run_type == "optimized" else None)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"scheduler": {"type": "OneCycle"}}, "scheduler"),
        ({"optimizer": {"type": "Lamb"}}, "Lamb"),
        ({"gradient_clipping": "high"}, "gradient_clipping"),
        ({"zero_optimization": 3}, "zero_optimization"),
        ({"zero_optimization": {"stage": 7}}, "stage"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16 and bf16"),
        ({"fp16": {"enabled": "true"}}, "fp16.enabled"),
        ({"optimizer": {"params": {"betas": [0.9]}}}, "betas"),
        ({"optimizer": {"params": {"betas": ["a", 0.9]}}}, "betas"),
        ({"optimizer": {"params": 5}}, "optimizer.params"),
        ({"optimizer": 3}, "optimizer"),
        ({"amp": {"enabled": True}}, "amp"),
    ],
)
def test_a_deepspeed_file_that_decides_what_it_must_not_is_refused(token_files, tmp_path, content, said):
    path = deepspeed_file(tmp_path, **content)
    message = refusal(token_files, "--run_type", "optimized", "--deepspeed_config", path)
    assert said in message and "--deepspeed_config" in message


@pytest.mark.parametrize("nothing", ["auto", None])
def test_sections_that_say_nothing_decide_nothing(token_files, tmp_path, nothing):
    names = ("optimizer", "scheduler", "zero_optimization", "fp16", "bf16", "gradient_clipping")
    sections = dict.fromkeys(names, nothing)
    flags = ["--run_type", "optimized", "--deepspeed_config", deepspeed_file(tmp_path, **sections)]
    settings = settings_of(token_files, *flags)
    assert (settings.deepspeed.zero_stage, settings.optimizer.max_grad_norm) == (1, 1.0)
    assert settings.compute.precision == "fp32"
    config = effective_config(settings)
    assert config["zero_optimization"]["stage"] == 1 and '"auto"' not in json.dumps(config)


def test_a_deepspeed_file_is_read_once(token_files, tmp_path):
    """What was checked is what the run trains with, whatever becomes of the file meanwhile."""
    path = deepspeed_file(tmp_path, gradient_clipping=0.5, zero_optimization={"stage": 2})
    settings = settings_of(token_files, "--run_type", "optimized", "--deepspeed_config", path)
    deepspeed_file(tmp_path, gradient_clipping=0.1, scheduler={"type": "WarmupLR"})
    config = effective_config(settings)
    assert config["gradient_clipping"] == 0.5 and "scheduler" not in config


def test_what_was_asked_for_and_what_it_came_to_are_two_records(token_files, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"seed": 7, "epochs": 3, "muon_momentum": None}))
    words = ["--config", str(config), "--epochs", "2"]
    words += ["--deepspeed_config", deepspeed_file(tmp_path, gradient_clipping=0.5)]
    checked = checked_run(token_files, *words)
    asked, settings = checked.asked, checked.settings
    assert asked.configured == {"seed"} and asked.from_deepspeed == {"max_grad_norm"}
    assert {"epochs", "config"} <= asked.typed and asked.given == asked.typed | {"seed", "max_grad_norm"}
    assert (asked.values["learning_rate"], settings.optimizer.learning_rate) == (None, 6e-4)
    assert (asked.values["epochs"], asked.values["seed"], asked.values["max_grad_norm"]) == (2, 7, 0.5)


def test_a_precision_that_the_file_switches_off_is_refused(token_files, tmp_path):
    path = deepspeed_file(tmp_path, bf16={"enabled": False})
    message = refusal(token_files, "--run_type", "optimized", "--deepspeed_config", path, "--precision", "bf16")
    assert "--precision bf16" in message and "bf16.enabled" in message


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_is_told_everything_that_it_would_otherwise_decide_silently(token_files, stage):
    settings = settings_of(
        token_files, "--run_type", "optimized", "--zero_stage", str(stage), "--max_grad_norm", "0", world_size=2
    )
    config = effective_config(settings)
    assert config["gradient_clipping"] == 0.0, "its own default is 1.0"
    assert config["train_batch_size"] == 32 and config["zero_optimization"]["stage"] == stage
    assert '"auto"' not in json.dumps(config)
    assert "optimizer" not in config


def test_every_flag_has_help_with_its_default():
    for action in build_parser()._actions:
        if action.dest in ("help", "local_rank"):
            continue
        is_switch = action.nargs == 0
        assert action.help and (is_switch or "(default: " in action.help), action.dest


def test_every_flag_of_the_older_programs_is_still_there():
    """Seeds 000 and 004."""
    kept = """
    vocab_size embedding_size num_layers num_heads dropout max_position_embeddings seq_length use_flash_attention
    epochs train_micro_batch_size_per_gpu steps_per_print checkpoint_path resume train_data_path val_data_path
    deepspeed_config local_rank run_type profile micro_batch_size_per_gpu grad_accum_steps global_batch_size
    enforce_global_batch_size quiet_nccl_monitor profile_mode max_train_steps max_val_steps timing_warmup_steps
    timing_sample_every num_workers""".split()
    known = {option for action in build_parser()._actions for option in action.option_strings}
    assert {f"--{name}" for name in kept} <= known


def test_a_corpus_too_short_for_validation_is_refused(tmp_path):
    files = write_token_files(tmp_path, val_tokens=20)
    assert "--max_val_steps 0" in refusal(files)
    assert settings_of(files, "--max_val_steps", "0").training.max_val_steps == 0
