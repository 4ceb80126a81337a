"""A flag is one row of the table: what the row decides, that code reads it, and that all else follows from it."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from support.programs import REPOSITORY, TINY_RUN, data_flags, write_token_files

from testbed.analysis.runs.arms import NOT_PART_OF_AN_ARM
from testbed.checkpoint.changed_settings import (
    FREE_TO_CHANGE,
    NEVER_TO_CHANGE,
    SETTING_THE_MATHEMATICS,
    WAYS_OF_SPREADING,
)
from testbed.config.flag import OF_RUN_TYPE, Filled, Flag, Kind, row
from testbed.config.run_types import STRATEGIES
from testbed.config.table import FLAGS, GROUPS, flags_where

ROWS = {
    "training_flags.py": (
        "    epochs: int = flag(\n",
        '    new_work: int = flag("how much (default: %(default)s)", WORK, type=positive, default=1, before=1)\n'
        '    new_spread: int = flag("ranks (default: %(default)s)", PARALLELISM, type=positive, default=1, before=1)\n',
    ),
    "system_flags.py": (
        "    steps_per_print: int = flag(\n",
        '    new_how: int = flag("by what (default: %(default)s)", EXECUTION, type=positive, default=1, before=1)\n'
        '    new_look: int = flag("how shown (default: %(default)s)", OUTPUT, type=positive, default=1)\n',
    ),
}
# what the copy's code must do; each line of it is a claim about a flag that has nothing but its row
CLAIMS = """
import json, sys
from pathlib import Path
from support.metrics_examples import example_metrics, save
from testbed.analysis.runs.arms import differing_conditions, group_into_arms, strategies_of
from testbed.analysis.runs.comparability import differing_work
from testbed.analysis.runs.load import load_run
from testbed.config.check import check_run
from testbed.config.flags import build_parser, parse_command_line
from testbed.config.flags_page import page
from testbed.distributed.launch import Launch

folder, words, new = Path(sys.argv[1]), sys.argv[2:], ["new_work", "new_spread", "new_how", "new_look"]
for name in new:
    assert f"--{name} " in build_parser().format_help() and f"| `--{name}` |" in page(), name

typed = [word for name in new for word in (f"--{name}", "2")]
settings = check_run(parse_command_line([*words, *typed]), Launch(0, 0, 1, 1)).settings
assert settings.training.new_work == settings.training.new_spread == 2
assert settings.measuring.new_how == settings.measuring.new_look == 2
assert {name: settings.as_recorded()[name] for name in new} == dict.fromkeys(new, 2)
(folder / "effective_config.json").write_text(json.dumps(settings.as_config()))
again = check_run(parse_command_line(["--config", str(folder / "effective_config.json")]), Launch(0, 0, 1, 1)).settings
assert again == settings

def run(name, **settings):
    return load_run(save(folder / name, example_metrics(settings=settings)))

plain, older = run("plain", **dict.fromkeys(new, 1)), run("older")
for name in new:
    other = run(name, **dict.fromkeys(new, 1) | {name: 2})
    work = [difference.field for difference in differing_work([plain, other])]
    assert work == (["new_work"] if name == "new_work" else []), (name, work)
    names = {strategy.name for strategy in strategies_of([plain, other])}
    is_named = name in ("new_spread", "new_how")
    assert names == {"baseline", *([f"baseline, {name} 2"] if is_named else [])}, (name, names)
    assert differing_conditions([other], [plain]) == (["new_how"] if name == "new_how" else []), name
    assert len(group_into_arms([plain, other])) == (1 if name == "new_look" else 2), name
