"""The runs that try a GPU machine, without one: their commands are accepted, and comparisons notice what differs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from support.metrics_examples import example_metrics, save
from support.programs import script
from support.settings import typed

from testbed.analysis.runs.load import Run, load_run
from testbed.autotune import device as device_choice
from testbed.autotune.attention import FUSED
from testbed.config.compatibility import compile_blocker
from testbed.config.run_types import STRATEGIES
from testbed.distributed.launch import Launch
from testbed.distributed.processes import Ended
from testbed.experiments import kept_runs
from testbed.experiments.gpu_paths import TOLERANCES, compare, rows, why_left_out, with_what_they_need
from testbed.experiments.made_up_tokens import write_made_up_tokens

PACKAGES = ("deepspeed", "torchao")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    write_made_up_tokens(folder, 8192, 2_000_000)
    return folder


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that makes PyTorch see this many H100s."""

    def mocked(number: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
        monkeypatch.setattr(device_choice, "check_backend", lambda settings, device: None)
        monkeypatch.setattr(device_choice, "keep_to_deterministic_kernels", lambda: None)
        monkeypatch.setattr(device_choice, "keep_freed_memory", lambda: None)
        monkeypatch.delenv("SLURM_PROCID", raising=False)

    return mocked


@pytest.mark.parametrize("number", [0, 1, 2, 4, 8])
def test_the_trainer_accepts_every_command(data, tmp_path, gpus, number):
    """The real parser, every rule that needs no device, and the choice of the device with that many H100s."""
    gpus(number)
    for name in ("deterministic", "saved_async"):
        for half in (3, 4, 10, 12):
            (tmp_path / name / "checkpoints" / f"step_{half:06}").mkdir(parents=True)
    here = [row for row in rows(number) if why_left_out(row, number, PACKAGES) is None]
    for row in here:
        words = row.words(str(tmp_path), "cuda" if number else "cpu", str(data))
        settings = typed(words[words.index("src/gpt2.py") + 1 :], row.ranks).settings
        for rank in range(row.ranks):
            launch = Launch(rank, rank, row.ranks, row.ranks)
            assert device_choice.choose_device(settings, launch).type == settings.compute.device
        assert settings.compute.precision != "auto", "a default must not decide what is compared"
        if settings.compute.compile:
            assert compile_blocker(settings.by_flag()) is None
        assert settings.checkpointing.checkpoint_path == f"{tmp_path}/{row.name}"
    assert len(here) > (20 if number == 0 else 30)


def test_names_and_references_hold_together():
    for number in (0, 1, 8):
        plan = rows(number)
        order = [row.name for row in plan]
        assert len(set(order)) == len(order)
        for row in plan:
            before = order[: order.index(row.name)]
            assert row.reference is None or (row.reference in before and row.within in TOLERANCES)
            assert row.reads is None or row.reads in before


def test_every_path_is_tried():
    def of(number: int) -> str:
        chosen = [row for row in rows(number) if why_left_out(row, number, PACKAGES) is None]
        return "\n".join(" ".join(row.words("runs", "cuda", "data")) + " " for row in chosen)

    for flag in (
        "--profile --save_every --deterministic --resume --backend=gloo --async_mode=async --precision=fp16 "
        "--precision=fp32 --precision=bf16 --matmul=fp8 --activation_checkpointing=block --compile=on --compile=off "
        "--activation_checkpointing=selective --attention=flash --attention=cudnn --attention=efficient "
        "--attention=math --micro_batch_size_per_gpu=auto --optimizer=muon --run_inference_benchmark "
        "--zero_stage=0 --zero_stage=2 --zero_stage=3"
    ).split():
        assert f"{flag.replace('=', ' ')} " in of(1), flag
    for name, entry in STRATEGIES.items():
        if name != "baseline":
            assert f"--run_type {name} " in of(8), name
            works_alone = not entry.cuts_model and entry.keeps != "axes" and entry.devices != "all"
            assert (f"--run_type {name} " in of(1)) == works_alone, name


def test_a_compiled_run_has_another_attention_kernel_than_auto_takes():
    """A graph that was compiled with one kernel must not be taken from disk for another."""
    compiled = next(row for row in rows(1) if row.name == "efficient_compiled")
    assert "--compile on --attention efficient" in compiled.flags and compiled.reference == "large_compiled"
    assert FUSED[-1] == "efficient", "auto prefers each of the others"


def test_what_a_machine_cannot_do_is_left_out_with_the_reason():
    assert [row.name for row in rows(8) if why_left_out(row, 8, PACKAGES)] == []
    bare = {row.name: why_left_out(row, 1, ()) for row in rows(1)}
    assert bare["fp8"] == "the package torchao is not installed" and "deepspeed" in bare["optimized_3"]
    assert bare["tensor"] == bare["dp"] == "it needs 2 CUDA devices" and bare["fsdp"] is None
    assert "CUDA" in why_left_out(next(row for row in rows(0) if row.name == "fp16"), 0, PACKAGES)


def test_a_chosen_run_brings_what_it_reads_and_is_compared_with():
    plan = rows(1)
    chosen = [row for row in plan if row.name == "deterministic_resumed"]
    names = [row.name for row in with_what_they_need(chosen, plan)]
    assert names == ["cpu_fp32", "fp32", "bf16", "deterministic", "deterministic_resumed"]


# --- agreement


def run_of(folder: Path, name: str) -> Run:
    save(folder / name, example_metrics(num_steps=6, warmup_steps=1))
    return load_run(folder / name / "training_metrics.json")


@pytest.mark.parametrize("field", ["train_losses", "grad_norms"])
def test_one_differing_step_is_noticed_at_the_tolerance(tmp_path, field):
    run, reference = run_of(tmp_path, "one"), run_of(tmp_path, "other")
    assert compare(run, reference, "same bits") == (True, "6 steps, loss within 0.0e+00, norm within 0.0e+00")
    values = getattr(run, field)
    for within, most in TOLERANCES.items():
        size = most.loss if field == "train_losses" else most.norm * float(values[4])
        for share, holds in ((0.9, True), (1.1, False)):
            changed = values.copy()
            changed[4] += share * size + (1e-9 if not holds else 0)
            changed_run = dataclasses.replace(run, **{field: changed})
            assert compare(changed_run, reference, within)[0] == holds, (within, share)


def test_a_resumed_run_is_compared_from_its_first_step_and_one_without_a_common_step_disagrees(tmp_path):
    reference = run_of(tmp_path, "whole")
    late = {name: getattr(reference, name)[3:] for name in ("train_steps", "train_losses", "grad_norms")}
    resumed = dataclasses.replace(reference, **late)
    assert compare(resumed, reference, "same bits")[1].startswith("3 steps")
    resumed = dataclasses.replace(resumed, train_steps=resumed.train_steps + 10)
    assert compare(resumed, reference, "fp8 against bf16") == (False, "no step in common")


def test_after_a_skipped_update_nothing_more_is_compared(tmp_path):
    reference = run_of(tmp_path, "whole")
    norms = np.array([1.5, 1.5, np.nan, 9, 9, 9])
    losses = reference.train_losses + np.array([0, 0, 0, 9, 9, 9])
    run = dataclasses.replace(reference, grad_norms=norms, train_losses=losses)
    assert compare(run, reference, "same bits")[0] is True
    run = dataclasses.replace(run, train_losses=losses + np.array([0, 0, 1, 0, 0, 0]))
    assert compare(run, reference, "same bits")[0] is False, "the loss of the skipped step still counts"


# --- the program


class Trainer:
    """Stands in for the processes of the runs: which were started, and what becomes of each."""

    def __init__(self, monkeypatch) -> None:
        self.made, self.fails, self.differs = [], set(), set()
        monkeypatch.setattr(kept_runs, "run", self.run)

    def run(self, command, log, stop, timeout_s, typed, **options) -> Ended:
        name = log.stem
        self.made.append(name)
        log.write_text(f"$ {' '.join(typed)}\nRuntimeError: it broke\n")
        if name in self.fails:
            return Ended(1, 1.0)
        losses = [5.0 + (name in self.differs)] * 6
        metrics = example_metrics(num_steps=6, warmup_steps=1)
        for row, loss in zip(metrics["steps"], losses, strict=True):
            row["loss"] = loss
        save(log.parent.parent / "runs" / name, metrics)
        return Ended(0, 1.0)


def test_what_is_done_is_kept_what_failed_is_tried_again_and_disagreement_is_exit_code_1(tmp_path, monkeypatch, capsys):
    trainer, benchmark = Trainer(monkeypatch), script("more/benchmark_gpu.py")

    def call(only: str) -> tuple[int, list[str], str]:
        trainer.made.clear()
        words = ["benchmark_gpu.py", "--device", "cpu", "--out_dir", str(tmp_path / "out"), "--only", only]
        monkeypatch.setattr("sys.argv", words)
        code = benchmark.main()
        return code, list(trainer.made), capsys.readouterr().out

    trainer.fails = {"deterministic"}
    code, made, said = call("^deterministic")
    assert code == 1 and made == ["fp32", "bf16", "deterministic"]
    assert "failed: deterministic: exit code 1: RuntimeError: it broke" in said
    assert "failed: deterministic_resumed: deterministic, which it reads, failed" in said
    trainer.fails = set()
    assert call("^deterministic")[:2] == (0, ["deterministic", "deterministic_resumed"])
    code, made, said = call("^deterministic")
    assert (code, made) == (0, []) and (tmp_path / "out" / "table.txt").read_text() in said
    trainer.differs = {"ddp"}
    code, made, said = call("^ddp$")
    assert (code, made) == (1, ["ddp"]) and "DOES NOT AGREE" in said
    log = tmp_path / "out" / "logs" / "ddp.log"
    log.write_text(log.read_text().replace("--max_train_steps 6", "--max_train_steps 5"))
    trainer.differs = set()
    assert call("^ddp$")[:2] == (0, ["ddp"]), "its command changed"
