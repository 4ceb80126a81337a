"""scripts/slurm/: what each batch script would run and refuses, how a job ends and is requeued. Needs no Slurm.

tests/experiments/test_lab_slurm.py runs the same scripts as jobs.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.programs import REPOSITORY

from testbed.config.environment_variables import slurm_facts
from testbed.config.flags import parse_command_line

pytestmark = pytest.mark.launches

SCRIPTS = REPOSITORY / "scripts" / "slurm"


CALLERS = sorted(path.name for path in SCRIPTS.iterdir() if path.suffix in (".slurm", ".sbatch"))


IN_A_JOB = {
    "SLURM_JOB_ID": "123456", "SLURM_JOB_NAME": "my job/1", "SLURM_JOB_NUM_NODES": "3", "SLURM_CPUS_ON_NODE": "8",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2),6", "SLURM_JOB_NODELIST": "n[1-3]", "MASTER_ADDR": "n1",
}  # fmt: skip


RULED_OUT = re.compile(
    "SLURM|SBATCH_|RUN_|NSYS|EVIDENCE_|NCCL_|MASTER_|OMP_NUM|GPT2_|GRAD_|MICRO_|RANKS_|LAUNCHER|PYTHON$|SITE_"
)


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not RULED_OUT.match(name)}
    kept = {name: value for name, value in kept.items() if name not in ("GIT_COMMIT", "DIST_DEBUG", "TORCHRUN_LOGS")}
    return {**kept, "PYTHON": sys.executable, **changes}


def ask(script: Path | str, *flags: str, **variables: str) -> subprocess.CompletedProcess:
    command = ["bash", str(SCRIPTS / script), "--dry_run", *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environment(**variables), timeout=30)


class Plan:
    """What a dry run printed, read as a shell would."""

    def __init__(self, script: Path | str, *flags: str, **variables: str):
        done = ask(script, *flags, **variables)
        assert done.returncode == 0, done.stderr
        self.said = done.stdout
        lines = [shlex.split(line) for line in done.stdout.splitlines() if not line.startswith("#")]
        assert {line[0] for line in lines} <= {"cd", "export", "mkdir", "srun", "env"}, "all else is a comment"
        self.check, self.step = [line for line in lines if line[0] == "srun"]
        self.finish = [line for line in lines if line[0] == "env"]
        self.made = next(line for line in lines if line[0] == "mkdir")[2:]
        self.exported = dict(word.split("=", 1) for line in lines if line[0] == "export" for word in line[1:])
        self.flags = self.step[self.step.index("src/gpt2.py") + 1 :]
        self.values = parse_command_line(self.flags).values

    def of(self, name: str) -> str:
        """The value of a flag of srun or torchrun."""
        return next(word.split("=", 1)[1] for word in self.step if word.startswith(f"--{name}="))


def start(variables: dict[str, str]) -> subprocess.CompletedProcess:
    command = ["bash", str(SCRIPTS / "launch.sh"), str(SCRIPTS / "train_b64_g2.slurm")]
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=30)


@pytest.fixture
def in_a_job_of_our_own(tmp_path) -> dict[str, str]:
    """A job whose srun and scontrol are stand-ins: they note how they were called."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("srun", "scontrol"):
        (commands / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{tmp_path}/called\nexit ${{STAND_IN_CODE:-0}}\n')
        (commands / name).chmod(0o755)
    one_node = {**IN_A_JOB, "SLURM_JOB_NUM_NODES": "1", "RUN_DIR": str(tmp_path / "run")}
    return environment(**one_node, PATH=f"{commands}:{os.environ['PATH']}")


WORK = {f"train_b{batch}_g{gpus}.slurm": ("baseline" if gpus == 1 else "ddp", gpus, {"global_batch_size": batch})
        for batch in (64, 128) for gpus in (1, 2, 4)}  # fmt: skip
WORK |= {
    "train_gpt2_small_single.sbatch": ("baseline", 1, {}),
    "train_gpt2_small_dp.sbatch": ("dp", 1, {}),
    "train_gpt2_small_ddp.sbatch": ("ddp", 4, {}),
    "train_gpt2_small_deepspeed_stage2.sbatch": ("optimized", 4, {"zero_stage": 2}),
    "train_gpt2_small_deepspeed_stage3.sbatch": ("optimized", 4, {"zero_stage": 3}),
    "run_2node_8gpu.sbatch": ("optimized", 4, {}),
}


def test_the_callers_are_those_of_the_earlier_projects():
    assert set(CALLERS) == set(WORK)


@pytest.mark.parametrize("caller", CALLERS)
def test_every_caller_does_the_work_that_its_name_says(caller):
    run_type, ranks, values = WORK[caller]
    plan = Plan(caller)
    assert values.items() <= plan.values.items()
    assert (plan.values["run_type"], plan.of("nproc-per-node")) == (run_type, str(ranks))
    assert plan.values["resume"] == "auto"
    assert plan.values["checkpoint_path"] == str(REPOSITORY / "checkpoint" / "slurm" / f"{Path(caller).stem}-1")
    assert plan.check[plan.check.index("--") + 1 :] == plan.flags, "the nodes are checked for what then runs"
    assert f"#SBATCH --job-name={Path(caller).stem} " in (SCRIPTS / caller).read_text()


def test_two_nodes_of_four_gpus():
    plan = Plan("run_2node_8gpu.sbatch")
    assert [plan.of(name) for name in ("nodes", "nnodes", "nproc-per-node")] == ["2", "2", "4"]
    assert plan.of("rdzv-endpoint") == "node1:20001" and plan.of("rdzv-backend") == "c10d"
    assert "SIGUSR1" in plan.of("signals-to-handle") and "--export=ALL" in plan.step and "--export=ALL" in plan.check
    assert "outside of a job" in plan.said


def test_the_contract_of_variables():
    """As the earlier project's README gives them on the command line."""
    variables = (
        "RUN_DIR='/scratch/a b/run' NSYS=0 NCCL_LOGS=0 TORCHRUN_LOGS=0 DIST_DEBUG=0 GRAD_ACCUM_STEPS=2 "
        "MICRO_BATCH_SIZE_PER_GPU=3 MASTER_PORT=29511 GIT_COMMIT=abc "
        "GPT2_EXTRA_ARGS='--profile_mode --max_train_steps 300 --max_val_steps 50'"
    )
    plan = Plan("run_2node_8gpu.sbatch", **dict(word.split("=", 1) for word in shlex.split(variables)))
    asked = {"checkpoint_path": "/scratch/a b/run", "grad_accum_steps": 2, "micro_batch_size_per_gpu": 3}
    asked |= {"profile_mode": True, "max_train_steps": 300, "max_val_steps": 50, "run_type": "optimized"}
    assert asked.items() <= plan.values.items()
    assert plan.exported["GIT_COMMIT"] == "abc" and plan.of("rdzv-endpoint") == "node1:29511"


TOGGLES = ("NSYS", "NCCL_LOGS", "TORCHRUN_LOGS", "DIST_DEBUG")


# of each toggle: a flag of torchrun, one of the program, a variable, a folder of its own
GIVES = {
    "NSYS": (None, "--profile_mode", None, "profiles"),
    "NCCL_LOGS": (None, None, "NCCL_DEBUG", None),
    "TORCHRUN_LOGS": ("--tee", None, None, "torchrun"),
    "DIST_DEBUG": (None, "--log_collectives", "TORCH_DISTRIBUTED_DEBUG", None),
}


@pytest.mark.parametrize(
    ("launcher", "on"),
    [
        *(("torchrun", on) for on in ((), *((toggle,) for toggle in TOGGLES), TOGGLES)),
        *(("srun", on) for on in ((), tuple(toggle for toggle in TOGGLES if toggle != "TORCHRUN_LOGS"))),
    ],
)
def test_launcher_and_evidence_fit_together(tmp_path, launcher, on):
    """A dry run prints all that a job would export, make and call, and writes nothing."""
    told = {"LAUNCHER": launcher, "RUN_DIR": str(tmp_path / "a run"), "GIT_COMMIT": "abc"}
    plan = Plan("run_2node_8gpu.sbatch", **told, NSYS_BIN="true", **{name: str(int(name in on)) for name in TOGGLES})
    assert list(tmp_path.iterdir()) == []
    start = str(tmp_path / "a run" / "evidence" / "start_1")
    for toggle, (of_torchrun, of_program, variable, folder) in GIVES.items():
        assert of_torchrun is None or (of_torchrun in plan.step) == (toggle in on)
        assert of_program is None or (of_program in plan.flags) == (toggle in on)
        assert variable is None or (variable in plan.exported) == (toggle in on)
        assert folder is None or (f"{start}/{folder}" in plan.made) == (toggle in on)
    assert (str(SCRIPTS / "rank.sh") in plan.step) == ("NSYS" in on or launcher == "srun")
    if "NSYS" in on:  # the prefix stands before the first rank of each node
        place = plan.step.index(f"{SCRIPTS}/rank.sh")
        assert plan.step[place + 1 : place + 5] == ["bash", f"{SCRIPTS}/evidence.sh", "rank", "--"]
        assert ("--no-python" in plan.step[:place]) == (launcher == "torchrun")
    if not on:
        assert (
            plan.said == Plan("run_2node_8gpu.sbatch", **told).said
            and "EVIDENCE_DIR" not in plan.exported
            and plan.finish == []
        )
        return
    assert plan.exported["EVIDENCE_DIR"] == start and sorted(plan.exported["EVIDENCE_TOGGLES"].split()) == sorted(on)
    assert plan.made[1] == start and plan.finish[0][-2:] == [start, plan.exported["EVIDENCE_TOGGLES"]]


def test_words_are_split_as_a_shell_does_and_nothing_is_carried_out(tmp_path):
    victim = tmp_path / "victim"
    text = f"""--sample_prompt 'two words; $(touch {victim})' --init_from "a'b" --seed 7"""
    plan = Plan("train_b64_g2.slurm", "--dropout", "0.5", GPT2_EXTRA_ARGS=text)
    assert plan.values["sample_prompt"] == f"two words; $(touch {victim})" and plan.values["init_from"] == "a'b"
    assert plan.values["seed"] == 7 and plan.values["dropout"] == 0.5 and not victim.exists()


def test_the_allocation_decides_nodes_ranks_and_names():
    """Of unequal nodes what all of them have; without GPUs a rank per CPU; a port of the job's own."""
    plan = Plan("run_2node_8gpu.sbatch", **IN_A_JOB)
    assert [plan.of(name) for name in ("nnodes", "nproc-per-node", "cpus-per-task")] == ["3", "6", "6"]
    assert plan.exported["OMP_NUM_THREADS"] == "1" and plan.of("rdzv-endpoint") == f"n1:{20000 + 123456 % 10000}"
    assert plan.values["checkpoint_path"].endswith("/checkpoint/slurm/my_job_1-123456")
    assert "outside" not in plan.said
    with_gpus = Plan("run_2node_8gpu.sbatch", **IN_A_JOB, SLURM_GPUS_ON_NODE="2")
    assert with_gpus.of("nproc-per-node") == "2" and with_gpus.exported["OMP_NUM_THREADS"] == "3"
    declined = Plan("run_2node_8gpu.sbatch", **IN_A_JOB, SLURM_GPUS_ON_NODE="2", SLURM_GPUS_PER_NODE="0")
    assert declined.of("nproc-per-node") == "6", "--exclusive hands out GPUs that --gpus-per-node=0 declined"


def test_gpus_may_have_a_type():
    for asked, gpus in (("a100:4", "4"), ("tesla:2,kepler:1", "3"), ("gpu:h100=8", "8")):
        assert Plan("run_2node_8gpu.sbatch", SBATCH_GPUS_PER_NODE=asked).of("nproc-per-node") == gpus


def test_a_task_per_rank():
    plan = Plan("run_2node_8gpu.sbatch", **IN_A_JOB, LAUNCHER="srun", RANKS_PER_NODE="2")
    assert [plan.of(name) for name in ("ntasks", "ntasks-per-node", "cpus-per-task")] == ["6", "2", "3"]
    assert "torch.distributed.run" not in plan.step


def test_a_requeued_job_goes_on_and_replaces_nothing():
    first = Plan("train_b64_g2.slurm", "--overwrite", **{**IN_A_JOB, "SLURM_JOB_NUM_NODES": "1"})
    assert first.values["overwrite"] and first.values["resume"] is None
    again = Plan(
        "train_b64_g2.slurm", "--overwrite", **{**IN_A_JOB, "SLURM_JOB_NUM_NODES": "1", "SLURM_RESTART_COUNT": "1"}
    )
    assert not again.values["overwrite"] and again.values["resume"] == "auto"
    assert again.values["checkpoint_path"] == first.values["checkpoint_path"] and again.of("rdzv-id") == "123456.1"


@pytest.mark.parametrize(("version", "waits"), [("2.12.0+cu130", "100"), ("2.11.0", None)])
def test_torchrun_waits_longer_than_a_rank_may_take_where_it_has_the_flag(tmp_path, version, waits):
    (tmp_path / "torch-0.dist-info").mkdir()
    (tmp_path / "torch-0.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
    done = ask("run_2node_8gpu.sbatch", "--grace_seconds=90", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0 and "torch.distributed.run" in done.stdout
    assert (f"--shutdown-timeout={waits} " in done.stdout) == (waits is not None)
    assert ("--grace_seconds 90 has no effect above 20" in done.stderr) == (waits is None)


def test_ranks_that_start_again_do_not_meet_the_addresses_of_the_dead():
    plain, again = Plan("run_2node_8gpu.sbatch"), Plan("run_2node_8gpu.sbatch", MAX_RESTARTS="2")
    assert (plain.of("max-restarts"), again.of("max-restarts")) == ("0", "2")
    assert (
        again.exported["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1" and len(again.exported) == len(plain.exported) + 1
    )


@pytest.mark.parametrize(
    ("script", "variables", "words"),
    [
        ("train_b64_g2.slurm", {"NSYS": "yes"}, "NSYS=yes is neither 0 nor 1"),
        ("train_b64_g2.slurm", {"RANKS_PER_NODE": "0"}, "RANKS_PER_NODE=0: give a number from 1 on"),
        ("train_b64_g2.slurm", {"MAX_RESTARTS": "-1"}, "MAX_RESTARTS=-1: give a number from 0 on"),
        ("train_b64_g2.slurm", {"LAUNCHER": "mpirun"}, r"LAUNCHER=mpirun: give torchrun \(the default\) or srun"),
        ("train_b64_g2.slurm", {"GPT2_EXTRA_ARGS": "--sample_prompt 'open"}, "a quote is not closed"),
        ("train_b64_g2.slurm", {"GPT2_EXTRA_ARGS": "--checkpoint-path=a-b"}, "--checkpoint_path a-b: give RUN_DIR=a-b"),
        ("train_b64_g2.slurm", {"SBATCH_GPUS_PER_NODE": "a100"}, "SBATCH_GPUS_PER_NODE=a100: give a number of GPUs"),
        (
            "run_2node_8gpu.sbatch",
            {"LAUNCHER": "srun", "TORCHRUN_LOGS": "1"},
            "TORCHRUN_LOGS=1 is collected by torchrun, and LAUNCHER=srun",
        ),
        ("run_2node_8gpu.sbatch", {"RUN_TYPE": "dp"}, "RUN_TYPE=dp is one process, not 2 x 1: ask for --nodes=1"),
        ("train_b64_g2.slurm", {"SITE_ENV": "nowhere.env"}, "SITE_ENV=nowhere.env is not a file; .*site.env.example"),
        ("train_b64_g2.slurm", {"PYTHON": "no-such-python"}, "there is no no-such-python on .*: set PYTHON"),
    ],
)
def test_what_is_asked_wrongly_is_refused_with_the_way_out(script, variables, words):
    done = ask(script, **variables)
    assert done.returncode == 2 and re.search(words, done.stderr), done.stderr + done.stdout
    assert "srun" not in done.stdout.replace("by srun", "")


def test_no_command_in_a_number_of_slurm_is_carried_out(tmp_path):
    """bash evaluates what it computes with: an index of an array may hold a command."""
    made = tmp_path / "made"
    for name in ("SLURM_JOB_ID", "SLURM_JOB_CPUS_PER_NODE", "SLURM_RESTART_COUNT", "SLURM_GPUS_ON_NODE"):
        done = ask("train_b64_g2.slurm", **{**IN_A_JOB, name: f"a[`touch {made}`]"})
        assert not made.exists() and done.returncode == 2
        assert f"{name}=a[`touch" in done.stderr and "is not a number as Slurm sets it" in done.stderr


def test_outside_of_a_job_nothing_runs_but_a_dry_run():
    done = subprocess.run(
        ["bash", str(SCRIPTS / "train_b64_g2.slurm")], capture_output=True, text=True, env=environment(), timeout=30
    )
    assert done.returncode == 2 and "there is no Slurm job here: sbatch " in done.stderr


def test_a_folder_that_cannot_be_written_is_said_before_anything_starts(in_a_job_of_our_own, tmp_path):
    (tmp_path / "run").write_text("a file in its place")
    done = start(in_a_job_of_our_own)
    assert done.returncode == 2 and re.search("RUN_DIR=.*/run cannot be written .*scratch", done.stderr)
    assert not (tmp_path / "called").exists()


def test_nodes_that_are_not_ready_start_no_rank(in_a_job_of_our_own, tmp_path):
    done = start({**in_a_job_of_our_own, "STAND_IN_CODE": "2"})
    assert done.returncode == 2 and "the nodes are not ready (the check ended with 2)" in done.stderr
    assert (tmp_path / "called").read_text().count("srun") == 1


PREEMPTED = "[Rank 0] RUN_PREEMPTED reason=asked to make room"


def in_the_step(variables: dict[str, str], tmp_path: Path, lines: str) -> subprocess.CompletedProcess:
    """The run of a job whose step does as the lines of shell say."""
    step = f'case "$*" in *check_node*) exit 0;; esac\ncd "$RUN_DIR"\n{lines}\n'
    (tmp_path / "bin" / "srun").write_text(f"#!/bin/sh\n{step}")
    return start(variables)


@pytest.mark.parametrize("code", [0, 1])
def test_marks_decide_and_not_the_exit_code_of_srun(in_a_job_of_our_own, tmp_path, code):
    done = in_the_step(in_a_job_of_our_own, tmp_path, f"echo done >RUN_COMPLETE.txt; exit {code}")
    assert done.returncode == 0 and "complete: " in done.stdout
    (tmp_path / "run" / "RUN_COMPLETE.txt").unlink()
    done = in_the_step(in_a_job_of_our_own, tmp_path, f"exit {code}")
    assert done.returncode == 1 and f"left no new mark in {tmp_path}/run (the step ended with {code})" in done.stdout
    done = in_the_step(in_a_job_of_our_own, tmp_path, f"echo rank 1 is dead >RUN_FAILED.txt; exit {code}")
    assert done.returncode == 1 and "rank 1 is dead" in done.stdout


def test_an_old_mark_makes_no_success_of_a_start_that_was_refused(in_a_job_of_our_own, tmp_path):
    """The program refuses a folder that holds a run, and leaves it as it is."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "RUN_COMPLETE.txt").write_text("done\n")
    done = in_the_step(in_a_job_of_our_own, tmp_path, "exit 2")
    assert done.returncode == 1 and "left no new mark" in done.stdout and "complete: " not in done.stdout
    assert in_the_step(in_a_job_of_our_own, tmp_path, "exit 0").returncode == 0
    done = in_the_step(in_a_job_of_our_own, tmp_path, "rm RUN_COMPLETE.txt; echo done >RUN_COMPLETE.txt; exit 2")
    assert done.returncode == 0, "a mark of this start counts, though it says the same"


def test_reading_the_evidence_takes_no_time_from_the_requeue_and_little_from_the_rest(in_a_job_of_our_own, tmp_path):
    nsys = tmp_path / "bin" / "nsys"
    nsys.write_text("#!/bin/sh\nexec sleep 60\n")
    nsys.chmod(0o755)
    variables = {**in_a_job_of_our_own, "NSYS": "1", "EVIDENCE_SECONDS": "1"}
    report = 'touch "$EVIDENCE_DIR/profiles/one.nsys-rep"'
    how = r"evidence is not read; do it with: (env PYTHON=\S+ bash \S+/evidence.sh finish \S+/start_\d NSYS)"
    preempted = {**variables, "STAND_IN_CODE": "1"}
    done = in_the_step(preempted, tmp_path, f"{report}; echo '{PREEMPTED}' >RUN_PREEMPTED.txt; exit 1")
    assert done.returncode == 143 and (tmp_path / "called").read_text() == "scontrol requeue 123456\n"
    later = re.search(how, done.stdout).group(1)
    done = in_the_step(variables, tmp_path, f"{report}; rm RUN_PREEMPTED.txt; echo rank 1 is dead >RUN_FAILED.txt")
    assert done.returncode == 1 and "rank 1 is dead" in done.stdout and re.search(how, done.stdout)
    assert "was ended after EVIDENCE_SECONDS=1" in done.stdout
    nsys.write_text("#!/bin/sh\necho stats of $2\n")
    subprocess.run(["bash", "-c", later], check=True, env=environment(PATH=variables["PATH"]), timeout=60)
    stats = tmp_path / "run" / "evidence" / "start_1" / "profiles" / "nsys_stats_one.txt"
    assert stats.read_text() == f"stats of {stats.parent}/one.nsys-rep\n"


def test_a_preempted_run_is_requeued_an_old_mark_is_not(in_a_job_of_our_own, tmp_path):
    quick = {
        **in_a_job_of_our_own,
        "SLURM_RESTART_COUNT": "4",
        "STAND_IN_CODE": "1",
    }  # scontrol refuses: no wait for Slurm
    done = in_the_step(quick, tmp_path, f"echo '{PREEMPTED}' >RUN_PREEMPTED.txt; exit 1")
    assert (tmp_path / "called").read_text() == "scontrol requeue 123456\n"
    assert done.returncode == 143 and f"go on with: RUN_DIR={tmp_path}/run sbatch" in done.stdout
    (tmp_path / "called").unlink()
    done = in_the_step(quick, tmp_path, "exit 2")
    assert done.returncode == 1 and not (tmp_path / "called").exists(), "it would be started again for ever"
    done = in_the_step({**quick, "MAX_REQUEUES": "4"}, tmp_path, f"echo '{PREEMPTED} again' >RUN_PREEMPTED.txt")
    assert done.returncode == 143 and "MAX_REQUEUES is 4" in done.stdout and not (tmp_path / "called").exists()


ARRAY_TASK = {"SLURM_ARRAY_JOB_ID": "123456", "SLURM_ARRAY_TASK_ID": "7"}


def test_a_task_of_an_array_requeues_and_signals_itself_alone(in_a_job_of_our_own, tmp_path):
    """The number of one task of an array is the number of the whole array too."""
    variables = {**in_a_job_of_our_own, **ARRAY_TASK, "STAND_IN_CODE": "1"}
    (tmp_path / "bin" / "scancel").symlink_to(tmp_path / "bin" / "scontrol")
    (tmp_path / "bin" / "scontrol").write_text(
        (tmp_path / "bin" / "scontrol").read_text().replace("echo scontrol", "echo $0")
    )
    ending = f"kill -USR1 $PPID; sleep 0.5; echo '{PREEMPTED}' >RUN_PREEMPTED.txt; exit 1"
    assert in_the_step(variables, tmp_path, ending).returncode == 143
    called = [line.rpartition("/")[2] for line in (tmp_path / "called").read_text().splitlines()]
    assert called == ["scancel --signal=USR1 123456_7", "scontrol requeue 123456_7"]


@pytest.mark.parametrize("caller", ["train_b64_g2.slurm", "run_2node_8gpu.sbatch"])
def test_a_caller_finds_its_launcher_wherever_a_copy_of_it_runs(caller, in_a_job_of_our_own, tmp_path):
    """sbatch runs a copy under another name, and Slurm says where it was, of an array once for each task. In the
    allocation of another script Slurm says where that was."""
    spool = tmp_path / "slurm_script"
    shutil.copy(SCRIPTS / caller, spool)
    place = tmp_path / "place"
    (tmp_path / "bin" / "scontrol").write_text(f"#!/bin/sh\ncat {place}\n")
    ours = f"JobId=1\n   Command={SCRIPTS}/{caller} --seed 1\n   WorkDir=/\n"
    for said, called in ((ours, spool), (2 * ours, spool), ("   Command=/elsewhere/x.sbatch\n", SCRIPTS / caller)):
        place.write_text(said)
        done = subprocess.run(
            ["bash", str(called), "--dry_run"], capture_output=True, text=True, env=in_a_job_of_our_own, timeout=30
        )
        assert done.returncode == 0 and "src/gpt2.py" in done.stdout, done.stderr


def test_a_job_that_is_cancelled_saves_and_is_not_requeued(in_a_job_of_our_own, tmp_path):
    """Slurm tells the batch script as well as the ranks; it waits for them."""
    ending = f"kill -TERM $PPID; sleep 0.5; echo '{PREEMPTED}' >RUN_PREEMPTED.txt; exit 1"
    done = in_the_step(in_a_job_of_our_own, tmp_path, ending)
    assert done.returncode == 143 and "ended from outside; go on with" in done.stdout
    assert not (tmp_path / "called").exists()


def test_the_site_has_its_say_and_the_user_the_last_word(tmp_path):
    site = tmp_path / "site.env"
    site.write_text(
        ': "${RANKS_PER_NODE:=3}"\nRUN_DIR=$HOME/$UNSET_AND_NO_ERROR/x\nfalse\nexport NCCL_SOCKET_IFNAME=ib0\n'
    )
    plan = Plan("run_2node_8gpu.sbatch", SITE_ENV=str(site), HOME="/home/me")
    assert plan.of("nproc-per-node") == "3" and plan.values["checkpoint_path"] == "/home/me//x"
    assert Plan("run_2node_8gpu.sbatch", SITE_ENV=str(site), RANKS_PER_NODE="5").of("nproc-per-node") == "5"
    assert subprocess.run(["git", "check-ignore", "-q", str(SCRIPTS / "site.env")], cwd=REPOSITORY).returncode == 0
    shutil.copy(SCRIPTS / "site.env.example", site)
    assert Plan("run_2node_8gpu.sbatch", SITE_ENV=str(site)).step == Plan("run_2node_8gpu.sbatch").step


def test_a_check_names_the_node_and_every_fault(tmp_path):
    folder = tmp_path / "not made by the first node"
    flags = ["--run_type", "ddp", "--train_data_path", "nowhere.bin", "--val_data_path", __file__]
    command = [sys.executable, str(SCRIPTS / "check_node.py"), "--ranks", "64", "--gpus", "64", "--", *flags]
    command += ["--checkpoint_path", str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(SLURMD_NODENAME="n7"), cwd=tmp_path, timeout=60
    )
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == 3 and all(line.startswith("n7: ") for line in lines), done.stderr
    for words in (
        "--train_data_path .*/nowhere.bin is not a readable file",
        "RUN_DIR=.* is not to be seen",
        "GPUs were asked",
    ):
        assert any(re.search(words, line) for line in lines), (words, lines)


def test_a_prefix_observes_the_first_rank_of_a_node_alone():
    command = ["bash", str(SCRIPTS / "rank.sh"), "echo", "seen by", "--", "env"]
    place = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2"}
    first, second = (
        subprocess.run(command, capture_output=True, text=True, env=environment(**place, SLURM_LOCALID=local)).stdout
        for local in ("0", "1")
    )
    assert first == "seen by env\n"
    assert {"RANK=3", "LOCAL_RANK=1", "WORLD_SIZE=4", "LOCAL_WORLD_SIZE=2"} <= set(second.splitlines())


def test_what_is_recorded_of_slurm(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    assert slurm_facts() is None
    for name, value in {**IN_A_JOB, "SLURM_JWT": "secret", "SLURM_NTASKS": "3", "SLURM_CLUSTER_NAME": ""}.items():
        monkeypatch.setenv(name, value)
    expected = {"job_id": "123456", "job_name": "my job/1", "nodelist": "n[1-3]", "ntasks": "3"}
    assert slurm_facts() == expected, "an empty value is left out, a name that is not known too"


def test_the_guide_tells_of_every_variable_and_every_script():
    guide = (REPOSITORY / "docs" / "clusters.md").read_text()
    table = guide[guide.index("## Variables") : guide.index("## Preemption")]
    told = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    source = "".join((SCRIPTS / name).read_text() for name in ("launch.sh", "carry_out.sh"))
    settable = set(re.findall(r"\$\{([A-Z0-9_]+):-", source)) - {"GIT_COMMIT"}
    settable = {name for name in settable if not name.startswith(("SLURM_", "SBATCH_", "VIRTUAL_ENV"))}
    assert settable <= told, "a variable that is read is not in the table"
    source += (SCRIPTS / "evidence.sh").read_text()
    assert all(re.search(rf"\b{name}\b", source) for name in told), "the table tells of one that nothing reads"
    for caller in CALLERS:
        assert caller in guide or re.search(r"_(b\d+_g\d|dp|ddp|single|deepspeed_stage\d)\.", caller), caller


def test_the_earlier_projects_commands_of_the_guide_are_understood(tmp_path):
    """Each as it stands there, with bash and a dry run in place of sbatch."""
    guide = (REPOSITORY / "docs" / "clusters.md").read_text()
    section = guide[guide.index("## The earlier projects' commands") :]
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL).group(1)
    block = re.sub(r"\bsbatch (\S+)", r"bash \1 --dry_run", block).replace("/scratch/$USER", str(tmp_path))
    block = block.replace(
        "cd scripts/slurm && bash train", "bash scripts/slurm/train"
    )  # the others are called from the root
    done = subprocess.run(
        ["bash", "-euc", block],
        capture_output=True,
        text=True,
        env=environment(NSYS_BIN="true"),
        cwd=REPOSITORY,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    steps = [line for line in done.stdout.splitlines() if line.startswith("srun") and "check_node" not in line]
    found = [parse_command_line(words[words.index("src/gpt2.py") + 1 :]).values for words in map(shlex.split, steps)]
    assert [values["run_type"] for values in found] == ["ddp", "ddp", "optimized", "optimized"]
    assert [(values["max_train_steps"], values["max_val_steps"]) for values in found[2:]] == [(300, 50), (80, 0)]
    assert "--tee" in steps[3] and "evidence.sh rank" in steps[3] and "evidence.sh" not in steps[2]


LAB = REPOSITORY / "scripts" / "lab"


@pytest.mark.parametrize(
    ("script", "flags", "words"),
    [
        ("slurm_up.sh", ["--nodes", "0"], "--nodes 0: give 1 to 16"),
        ("slurm_up.sh", ["--node", "2"], "--node is not an option; there are --nodes N"),
        ("slurm_down.sh", ["--dir", str(REPOSITORY)], "is not a lab of slurm_up.sh: nothing was touched"),
    ],
)
def test_the_lab_refuses_what_it_does_not_understand(script, flags, words):
    variables = environment()
    variables.pop("SLURM_LAB_DIR", None)
    done = subprocess.run(
        ["bash", str(LAB / script), *flags], capture_output=True, text=True, env=variables, timeout=30
    )
    assert done.returncode == 2 and re.search(words, done.stderr), done.stderr


def test_a_machine_where_slurm_cannot_be_installed_is_told_why(tmp_path):
    for name in ("bash", "id"):
        (tmp_path / name).symlink_to(shutil.which(name))
    command = [shutil.which("bash"), str(LAB / "install_slurm.sh")]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": str(tmp_path)}, timeout=30)
    reason = "there is no apt-get here" if os.geteuid() == 0 else "only root can install packages"
    assert done.returncode == 1 and f"Slurm is not installed: {reason}" in done.stderr
