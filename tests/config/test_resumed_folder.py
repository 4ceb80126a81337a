"""A mistyped --resume is said before anything else; a file, with the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.settings import typed

from testbed.config.initial_shape import shape_of_folder
from testbed.config.resumed_folder import check_resumed
from testbed.errors import InputError
from testbed.inference.loading import shape_of_config

CONVERT = "python scripts/convert_checkpoint.py --from"


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("ddp", "fsdp"):
        Path("checkpoint", name, "checkpoints", "step_000020").mkdir(parents=True)
    Path("checkpoint/empty").mkdir()
    Path("step_by_step").mkdir()
    for name in ("ckpt.pt", "gpt2.bin", "model_00000005.bin", "state_00000005_00000.bin", "other.txt"):
        Path(name).touch()


@pytest.mark.parametrize(
    ("resume", "said"),
    [
        ("checkpoint/dpd", "does not exist"),
        ("checkpoint/ddp/checkpoints/step_20", "does not exist"),
        ("checkpoint", "holds no checkpoint; "),
        ("checkpoint/ddp/checkpoints", "holds no checkpoint; "),
        ("step_by_step", "holds no checkpoint; "),
        ("checkpoint/empty", "holds no checkpoint; give auto, a run's folder, or"),
        ("/nowhere/at/all", "give auto, a run's folder, or"),
        ("other.txt", "is a file, not a folder; give auto"),
        ("ckpt.pt", f"{CONVERT} ckpt.pt --to ckpt; then give --resume ckpt"),
        ("gpt2.bin", "--init_from gpt2.bin trains its weights further"),
        ("model_00000005.bin", f"{CONVERT} model_00000005.bin --to model_00000005; then give --resume model_00000005"),
    ],
)
def test_what_holds_no_checkpoint_is_refused(resume, said):
    with pytest.raises(InputError) as caught:  # without data, which is not to be blamed
        typed(["--resume", resume])
    assert str(caught.value).startswith(f"--resume {resume} ") and said in str(caught.value)


def test_what_holds_a_checkpoint_is_taken():
    for resume in (None, "auto", "checkpoint/ddp", "checkpoint/fsdp/checkpoints/step_000020"):
        check_resumed(resume)


@pytest.mark.parametrize("name", ["ckpt.pt", "gpt2.bin"])
def test_programs_that_open_a_model_name_the_command_for_a_file(name):
    with pytest.raises(InputError, match=f"{CONVERT} {name} --to {Path(name).stem}; then name {Path(name).stem}$"):
        shape_of_config(Path(name))


@pytest.mark.parametrize(
    ("folder", "file", "resumes"),
    [
        ("out", "out/ckpt.pt", True),
        ("log124M", "log124M/model_00000010.bin", False),
        ("whole", "whole/model_00000005.bin", True),
    ],
)
def test_the_folder_of_another_program_leads_to_its_last_file(folder, file, resumes):
    written = ("out/ckpt.pt", "out/model_weights.bin", "log124M/model_00000005.bin", "log124M/model_00000010.bin")
    for name in (*written, "whole/model_00000005.bin", "whole/state_00000005_00000.bin"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    with pytest.raises(InputError, match=f"^{folder} has no model.safetensors, but .*; make a folder of it: "):
        shape_of_config(Path(folder))
    with pytest.raises(InputError, match=f"^--from {folder} has no .*but another program's file; name {file}$"):
        shape_of_folder(Path(folder), f"--from {folder}")
    way_out = f"{CONVERT} {file} --to " if resumes else f"--init_from {file} trains its weights further"
    with pytest.raises(InputError, match=f"^--resume {folder} holds no checkpoint; there is {file}: .*{way_out}"):
        check_resumed(folder)


def test_a_folder_of_runs_is_no_run_and_one_of_them_is_named():
    Path("checkpoint/ddp/model.safetensors").touch()
    with pytest.raises(InputError, match=r"^--from checkpoint has no .* name one, such as checkpoint/ddp$"):
        shape_of_folder(Path("checkpoint"), "--from checkpoint")
