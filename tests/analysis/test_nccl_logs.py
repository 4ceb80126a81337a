"""What parse_nccl_logs.py states of logs in NCCL's own format, and what it refuses to state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.nccl_examples import init_lines, one_host, two_hosts, write_logs
from support.programs import run_here

from testbed.analysis.profiles.nccl_logs import find_logs, parse_lines, summarise, summary_of, summary_text

PROGRAM = "scripts/profiling/parse_nccl_logs.py"


def summary(*logs: list[str]) -> dict:
    return summary_of([parse_lines(lines, Path(f"log{number}")) for number, lines in enumerate(logs)])


def only_communicator(*logs: list[str]) -> dict:
    (one,) = summary(*logs)["communicators"]
    return one


def transports(one: dict) -> list[tuple]:
    return [(row["transport"], row["where"], row["connections"]) for row in one["transports"]]


@pytest.mark.parametrize("via", ["P2P/CUMEM/read", "P2P/IPC", "P2P/direct pointer", "SHM/direct/direct"])
def test_a_machine_of_its_own(via):
    found = summary(one_host(0, via), one_host(1, via))
    (one,) = found["communicators"]
    assert transports(one) == [(via, "within a host", 4)]
    assert (one["size"], one["ranks"], one["channels"]["coll"]) == (2, [0, 1], 2)
    assert one["disagreements"] == one["unknown"] == []
    assert found["version"] == {
        "value": "2.21.5+cuda12.4", "values": ["2.21.5+cuda12.4"], "processes_that_say": 1, "processes": 2,
    }  # fmt: skip
    assert found["network"]["value"] == "Socket" and found["environment"] == {"NCCL_IB_DISABLE": ["1"]}


def test_processes_are_counted_and_not_files():
    """Count processes in the one file that a job's processes print to. A line without a name counts as one."""
    apart, together = summary(one_host(0), one_host(1)), summary([*one_host(0), *one_host(1)])
    assert together == apart
    assert together["num_processes"] == 2 and together["network"]["processes_that_say"] == 2
    assert "NCCL 2.21.5+cuda12.4 (said by 1 of 2 processes)" in summary_text(together)
    assert "network: Socket (said by 1 of 1 process)" in summary_text(summary(one_host(0)))


def test_processes_of_two_hosts_with_one_number_are_two():
    first, second = ([line.replace("991", "981") for line in two_hosts(rank)] for rank in (0, 1))
    found = summary([*first, *second])
    assert found["num_processes"] == 2 and found["communicators"][0]["hosts"] == ["gn-0010", "gn-0011"]


