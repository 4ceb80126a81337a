"""The programs themselves, started with bad input: exit code 1 or 2, one sentence, no traceback, no file changed.

A handful: thousands of cases run in one process in test_fuzz_command_line.py and test_fuzz_files.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.data_fixtures import offline_environment
from support.fuzz import content_of
from support.programs import REPOSITORY, write_token_files

pytestmark = pytest.mark.launches


@pytest.fixture(scope="module")
def bad(tmp_path_factory) -> Path:
    """A folder with everything that the cases name. Whatever is called whole is whole."""
    folder = tmp_path_factory.mktemp("bad")
    write_token_files(folder, train_tokens=2000, val_tokens=400)
    (folder / "deep.json").write_bytes(b"[" * 100_000)
    (folder / "weights").mkdir()
    return folder


GPT2 = ["src/gpt2.py", "--train_data_path", "train.bin", "--val_data_path", "val.bin", "--device", "cpu"]
# words -> exit code and a piece of the sentence: one of each kind of program, and what only a real process can be given
CASES = {
    "a flag that is not UTF-8": ([*GPT2, "--sample_prompt", b"\xff\xfe"], 2, "not UTF-8"),
    "an audit of what is nested too deeply": (["scripts/audit_runs.py", "deep.json"], 2, "deep.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_sentence_and_an_exit_code(bad, tmp_path, name):
    (program, *words), code, piece = CASES[name]
    before = content_of(bad)
    done = subprocess.run(
        [sys.executable, REPOSITORY / program, *words],
        cwd=bad, capture_output=True, timeout=120, check=False, env=offline_environment(tmp_path),
    )  # fmt: skip
    said = done.stderr.decode()
    assert done.returncode == code, said[-1500:]
    assert "Traceback" not in said and piece in said
    sentences = [line for line in said.splitlines() if not line.startswith(("usage:", " "))]
    assert len(sentences) == 1 and len(sentences[0]) < 4000, said
    assert content_of(bad) == before, "a file was changed"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can change the user")
def test_files_that_may_not_be_read_are_one_sentence(bad, tmp_path):
    """Root may read everything, so another user runs it: a file without rights, a folder that cannot be entered."""
    shutil.copytree(bad, tmp_path / "files")
    folder = tmp_path / "files"
    for each in (folder, tmp_path, *list(tmp_path.parents)[:2]):
        each.chmod(0o755)
    (folder / "val.bin").chmod(0)
    (folder / "weights").chmod(0)
    code = (
        "import os, sys\n"
        "from testbed.config.check import check_command_line\n"  # as root, who can read the library
        "import email.parser, encodings.utf_8_sig, mmap\n"
        "from testbed.config.flags import build_parser\n"
        "build_parser().format_help()\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "check_command_line(sys.argv[1:])\n"
    )
    for words, piece in (
        (["--train_data_path", "val.bin"], "val.bin cannot be read"),
        (["--train_data_path", "weights/x.bin"], "weights/x.bin cannot be read"),
        (["--val_data_path", "train.bin", "--init_from", "weights"], "weights"),
        (["--val_data_path", "train.bin", "--config", "weights/x.json"], "cannot be read: Permission denied"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, "--train_data_path", "train.bin", *words],
            cwd=folder, capture_output=True, text=True, timeout=60, check=False,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert piece in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
