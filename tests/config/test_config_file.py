"""--config as a person writes it by hand: TOML, YAML or JSON; and --max_tokens."""

from __future__ import annotations

import json
import re

import pytest
from support.programs import REPOSITORY, TINY_RUN, data_flags
from support.settings import checked_run, launch, refusal, settings_of, typed

from testbed.config.check import check_run
from testbed.config.flags import parse_command_line
from testbed.errors import InputError

BY_HAND = {
    "toml": """
run_type = "baseline"
learning_rate = 1e-3
max_train_steps = 5
eval_only = false
save_at_end = "off"
""",
    "yaml": "# mine\nrun_type: baseline\nlearning_rate: 1e-3\nmax_train_steps: 5\neval_only: False\nsave_at_end: off\n",
    "yml": '"run_type": "baseline"\nlearning_rate: 0.001\nmax_train_steps: "5"\neval_only: false\nsave_at_end: off\n',
    "json": """{"run_type": "baseline", "learning_rate": 1e-3, "max_train_steps": 5, "eval_only": false,
                "save_at_end": "off"}""",
}


@pytest.mark.parametrize("suffix", BY_HAND)
def test_one_run_from_every_format_and_from_flags(token_files, tmp_path, suffix):
    path = tmp_path / f"mine.{suffix}"
    path.write_text(BY_HAND[suffix])
    words = "--run_type baseline --learning_rate 1e-3 --max_train_steps 5 --save_at_end off".split()
    assert settings_of(token_files, "--config", str(path)).as_config() == settings_of(token_files, *words).as_config()
    typed_wins = settings_of(token_files, "--config", str(path), "--max_train_steps", "7")
    assert (typed_wins.plan.total_steps, typed_wins.checkpointing.save_at_end) == (7, "off")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", 'track = ["tensorboard", "mlflow"]\n'),
        ("a.yaml", "track: [tensorboard, mlflow]\n"),
        ("a.yml", "track:\n  - tensorboard\n  - 'mlflow'\n"),
        ("a.json", '{"track": ["tensorboard", "mlflow"]}'),
        ("b.json", '{"track": "tensorboard, mlflow"}'),
    ],
)
def test_a_flag_of_several_words_takes_a_list(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert parse_command_line(["--config", str(tmp_path / name)]).values["track"] == "tensorboard,mlflow"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", '{"track": ["comet"]}', "track cannot be 'comet' ('comet' is not one of tensorboard, "),
        ("a.yaml", "track: []\n", "track cannot be '' ('' names no tracker"),
        ("a.yaml", "track: [[mlflow]]\n", "track is a section or a list"),
        ("a.yaml", "track: {mlflow: true}\n", "track is a section or a list"),
        ("a.yaml", "track: [" + "mlflow, " * 17 + "]\n", "track is a section or a list"),
        ("a.json", '{"track": ["mlflow", 3]}', "track is a section or a list"),
        ("a.toml", 'train_data_path = ["a.bin", "b.bin"]\n', "train_data_path is a section or a list"),
        ("a.toml", "learning_rate = \n", "is not TOML that can be read"),
        ("a.toml", "[model]\nnum_layers = 2\n", "model is a section or a list"),
        ("a.toml", "seed = 1\nseed = 2\n", "is not TOML that can be read"),
        ("a.yaml", "- 1\n- 2\n", "it must hold lines of NAME: VALUE"),
        ("a.yaml", "seed: 1\nseed: 2\n", "'seed' stands there twice"),
        ("a.json", '{"seed": 1, "seed": 2}', "has the key 'seed' twice in one object"),
        ("a.yaml", "? [a]\n: 1\n", "line 1 has no name before its colon"),
        ("a.yaml", "seed: 1\n  b: 2\n", "mapping values are not allowed here in line 2, column 4"),
        ("a.yaml", "seed: !!python/object/apply:os.getcwd []\n", "seed is a section or a list"),
        ("a.yaml", "seed: 1:30\n", "seed cannot be '1:30'"),
        ("a.yaml", "[" * 5000, "is not YAML that can be read: it is nested too deeply"),
        ("a.py", "seed = \n", "is not a config of nanoGPT that can be read: invalid syntax (the file, line 1)"),
        ("a.py", "out_dir = '\\ud800'\n", "surrogates not allowed"),
        ("a.py", "seed = 0x" + "f" * 5000, "is not a config of nanoGPT that can be read"),
        ("a.py", "#" * 70_000, "has 70,000 bytes, and a config of nanoGPT has at most 65,536"),
        ("a.py", "seed = 1\nif seed: pass\n", "line 2 is not NAME = VALUE, and a config is read, not executed"),
        ("a.py", "a = b = 1\n", "line 1 is not NAME = VALUE"),
        ("a.py", "seed = open('a').read()\n", "the value in line 1 is no number, text"),
        ("a.py", "batch_size = 10 ** 10\n", "the value in line 1 is no number, text"),
        ("a.py", "a = 9\n" + "a = a * a\n" * 60, "calculates with"),
        ("a.py", "seed = 1 / 0\n", "division by zero"),
        ("a.py", "a = " + "-" * 50_000 + "1", "is not a config of nanoGPT that can be read: it is nested too deeply"),
        ("a.py", "gradient_accumulation_steps = 0\n", "must be whole numbers from 1"),
        ("a.py", "model_parallel = 2\nquux = 1\n", "'quux' is not a setting"),
        ("a.py", "learning_rate = 'high'\n", "learning_rate cannot be 'high'"),
    ],
)
def test_what_is_written_wrong_is_one_sentence(token_files, tmp_path, name, text, said):
    path = tmp_path / name
    path.write_text(text)
    message = refusal(token_files, "--config", str(path))
    assert message.startswith(f"--config {path}") and said in message


