"""Check how a Slurm job ends, is requeued and observed."""

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
from support.slurm_launcher_cases import CALLERS, IN_A_JOB, SCRIPTS, Plan, environment, start

from testbed.config.environment_variables import slurm_facts
from testbed.config.flags import parse_command_line

pytestmark = pytest.mark.launches


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


def test_all_callers_find_their_launcher_by_the_same_lines():
    ways = {tuple((SCRIPTS / caller).read_text().splitlines()[5:7]) for caller in CALLERS}
    assert len(ways) == 1


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
        ("slurm_up.sh", ["--cpus", "many"], "--cpus many: give 1 to 512"),
        ("slurm_up.sh", ["--gpus", "-1"], "--gpus -1: give 0 to 64"),
        ("slurm_up.sh", ["--nodes"], "--nodes needs a value"),
        ("slurm_up.sh", ["--node", "2"], "--node is not an option; there are --nodes N"),
        ("slurm_down.sh", [], "which lab. give --dir DIR"),
        ("slurm_down.sh", ["--dir", "/no/such"], "--dir /no/such is not a folder"),
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
