"""Every flag is read by code that trains: a row alone does nothing, and its help would promise what is not there."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from support.programs import REPOSITORY

from testbed.config.flag import Flag, Kind, row
from testbed.config.table import FLAGS, GROUPS

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
        ("rate = settings.model.new_rate", True),
        ("a, chosen = 1, settings.model\nrate = chosen.new_rate", True),
        ('rate = values["new_rate"]', True),
        ('rate = asked.values.get("new_rate")', True),
        ("rate = settings.optimizer.new_rate", False),
        ("settings.model.new_rate = 1", False),
        ("new_rate = 1\nprint(new_rate)", False),
    ],
)
def test_a_read_is_told_from_a_mention(source, is_read):
    flag = row("a rate", Kind.WORK, name="new_rate", group="model", field="new_rate")
    assert unread({"new_rate": flag}, set(reads(source))) == ([] if is_read else ["new_rate"])
