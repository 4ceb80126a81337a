"""The rules of place that docs/architecture.md states: what may import what, and who may read what."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import REPOSITORY

PACKAGE = REPOSITORY / "src" / "testbed"


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        if name != "__init__":
            found[name] = path
    return found


# The rooms of src/testbed from the ground up: a room imports only from rooms before it.
ROOMS = (
    "errors io typed_json run_folder step program distributed model data config memory_model planner optim profiling "
    "strategies autotune metrics checkpoint sweep analysis audit inference train experiments"
).split()
MOST_FLAT_MODULES = 5


def room_of(module: str) -> str:
    return module.partition(".")[0]


def imported_by(path: Path) -> set[str]:
    """Return the package's modules that a file imports, anywhere in it and for type checking too."""
    known, found = modules(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("testbed.") for alias in node.names if alias.name.startswith("testbed.")}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where an arrow points"
            package, _, base = (node.module or "").partition(".")
            if package == "testbed":
                names = [".".join(filter(None, (base, alias.name))) for alias in node.names]
                found |= {name if name in known else base for name in names}
    return found


IMPORTS = {module: imported_by(path) for module, path in modules().items()}


def test_every_module_has_a_room():
    assert {room_of(module) for module in modules()} == set(ROOMS)
    flat = [path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"]
    assert len(flat) <= MOST_FLAT_MODULES, flat


def test_architecture_lists_the_rooms_in_their_order():
    code = (
        (REPOSITORY / "docs" / "architecture.md")
        .read_text(encoding="utf-8")
        .partition("## Packages")[2]
        .split("```")[1]
    )
    names = [re.split(r"\s{2,}", line)[0].split(", ") for line in code.strip().splitlines()]
    assert [name.removesuffix(".py").rstrip("/") for line in names for name in line] == ROOMS


def test_a_room_imports_only_rooms_before_it(capsys):
    arrows = {(room_of(one), room_of(other)) for one, found in IMPORTS.items() for other in found}
    arrows = {(one, other) for one, other in arrows if one != other}
    back = [
        f"{module} imports {other}"
        for module, found in IMPORTS.items()
        for other in found
        if ROOMS.index(room_of(other)) > ROOMS.index(room_of(module))
    ]
    with capsys.disabled():
        print(f"\n{len(ROOMS)} rooms, {len(arrows)} arrows between them, {len(back)} back")
    assert back == []


def test_no_files_import_each_other_in_a_circle(capsys):
    def reached_from(module: str) -> set[str]:
        seen, waiting = set(), [module]
        while waiting:
            new = IMPORTS.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        return seen

    circles = sorted(module for module in IMPORTS if module in reached_from(module))
    with capsys.disabled():
        print(f"\n{len(circles)} files in circles")
    assert circles == []


def test_nothing_but_an_experiment_or_a_program_imports_an_experiment():
    for module, found in IMPORTS.items():
        assert room_of(module) == "experiments" or not {room_of(other) for other in found} & {"experiments"}, module


TORCH_FREE = set(
    "errors io typed_json run_folder step program data config memory_model planner sweep analysis audit".split()
)
TORCH_FREE_MODULES = (
    "distributed.launch distributed.processes distributed.signals distributed.watchdog distributed.rendezvous "
    "profiling.trace metrics.file "
    "checkpoint.manifest inference.report inference.charts "
    "inference.evaluated_model inference.loading experiments.kept_runs experiments.calibration.calibrate "
    "experiments.gpu_paths"
).split()


@pytest.mark.launches
def test_what_answers_help_and_reads_files_loads_no_torch():
    """torch costs seconds. Asked of the interpreter itself, so that no import hides."""
    names = [name for name in modules() if room_of(name) in TORCH_FREE] + TORCH_FREE_MODULES
    code = (
        f"import importlib, sys, json; [importlib.import_module('testbed.' + name) for name in {names}]; "
        "print(json.dumps([m for m in ('torch', 'deepspeed', 'transformers') if m in sys.modules]))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY / "src"
    )
    assert json.loads(said.stdout) == []


def test_only_launch_reads_the_ranks_of_the_launcher():
    names = {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
    readers = set()
    for module, path in modules().items():
        text = path.read_text(encoding="utf-8")
        nodes = ast.walk(ast.parse(text)) if any(name in text for name in names) else ()
        if any(isinstance(node, ast.Constant) and node.value in names for node in nodes):
            readers.add(module)
    assert readers - {"experiments.conformance.trials"} == {"distributed.launch"}, "it sets them, as a launcher"


def test_no_file_has_outgrown_its_idea():
    for path in [*modules().values(), *REPOSITORY.glob("*.py"), *(REPOSITORY / "src").glob("*.py")]:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 600, path


ONE_PLACE = {"say": "errors", "say_if_read": "errors", "_sigterm_as_interrupt": "program"}


def test_what_is_said_and_how_a_program_is_interrupted_is_in_one_place():
    """Each of these had copies. What raises KeyboardInterrupt is one of the last, whatever its name."""
    places = {name: [] for name in ONE_PLACE}
    programs = [*REPOSITORY.glob("*.py"), *(REPOSITORY / "scripts").rglob("*.py")]
    paths = modules() | {path.stem: path for path in programs}
    for module, path in paths.items():
        text = path.read_text(encoding="utf-8")
        for name in places:
            places[name] += [module] * len(re.findall(rf"^def {name}\(", text, re.MULTILINE))
        assert "raise KeyboardInterrupt" not in text or module == ONE_PLACE["_sigterm_as_interrupt"]
    assert places == {name: [module] for name, module in ONE_PLACE.items()}
