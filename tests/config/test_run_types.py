"""The registry of run types is the one place that knows what a strategy is."""

from __future__ import annotations

import ast
import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.programs import REPOSITORY
from support.settings import settings_of

from testbed.analysis.runs import load as work_of_runs
from testbed.analysis.runs.load import WORK_FIELDS, recorded_work
from testbed.config.flag import OF_RUN_TYPE, Kind, row
from testbed.config.run_types import STRATEGIES, StrategyEntry
from testbed.config.table import FLAGS
from testbed.strategies.baseline import Baseline

OWN_FILES = {f"src/testbed/strategies/{entry.module}.py" for entry in STRATEGIES.values()}
REGISTRY = "src/testbed/config/run_types.py"
# where a word is the name of a run type and means something else, or names runs to be started
ALLOWED = {
    "src/testbed/experiments/": "studies name the runs that they start",
    "src/testbed/distributed/axes.py": "pipeline and tensor are axes of the device mesh",
    "src/testbed/strategies/tensor.py": "fsdp is an axis of the device mesh",
    "src/testbed/analysis/runs/load.py": "pipeline and tensor are axes of the device mesh",
    "src/testbed/profiling/trace.py": "allreduce is a part of a kernel's name",
    "scripts/maintain/update_docs.py": "folders of the runs that a page shows",
}


def asked_by_name(source: str) -> Iterator[tuple[int, str]]:
    """Yield lines that compare something with the name of a run type, or list two of them or more."""
    for node in ast.walk(ast.parse(source)):
        found: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            found = [node.left, *node.comparators]
            found += [item for each in found if isinstance(each, ast.Tuple | ast.List | ast.Set) for item in each.elts]
        elif isinstance(node, ast.MatchValue):
            found = [node.value]
        elif isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
            items = node.keys if isinstance(node, ast.Dict) else node.elts
            named = [item for item in items if isinstance(item, ast.Constant) and item.value in STRATEGIES]
            found = list(named) if len(named) > 1 else []
        for item in found:
            if isinstance(item, ast.Constant) and isinstance(item.value, str) and item.value in STRATEGIES:
                yield item.lineno, item.value


def is_allowed(path: str) -> bool:
    return path in OWN_FILES or path == REGISTRY or any(path.startswith(each) for each in ALLOWED)


def programs() -> list[Path]:
    return sorted([*(REPOSITORY / "src").rglob("*.py"), *(REPOSITORY / "scripts").rglob("*.py")])


def test_nothing_but_the_registry_asks_for_a_run_type_by_name():
    found = {str(path.relative_to(REPOSITORY)): [*asked_by_name(path.read_text())] for path in programs()}
    asking = {path: lines for path, lines in found.items() if lines}
    wrong = {path: lines for path, lines in asking.items() if not is_allowed(path)}
    assert not wrong, f"ask for a field of StrategyEntry ({REGISTRY}) instead"
    assert all(any(path.startswith(allowed) for path in asking) for allowed in ALLOWED), "an exception is not needed"


QUESTIONS = ('x == "ddp"', 'x in ("fsdp", y)', 'KNOWN = ("ddp", "fsdp")', 'match x:\n    case "ddp":\n        pass',
             '{"dp": 1, "ddp": 2}')  # fmt: skip


@pytest.mark.parametrize("source", QUESTIONS)
def test_a_question_by_name_is_seen(source):
    assert list(asked_by_name(source))


def test_a_row_answers_every_question():
    for field in dataclasses.fields(StrategyEntry):
        assert field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING, field.name


@pytest.mark.parametrize(
    "wrong", [{"equals_baseline": False}, {"differs_because": "of a reason"}, {"refuses": {"no such flag": "why"}}]
)
def test_a_row_that_contradicts_itself_is_refused(wrong):
    with pytest.raises(TypeError, match="AllReduce: "):
        dataclasses.replace(STRATEGIES["allreduce"], **wrong)


def class_of(entry: StrategyEntry) -> type:
    return getattr(importlib.import_module(f"testbed.strategies.{entry.module}"), entry.class_name)


