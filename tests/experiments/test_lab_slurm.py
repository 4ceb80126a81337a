"""Whole jobs in a CPU-only Slurm cluster of two virtual nodes, brought up by scripts/lab/slurm_up.sh."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.programs import REPOSITORY, SEQUENCE, data_flags

from testbed.metrics.file import read_metrics

LAB = REPOSITORY / "scripts" / "lab"
SLURM = REPOSITORY / "scripts" / "slurm"
MISSING = [name for name in ("slurmctld", "slurmd", "munged", "sbatch", "srun") if shutil.which(name) is None]
WORK = f"--model nano --vocab_size 300 --seq_length {SEQUENCE} --precision fp32 --max_val_steps 1 --sample_tokens 0"
SMALL_NODES = "--cpus-per-task=2"  # the files ask for four per GPU, and a node of the lab has two
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")

pytestmark = [
    pytest.mark.launches,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons start as root only"),
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: bash scripts/lab/install_slurm.sh"),
]


@dataclass
class Cluster:
    """A lab, and where its jobs leave their output."""

    directory: Path
    output: Path
    data: str
    variables: dict[str, str]

    def call(self, *command: str, cwd: Path = REPOSITORY, **variables: str) -> str:
        environment = self.variables | variables
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=60)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def submit(self, script: str, variables: str, more: str, *flags: str, cwd: Path = REPOSITORY) -> str:
        """The number of the job, submitted as a user does: with variables ("NAME=VALUE ...") before sbatch.

        Args:
            more: flags of src/gpt2.py, after those that make a run small.
        """
        told = dict(word.split("=", 1) for word in variables.split()) | {
            "GPT2_EXTRA_ARGS": f"{WORK} {self.data} {more}"
        }
        path = script if cwd == SLURM else f"scripts/slurm/{script}"
        return self.call("sbatch", "--parsable", f"--output={self.output}/%j.out", *flags, path, cwd=cwd, **told)

    def said(self, job: str) -> str:
        path = self.output / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def facts(self, job: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", self.call("scontrol", "-o", "show", "job", job)))

    def wait_for(self, job: str, words: str, timeout_s: float = 90, is_over: bool = False) -> None:
        """Until the job has said so; unless `is_over` it must still be there."""
        deadline_s = time.monotonic() + timeout_s
        while not re.search(words, self.said(job)):
            assert time.monotonic() < deadline_s, f"job {job} never said {words}:\n{self.said(job)}"
            assert is_over or self.facts(job)["JobState"] not in ENDS, self.said(job)
            time.sleep(0.2)

    def end_of(self, job: str, timeout_s: float = 120) -> dict[str, str]:
        """What Slurm says of the job once it has ended for good."""
        deadline_s = time.monotonic() + timeout_s
        while (facts := self.facts(job))["JobState"] not in ENDS:
            assert time.monotonic() < deadline_s, f"job {job} is still {facts['JobState']}:\n{self.said(job)}"
            time.sleep(0.2)
        return facts


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, token_files) -> Iterator[Cluster]:
    directory, output = tmp_path_factory.mktemp("lab") / "cluster", tmp_path_factory.mktemp("jobs")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "OMP_"))}
    up = ["bash", str(LAB / "slurm_up.sh"), "--nodes", "2", "--cpus", "2", "--dir", str(directory)]
    subprocess.run(up, check=True, env={**kept, "LAB_MINUTES": "30"}, timeout=60)
    # the first is what docs/clusters.md tells the users of CPU-only clusters to set once
    settings = {"SBATCH_GPUS_PER_NODE": "0", "SLURM_CONF": f"{directory}/etc/slurm.conf"}
    settings |= {"PYTHON": sys.executable}
    try:
        yield Cluster(directory, output, " ".join(data_flags(token_files)), kept | settings)
    finally:
        down = ["bash", str(LAB / "slurm_down.sh"), "--dir", str(directory)]
        subprocess.run(down, check=True, timeout=60)
        assert not directory.exists() and leftovers(directory) == []


def leftovers(directory: Path) -> list[list[str]]:
    """Processes that have to do with the lab: in their words, their environment or their folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            seen = [*process.cmdline(), *process.environ().values(), process.cwd()]
            found += [process.cmdline()] if any(str(directory) in word for word in seen) else []
    return found


