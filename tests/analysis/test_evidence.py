"""scripts/slurm/evidence.sh: nothing where nothing is asked for, and a run that is marked where anything is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.nccl_examples import one_host, write_logs
from support.programs import PROGRAM, REPOSITORY, TINY_RUN, data_flags

from testbed.config.environment_variables import instruments_in
from testbed.metrics.file import read_metrics

pytestmark = pytest.mark.launches

SCRIPT = REPOSITORY / "scripts" / "slurm" / "evidence.sh"
TOGGLES = ("NCCL_LOGS", "TORCHRUN_LOGS", "DIST_DEBUG", "NSYS")
ARRAYS = ("EVIDENCE_TORCHRUN_FLAGS", "EVIDENCE_RANK_PREFIX", "EVIDENCE_GPT2_FLAGS")
SHOW = """
. "$SCRIPT"
evidence_prepare "$1" >&2 || exit
for name in EVIDENCE_TORCHRUN_FLAGS EVIDENCE_RANK_PREFIX EVIDENCE_GPT2_FLAGS; do
    declare -n array=$name
    printf '%s\\0' "$name" "${array[@]}" ""
done
printf '%s\\0' ENVIRONMENT
env -0
"""
RUN = """
. "$SCRIPT"
evidence_prepare "$RUN_DIR" >&2 || exit
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 --no-python \\
    "${EVIDENCE_TORCHRUN_FLAGS[@]}" "${EVIDENCE_RANK_PREFIX[@]}" \\
    "$PYTHON" "$PROGRAM" "$@" "${EVIDENCE_GPT2_FLAGS[@]}" || exit
evidence_finish
"""
# runs what it is to profile, as nsys does, and leaves a report
NSYS = """#!/bin/bash
if [ "$1" = stats ]; then echo "stats of $2"; exit; fi
shift
all=$*
for word in "$@"; do
    case $word in
    --output=*) echo "$all" >"${word#--output=}.nsys-rep"; shift ;;
    --*) shift ;;
    *) break ;;
    esac
