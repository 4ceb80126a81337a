"""Charts, comparison and audit run with what `pip install .` brings, and requirements.txt fits pyproject.toml."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.programs import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RESULTS = "docs/results"

# Run in a new interpreter: no package outside of the list can be imported, then each program is run as __main__.
WITH_PACKAGES_ALONE = """
import json, runpy, sys

blocked = set(json.loads(sys.argv[1])) - set(sys.modules)


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Blocker())
for command in json.loads(sys.argv[2]):
    sys.argv = command
    print("==", *command, flush=True)
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            sys.exit(f"{command[0]} ended with {end.code}")
print("loaded:", *sorted(blocked & set(sys.modules)))
"""


def distributions_of(requirements: list[str]) -> set[str]:
    """Return the installed distributions that `requirements` ask for, and those that these ask for in turn."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        waiting += [Requirement(line) for line in metadata.requires(name) or []]
    return found


def packages_outside(distributions: set[str]) -> list[str]:
    """Return the importable packages of this environment that none of `distributions` carries."""
    return [
        package
        for package, carriers in metadata.packages_distributions().items()
        if package not in sys.stdlib_module_names
        and package != "testbed"
        and not {canonicalize_name(carrier) for carrier in carriers} & distributions
    ]


@pytest.mark.launches
def test_charts_comparison_and_audit_need_no_torch(tmp_path):
    blocked = packages_outside(distributions_of(PROJECT["dependencies"]))
    assert {"torch", "deepspeed", "transformers", "datasets"} <= set(blocked)
    sweep = f"{RESULTS}/sweep"
    report = [f"--report={tmp_path / 'report.html'}", f"--markdown={tmp_path / 'report.md'}"]
    commands = [
        ["generate_charts.py", "--runs", f"{RESULTS}/quickstart", f"--output-dir={tmp_path / 'charts'}", *report],
        ["scripts/compare_runs.py", f"{sweep}/fsdp_2ranks_batch32", "--against", f"{sweep}/allreduce_2ranks_batch32"],
        ["scripts/audit_runs.py", f"{RESULTS}/quickstart"],
        ["scripts/plan.py", "--gpu=h100-sxm", f"--picture={tmp_path / 'plan.png'}", f"--json={tmp_path / 'plan.json'}"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", WITH_PACKAGES_ALONE, json.dumps(blocked), json.dumps(commands)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("loaded:\n")  # nothing that is blocked came in another way
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert len(list((tmp_path / "charts").glob("*.png"))) == 6
    assert "ratio (95 % interval)" in done.stdout and "claim does not stand" in done.stdout


# Programs with what they need to come to their first import of a package.
COMMANDS = [
    "src/gpt2.py --run_type baseline",
    "preprocess_small.py",
    f"scripts/compare_runs.py {RESULTS}/sweep --against {RESULTS}/sweep",
    "scripts/maintain/update_docs.py",
]


@pytest.mark.launches
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[0])
def test_without_an_environment_a_program_says_how_to_get_one(command):
    """-I -S: an interpreter with the standard library alone, as the system's without .venv."""
    words = [sys.executable, "-I", "-S", *command.split()]
    done = subprocess.run(words, capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
    name = Path(words[3]).name
    assert done.returncode == 1 and re.match(rf"{name}: error: no module named \w+ in ", done.stderr), done.stderr
    assert len(done.stderr.splitlines()) == 1 and "pip install -r requirements.txt" in done.stderr


@pytest.mark.launches
def test_a_module_that_somebody_elses_program_lacks_is_not_ours_to_explain(tmp_path):
    """testbed is imported there too."""
    theirs = tmp_path / "theirs.py"
    theirs.write_text(f"import sys; sys.path.insert(0, {str(REPOSITORY / 'src')!r}); import testbed, not_installed")
    done = subprocess.run([sys.executable, theirs], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" in done.stderr and "pip install" not in done.stderr


def pinned() -> dict[str, str]:
    lines = (REPOSITORY / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.partition("==") for line in lines if line and not line.startswith(("#", "-"))]
    return {canonicalize_name(name): version for name, _, version in pins}


def test_requirements_pin_every_dependency_within_its_bound():
    extras = PROJECT["optional-dependencies"]
    asked = [Requirement(line) for line in (*PROJECT["dependencies"], *extras["train"], *extras["fp8"])]
    for requirement in asked:
        version = pinned()[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} does not admit {version}"
    assert set(pinned()) - {canonicalize_name(requirement.name) for requirement in asked} == {"setuptools"}
    assert "-e ." in (REPOSITORY / "requirements.txt").read_text(encoding="utf-8").splitlines()
