"""Every program runs its own checkout's code, and ends with one sentence and the exit code that says what happened."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import REPOSITORY

from testbed.errors import Failure, InputError
from testbed.program import program

FOLDERS = [".", "src", "scripts", *(f"scripts/{name}" for name in ("lab", "maintain", "more", "profiling", "slurm"))]
PROGRAMS = [
    path
    for folder in FOLDERS
    for path in sorted((REPOSITORY / folder).glob("*.py"))
    if "testbed" in path.read_text(encoding="utf-8")
]


def is_of_testbed(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "testbed"


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_program_puts_its_own_source_first_before_it_imports_any(path):
    body = ast.parse(path.read_text(encoding="utf-8")).body
    before = body[: next(index for index, node in enumerate(body) if is_of_testbed(node))]
    (insert,) = [ast.unparse(node) for node in before if "sys.path.insert" in ast.unparse(node)]
    folder = eval(insert.removeprefix("sys.path.insert(0, ").removesuffix(")"), {"__file__": path, "Path": Path})
    assert Path(folder) == REPOSITORY / "src"


@pytest.mark.launches
@pytest.mark.parametrize("name", ["generate_charts.py", "scripts/profiling/diff_profiles.py", "src/gpt2.py"])
def test_another_testbed_that_is_installed_is_not_run(tmp_path, name):
    """Planted on PYTHONPATH, which comes before site-packages."""
    planted = tmp_path / "testbed"
    planted.mkdir()
    (planted / "__init__.py").write_text("raise SystemExit('another testbed')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", "import testbed"], env=environment, capture_output=True, text=True)
    assert "another testbed" in said.stderr, "the plant would win without the program's own line"
    command = [sys.executable, str(REPOSITORY / name), "--help"]
    said = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode == 0 and "usage:" in said.stdout, said.stderr


@pytest.mark.launches
def test_help_waits_for_no_library_that_takes_seconds_to_load():
    """In one process, so what loads numpy comes last."""
    light = ["generate_charts.py", "download_data.py", "preprocess_small.py"]
    light += ["scripts/compare_runs.py", "scripts/run_scaling_benchmarks.py"]
    code = (
        "import contextlib, runpy, sys\n"
        "def check(name, *more):\n"
        "    heavy = {'torch', 'deepspeed', 'datasets', 'tiktoken', 'tokenizers', 'requests', *more}\n"
        "    assert not heavy & set(sys.modules), (name, heavy & set(sys.modules))\n"
        f"for program in {[*light, 'src/gpt2.py']}:\n"
        "    sys.argv = [program, '--help']\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        runpy.run_path(program, run_name='__main__')\n"
        "    check(program, *['numpy', 'scipy', 'matplotlib', 'jinja2'] * (program != 'src/gpt2.py'))\n"
        "import testbed.data.corpus, testbed.data.preprocess\n"
        "check('what writes a corpus')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("usage: ") == len(light) + 1, done.stderr


def raising(error: BaseException):
    @program
    def main() -> None:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (InputError("--steps -1 is not above 0"), 2, "--steps -1 is not above 0"),
        (Failure("no run ended well"), 1, "no run ended well"),
        (PermissionError(13, "Permission denied", "run/sweep.json"), 1, "run/sweep.json: Permission denied"),
        (OSError("the hub does not answer\nlong story"), 1, r"the hub does not answer\nlong story"),
    ],
)
def test_what_went_wrong_is_one_sentence_and_an_exit_code(capsys, error, code, sentence):
    assert raising(error)() == code
    assert capsys.readouterr().err == f"test_program.py: error: {sentence}\n"


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("not enough values to unpack")])
def test_a_mistake_in_the_code_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        raising(error)()


def test_what_is_refused_is_an_input_error():
    """A plain ValueError would be shown as a mistake in the code."""
    paths = [*(REPOSITORY / "src").rglob("*.py"), *(REPOSITORY / "scripts").rglob("*.py"), *REPOSITORY.glob("*.py")]
    found = [path for path in paths if "raise ValueError(" in path.read_text(encoding="utf-8")]
    assert [path for path in found if path.parent.name != "cloud"] == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_through_its_own_clauses(capsys, number, code):
    """And the handler that was there before is there again."""
    before, cleaned = signal.getsignal(signal.SIGTERM), []

    @program
    def main() -> None:
        try:
            signal.raise_signal(number)
        finally:
            cleaned.append(True)

    assert main() == code and cleaned
    assert signal.getsignal(signal.SIGTERM) == before
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.launches
def test_a_reader_that_has_gone_is_no_traceback(tmp_path):
    script = "from testbed.program import program\nimport sys\n"
    script += "@program\ndef main():\n    print('x' * 1_000_000)\nsys.exit(main())"
    (tmp_path / "shown.py").write_text(script)
    command = f"{sys.executable} {tmp_path / 'shown.py'} | head -c 1; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "x", "")