done
NSYS_PROFILING_SESSION_ID=1 exec "$@"
"""


def environment(**variables: str) -> dict[str, str]:
    """This process's, without what would switch anything on."""
    foreign = ("NCCL_", "TORCH_", "SLURM", "EVIDENCE_", "NSYS")
    own = {name: value for name, value in os.environ.items() if not name.startswith(foreign) and name not in TOGGLES}
    own |= {"SCRIPT": str(SCRIPT), "PROGRAM": str(PROGRAM), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return own | variables


def prepare(folder: Path, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", "-uc", SHOW, "show", str(folder)], capture_output=True, text=True, env=environment(**variables)
    )


def prepared(folder: Path, **variables: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The arrays, and the variables that were exported or changed."""
    done = prepare(folder, **variables)
    assert done.returncode == 0, done.stderr
    words, _, after = done.stdout.partition("ENVIRONMENT\0")
    arrays, name = {}, None
    for word in words.split("\0"):
        if word in ARRAYS:
            name = word
            arrays[name] = []
        elif word:
            arrays[name].append(word)
    before = environment(**variables)
    pairs = (pair.partition("=") for pair in after.split("\0") if pair)
    left_out = ("_", "SHLVL", "PWD", "OLDPWD")
    return arrays, {key: value for key, _, value in pairs if before.get(key) != value and key not in left_out}


@pytest.fixture(scope="module")
def fake_nsys(tmp_path_factory) -> Path:
    program = tmp_path_factory.mktemp("nsys") / "nsys"
    program.write_text(NSYS)
    program.chmod(0o755)
    return program


def test_without_a_toggle_nothing_is_set_and_nothing_is_written(tmp_path):
    for variables in ({}, dict.fromkeys(TOGGLES, "0")):
        arrays, changed = prepared(tmp_path / "run", **variables)
        assert arrays == {name: [] for name in ARRAYS} and changed == {}
    assert list(tmp_path.iterdir()) == []


def test_nccl_logs_change_what_is_written_and_never_the_route(tmp_path):
    arrays, changed = prepared(tmp_path, NCCL_LOGS="1")
    assert arrays == {name: [] for name in ARRAYS}
    start = tmp_path / "evidence" / "start_1"
    assert changed.pop("NCCL_DEBUG_SUBSYS").split(",") == "INIT ENV GRAPH NET P2P SHM NVLS TUNING".split()
    assert changed == {
        "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{start}/nccl_rank_%h_%p.log",
        "NCCL_TOPO_DUMP_FILE": f"{start}/nccl_topo.xml", "EVIDENCE_DIR": str(start), "EVIDENCE_TOGGLES": "NCCL_LOGS",
    }  # fmt: skip
    for said, stands in (("WARN", "INFO"), ("TRACE", None)):  # what a person set stays where it logs enough
        _, changed = prepared(tmp_path, NCCL_LOGS="1", NCCL_DEBUG=said, NCCL_DEBUG_SUBSYS="INIT")
        assert changed.get("NCCL_DEBUG") == stands and "NCCL_DEBUG_SUBSYS" not in changed


def test_dist_debug_never_asks_for_detail(tmp_path):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL ends DDP on gloo with a segmentation fault."""
    arrays, changed = prepared(tmp_path, DIST_DEBUG="1")
    assert arrays["EVIDENCE_GPT2_FLAGS"] == ["--log_collectives"]
    assert changed["TORCH_DISTRIBUTED_DEBUG"] == "INFO"
    assert changed["TORCH_FR_BUFFER_SIZE"] == changed["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "20000"
    note = (tmp_path / "evidence" / "start_1" / "flight_recorder.txt").read_text()
    assert "A run on gloo\n(CPU) leaves no such file" in note


def test_the_first_rank_of_each_node_runs_under_nsys(tmp_path, fake_nsys):
    arrays, _ = prepared(tmp_path, NSYS="1", NSYS_BIN=str(fake_nsys))
    assert arrays["EVIDENCE_TORCHRUN_FLAGS"] == []
    assert arrays["EVIDENCE_GPT2_FLAGS"] == ["--profile_mode"]
    start = tmp_path / "evidence" / "start_1"
    assert arrays["EVIDENCE_RANK_PREFIX"] == ["bash", str(SCRIPT), "rank"]
    for rank, reports in (("1", 0), ("0", 1)):
        variables = environment(
            LOCAL_RANK=rank, EVIDENCE_DIR=str(start), NSYS_BIN=str(fake_nsys), NSYS_TRACE="cuda", NSYS_DELAY="5"
        )
        command = [*arrays["EVIDENCE_RANK_PREFIX"], "echo", "trained"]
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        assert done.stdout == "trained\n", done.stderr
        found = list((start / "profiles").glob("*.nsys-rep"))
        assert len(found) == reports
    assert "--trace=cuda " in found[0].read_text() and "--delay=5" in found[0].read_text()


def test_what_cannot_be_collected_is_refused(tmp_path):
    done = prepare(tmp_path, DIST_DEBUG="yes")
    assert done.returncode == 2 and "DIST_DEBUG=yes is neither 0 nor 1" in done.stderr
    done = prepare(tmp_path, NSYS="1", NSYS_BIN="no-such-nsys")
    assert done.returncode == 2 and "no-such-nsys is not on PATH" in done.stderr
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    done = prepare(tmp_path / "file", NCCL_LOGS="1")
    assert done.returncode == 1 and "set RUN_DIR to a folder" in done.stderr


def test_every_start_has_a_folder_of_its_own(tmp_path, fake_nsys):
    """Numbers follow time: after two starts in a folder, a job's fifth (restart count 4) and one submitted anew.
    profiles leads to the newest start alone."""
    names = []
    for restart in ("", "", "4", ""):
        _, changed = prepared(tmp_path, NSYS="1", NSYS_BIN=str(fake_nsys), SLURM_RESTART_COUNT=restart)
        names.append(Path(changed["EVIDENCE_DIR"]).name)
        assert f"slurm_restart_count={restart or 'none'}" in (Path(changed["EVIDENCE_DIR"]) / "start.txt").read_text()
    assert names == ["start_1", "start_2", "start_5", "start_6"]
    assert (tmp_path / "profiles").resolve() == tmp_path / "evidence" / "start_6" / "profiles"


def test_what_is_exported_is_told_to_who_prints_it(tmp_path, fake_nsys):
    """EVIDENCE_VARIABLES holds what was exported, and what a person had set already; EVIDENCE_FOLDERS what was made."""
    show = 'printf "%s\\n" "${EVIDENCE_VARIABLES[@]}" "" "${EVIDENCE_FOLDERS[@]}"'
    script = f'. "$SCRIPT"; evidence_prepare "$1"; {show}'
    toggles = {**dict.fromkeys(TOGGLES, "1"), "NSYS_BIN": str(fake_nsys), "NCCL_DEBUG": "TRACE"}
    done = subprocess.run(
        ["bash", "-uc", script, "told", str(tmp_path)], capture_output=True, text=True, env=environment(**toggles)
    )
    variables, folders = (part.splitlines() for part in done.stdout.split("\n\n"))
    _, changed = prepared(tmp_path / "again", **toggles)
    assert set(changed) <= {word.partition("=")[0] for word in variables} and "NCCL_DEBUG=TRACE" in variables
    start = tmp_path / "evidence" / "start_1"
    assert folders == [str(start), str(start / "torchrun"), str(start / "profiles")]
    assert all(Path(folder).is_dir() for folder in folders)
    arrays, changed = prepared(tmp_path / "dry", **toggles, is_dry="yes")
    assert all(arrays.values()) and changed["EVIDENCE_DIR"] == str(tmp_path / "dry" / "evidence" / "start_1")
    assert not (tmp_path / "dry").exists()


def test_a_plain_start_has_no_profiles_of_an_earlier_one(tmp_path, fake_nsys):
    """Whoever reads the folder would take it for a profiled run. What somebody else put there stays."""
    link = tmp_path / "profiles"
    prepared(tmp_path, NSYS="1", NSYS_BIN=str(fake_nsys))
    prepare(tmp_path, is_dry="yes")
    assert link.is_symlink()
    prepared(tmp_path)
    assert not link.is_symlink() and (tmp_path / "evidence" / "start_1" / "profiles").is_dir()
    link.symlink_to("/somewhere/else")
    prepared(tmp_path)
    assert link.is_symlink()


def test_nodes_of_one_host_do_not_take_each_others_names(tmp_path, fake_nsys):
    for node in ("node1", "node2"):
        on_node = environment(
            SLURMD_NODENAME=node,
            LOCAL_RANK="0",
            EVIDENCE_DIR=str(tmp_path),
            NSYS_BIN=str(fake_nsys),
            PATH="/usr/bin:/bin",
        )
        (tmp_path / "profiles").mkdir(exist_ok=True)
        subprocess.run(["bash", str(SCRIPT), "host", str(tmp_path)], check=True, env=on_node)
        subprocess.run(["bash", str(SCRIPT), "rank", "true"], check=True, env=on_node)
    assert sorted(path.stem for path in tmp_path.glob("*.topo")) == ["node1", "node2"]
    assert len(list((tmp_path / "profiles").glob("nsys_0_node?_attempt_0.nsys-rep"))) == 2


def test_a_driver_that_hangs_does_not_hold_the_run_up(tmp_path):
    """`timeout` is a stand-in that ends at once what it is asked to bound."""
    for name, does in (("nvidia-smi", "exec sleep 300"), ("timeout", 'echo "$@"; exit 124')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    variables = environment(PATH=f"{tmp_path}:/usr/bin:/bin", SLURMD_NODENAME="n")
    subprocess.run(["bash", str(SCRIPT), "host", str(tmp_path)], check=True, env=variables, timeout=20)
    said = (tmp_path / "n.topo").read_text()
    assert "-k 2 25 nvidia-smi topo -m" in said and "failed on n, or took longer than 25 s" in said


def test_the_signal_before_the_time_limit_does_not_end_nsys(tmp_path):
    """Slurm sends USR1 to every process of the step: nsys would die of it, and take its rank along."""
    nsys = tmp_path / "nsys"
    nsys.write_text("#!/bin/bash\nkill -USR1 $$\necho alive\n")
    nsys.chmod(0o755)
    variables = environment(LOCAL_RANK="0", EVIDENCE_DIR=str(tmp_path), NSYS_BIN=str(nsys))
    done = subprocess.run(["bash", str(SCRIPT), "rank", "true"], capture_output=True, text=True, env=variables)
    assert (done.returncode, done.stdout) == (0, "alive\n")


def test_a_missing_tool_is_said_in_the_file(tmp_path):
    prepared(tmp_path, NCCL_LOGS="1", PATH="/usr/bin:/bin")
    start = tmp_path / "evidence" / "start_1"
    for name, tool in (("topo.txt", "nvidia-smi"), ("ibstat.txt", "ibstat")):
        said = (start / name).read_text()
        assert f": {tool}" in said.splitlines()[0]
        assert f"{tool} is not installed on" in said or len(said.splitlines()) > 2


def test_what_slows_a_run_down_is_known_by_its_variables():
    assert instruments_in({"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Ring", "TORCH_DISTRIBUTED_DEBUG": "OFF"}) == []
    assert instruments_in({"NCCL_DEBUG": "info"}) == ["NCCL_DEBUG=INFO"]
    assert instruments_in({"NSYS_PROFILING_SESSION_ID": "7", "CUDA_LAUNCH_BLOCKING": "1"}) == [
        "CUDA_LAUNCH_BLOCKING=1", "nsys",
    ]  # fmt: skip
    assert instruments_in({"EVIDENCE_TOGGLES": "NCCL_LOGS NSYS", "NCCL_DEBUG": None}) == ["NCCL_LOGS=1", "NSYS=1"]


class Trained:
    """A run of two ranks that ended well, and its files."""

    def __init__(self, folder: Path, files: tuple[Path, Path], launch: list[str], **variables: str):
        self.folder = folder
        flags = [*TINY_RUN, *data_flags(files), "--run_type", "ddp", "--max_train_steps", "6", "--epochs", "9"]
        flags += ["--global_batch_size", "8", "--timing_warmup_steps", "1", "--checkpoint_path", str(folder)]
        variables |= {"RUN_DIR": str(folder)}
        self.done = subprocess.run(
            [*launch, *flags], capture_output=True, text=True, env=environment(**variables), timeout=120
        )
        assert self.done.returncode == 0, self.done.stderr[-3000:]
        self.metrics = read_metrics(folder / "training_metrics.json")
        self.launcher = json.loads((folder / "launcher_metadata.json").read_text())

    @property
    def losses(self) -> list[tuple]:
        return [(row["loss"], row["grad_norm"]) for row in self.metrics["steps"]]


THROUGH_THE_SCRIPT = ["bash", "-uc", RUN, "run"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory, token_files) -> Trained:
    """With all toggles off: no variable is set and no flag is added, as the first test has it."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    return Trained(folder, token_files, THROUGH_THE_SCRIPT, **dict.fromkeys(TOGGLES, "0"))


@pytest.fixture(scope="module")
def all_on(tmp_path_factory, token_files, fake_nsys) -> Trained:
    folder = tmp_path_factory.mktemp("on") / "run"
    variables = {**dict.fromkeys(TOGGLES, "1"), "NSYS_BIN": str(fake_nsys)}
    return Trained(folder, token_files, THROUGH_THE_SCRIPT, **variables)


@pytest.mark.slow
def test_with_all_on_the_run_trains_the_same_and_is_marked(plain, all_on):
    assert all_on.losses == plain.losses
    assert plain.metrics["instrumented"] is False and plain.metrics["instruments"] == []
    assert not (plain.folder / "evidence").exists()
    assert all_on.metrics["instrumented"] is True
    assert set(all_on.metrics["instruments"]) >= {
        "--profile_mode", "--log_collectives", "NCCL_DEBUG=INFO", "TORCH_DISTRIBUTED_DEBUG=INFO", "nsys",
        *(f"{toggle}=1" for toggle in TOGGLES),
    }  # fmt: skip
    start = all_on.folder / "evidence" / "start_1"
    assert {"start.txt", "topo.txt", "ibstat.txt", "flight_recorder.txt"} <= {path.name for path in start.iterdir()}
    assert len(list((start / "profiles").glob("*.nsys-rep"))) == 1  # two ranks of one node
    logs = {str(path.relative_to(start)).split("/")[-2:][0] for path in (start / "torchrun").rglob("stdout.log")}
    assert logs == {"0", "1"}
    assert "stats of" in next((all_on.folder / "profiles").glob("nsys_stats_*.txt")).read_text()
    assert "its backend was gloo" in all_on.done.stderr  # no NCCL, so no summary of its logs


def test_each_rank_logs_when_it_enters_and_leaves_each_collective(all_on):
    """Both the same ones in the same order, DDP's all-reduces among them, and each that was entered was left."""
    orders = []
    for rank in range(2):
        (file,) = (all_on.folder / "evidence" / "start_1").glob(f"collectives_rank{rank}_*.jsonl")
        start, *lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert (start["event"], start["rank"], start["world_size"], start["backend"]) == ("start", rank, 2, "gloo")
        numbers = {event: [line["number"] for line in lines if line["event"] == event] for event in ("enter", "return")}
        assert numbers["enter"] == list(range(1, len(numbers["enter"]) + 1))
        assert sorted(numbers["return"]) == numbers["enter"]
        done = [line["number"] for line in lines if line["event"] == "done"]
        assert len(done) >= len(numbers["enter"]) - 1 and max(Counter(done).values()) == 1
        times = {(line["event"], line["number"]): line["s"] for line in lines}
        assert all(times["enter", number] <= times["done", number] for number in done)
        entered = [(line["name"], line["bytes"]) for line in lines if line["event"] == "enter"]
        # one bucket of all gradients in each step: the parameters in fp32
        gradients = 4 * all_on.metrics["training_config"]["num_parameters"]
        large = [sizes for name, sizes in entered if name == "allreduce" and sizes and sizes[0] > gradients // 4]
        assert len(large) >= 6 and "barrier" in {name for name, _ in entered}
        # A checkpoint gathers on rank 0 and scatters from it; only the root's entry sizes all of them.
        orders.append([(name, None if name in ("gather", "scatter") else sizes) for name, sizes in entered])
    assert orders[0] == orders[1]


def test_the_end_reads_what_was_collected_and_never_fails_the_run(tmp_path):
    script = '. "$SCRIPT"; evidence_prepare "$1"; cp "$2"/*.log "$EVIDENCE_DIR"; evidence_finish; echo "ended $?"'
    logs = write_logs(tmp_path / "logs", [one_host(0), one_host(1)])
    done = subprocess.run(
        ["bash", "-uc", script, "end", str(tmp_path / "run"), str(logs)],
        capture_output=True, text=True, env=environment(NCCL_LOGS="1"),
    )  # fmt: skip
    assert "ended 0" in done.stdout, done.stderr
    start = tmp_path / "run" / "evidence" / "start_1"
    assert "P2P/CUMEM/read: 4 connections" in (start / "nccl_summary.txt").read_text()
    assert json.loads((start / "nccl_summary.json").read_text())["num_processes"] == 2