@pytest.fixture(scope="module")
def plain(cluster, tmp_path_factory) -> tuple[Path, str]:
    """A job of two nodes of two ranks: the run's folder, and the job's number."""
    run = tmp_path_factory.mktemp("plain") / "run"
    job = cluster.submit("run_2node_8gpu.sbatch", f"RUN_TYPE=ddp RUN_DIR={run}", "--max_train_steps 8")
    assert cluster.end_of(job)["JobState"] == "COMPLETED", cluster.said(job)
    return run, job


def test_two_nodes_of_two_ranks(cluster, plain):
    run, job = plain
    assert "2 x 2 ranks by torchrun" in cluster.said(job) and f"complete: {run}" in cluster.said(job)
    metrics = read_metrics(run / "training_metrics.json")
    hardware = metrics["hardware"]
    assert (metrics["status"], hardware["world_size"], hardware["num_nodes"]) == ("complete", 4, 2)
    assert (run / "RUN_COMPLETE.txt").exists() and (run / "model.safetensors").exists()
    slurm = json.loads((run / "launcher_metadata.json").read_text())["slurm"]
    expected = {"job_id": job, "job_name": "run_2node_8gpu", "cluster": "lab", "partition": "main", "nnodes": "2"}
    assert {**expected, "nodelist": "node[1-2]", "ntasks": "2"}.items() <= slurm.items()
    assert metrics["scheduler"] == {"type": "slurm", **slurm}
    assert not metrics["instrumented"] and metrics["git_commit"] != "unknown"


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run / "training_metrics.json")["steps"]]


def test_a_task_per_rank_trains_the_same(cluster, plain, tmp_path):
    """Submitted with --export of a few names; srun by itself would give the ranks those alone."""
    few = "--export=RUN_TYPE,LAUNCHER,RUN_DIR,GPT2_EXTRA_ARGS,PYTHON,PATH,HOME"
    variables = f"RUN_TYPE=ddp LAUNCHER=srun RUN_DIR={tmp_path}/run"
    job = cluster.submit("run_2node_8gpu.sbatch", variables, "--max_train_steps 8", few)
    assert cluster.end_of(job)["JobState"] == "COMPLETED", cluster.said(job)
    metrics = read_metrics(tmp_path / "run" / "training_metrics.json")
    assert metrics["hardware"]["world_size"] == 4 and metrics["git_commit"] != "unknown"
    assert losses(tmp_path / "run") == losses(plain[0]) and len(losses(plain[0])) == 8


LONG = "--max_train_steps 150 --epochs 1000 --global_batch_size 8"  # long enough to be interrupted
UNDER_WAY = r"step +\d{2,}/"


def test_a_cancelled_job_has_saved_and_a_new_one_goes_on(cluster, tmp_path):
    run = tmp_path / "run"
    job = cluster.submit("train_b64_g2.slurm", f"RUN_DIR={run}", LONG, SMALL_NODES)
    cluster.wait_for(job, UNDER_WAY)
    cluster.call("scancel", job)
    cluster.wait_for(job, "ended from outside; go on with: RUN_DIR=", is_over=True)
    step = int(re.search(r"step=(\d+)", (run / "RUN_PREEMPTED.txt").read_text()).group(1))
    assert (run / "checkpoints" / f"step_{step:06d}").is_dir()
    again = cluster.submit("train_b64_g2.slurm", f"RUN_DIR={run}", LONG, SMALL_NODES)
    assert cluster.end_of(again)["JobState"] == "COMPLETED", cluster.said(again)
    check_that_nothing_was_lost(run, starts=2)