assert differing_work([plain, older]) == [] and len(group_into_arms([plain, older])) == 1, "before the flag"
print("every claim holds")
"""


def copy_of_the_code(folder: Path) -> Path:
    shutil.copytree(REPOSITORY / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return folder / "src" / "testbed" / "config"


def python(folder: Path, *words: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder / "src"), str(REPOSITORY / "tests")))}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=folder, env=environment, timeout=120
    )


@pytest.mark.launches
def test_a_flag_of_each_kind_is_one_row(tmp_path):
    config = copy_of_the_code(tmp_path)
    for name, (before, rows) in ROWS.items():
        text = (config / name).read_text()
        assert text.count(before) == 1
        (config / name).write_text(text.replace(before, rows + before))
    words = [*TINY_RUN, *data_flags(write_token_files(tmp_path))]
    done = python(tmp_path, "-c", CLAIMS, str(tmp_path), *map(str, words))
    assert done.stdout.endswith("every claim holds\n"), done.stderr[-3000:]


@pytest.mark.launches
def test_an_option_of_a_run_type_without_a_row_is_named(tmp_path):
    run_types = copy_of_the_code(tmp_path) / "run_types.py"
    run_types.write_text(run_types.read_text().replace('"bucket_cap_mb": 25.0', '"bucket_cap_mb": 25.0, "gossip": 2'))
    done = python(tmp_path, "-c", "import testbed.config.table")
    assert "gossip: a flag of some run types only needs a row" in done.stderr


def test_no_row_contradicts_itself():
    for name, flag in FLAGS.items():
        assert flag.help, name
        assert flag.kind is Kind.WORK or (flag.compared_as is None and not flag.is_task), name
        assert flag.needs is None or flag.needs[0] in FLAGS, name
        assert flag.filled is Filled.KEPT or flag.default in (None, "auto", OF_RUN_TYPE), "only an open value is filled"
        assert flag.is_option == any(name in entry.options for entry in STRATEGIES.values()), name


# A resumed run may have other values of these: none changes what is trained.
FREE = (
    "bind_cores checkpoint_path stop_at_step early_stop_patience eval_every eval_multiple_choice save_every "
    "save_at_end keep_last async_mode keep_best max_val_steps num_workers steps_per_print timing_warmup_steps "
    "timing_sample_every profile profile_steps "
    "profile_mode log_collectives watch_collectives tensorboard track quiet_nccl_monitor sample_prompt sample_tokens "
    "run_inference_benchmark "
    "threads_per_rank enforce_global_batch_size deepspeed_config grace_seconds collective_timeout train_data_path "
    "val_data_path"
)
# The same work on other ranks or in other pieces: losses move by rounding.
SPREAD = (
    "run_type backend micro_batch_size_per_gpu grad_accum_steps activation_checkpointing zero_stage offload shard_size "
    "reshard_after_forward bucket_cap_mb reduce_bucket_size allgather_bucket_size overlap_comm pipeline_stages "
    "pipeline_schedule stages_per_rank tensor_parallel_size sequence_parallel context_parallel_size "
    "context_parallel_method"
)
MATHEMATICS = "mixed_precision gradient_compression skip_gradient_sync"
NEVER = "num_layers num_heads embedding_size vocab_size max_position_embeddings optimizer"
# Repeats of one configuration may differ in these. Where a run computed is compared as hardware.
WITHIN_AN_ARM = (
    "checkpoint_path seed steps_per_print sample_prompt sample_tokens run_inference_benchmark train_data_path "
    "val_data_path save_every save_at_end keep_last keep_best watch_collectives timing_sample_every tensorboard track "
    "grace_seconds collective_timeout device enforce_global_batch_size"
)
# A strategy is called by these where runs differ in them.
NAMES_AN_ARM = (
    "run_type zero_stage offload overlap_comm reduce_bucket_size allgather_bucket_size deepspeed_config "
    "mixed_precision gradient_compression skip_gradient_sync bucket_cap_mb reshard_after_forward shard_size "
    "pipeline_stages pipeline_schedule stages_per_rank tensor_parallel_size sequence_parallel context_parallel_size "
    "context_parallel_method micro_batch_size_per_gpu grad_accum_steps "
    "activation_checkpointing backend deterministic compile attention matmul num_workers threads_per_rank bind_cores "
    "async_mode optimizer lr_schedule warmup_shape decay_share muon_learning_rate muon_momentum eval_only"
)
ONE_START = flags_where(lambda flag: flag.of_one_start or not flag.field)


@pytest.mark.parametrize(
    ("derived", "written"),
    [
        (FREE_TO_CHANGE, FREE),
        (WAYS_OF_SPREADING, f"{SPREAD} {MATHEMATICS}"),
        (SETTING_THE_MATHEMATICS, MATHEMATICS),
        (NEVER_TO_CHANGE, NEVER),
        (NOT_PART_OF_AN_ARM, WITHIN_AN_ARM),
        (flags_where(lambda flag: flag.names_arm), NAMES_AN_ARM),
    ],
    ids=["free", "spread", "mathematics", "never", "within an arm", "names an arm"],
)
def test_the_rows_decide_what_is_written_here(derived, written):
    assert sorted(derived - ONE_START) == sorted(written.split())


def test_every_other_flag_changes_with_consent_only():
    decided = {*FREE.split(), *SPREAD.split(), *MATHEMATICS.split(), *NEVER.split()} | ONE_START
    asked = sorted(name for name in FLAGS if name not in decided)
    assert {"learning_rate", "precision", "matmul", "adam_beta1", "seed", "init_from", "global_batch_size"} <= {*asked}
    assert flags_where(lambda flag: flag.resume.name == "CONSENT") - ONE_START == {*asked}


SOURCE = REPOSITORY / "src"
TABLES = {"training_flags.py", "system_flags.py"}
# rooms that compare runs or predict them: what they read of a flag is not an effect of it
NO_TRAINING = {"analysis", "audit", "experiments", "memory_model", "planner", "sweep"}
WITHOUT_EFFECT = {
    "local_rank": "older launchers give it; the rank is read from the environment",
    "timing_sample_every": "older commands give it, and --help says that it has no effect",
}


def sources() -> Iterator[Path]:
    for path in sorted(SOURCE.rglob("*.py")):
        if path.name not in TABLES and not NO_TRAINING & set(path.relative_to(SOURCE).parts):
            yield path


def reads(source: str) -> Iterator[tuple[str, str]]:
    """Yield what is read as (group, field), from `settings.model.dropout` or from `dropout` of a name for the group,
    and as ("", flag), from `values["dropout"]`, `.get("dropout")` or `.value("dropout")`."""
    tree = ast.parse(source)
    names: dict[str, set[str]] = {}  # name -> groups that are assigned to it somewhere in the file
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            for target in node.targets:
                for name, value in zip(
                    target.elts if isinstance(target, ast.Tuple) else [target], values, strict=False
                ):
                    if isinstance(name, ast.Name) and isinstance(value, ast.Attribute) and value.attr in GROUPS:
                        names.setdefault(name.id, set()).add(value.attr)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Attribute(attr=group), attr=field, ctx=ast.Load()):
                yield group, field
            case ast.Attribute(value=ast.Name(id=name), attr=field, ctx=ast.Load()):
                yield from ((group, field) for group in names.get(name, ()))
            case ast.Subscript(slice=ast.Constant(value=str(flag)), ctx=ast.Load()):
                yield "", flag
            case ast.Call(func=ast.Attribute(attr="get" | "value"), args=[ast.Constant(value=str(flag)), *_]):
                yield "", flag


def unread(flags: Mapping[str, Flag], found: set[tuple[str, str]]) -> list[str]:
    """Return the flags that are read in no way. A switch that stands for another flag is read with that one."""
    return [name for name, flag in flags.items() if ("", name) not in found and (flag.group, flag.field) not in found]


def test_every_flag_is_read():
    found = {each for path in sources() for each in reads(path.read_text(encoding="utf-8"))}
    forgotten = set(unread(FLAGS, found)) - WITHOUT_EFFECT.keys()
    assert not forgotten, "no code reads them: use settings.GROUP.FIELD where it takes effect, or remove the row"
    assert WITHOUT_EFFECT.keys() <= set(unread(FLAGS, found)), "what is read needs no exception"
    assert all(FLAGS[name].kind is Kind.OUTPUT for name in WITHOUT_EFFECT)


@pytest.mark.parametrize(
    ("source", "is_read"),
    [
        ("a, chosen = 1, settings.model\nrate = chosen.new_rate", True),
        ('rate = values["new_rate"]', True),
        ('rate = asked.values.get("new_rate")', True),
        ("rate = settings.optimizer.new_rate", False),
        ("new_rate = 1\nprint(new_rate)", False),
    ],
)
def test_a_read_is_told_from_a_mention(source, is_read):
    flag = row("a rate", Kind.WORK, name="new_rate", group="model", field="new_rate")
    assert unread({"new_rate": flag}, set(reads(source))) == ([] if is_read else ["new_rate"])
