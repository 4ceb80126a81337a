"""What parse_nccl_logs.py states of logs in NCCL's own format, and what it refuses to state."""

from __future__ import annotations

import json

import pytest
from support.nccl_examples import one_host, two_hosts, write_logs
from support.programs import run_here

from testbed.analysis.profiles.nccl_logs import Logs, find_logs, summarise, summary_of, summary_text

PROGRAM = "scripts/profiling/parse_nccl_logs.py"


def summary(*logs: list[str]) -> dict:
    found = Logs()
    for line in (line for lines in logs for line in lines):
        found.read(line)
    return summary_of(found)


def transports(found: dict) -> list[tuple]:
    return [(row["transport"], row["for"], row["connections"]) for row in found["transports"]]


@pytest.mark.parametrize("via", ["P2P/CUMEM/read", "P2P/IPC", "P2P/direct pointer", "SHM/direct/direct"])
def test_one_machine(via):
    found = summary(one_host(0, via), one_host(1, via))
    assert transports(found) == [(via, "collectives", 4)]
    (one,) = found["communicators"]
    assert (one["size"], one["ranks"], one["unknown"], found["unknown"]) == (2, [0, 1], [], [])
    assert (found["num_processes"], found["hosts"]) == (2, ["node0"])
    assert (found["versions"], found["networks"]) == (["2.21.5+cuda12.4"], ["Socket"])
    assert found["environment"] == ["NCCL_IB_DISABLE=1"]


def test_numbers_and_names_of_algorithms_mean_the_same():
    found = summary(one_host(0), one_host(1))["algorithms"]
    assert [tuple(row.values()) for row in found] == [
        ("AllReduce", "Ring LL", 2, [8, 1024]), ("AllReduce", "Ring Simple", 2, [26214400, 26214400]),
    ]  # fmt: skip
    assert {row["algorithm"] for row in summary(two_hosts(0), two_hosts(1))["algorithms"]} == {
        "Tree LL", "Ring LL128", "NVLS Simple", "symmetric AllGather_LLMC",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("via", "kind"),
    [
        ("NET/IB/0/GDRDMA", "NET/IB/GDRDMA"),
        ("NET/IB/3(1)/GDRDMA", "NET/IB/GDRDMA"),
        ("NET/Socket/0", "NET/Socket"),
        ("NET/AWS Libfabric/2/GDRDMA", "NET/AWS Libfabric/GDRDMA"),
    ],
)
def test_between_machines_both_ends_tell_of_one_connection(via, kind):
    """Four channels each way: 8 connections, told 16 times."""
    found = summary(two_hosts(0, via), two_hosts(1, via))
    assert transports(found) == [(kind, "collectives", 8)]
    assert found["hosts"] == ["gn-0010", "gn-0011"] and found["networks"] == ["IB"]


def test_a_rank_without_a_log_or_without_an_end_and_a_second_start_are_named():
    def unknown(*logs: list[str]) -> list[str]:
        (one,) = summary(*logs)["communicators"]
        return one["unknown"]

    assert unknown(two_hosts(0)) == ["ranks 1 of 2: they left no log"]
    begun = [line for line in one_host(1) if "Init COMPLETE" not in line]
    assert unknown(one_host(0), begun) == ["ranks 1 began to set it up and do not say that they ended"]
    twice = [line.replace("node0:23441:", "node0:99441:") for line in one_host(1)]
    (said,) = unknown(one_host(0), one_host(1), twice)
    assert said == "ranks 1 are of several processes: these logs are of more than one start"


def test_what_was_not_logged_is_said_and_not_guessed():
    quiet = [[line for line in one_host(rank) if " via " not in line and "Bytes ->" not in line] for rank in range(2)]
    found = summary(*quiet)
    assert found["transports"] == found["algorithms"] == []
    assert [text.partition(":")[0] for text in found["unknown"]] == ["transports", "algorithms and protocols"]


def test_processes_that_disagree_and_warnings_are_shown():
    said = summary_text(summary(one_host(0), one_host(1, coll_channels=4)))
    for channels in (2, 4):
        assert f"{channels} coll channels, 0 collnet channels, 0 nvls channels, 2 p2p channels: said 1 times" in said
    other = [line.replace("2.27.3", "2.26.2") for line in two_hosts(0)]
    warned = "node0:23440:23999 [0] NCCL WARN NET/IB : Got completion from peer with status=12"
    said = summary_text(summary(other, two_hosts(1), [warned]))
    assert "NCCL: PROCESSES DISAGREE: 2.26.2+cuda12.9 / 2.27.3+cuda12.9" in said
    assert "NCCL warned: NET/IB : Got completion" in said


def test_a_file_that_is_cut_off_is_read_up_to_there():
    text = "\n".join(one_host(0))
    for length in range(0, len(text), 97):
        assert len(summary(text[:length].splitlines())["communicators"]) <= 1


def test_the_program(tmp_path):
    folder = write_logs(tmp_path / "start_1", [two_hosts(0), two_hosts(1)])
    done = run_here(PROGRAM, folder, "--json", tmp_path / "summary.json")
    assert done.returncode == 0, done.stderr
    for line in (
        "processes: 2, on gn-0010, gn-0011",
        "NCCL: 2.27.3+cuda12.9",
        "NET/IB/GDRDMA: 8 connections for collectives",
        "AllReduce: Ring LL128, 1 calls of 8,388,608 bytes",
    ):
        assert line in done.stdout
    assert json.loads((tmp_path / "summary.json").read_text()) == summarise(folder)
    assert run_here(PROGRAM, folder, "--json", tmp_path).returncode == 1


def test_what_is_not_the_log_of_one_start_is_refused(tmp_path):
    missing = run_here(PROGRAM, tmp_path)
    assert missing.returncode == 2 and "gloo, which has no such log" in missing.stderr
    (tmp_path / "nccl_rank_a_1.log").write_text("nothing of the kind\n")
    assert run_here(PROGRAM, tmp_path).returncode == run_here(PROGRAM, tmp_path / "nowhere").returncode == 2
    for number in (1, 2):
        write_logs(tmp_path / "evidence" / f"start_{number}", [one_host(0), one_host(1)])
    with pytest.raises(ValueError, match=r"the logs of 2 starts \(start_1, start_2\)"):
        find_logs(tmp_path / "evidence")
