"""Check that no secret of the environment lands in a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

import pytest
from support.programs import REPOSITORY, TINY_RUN, data_flags, python_command, run_program
from support.report_cases import load
from support.settings import typed

from testbed.analysis.report.build import write_html
from testbed.config.environment_variables import check_no_secret, nccl_variables, recorded_variables
from testbed.config.flag_parser import FlagParser
from testbed.config.flags import parse_command_line

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIplantedK7MDENGbPxRfi",
    "AWS_ACCESS_KEY_ID": "AKIAPLANTEDPLANTED01",
    "HF_TOKEN": "hf_plantedPlantedPlanted0123456789",
    "WANDB_API_KEY": "plantedwandb0123456789abcdef01234567",
    "GITHUB_TOKEN": "ghp_plantedPlanted0123456789abcdefgh",
    "MY_PASSWORD": "planted-password-0123",
    "PGPASSWORD": "planted-pg-0123",
    "MYSQL_PWD": "planted-mysql-0123",
    "GH_PAT": "planted_github_pat_0123",
    "SSHPASS": "planted-sshpass-0123",
    "SLURM_JWT": "planted.slurm.jwt.0123456789",
    "NCCL_NONSENSE": "planted_nccl_nonsense_0123",
    "NCCL_AUTH_TOKEN": "planted_nccl_token_0123",
    "TORCH_NCCL_SECRET": "planted_torch_nccl_0123",
    "SLURM_PLANTED": "planted_slurm_variable_0123",
    "MASTER_ADDR_PLANTED": "planted_master_0123",
}


KNOWN = {"NCCL_DEBUG": "WARN", "TORCH_NCCL_ENABLE_MONITORING": "0", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def test_only_named_variables_have_values_in_a_file():
    with mock.patch.dict(os.environ, {**SECRETS, **KNOWN}, clear=True):
        recorded, nccl = recorded_variables(), nccl_variables()
    assert recorded == {"OMP_NUM_THREADS": "1"}
    assert nccl == {"NCCL_DEBUG": "WARN", "TORCH_NCCL_ENABLE_MONITORING": "0", "NCCL_NONSENSE": None}


@pytest.mark.parametrize("name", "AWS_SECRET_ACCESS_KEY HF_TOKEN PGPASSWORD MYSQL_PWD GH_PAT SSHPASS".split())
def test_a_flag_that_holds_a_secret_is_refused(monkeypatch, name, capsys):
    """Flags are recorded as they were typed, by the trainer and by other programs."""
    monkeypatch.setenv(name, SECRETS[name])
    with pytest.raises(SystemExit) as ended:
        FlagParser(prog="other.py").parse_args([f"--out={SECRETS[name]}"])
    assert ended.value.code == 2 and f"the value of {name}" in capsys.readouterr().err
    with pytest.raises(ValueError, match=f"the value of {name}") as caught:
        parse_command_line(["--sample_prompt", f"before {SECRETS[name]} after"])
    assert SECRETS[name] not in str(caught.value)


@pytest.mark.parametrize("flag", ["--config", "--deepspeed_config"])
def test_a_file_of_settings_that_holds_a_secret_is_refused(monkeypatch, tmp_path, token_files, flag):
    """What a --config file says stands in effective_config.json; escapes of JSON hide nothing."""
    monkeypatch.setenv("GH_PAT", SECRETS["GH_PAT"])
    path = tmp_path / "settings.json"
    hidden = "".join(f"\\u{ord(each):04x}" for each in SECRETS["GH_PAT"])
    inside = {"--config": '"sample_prompt": "x SECRET"', "--deepspeed_config": '"monitor": [{"SECRET": 1}]'}[flag]
    path.write_text("{" + inside.replace("SECRET", hidden) + "}")
    words = ["--run_type", "optimized", *TINY_RUN, *data_flags(token_files), flag, str(path)]
    with pytest.raises(ValueError, match=rf"{flag} .*settings\.json holds the value of GH_PAT") as caught:
        typed(words)
    assert SECRETS["GH_PAT"] not in str(caught.value)


def test_words_that_are_no_secrets_are_not_refused(monkeypatch):
    monkeypatch.setenv("STARTED_PWD", str(REPOSITORY))  # a folder is not a secret
    words = {"GIT_AUTHOR_NAME": "checkpoint", "TOKEN": "run", "KEYBOARD": "checkpoint", "MONKEY": "baseline"}
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    check_no_secret("a flag", f"{REPOSITORY}/checkpoint", "checkpoint/baseline/run")


@pytest.fixture(scope="module")
def secretive_runs(tmp_path_factory, token_files) -> tuple[Path, str]:
    """A run that ends well and writes all that a run can write, one that fails, and all that both said."""
    folder = tmp_path_factory.mktemp("secretive")
    flags = [*python_command(), *TINY_RUN, *data_flags(token_files), "--global_batch_size", "8"]
    whole = "--max_train_steps 8 --save_every 4 --keep_best --profile --profile_steps 2 --tensorboard".split()
    broken = "--max_train_steps 8 --learning_rate 1e30 --warmup_steps 0 --max_grad_norm 0".split()
    environment = {**os.environ, **SECRETS, "NCCL_DEBUG": "WARN", "SLURM_JOB_ID": "77"}
    said = []
    for name, more, code in (("whole", whole, 0), ("broken", broken, 1)):
        done = run_program([*flags, *more, "--checkpoint_path", str(folder / name)], env=environment)
        assert done.returncode == code, done.stderr[-2000:]
        said += [done.stdout, done.stderr]
    write_html(load(folder), folder / "report.html")
    return folder, "".join(said)


@pytest.mark.launches
@pytest.mark.slow
def test_no_secret_of_the_environment_lands_in_a_file(secretive_runs):
    folder, said = secretive_runs
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"launcher_metadata.json", "training_metrics.json", "RUN_FAILED.txt", "report.html"} <= names
    assert any("tfevents" in name for name in names) and any("trace" in name for name in names) and len(files) > 20
    launcher = json.loads((folder / "whole" / "launcher_metadata.json").read_text())
    assert launcher["nccl_env"]["NCCL_DEBUG"] == "WARN" and launcher["nccl_env"]["NCCL_NONSENSE"] is None
    assert any(b'"job_id": "77"' in path.read_bytes() for path in files), "what is recorded would be found"
    for name, secret in SECRETS.items():
        assert secret not in said, name
        holders = [path for path in files if secret.encode() in path.read_bytes()]
        assert holders == [], f"{name} is in {holders}"