def test_a_signal_before_the_end_requeues_the_job(cluster, tmp_path):
    """Sent by hand, what Slurm sends before the time limit: for --signal=USR1@120 to the ranks, then for
    --signal=B:USR1@120 to the batch script alone."""
    run = tmp_path / "run"
    variables = f"RUN_TYPE=fsdp RANKS_PER_NODE=1 RUN_DIR={run}"
    job = cluster.submit("run_2node_8gpu.sbatch", variables, LONG)
    cluster.wait_for(job, UNDER_WAY)
    cluster.call("scancel", "--signal=USR1", job)
    cluster.wait_for(job, rf"start 2,[\s\S]*{UNDER_WAY}")
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    facts = cluster.end_of(job, timeout_s=180)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "2"), cluster.said(job)
    assert cluster.said(job).count("requeue: the next start resumes from there") == 2
    check_that_nothing_was_lost(run, starts=3)
    assert json.loads((run / "launcher_metadata.json").read_text())["slurm"]["restart_count"] == "2"


def check_that_nothing_was_lost(run: Path, starts: int) -> None:
    """Check a run of LONG in `starts` starts, each but the last of which was told to end."""
    metrics = read_metrics(run / "training_metrics.json")
    segments = metrics["segments"]
    assert [segment["ended"] for segment in segments] == ["preempted"] * (starts - 1) + ["complete"]
    for before, after in itertools.pairwise(segments):
        assert 0 < before["last_step"] == after["first_step"] - 1 and after["lost_steps"] == 0
    assert [row["step"] for row in metrics["steps"]] == list(range(1, 151))


def test_the_commands_of_the_earlier_projects(cluster, tmp_path):
    """One submitted from where it lies, and one with all variables. Others are submitted above."""
    off = "NSYS=0 NCCL_LOGS=0 TORCHRUN_LOGS=0 DIST_DEBUG=0"
    told = f"RUN_DIR={tmp_path}/004 {off} GRAD_ACCUM_STEPS=2 MICRO_BATCH_SIZE_PER_GPU=2 RANKS_PER_NODE=1"
    short = "--max_train_steps 1"
    jobs = {
        "003": cluster.submit("train_gpt2_small_ddp.sbatch", f"RUN_DIR={tmp_path}/003", short, SMALL_NODES, cwd=SLURM),
        "004": cluster.submit("run_2node_8gpu.sbatch", told, "--profile_mode --max_train_steps 2 --max_val_steps 1"),
    }
    found = {}
    for name, job in jobs.items():
        assert cluster.end_of(job, timeout_s=180)["JobState"] == "COMPLETED", cluster.said(job)
        config = read_metrics(tmp_path / name / "training_metrics.json")["training_config"]
        found[name] = (config["run_type"], config["global_batch_size"], config["data_world_size"])
    assert found == {"003": ("ddp", 32, 2), "004": ("optimized", 8, 2)}


