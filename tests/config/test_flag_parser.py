"""The parser that every program uses: spellings, mistakes, and which flag was meant."""

from __future__ import annotations

import argparse
import ast

import pytest
from support.programs import REPOSITORY

from testbed.config.flag_parser import OF_OTHERS, FlagParser
from testbed.config.flag_types import fraction, not_negative, not_negative_number, positive, positive_number, share
from testbed.config.flags import build_parser, parse_command_line
from testbed.errors import InputError


def parser(**options) -> FlagParser:
    made = FlagParser(prog="program.py", **options)
    made.add_argument("--save_every", "--save_each", type=positive)
    made.add_argument("--metrics-only", action="store_true")
    made.add_argument("--text")
    made.add_argument("--steps", type=int)
    made.add_argument("--share", type=float)
    made.add_argument("--hidden_flag", help=argparse.SUPPRESS)
    made.add_argument("words", nargs="*")
    return made


def refusal(capsys, *words: str, **options) -> str:
    with pytest.raises(SystemExit) as ended:
        parser(**options).parse_args(words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("program.py: error: ") and len(said.splitlines()) == 1
    return said


@pytest.mark.parametrize("allow_abbrev", [True, False])
def test_dashes_and_underscores_are_one_letter(allow_abbrev):
    for words in (["--save_every", "3", "--metrics-only"], ["--save-every=3", "--metrics_only"]):
        parsed = parser(allow_abbrev=allow_abbrev).parse_args(words)
        assert parsed.save_every == 3 and parsed.metrics_only
    parsed = parser().parse_args(["--text=--save_every a_b-c", "x_y", "--", "--save-every", "--text"])
    assert parsed.text == "--save_every a_b-c" and parsed.words == ["x_y", "--save-every", "--text"]


def test_a_flag_may_be_shortened_in_both_spellings_where_it_may_be_shortened():
    assert parser().parse_args(["--metrics_o"]).metrics_only and parser().parse_args(["--save-ev", "2"]).save_every == 2
    with pytest.raises(SystemExit):
        parser(allow_abbrev=False).parse_args(["--metrics_o"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--save_evry", "3"], "--save_evry is not a flag (did you mean --save_every or --save_each?)"),
        (["--metricsonly"], "--metricsonly is not a flag (did you mean --metrics-only?)"),
        (["--quux=1"], "--quux is not a flag; --help lists every flag"),
        (["--hidden_flg", "1"], "--hidden_flg is not a flag; --help"),
        (["--dtype", "fp32"], "--dtype is not a flag; --help"),  # it leads to --precision, which this program lacks
        (["-steps", "1"], "-steps is not a flag (did you mean --steps?)"),
        (["--steps", "10.5"], "--steps: '10.5' is not a whole number; --help"),
        (["--share", "much"], "--share: 'much' is not a number; --help"),
        (["--save_every", "0"], "error: --save_every: '0' is not a positive whole number"),
    ],
)
def test_a_mistake_is_one_sentence(words, said, capsys):
    assert said in refusal(capsys, *words)


def test_a_misspelt_flag_is_said_before_what_is_missing_and_in_commands_too(capsys):
    plain = FlagParser(prog="program.py")
    plain.add_argument("--directory", required=True)
    with pytest.raises(SystemExit):
        plain.parse_args(["--directry", "x"])
    assert "--directry is not a flag (did you mean --directory?)" in capsys.readouterr().err, "and not what is missing"
    made = FlagParser(prog="program.py")
    made.add_subparsers(dest="what").add_parser("run").add_argument("--patience_s", type=float)
    assert made.parse_args(["run", "--patience-s", "3"]).patience_s == 3
    with pytest.raises(SystemExit):
        made.parse_args(["run", "--patince_s", "3"])
    assert "--patince_s is not a flag (did you mean --patience_s?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--run_typ", "ddp"], "--run_typ is not a flag (did you mean --run_type?)"),
        (["--batch_size", "8"], "did you mean --global_batch_size or --micro_batch_size_per_gpu?"),
        (["--run-type", "dpp"], "--run_type: invalid choice: 'dpp'"),
        (["ddp"], "'ddp' stands there without a flag"),
        (["mine.py", "--n_layer=4"], "nanoGPT's .py; --n_layer is not a flag (did you mean --num_layers?)"),
        (["--bf16"], "--bf16 is not a flag (did you mean --precision bf16?)"),
        (["--tensor-model-parallel-size", "2"], "(did you mean --tensor_parallel_size?)"),
        (
            ["--precision=float32"],
            "invalid choice: 'float32' (choose from 'auto', 'fp32', 'bf16', 'fp16') (did you mean ",
        ),
        (["--run_type=float32"], "'mesh', 'auto'); --help"),  # whose names those are not
    ],
)
def test_the_trainer_says_which_flag_was_meant(words, said):
    with pytest.raises(ValueError) as refused:
        parse_command_line(words)
    assert said in str(refused.value)


