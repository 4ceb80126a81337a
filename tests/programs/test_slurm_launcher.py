"""scripts/slurm/: what each batch script would run and refuses, and what it takes from site and user. Needs no Slurm.

tests/experiments/test_lab_slurm.py runs the same scripts as jobs.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from support.programs import REPOSITORY
from support.slurm_launcher_cases import CALLERS, IN_A_JOB, SCRIPTS, Plan, ask, environment, start

pytestmark = pytest.mark.launches


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


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
@pytest.mark.parametrize("on", [(), *[(toggle,) for toggle in TOGGLES], ("NCCL_LOGS", "DIST_DEBUG", "NSYS"), TOGGLES])
def test_launcher_and_evidence_fit_together(tmp_path, launcher, on):
    """A dry run prints all that a job would export, make and call, and writes nothing."""
    if launcher == "srun" and "TORCHRUN_LOGS" in on:
        done = ask("run_2node_8gpu.sbatch", LAUNCHER="srun", NSYS_BIN="true", **dict.fromkeys(on, "1"))
        assert done.returncode == 2 and "TORCHRUN_LOGS=1 is collected by torchrun, and LAUNCHER=srun" in done.stderr
        return
    told = {"LAUNCHER": launcher, "RUN_DIR": str(tmp_path / "a run"), "GIT_COMMIT": "abc"}
    plain = Plan("run_2node_8gpu.sbatch", **told)
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
        assert plan.said == plain.said and "EVIDENCE_DIR" not in plan.exported and plan.finish == []
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


@pytest.mark.parametrize(("asked", "gpus"), [("a100:4", "4"), ("tesla:2,kepler:1", "3"), ("gpu:h100=8", "8")])
def test_gpus_may_have_a_type(asked, gpus):
    assert Plan("run_2node_8gpu.sbatch", SBATCH_GPUS_PER_NODE=asked).of("nproc-per-node") == gpus
    job = {**IN_A_JOB, "SLURM_GPUS_ON_NODE": "2"}
    assert Plan("run_2node_8gpu.sbatch", **job, SLURM_GPUS_PER_NODE=asked).of("nproc-per-node") == "2"
    declined = Plan("run_2node_8gpu.sbatch", **job, SLURM_GPUS_PER_NODE=f"{asked.partition(':')[0]}:0")
    assert declined.of("nproc-per-node") == "6"


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


def with_torch(folder: Path, version: str) -> str:
    """Return a PYTHONPATH on which this version of PyTorch is installed."""
    (folder / "torch-0.dist-info").mkdir()
    (folder / "torch-0.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
    return str(folder)


def test_torchrun_waits_longer_than_a_rank_may_take(tmp_path):
    installed = with_torch(tmp_path, "2.12.0+cu130")
    assert Plan("run_2node_8gpu.sbatch", PYTHONPATH=installed).of("shutdown-timeout") == "30"
    assert Plan("run_2node_8gpu.sbatch", "--grace_seconds=90", PYTHONPATH=installed).of("shutdown-timeout") == "100"


@pytest.mark.parametrize(("grace", "is_warned"), [("20", False), ("90", True)])
def test_torchrun_of_an_older_pytorch_gets_no_flag_that_it_lacks(tmp_path, grace, is_warned):
    installed = with_torch(tmp_path, "2.11.0")
    done = ask("run_2node_8gpu.sbatch", "--grace_seconds", grace, PYTHONPATH=installed)
    assert done.returncode == 0 and "torch.distributed.run" in done.stdout
    assert "--shutdown-timeout" not in done.stdout
    assert (f"--grace_seconds {grace} has no effect above 20" in done.stderr) == is_warned


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
        ("train_b64_g2.slurm", {"RANKS_PER_NODE": "two"}, "RANKS_PER_NODE=two: give a number from 1 on"),
        ("train_b64_g2.slurm", {"RANKS_PER_NODE": "0"}, "RANKS_PER_NODE=0: give a number from 1 on"),
        ("train_b64_g2.slurm", {"MAX_RESTARTS": "-1"}, "MAX_RESTARTS=-1: give a number from 0 on"),
        ("train_b64_g2.slurm", {"MASTER_PORT": "http"}, "MASTER_PORT=http: give a number"),
        ("train_b64_g2.slurm", {"LAUNCHER": "mpirun"}, r"LAUNCHER=mpirun: give torchrun \(the default\) or srun"),
        ("train_b64_g2.slurm", {"GPT2_EXTRA_ARGS": "--sample_prompt 'open"}, "a quote is not closed"),
        ("train_b64_g2.slurm", {"GPT2_EXTRA_ARGS": "--checkpoint_path x"}, "--checkpoint_path x: give RUN_DIR=x"),
        ("train_b64_g2.slurm", {"GPT2_EXTRA_ARGS": "--checkpoint-path=a-b"}, "--checkpoint_path a-b: give RUN_DIR=a-b"),
        ("train_b64_g2.slurm", {"SBATCH_GPUS_PER_NODE": "a100"}, "SBATCH_GPUS_PER_NODE=a100: give a number of GPUs"),
        ("train_b64_g2.slurm", {"RUN_TYPE": "baseline"}, "RUN_TYPE=baseline is one process, not 1 x 2"),
        ("run_2node_8gpu.sbatch", {"RUN_TYPE": "dp"}, "RUN_TYPE=dp is one process, not 2 x 1: ask for --nodes=1"),
        ("train_b64_g2.slurm", {"SITE_ENV": "nowhere.env"}, "SITE_ENV=nowhere.env is not a file; .*site.env.example"),
        ("train_b64_g2.slurm", {"PYTHON": "no-such-python"}, "there is no no-such-python on .*: set PYTHON"),
    ],
)
def test_what_is_asked_wrongly_is_refused_with_the_way_out(script, variables, words):
    done = ask(script, **variables)
    assert done.returncode == 2 and re.search(words, done.stderr), done.stderr + done.stdout
    assert "srun" not in done.stdout.replace("by srun", "")


@pytest.mark.parametrize(
    "name", ["SLURM_JOB_ID", "SLURM_JOB_CPUS_PER_NODE", "SLURM_RESTART_COUNT", "SLURM_GPUS_ON_NODE"]
)
def test_no_command_in_a_number_of_slurm_is_carried_out(tmp_path, name):
    """bash evaluates what it computes with: an index of an array may hold a command."""
    made = tmp_path / "made"
    done = ask("train_b64_g2.slurm", **{**IN_A_JOB, name: f"a[`touch {made}`]"})
    assert not made.exists()
    assert (
        done.returncode == 2 and f"{name}=a[`touch" in done.stderr and "is not a number as Slurm sets it" in done.stderr
    )


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
