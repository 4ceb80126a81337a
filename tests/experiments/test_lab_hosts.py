"""Training over hosts of the lab: the same mathematics, what the link allows, launchers, a host that dies."""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path

import pytest
from support.agreement import WORKER, case_flags, disagreements, run_cases
from support.programs import PROGRAM, REPOSITORY, TINY_RUN, data_flags

from testbed.experiments.network_lab import HostEnd, Lab, Link, lab, parse_rate, run_on_hosts, why_impossible
from testbed.metrics.file import read_metrics

pytestmark = [
    pytest.mark.launches,
    pytest.mark.alone,
    pytest.mark.skipif(why_impossible() is not None, reason=f"no lab here: {why_impossible()}"),
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"]
OVER_HOSTS = ("allreduce", "ddp", "fsdp", "optimized --zero_stage 1", "optimized --zero_stage 3", "pipeline")
NANO_BYTES = 8_000_000  # of nano's gradients, about


@pytest.fixture(scope="module")
def two_hosts():
    """On a bridge without limits; the tests use it one after the other."""
    with lab(2, Link()) as made:
        yield made


def run(made: Lab, command: list[str], folder: Path, **options) -> tuple[list[HostEnd], str]:
    """Run to the end; how, and all that was said, in the order in which it came."""
    said: list[str] = []
    ends = run_on_hosts(
        made, command, folder, 150, on_output=lambda host, line: said.append(f"[{host}] {line}"), **options
    )
    return ends, "\n".join(said)


def codes(ends: list[HostEnd]) -> list[int]:
    return [end.exit_code for end in ends]


def training(token_files, folder: Path, *flags: str) -> list[str]:
    """What gpt2.py is told: four steps, all that it writes in one folder, which both hosts see."""
    return [
        str(PROGRAM), *TINY_RUN, *data_flags(token_files), "--global_batch_size", "8", "--max_train_steps", "4",
        "--max_val_steps", "1", "--sample_tokens", "0", "--checkpoint_path", str(folder), *flags,
    ]  # fmt: skip


def losses(folder: Path) -> list[float]:
    metrics = read_metrics(folder / "training_metrics.json")
    assert metrics["status"] == "complete"
    return [row["loss"] for row in metrics["steps"]]


@pytest.fixture(scope="module")
def baseline_losses(ranks, token_files, tmp_path_factory) -> list[float]:
    folder = tmp_path_factory.mktemp("baseline")
    done = ranks.run_program(training(token_files, folder / "run")[1:], folder)
    assert done.returncode == 0, done.stderr
    return losses(folder / "run")


def test_strategies_over_two_hosts_follow_the_single_process(two_hosts, ranks, token_files, tmp_path):
    """Loss, norm, validation and weights to the tolerances of test_strategies_agree.py."""
    alone, *cases = (
        (case_flags(token_files, None, ["--run_type", *words.split()]), None) for words in ("baseline", *OVER_HOSTS)
    )
    (expected,) = run_cases(ranks, tmp_path / "alone", [alone], 1)
    (tmp_path / "tasks.json").write_text(json.dumps(cases))
    ends, said = run(two_hosts, [*TORCHRUN, str(WORKER), str(tmp_path)], tmp_path / "logs")
    assert codes(ends) == [0, 0], said[-3000:]
    for words, actual in zip(OVER_HOSTS, json.loads((tmp_path / "results.json").read_text()), strict=True):
        assert actual["world_size"] == 2
        assert disagreements(expected, actual) == [], words


def test_a_command_starts_in_the_folder_where_it_was_typed(two_hosts, tmp_path, monkeypatch):
    """So that `network.py run -- torchrun src/gpt2.py` finds the program."""
    monkeypatch.chdir(tmp_path)
    ends, said = run(two_hosts, ["pwd"], tmp_path)
    assert codes(ends) == [0, 0] and said.count(str(tmp_path)) == 2


def test_a_process_per_host_trains_as_one_alone(two_hosts, token_files, tmp_path, baseline_losses):
    command = [sys.executable, *training(token_files, tmp_path / "run", "--run_type", "ddp")]
    ends, said = run(two_hosts, command, tmp_path / "logs")
    assert codes(ends) == [0, 0], said[-3000:]
    assert losses(tmp_path / "run") == pytest.approx(baseline_losses, abs=5e-6)
    hardware = read_metrics(tmp_path / "run" / "training_metrics.json")["hardware"]
    assert (hardware["num_nodes"], hardware["world_size"]) == (2, 2)


def test_deepspeeds_hostfile_launcher_trains_over_both_hosts(two_hosts, token_files, tmp_path, baseline_losses):
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner"]
    flags = ("--run_type", "optimized", "--zero_stage", "2")
    ends, said = run(two_hosts, [*launcher, *training(token_files, tmp_path / "run", *flags)], tmp_path / "logs")
    assert codes(ends) == [0, 0], said[-3000:]
    assert losses(tmp_path / "run") == pytest.approx(baseline_losses, abs=5e-6)


ALL_REDUCE = f"""
import sys
sys.path.insert(0, {str(REPOSITORY / "src")!r})
import torch
from testbed.distributed import process_group
from testbed.distributed.launch import read_launch
from testbed.profiling.attribution import measured_bus_bandwidth
torch.set_num_threads(1)
process_group.start_process_group(torch.device("cpu"), read_launch(), True)
print("bus bytes/s", measured_bus_bandwidth({NANO_BYTES}, torch.device("cpu"), repeats=4), flush=True)
process_group.stop_process_group()
"""


def test_an_all_reduce_takes_what_its_bytes_need_at_the_rate_of_the_link(tmp_path):
    """Within 25 % of 2 (N - 1) / N x bytes / bandwidth, and the bucket does not let it through faster either."""
    with lab(2, Link(parse_rate("100mbit"))) as made:
        ends, said = run(made, [sys.executable, "-c", ALL_REDUCE], tmp_path)
    assert codes(ends) == [0, 0], said
    for line in (line for line in said.splitlines() if "bus bytes/s" in line):
        assert 12.5e6 / 1.25 <= float(line.split()[-1]) <= 12.5e6 * 1.08, said


def in_the_middle(made: Lab, command: list[str], folder: Path, strike) -> tuple[list[HostEnd], str]:
    """Run the command, and strike once the first step has been said to be done."""
    said: list[str] = []
    has_begun = threading.Event()

    def listen(host: int, line: str) -> None:
        said.append(f"[{host}] {line}")
        if "step " in line and "loss" in line:
            has_begun.set()

    def wait_and_strike() -> None:
        if has_begun.wait(60):
            strike()

    striker = threading.Thread(target=wait_and_strike)
    striker.start()
    ends = run_on_hosts(made, command, folder, 120, on_output=listen, patience_s=20)
    striker.join()
    assert has_begun.is_set(), said
    return ends, "\n".join(said)


LONG = ("--run_type", "ddp", "--max_train_steps", "100000", "--epochs", "100000", "--steps_per_print", "100000")


def test_a_host_that_dies_ends_the_run_on_the_other_with_the_reason(token_files, tmp_path):
    """kill -9 of all that runs on it."""
    with lab(2, Link()) as made:
        command = [sys.executable, *training(token_files, tmp_path / "run", *LONG)]
        ends, said = in_the_middle(made, command, tmp_path / "logs", lambda: made.hosts[1].signal_all(signal.SIGKILL))
    assert codes(ends) == [1, -signal.SIGKILL] and not ends[0].ended_by_us, said[-3000:]
    assert "rank 1" in (tmp_path / "run" / "RUN_FAILED.txt").read_text()


def test_a_host_that_is_cut_off_ends_the_run_within_the_timeout_of_collectives(token_files, tmp_path):
    """No connection breaks: packets are not answered any more."""
    with lab(2, Link()) as made:
        command = [sys.executable, *training(token_files, tmp_path / "run", *LONG, "--collective_timeout", "5")]
        ends, said = in_the_middle(made, command, tmp_path / "logs", lambda: made.set_connected(2, False))
    assert codes(ends) == [1, 1] and not any(end.ended_by_us for end in ends), said[-3000:]
    assert (tmp_path / "run" / "RUN_FAILED.txt").exists()
