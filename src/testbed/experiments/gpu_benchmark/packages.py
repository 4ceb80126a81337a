"""List the packages that a GPU machine lacks, and the commands that fetch their wheels. The standard library alone."""

from __future__ import annotations

import importlib.util
import platform
import re
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.errors import InputError
from testbed.io import SOURCE

REQUIREMENTS = SOURCE.parent / "requirements.txt"
MOST_BYTES = 60 * 2**20  # of the folder of wheels: what travels to a machine with a working tree is often limited
MIB = 2**20
GLIBC = (17, 24, 27, 28, 31, 34, 35)  # minor versions that wheels are built for; pip matches each by its own name


@dataclass(frozen=True)
class Package:
    """A package that the benchmark uses.

    Attributes:
        name: in the index. `module`: what is imported.
        used_for: steps that are left out without it; empty: nothing runs without it.
        is_alone: fetched without what it depends on, as that is PyTorch.
        is_source: has no wheel in the index; one is built, without compiling anything.
    """

    name: str
    module: str
    used_for: str = ""
    is_alone: bool = False
    is_source: bool = False


PACKAGES = (
    Package("torch", "torch"),
    Package("numpy", "numpy"),
    Package("scipy", "scipy"),
    Package("tqdm", "tqdm"),
    Package("psutil", "psutil"),
    Package("safetensors", "safetensors"),
    Package("tokenizers", "tokenizers"),
    Package("jsonschema", "jsonschema"),
    Package("matplotlib", "matplotlib", "pictures of the comparisons with other trainers"),
    Package("transformers", "transformers", "the comparison with transformers"),
    Package("accelerate", "accelerate", "the comparison with transformers", is_alone=True),
    Package("torchao", "torchao", "fp8", is_alone=True),
    Package("deepspeed", "deepspeed", "--run_type optimized", is_source=True),
    *(
        Package(name, name.replace("-", "").replace("pycpuinfo", "cpuinfo"), "--run_type optimized")
        for name in ("einops", "hjson", "msgpack", "ninja", "packaging", "py-cpuinfo", "pydantic")
    ),
)
TRAINING = ("torch", "safetensors", "tokenizers")  # modules that every run needs and the summary does not
OPTIONAL = tuple(package for package in PACKAGES if package.used_for)


def is_here(package: Package) -> bool:
    """Return whether this interpreter can import it."""
    return importlib.util.find_spec(package.module) is not None


def is_listed_in(text: str) -> Callable[[Package], bool]:
    """Return a function that says whether a list, such as pip list's or pip freeze's, has a package."""
    names = {_plain(re.split(r"[\s=<>@;,]", line.strip(), maxsplit=1)[0]) for line in text.splitlines() if line.strip()}
    return lambda package: _plain(package.name) in names


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def missing(has: Callable[[Package], bool] = is_here) -> list[Package]:
    """Return the packages that are not there."""
    return [package for package in PACKAGES if not has(package)]


def check_needed(missing_now: Collection[Package]) -> None:
    """Raise InputError unless what every step needs is there."""
    needed = [package.name for package in missing_now if not package.used_for]
    if needed:
        raise InputError(
            f"{sys.executable} lacks {', '.join(needed)}; use an environment with requirements.txt, name another "
            "interpreter with PYTHON=, or fetch wheels with the commands that --check prints and give --wheels"
        )


def fetching_commands(packages: Sequence[Package], folder: str, python: str, machine: str) -> list[str]:
    """Return the commands that fetch the wheels of these packages where there is a network.

    Args:
        python: version of the GPU machine's Python, such as "3.12".
        machine: its processor, such as "x86_64".
    """
    versions = pinned_versions()
    pip = "python3 -m pip"
    for_machine = (
        f"--only-binary=:all: --implementation cp --python-version {python} "
        + " ".join(f"--platform manylinux_2_{minor}_{machine}" for minor in GLIBC)
        + f" --platform manylinux2014_{machine}"
    )

    def words(chosen: Sequence[Package]) -> str:
        named = [f"{each.name}=={versions[each.name]}" if each.name in versions else each.name for each in chosen]
        return f"-d {shlex.quote(folder)} {' '.join(named)}"

    wheels = [each for each in packages if not each.is_source and each.module != "torch"]
    commands = []
    if whole := [each for each in wheels if not each.is_alone]:
        commands.append(f"{pip} download {for_machine} {words(whole)}")
    if alone := [each for each in wheels if each.is_alone]:
        commands.append(f"{pip} download --no-deps {for_machine} {words(alone)}")
    if source := [each for each in packages if each.is_source]:
        commands.append(f"DS_BUILD_OPS=0 {pip} wheel --no-deps {words(source).replace('-d ', '-w ', 1)}")
    return commands


def pinned_versions() -> dict[str, str]:
    """Return the versions that the tests ran with, by package."""
    lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    return dict(line.strip().split("==") for line in lines if "==" in line and not line.startswith("#"))


def wheels_in(folder: Path) -> list[Path]:
    """Return the wheels of a folder. InputError where there is none."""
    found = sorted(folder.glob("*.whl"))
    if not found:
        raise InputError(f"--wheels {folder} holds no wheel; --check prints the commands that fetch them")
    return found


def in_wheels(folder: Path) -> Callable[[Package], bool]:
    """Return a function that says whether a folder holds a package's wheel."""
    names = {_plain(wheel.name.split("-")[0]) for wheel in folder.glob("*.whl")}
    return lambda package: _plain(package.name) in names


def report(has: Callable[[Package], bool], folder: Path, python: str | None) -> tuple[list[str], bool]:
    """Return what --check prints, and whether everything is there or in the folder, which is small enough."""
    lacking = missing(has)
    fetched = in_wheels(folder)
    lines = []
    for package in lacking:
        without = f"without it: no {package.used_for}" if package.used_for else "nothing runs without it"
        lines.append(f"missing: {package.name} ({f'a wheel is in {folder}' if fetched(package) else without})")
    wanted = [package for package in lacking if not fetched(package) and package.module != "torch"]
    version = python or ".".join(map(str, sys.version_info[:2]))
    if wanted:
        lines += [f"fetch the wheels for Python {version}, where there is a network:"]
        lines += [f"  {command}" for command in fetching_commands(wanted, str(folder), version, platform.machine())]
    num_bytes = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    if num_bytes:
        size = f"{folder}: {num_bytes / MIB:.1f} MiB of {MOST_BYTES / MIB:.0f} MiB"
        lines.append(size if num_bytes <= MOST_BYTES else f"{size}, which is too large: remove the largest wheels")
    torch_is_there = all(package.module != "torch" for package in lacking)
    lines += [] if torch_is_there else ["PyTorch is not fetched: install it on the machine"]
    return lines or ["nothing is missing"], not wanted and torch_is_there and num_bytes <= MOST_BYTES