def test_a_job_with_evidence_is_marked_and_enters_no_comparison(cluster, plain, tmp_path):
    toggles = ("NCCL_LOGS", "TORCHRUN_LOGS", "DIST_DEBUG")
    told = " ".join(f"{toggle}=1" for toggle in toggles)
    variables = f"RUN_TYPE=ddp RUN_DIR={tmp_path}/seen {told}"
    job = cluster.submit("run_2node_8gpu.sbatch", variables, "--max_train_steps 8")
    assert cluster.end_of(job, timeout_s=180)["JobState"] == "COMPLETED", cluster.said(job)
    seen = read_metrics(tmp_path / "seen" / "training_metrics.json")
    assert (seen["status"], seen["hardware"]["world_size"], seen["hardware"]["num_nodes"]) == ("complete", 4, 2)
    assert seen["instrumented"] and {f"{toggle}=1" for toggle in toggles} <= set(seen["instruments"])
    assert not (plain[0] / "evidence").exists() and losses(tmp_path / "seen") == losses(plain[0])
    start = tmp_path / "seen" / "evidence" / "start_1"
    ranks = [re.match(r"collectives_rank(\d)_", path.name).group(1) for path in start.glob("collectives_rank*.jsonl")]
    assert sorted(ranks) == ["0", "1", "2", "3"]
    assert {path.parent.name for path in (start / "torchrun").rglob("stdout.log")} == {"0", "1"}
    assert len(list((start / "torchrun").rglob("stdout.log"))) == 4, "of two ranks on each of two nodes"
    topology = (start / "topo.txt").read_text()
    assert "== node1: nvidia-smi" in topology and "== node2: nvidia-smi" in topology
    compare = [sys.executable, str(REPOSITORY / "scripts" / "compare_runs.py"), str(tmp_path / "seen")]
    done = subprocess.run([*compare, "--against", str(plain[0])], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "has no run that counts: it is instrumented (" in done.stderr, done.stderr


def test_nodes_that_are_not_ready_are_named(cluster, tmp_path):
    job = cluster.submit("run_2node_8gpu.sbatch", f"RUN_DIR={tmp_path}/run", "--train_data_path nowhere.bin")
    assert cluster.end_of(job)["JobState"] == "FAILED"
    for node in ("node1", "node2"):
        assert f"{node}: --train_data_path {REPOSITORY}/nowhere.bin is not a readable file" in cluster.said(job)
    assert "nothing was started" in cluster.said(job) and list((tmp_path / "run").iterdir()) == []


def test_a_node_that_dies_ends_the_job_with_the_reason(cluster, tmp_path):
    """Last of those that need both nodes."""
    run = tmp_path / "run"
    variables = f"RUN_TYPE=ddp RANKS_PER_NODE=1 RUN_DIR={run}"
    job = cluster.submit("run_2node_8gpu.sbatch", variables, f"{LONG} --save_every 5", "--no-requeue")
    cluster.wait_for(job, UNDER_WAY)
    killed_s = time.monotonic()
    cluster.call("bash", str(LAB / "slurm_down.sh"), "--dir", str(cluster.directory), "--node", "node2")
    facts = cluster.end_of(job)
    assert facts["JobState"] in ("FAILED", "NODE_FAIL") and time.monotonic() - killed_s < 120, cluster.said(job)
    mark = (run / "RUN_FAILED.txt").read_text()
    assert re.match(r"\[Rank \d\] RUN_FAILED reason=", mark), mark
    assert re.search("Connection (closed|reset) by peer", mark), mark
    assert read_metrics(run / "training_metrics.json")["status"] == "failed"
    assert list((run / "checkpoints").glob("step_*")), "what was saved is there to go on from"


def test_the_lab_touches_nothing_that_it_did_not_start(cluster, tmp_path):
    """A bystander that talks to the lab, as a shell of the user does. Last, since a node of the lab ends."""
    bystander = subprocess.Popen(["sleep", "60"], env={**cluster.variables, "SLURMD_NODENAME": "node1"})
    down = ["bash", str(LAB / "slurm_down.sh"), "--dir"]
    try:
        refused = subprocess.run([*down, str(tmp_path)], capture_output=True, text=True)
        assert refused.returncode == 2 and "is not a lab of slurm_up.sh: nothing was touched" in refused.stderr
        forged = tmp_path / "forged"  # the number is right, the process is another
        forged.mkdir()
        shutil.copy(cluster.directory / "lab", forged)
        (forged / "processes").write_text(f"{bystander.pid} slurmctld\n")
        assert subprocess.run([*down, str(forged)]).returncode == 0 and not forged.exists()
        again = ["bash", str(LAB / "slurm_up.sh"), "--dir", str(cluster.directory)]
        refused = subprocess.run(again, capture_output=True, text=True)
        assert refused.returncode == 2 and "is not empty" in refused.stderr
        started = cluster.output / "started"
        job = cluster.call(
            "sbatch", "--parsable", "--nodelist=node1", f"--output={cluster.output}/%j.out",
            f"--wrap=setsid sleep 61 & touch {started}; bash {down[1]} --dir {cluster.directory}; sleep 62",
        )  # fmt: skip
        cluster.wait_for(job, "call it where slurm_up.sh was called, not in a job of the lab")
        assert started.exists() and sleepers() == ["61", "62"]
        cluster.call(*down, str(cluster.directory), "--node", "node1")
        assert sleepers() == [] and bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def sleepers() -> list[str]:
    """The seconds of the processes of the last job that sleep."""
    words = [process.info["cmdline"] or [""] for process in psutil.process_iter(["cmdline"])]
    return sorted(each[1] for each in words if each in (["sleep", "61"], ["sleep", "62"]))
