"""Share tiny token files and ranks among the tests, and hold the marker `launches`."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings
from support.builds import own_builds
from support.programs import write_pair_files, write_token_files
from support.ranks import AUDIT_EVENT, Ranks

# No deadline: beside other work an example takes as long as it takes.
settings.register_profile("everyday", deadline=None)
settings.register_profile("all", deadline=None)  # support/fuzz.py draws a fifth without it
settings.load_profile("everyday")
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", AUDIT_EVENT)
FREE = ("git", "uname")  # every record of a run asks for the commit, and the platform module once for the processor
started: list[str] = []  # by the test that runs now
starting_fixtures: set[tuple[str, str]] = set()  # below which folder or file, name


def pytest_addoption(parser):
    parser.addoption("--drills", type=int, default=2, help="how often test_kill_and_resume.py disturbs a run")
    parser.addoption(
        "--divergences",
        type=int,
        default=10,
        help="faults, and sound runs, that test_first_divergence.py tries",
    )
    parser.addoption("--drill-seed", type=int, help="seed of the first drill; those after it count on (default: drawn)")


def pytest_generate_tests(metafunc):
    if "drill_seed" in metafunc.fixturenames:
        metafunc.parametrize("drill_seed", range(metafunc.config.getoption("--drills")), indirect=True)


def pytest_ignore_collect(collection_path, config):
    """With `-m alone`, import only the few files that have such tests."""
    if config.option.markexpr == "alone" and collection_path.suffix == ".py":
        return "mark.alone" not in collection_path.read_text(encoding="utf-8") or None
    return None


@pytest.hookimpl(trylast=True)  # what is deselected does not count
def pytest_collection_modifyitems(items):
    """Begin with the files that start most: a worker has a file to itself, and the last ones should be short."""
    launching = Counter(item.path for item in items if item.get_closest_marker("launches"))
    items.sort(key=lambda item: -launching[item.path])


@pytest.fixture
def drill_seed(request) -> int:
    first = request.config.getoption("--drill-seed")
    return random.randrange(10**6) if first is None else first + request.param


def note_start(event: str, arguments: tuple) -> None:
    if event not in STARTS:
        return
    command = arguments[1] if event == "subprocess.Popen" else [event]
    if isinstance(command, str) or str(command[0]) not in FREE:
        started.append(str(command)[:200])


sys.addaudithook(note_start)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    before = len(started)
    try:
        return (yield)
    finally:
        if len(started) > before:
            starting_fixtures.add((fixturedef.baseid, fixturedef.argname))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    started.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fail a test that starts a process, itself or by a fixture of any scope, and is not marked `launches`."""
    result = yield
    if item.get_closest_marker("launches") is None:
        causes = [f"fixture {name}" for base, name in sorted(starting_fixtures)
                  if name in item.fixturenames and item.nodeid.startswith(base)]  # fmt: skip
        for cause in [*started[:1], *causes]:
            pytest.fail(f"{item.nodeid} starts a process and is not marked `launches`: {cause}", pytrace=False)
    return result


@pytest.fixture(scope="session", autouse=True)
def quiet_environment(tmp_path_factory):
    """Set one thread per process, no network, and a build cache of this run of the suite. Ctrl-C and a closed terminal
    reach what tests start: a suite in the background of a script, or under nohup, would hand down that they are
    ignored."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    folder = tmp_path_factory.getbasetemp()
    of_all_workers = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    with own_builds(of_all_workers / "torch_extensions"):
        yield


@pytest.fixture
def other_process():
    """A process that can be stopped and killed in a rank's stead."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Ranks that share their imports; each request gets fresh ones."""
    ranks = Ranks(tmp_path_factory.mktemp("ranks") / "server.txt")
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def token_files(tmp_path_factory) -> tuple[Path, Path]:
    """A training and a validation file; no test may change them."""
    return write_token_files(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="session")
def pair_files(tmp_path_factory) -> tuple[Path, Path]:
    """A training and a validation file of pairs; no test may change them."""
    return write_pair_files(tmp_path_factory.mktemp("pairs"))
