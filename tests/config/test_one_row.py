"""A flag is one row of the table: in a copy of the tree a row of each kind is added, and everything else follows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import REPOSITORY, TINY_RUN, data_flags, write_token_files

from testbed.config.flag import OF_RUN_TYPE, Filled, Kind
from testbed.config.run_types import STRATEGIES
from testbed.config.table import FLAGS

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