def what_is_missing(entry: StrategyEntry) -> list[str]:
    """Return what a strategy that is unlike the others must have of its own."""
    found, own_test = [], f"tests/strategies/test_{entry.module}.py"
    if not entry.equals_baseline and not (REPOSITORY / own_test).is_file():
        found.append(f"{own_test}, as the agreement test leaves it out")
    if entry.state_layout == "per_rank" and "full_state_dict" not in vars(class_of(entry)):
        found.append(f"{entry.class_name}.full_state_dict: of which weights is the exported model?")
    if not entry.equals_baseline:
        others = {name for other in STRATEGIES.values() if other.equals_baseline for name in other.options}
        own = [name for name in entry.options if name not in others and FLAGS[name].kind is not Kind.WORK]
        found += [f"--{name}: Kind.WORK, or runs that differ in it would count as equal work" for name in own]
    return found


def test_no_strategy_lacks_what_it_needs():
    assert {name: missing for name, entry in STRATEGIES.items() if (missing := what_is_missing(entry))} == {}


def test_every_strategy_has_a_row():
    """A class of strategies/ that no row names, and that no class of a row is built on, cannot be asked for."""
    used = {base for entry in STRATEGIES.values() for base in class_of(entry).__mro__}
    written = {
        value
        for path in (REPOSITORY / "src/testbed/strategies").glob("*.py")
        for value in vars(importlib.import_module(f"testbed.strategies.{path.stem}")).values()
        if isinstance(value, type) and issubclass(value, Baseline)
    }
    assert written - used == set()


def unlike() -> StrategyEntry:
    return dataclasses.replace(
        STRATEGIES["allreduce"],
        equals_baseline=False,
        differs_because="weights are averaged every 8 steps",
        state_layout="per_rank",
        options={"bucket_cap_mb": 25.0, "stages_per_rank": None},
    )


def test_what_a_strategy_of_its_own_kind_lacks_is_named(monkeypatch):
    """`stages_per_rank` is not an option of another strategy here."""
    for name in ("pipeline", "mesh"):
        monkeypatch.setitem(STRATEGIES, name, dataclasses.replace(STRATEGIES[name], options={}))
    assert what_is_missing(unlike()) == [
        "tests/strategies/test_allreduce.py, as the agreement test leaves it out",
        "AllReduce.full_state_dict: of which weights is the exported model?",
        "--stages_per_rank: Kind.WORK, or runs that differ in it would count as equal work",
    ]


def test_a_strategy_that_differs_is_other_work_for_its_reason(token_files, monkeypatch):
    """compare_runs gives unequal work no verdict, and prints the fields that differ."""
    monkeypatch.setitem(STRATEGIES, "allreduce", unlike())
    settings = settings_of(token_files, "--run_type", "allreduce", world_size=2)
    assert settings.plan.math_changes == ("weights are averaged every 8 steps",)
    ddp = settings_of(token_files, "--run_type", "ddp", world_size=2)
    work = [
        recorded_work(
            {"optimizer": "AdamW", "lr_schedule": "cosine", "math_changes": list(each.plan.math_changes)},
            each.as_dict(),
        )
        for each in (settings, ddp)
    ]
    assert [each["math_changes"] for each in work] == ["weights are averaged every 8 steps", "none"]
    assert "math_changes" in WORK_FIELDS


@pytest.mark.parametrize("settings", [{}, {"new_option": None}])
def test_earlier_runs_did_not_have_an_option_of_a_new_strategy(monkeypatch, settings):
    """So they still compare with each other, and with runs of the other strategies."""
    option = row("what it does", Kind.WORK, name="new_option", default=OF_RUN_TYPE)
    monkeypatch.setattr(work_of_runs, "_COMPARED", [*work_of_runs._COMPARED, option])
    assert recorded_work({}, {})["new_option"] == "not set"
    config = {"optimizer": "AdamW", "lr_schedule": "cosine"}
    assert recorded_work(config, {"seed": 1, **settings})["new_option"] == "not set"
    assert recorded_work(config, {"seed": 1, "new_option": 4})["new_option"] == 4