def test_all_unknown_names_are_named_at_once_with_the_flags_that_are_meant(token_files, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("block_size: 64\nseed: 1\nwandb_log: true\nlogging_strategy: steps\nquux: 1\n")
    said = refusal(token_files, "--config", str(path))
    for words in (
        "'block_size' is not a setting (did you mean --seq_length?); 'wandb_log' is not a setting (did you mean --tra",
        "'logging_strategy' is not a setting (did you mean --steps_per_print?); 'quux' is not a setting; the names",
    ):
        assert words in said
    path.write_text("".join(f"quux{n}: 1\n" for n in range(20)))
    assert "; and 8 more; the names" in refusal(token_files, "--config", str(path))


def test_aliases_of_yaml_do_not_grow(token_files, tmp_path):
    path = tmp_path / "a.yaml"
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    path.write_text("\n".join(lines))
    assert "'a0' is not a setting" in refusal(token_files, "--config", str(path))
    path.write_text("dropout: &a0 [x, x]\nseed: *a0\n")
    assert "dropout is a section or a list" in refusal(token_files, "--config", str(path))


def test_tokens_say_how_long_to_train(token_files, tmp_path):
    per_step = settings_of(token_files).tokens_per_step
    assert settings_of(token_files, "--max_tokens", str(10 * per_step)).plan.total_steps == 10
    assert settings_of(token_files, "--max_tokens", str(10 * per_step + 1)).plan.total_steps == 11
    for text, tokens in (("2.5k", 2500), ("1_000", 1000), ("3e3", 3000), ("1M", 10**6), ("0.0001B", 10**5)):
        assert parse_command_line(["--max_tokens", text]).values["max_tokens"] == tokens
    for text in ("0", "-1", "ten", "1Q", "nan", "inf", "9e30", ""):
        with pytest.raises(InputError, match="--max_tokens"):
            parse_command_line(["--max_tokens", text])


def test_of_steps_and_tokens_one_says_it(token_files, tmp_path):
    both = ["--max_tokens", "1k", "--max_train_steps", "5"]
    assert "both say how long to train" in refusal(token_files, *both)
    path = tmp_path / "mine.toml"
    path.write_text("max_tokens = 100_000\nmax_train_steps = 5\n")
    assert f"how long to train, and both are of --config {path}; give one" in refusal(
        token_files, "--config", str(path)
    )
    assert "both are of" not in refusal(token_files, "--config", str(path), *both)
    path.write_text("max_tokens = 100_000\n")
    asked = settings_of(token_files, "--config", str(path), "--max_train_steps", "5")
    assert asked.plan.total_steps == 5 and asked.as_config()["max_tokens"] is None, "the other is not kept"
    record = tmp_path / "effective_config.json"
    record.write_text(json.dumps(asked.as_config()))
    assert typed(["--config", str(record)]).settings.plan.total_steps == 5
    longer = checked_run(token_files, "--max_tokens", "100k").settings
    record.write_text(json.dumps(longer.as_config()))
    words = [*TINY_RUN, *data_flags(token_files), "--config", str(record)]
    assert check_run(parse_command_line(words), launch()).settings.plan.total_steps == longer.plan.total_steps


@pytest.mark.parametrize("suffix", ["toml", "yaml"])
def test_the_examples_of_the_guide_are_read(tmp_path, suffix):
    guide = (REPOSITORY / "docs" / "configs.md").read_text(encoding="utf-8")
    (text,) = re.findall(rf"```{suffix}\n(.*?)```", guide, re.DOTALL)
    path = tmp_path / f"gpt2_124m.{suffix}"
    path.write_text(text)
    values = parse_command_line(["--config", str(path)]).values
    assert (values["max_tokens"], values["learning_rate"], values["model"]) == (10**10, 6e-4, "gpt2")


# a run of GPT-2 124M with the names of nanoGPT's configs, whose text is not copied
NANOGPT = """
import time  # not executed

'''A longer text about the run.'''
wandb_log = True
wandb_project = "words"
wandb_run_name = "try-" + str(time.time())
dataset = "words"
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8
max_iters = 600000 // 2
lr_decay_iters = max_iters
eval_interval = 1000
eval_iters = 200
log_interval = 10
weight_decay = 1e-1
dtype = "bfloat16"
compile = False
"""


def test_what_a_config_of_nanogpt_asks_for_in_vain_is_said(tmp_path, token_files):
    for name, text, is_said in (("a.py", "bias = False", True), ("a.json", "{}", False)):
        (tmp_path / name).write_text(text)
        notes = checked_run(token_files, "--config", str(tmp_path / name)).notes
        assert bool(notes) == is_said and ("`bias`, `wandb_project`" in "".join(notes)) == is_said


def test_a_config_of_nanogpt_means_the_same_here(tmp_path):
    path = tmp_path / "train_words.py"
    path.write_text(NANOGPT)
    words = (
        "--track wandb --train_data_path data/words/train.bin --val_data_path data/words/val.bin --seq_length 1024 "
        "--max_position_embeddings 1024 --global_batch_size 480 --max_train_steps 300000 --lr_decay_steps 300000 "
        "--eval_every 1000 --save_every 1000 --max_val_steps 5 --steps_per_print 10 --weight_decay 0.1 "
        "--precision bf16 --compile off --num_layers 12 --num_heads 12 --embedding_size 768 --dropout 0 "
        "--learning_rate 6e-4 --adam_beta1 0.9 --adam_beta2 0.95 --max_grad_norm 1 --warmup_steps 2000 "
        "--min_learning_rate 6e-5 --init_from scratch --gelu exact"
    ).split()
    of_file, of_flags = parse_command_line(["--config", str(path)]), parse_command_line(words)
    assert of_file.configured == of_flags.typed - {"config"}
    assert {**of_file.values, "config": None} == of_flags.values
    path.write_text(
        "init_from = 'gpt2-xl'\ndecay_lr = False\nalways_save_checkpoint = False\nwandb_log = False\nn_head = 5"
    )
    values = parse_command_line(["--config", str(path), "--seed", "7"]).values
    assert (values["init_from"], values["num_heads"], values["max_position_embeddings"]) == ("gpt2-xl", None, None)
    assert (values["lr_schedule"], values["warmup_steps"], values["min_learning_rate"]) == ("constant", 0, None)
    assert (values["keep_best"], values["save_every"], values["track"], values["seed"]) == (True, None, None, 7)


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("", "--model gpt2-medium", {"num_layers": None, "embedding_size": None}),
        ("model = 'gpt2-medium'\nn_head = 8", "", {"num_layers": None, "num_heads": 8}),
        ("n_layer = 3", "--init_from gpt2-xl", {"num_layers": None, "max_position_embeddings": None}),
        ("", "--epochs 1", {"max_train_steps": None, "lr_decay_steps": 600_000}),
        ("max_iters = 9", "--epochs 1", {"max_train_steps": 9}),
        ("max_tokens = 9", "", {"max_train_steps": None}),
        ("", "--lr_schedule constant", {"warmup_steps": None, "lr_decay_steps": None}),
        ("eval_iters = 0", "", {"max_val_steps": 0}),
        ("eval_iters = 41", "", {"max_val_steps": 2}),
    ],
)
def test_a_default_of_nanogpt_gives_way_to_what_is_said(tmp_path, text, words, expected):
    path = tmp_path / "a.py"
    path.write_text(text)
    values = parse_command_line(["--config", str(path), *words.split()]).values
    assert {name: values[name] for name in expected} == expected