def test_numbers_and_names_of_algorithms_mean_the_same():
    one = only_communicator(one_host(0), one_host(1))
    assert [(row["collective"], row["algorithm"], row["protocol"], row["calls"]) for row in one["algorithms"]] == [
        ("AllReduce", "Ring", "LL", 2), ("AllReduce", "Ring", "Simple", 2),
    ]  # fmt: skip
    named = only_communicator(two_hosts(0), two_hosts(1))
    assert {(row["algorithm"], row["protocol"]) for row in named["algorithms"]} == {
        ("Tree", "LL"), ("Ring", "LL128"), ("NVLS", "Simple"), ("symmetric AllGather_LLMC", None),
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
    (one,) = found["communicators"]
    assert transports(one) == [(kind, "between hosts", 8)]
    assert one["hosts"] == ["gn-0010", "gn-0011"] and found["network"]["value"] == "IB"
    assert found["version"]["value"] == "2.27.3+cuda12.9"


def test_a_missing_log_is_not_concluded_from():
    one = only_communicator(two_hosts(0))
    assert one["unknown"] == ["ranks 1 of 2: they left no log"]
    assert transports(one) == [("NET/IB/GDRDMA", "unknown", 8)]  # on which machine the other rank is, nobody said


def test_what_was_not_logged_is_said_and_not_guessed():
    quiet = [[line for line in one_host(rank) if " via " not in line and "Bytes ->" not in line] for rank in range(2)]
    one = only_communicator(*quiet)
    assert one["transports"] == [] and one["algorithms"] is None
    assert [text.partition(":")[0] for text in one["unknown"]] == ["transports", "algorithms and protocols"]


def test_ranks_that_disagree_are_named():
    said = summary_text(summary(one_host(0), one_host(1, coll_channels=4)))
    assert "RANKS DISAGREE: channels for collectives: rank 0 2, rank 1 4" in said
    other = [line.replace("2.21.5", "2.20.3") for line in two_hosts(0)]
    other = [line.replace("2.27.3", "2.26.2") for line in other]
    assert "PROCESSES DISAGREE: 2.26.2+cuda12.9 / 2.27.3+cuda12.9" in summary_text(summary(other, two_hosts(1)))


def test_a_rank_that_never_finished_is_named():
    begun = [line for line in one_host(1) if "Init COMPLETE" not in line]
    assert (
        "ranks 1 began to set it up and do not say that they ended" in only_communicator(one_host(0), begun)["unknown"]
    )


def test_two_starts_in_one_folder_are_not_one_run(tmp_path):
    """A launcher that restarts its ranks leaves their logs beside the first ones'; two folders are two starts."""
    twice = [line.replace("node0:23441:", "node0:99441:") for line in one_host(1)]
    one = only_communicator(one_host(0), one_host(1), twice)
    assert "ranks 1 are in several files: these logs are of more than one start" in one["unknown"]
    for number in (1, 2):
        write_logs(tmp_path / "evidence" / f"start_{number}", [one_host(0), one_host(1)])
    with pytest.raises(ValueError, match=r"the logs of 2 starts \(evidence/start_1, evidence/start_2\)"):
        find_logs(tmp_path)
    assert len(summarise(tmp_path / "evidence" / "start_2")["communicators"]) == 1


def test_lines_after_the_end_of_set_up_belong_to_the_only_communicator_or_to_none():
    """Newer releases connect at the first collective, and do not say for which communicator."""
    late = one_host(0)
    connections = [line.replace(":23441 ", ":23999 ") for line in late if " via " in line]
    late = [line for line in late if " via " not in line] + connections
    one = only_communicator(late, one_host(1))
    assert transports(one) == [("P2P/CUMEM/read", "within a host", 4)]
    second = [init_lines("node0", 23440, 0, 1, 0, event, "0x0000000000000077") for event in ("START", "COMPLETE")]
    found = summary([*late[:-2], *second, *connections])["communicators"]
    assert [one["comm_id"] for one in found].count(None) == 1
    (nameless,) = [one for one in found if one["comm_id"] is None]
    assert any("has several" in text for text in nameless["unknown"]) and len(nameless["transports"]) == 1


def test_a_log_that_is_cut_off_is_read_up_to_there():
    text = "\n".join(one_host(0))
    for length in range(0, len(text), 97):
        log = parse_lines(text[:length].splitlines(), Path("log"))
        assert len(log.members) <= 1


def test_warnings_of_nccl_are_shown():
    warned = [*one_host(0), "node0:23440:23999 [0] NCCL WARN NET/IB : Got completion from peer with status=12"]
    assert "NCCL warned (log0): NET/IB : Got completion" in summary_text(summary(warned, one_host(1)))


def test_the_program(tmp_path):
    folder = write_logs(tmp_path / "start_1", [two_hosts(0), two_hosts(1)])
    done = run_here(PROGRAM, folder, "--json", tmp_path / "summary.json")
    assert done.returncode == 0, done.stderr
    for line in (
        "NCCL 2.27.3+cuda12.9 (said by 2 of 2 processes)",
        "of 2 ranks on gn-0010, gn-0011",
        "NET/IB/GDRDMA: 8 connections for collectives, between hosts",
        "AllReduce: Ring LL128, 1 calls of 8,388,608 bytes",
    ):
        assert line in done.stdout
    assert json.loads((tmp_path / "summary.json").read_text()) == summarise(folder)
    assert run_here(PROGRAM, folder, "--json", tmp_path).returncode == 1


def test_the_program_refuses_what_is_no_log(tmp_path):
    missing = run_here(PROGRAM, tmp_path)
    assert missing.returncode == 2 and "gloo, which has no such log" in missing.stderr
    (tmp_path / "nccl_rank_a_1.log").write_text("nothing of the kind\n")
    assert run_here(PROGRAM, tmp_path).returncode == run_here(PROGRAM, tmp_path / "nowhere").returncode == 2