def test_a_program_whose_flag_is_shorter_says_that_one():
    parser = FlagParser(prog="sample.py")
    for flag in ("--checkpoint", "--prompt"):
        parser.add_argument(flag)
    assert parser.meant_by("--out_dir") == " (did you mean --checkpoint?)"
    assert parser.meant_by("--start") == " (did you mean --prompt?)"


def test_each_name_of_another_trainer_leads_to_a_flag_and_is_none():
    """With the value, where the entry has one."""
    trainer = build_parser()
    for theirs, ours in OF_OTHERS.items():
        assert not trainer._flags_like(f"--{theirs}"), theirs
        assert ours.partition(" ")[0] in trainer._visible_flags(), ours
        if " " in ours:
            trainer.parse_args(ours.split())


def test_the_trainer_takes_dashes():
    parsed = parse_command_line(["--run-type", "ddp", "--save-every=4", "--allow_setting_change", "--local-rank=1"])
    assert parsed.values["run_type"] == "ddp" and parsed.values["save_every"] == 4
    assert parsed.typed == {"run_type", "save_every", "allow_setting_change", "local_rank"}


@pytest.mark.parametrize(
    ("rule", "refused"),
    [
        (positive, ["0", "-5", "10.5", "ten", ""]),
        (not_negative, ["-5", "10.5", "ten"]),
        (not_negative_number, ["-1", "inf", "nan", "much"]),
        (positive_number, ["0", "-1", "inf", "nan", "much"]),
        (fraction, ["1", "-0.1", "nan", "half"]),
        (share, ["0", "1.5", "nan", "half"]),
    ],
)
def test_what_is_no_number_gets_the_sentence_of_a_wrong_number(rule, refused):
    said = set()
    for text in refused:
        with pytest.raises(argparse.ArgumentTypeError) as error:
            rule(text)
        assert str(error.value).startswith(repr(text))
        said.add(str(error.value).removeprefix(repr(text)))
    assert len(said) == 1


def test_every_program_takes_the_shared_parser():
    programs = [*REPOSITORY.glob("*.py"), *(REPOSITORY / "scripts").rglob("*.py"), *(REPOSITORY / "src").rglob("*.py")]
    for path in programs:
        made = [
            node.func.attr
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        ]
        assert "ArgumentParser" not in made, path


def test_a_long_value_is_shown_in_part():
    for flag in ("--grace_seconds", "--activation_checkpointing"):
        with pytest.raises(InputError) as caught:
            parse_command_line([flag, "a/" * 3000])
        assert len(str(caught.value)) < 1200 and "...'" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--eval_only=True"], "--eval_only takes no value, and 'True' is one; give the flag or leave it out"),
        (["a.bin", "b.bin"], "a pattern of several files must be quoted, such as 'DIR/train_*.bin'"),
        (["config/train_x.py"], "settings from a file are --config FILE, as TOML, YAML, JSON or nanoGPT's .py"),
        (["my.toml"], "settings from a file are --config FILE"),
    ],
)
def test_what_stands_without_a_flag_gets_the_flag_it_needs(words, said, capsys):
    with pytest.raises((SystemExit, ValueError)) as caught:
        parse_command_line(words)
    assert said in capsys.readouterr().err + str(caught.value)


def test_all_unknown_flags_are_named_at_once(capsys):
    with pytest.raises((SystemExit, ValueError)) as caught:
        parse_command_line(["--block_size", "8", "--max_iters=3", "--epochs", "2"])
    said = capsys.readouterr().err + str(caught.value)
    assert "--block_size is not a flag (did you mean --seq_length?); --max_iters is not a flag" in said
