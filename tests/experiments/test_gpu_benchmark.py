"""The benchmark of a GPU machine, without one: its commands are accepted, its parts fit, it goes on where it ended."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.gpu_benchmark_examples import content_of, done_rows, machine
from support.programs import REPOSITORY, script, write_token_files
from support.settings import typed

from testbed.autotune import device as device_choice
from testbed.autotune.attention import FUSED
from testbed.config.compatibility import compile_blocker
from testbed.distributed.launch import Launch
from testbed.distributed.processes import Ended
from testbed.experiments.gpu_benchmark import record, running, table
from testbed.experiments.gpu_benchmark.parts import DEADLINE_S, PART_S, estimate_s, parts
from testbed.experiments.gpu_benchmark.record import DONE, FAILED, INTERRUPTED, LATE, PENDING
from testbed.experiments.gpu_benchmark.steps import Step, plan
from testbed.experiments.peers import nanogpt
from testbed.experiments.peers.plan import make_plan
from testbed.experiments.peers.work import gpt2_run


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """The benchmark's folder with token files of the size that the source of Python's library has."""
    folder = tmp_path_factory.mktemp("benchmark")
    (folder / "data").mkdir()
    made = write_token_files(folder / "data", 2_000_000, 200_000)
    for path, name in zip(made, ("train_small", "val_small"), strict=True):
        path.rename(folder / "data" / f"{name}.bin")
        path.with_suffix(".json").rename(folder / "data" / f"{name}.json")
    for name in ("deterministic", "saved_async"):
        for half in (10, 12, 3, 4):
            (folder / "runs" / name / "checkpoints" / f"step_{half:06}").mkdir(parents=True)
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


def of_gpt2(step: Step) -> tuple[list[str], int] | None:
    """The flags of src/gpt2.py and the number of ranks; None for another program."""
    if "src/gpt2.py" not in step.command:
        return None
    place = step.command.index("src/gpt2.py")
    ranks = [word.removeprefix("--nproc-per-node=") for word in step.command[:place] if "--nproc" in word]
    return list(step.command[place + 1 :]), int(ranks[0]) if ranks else 1


@pytest.mark.parametrize(("device", "number"), [("cuda", 1), ("cuda", 2), ("cuda", 8), ("cpu", 0)])
def test_the_program_accepts_every_command_of_the_plan(out, gpus, device, number):
    """The real parser, every rule that needs no device, and the choice of the device with that many H100s."""
    gpus(number)
    steps = [step for step in plan(machine(device, number), str(out)) if step.left_out is None]
    seen = 0
    for step in steps:
        if (found := of_gpt2(step)) is None:
            continue
        flags, ranks = found
        settings = typed(flags, ranks).settings
        for rank in range(ranks):
            assert (
                device_choice.choose_device(settings, Launch(rank, rank, ranks, ranks)).type == settings.compute.device
            )
        assert settings.compute.precision != "auto", "a default must not decide what is compared"
        if settings.compute.compile:
            assert compile_blocker(settings.by_flag()) is None
        assert settings.checkpointing.checkpoint_path == f"{out}/runs/{step.name}"
        seen += 1
    assert seen > (25 if device == "cuda" else 18)


@pytest.mark.parametrize(("device", "number"), [("cuda", 1), ("cpu", 0)])
def test_the_comparisons_with_other_trainers_are_accepted(out, monkeypatch, device, number):
    monkeypatch.setattr(nanogpt, "check_directory", lambda folder: None)
    compare_peers = script("more/compare_peers.py")
    steps = {step.name: step for step in plan(machine(device, number), str(out))}
    for name, peer in (("peers_nanogpt", "nanogpt"), ("peers_transformers", "transformers")):
        words = list(steps[name].command)
        arguments = compare_peers.parse_arguments(words[words.index("scripts/more/compare_peers.py") + 1 :])
        peers, sets = compare_peers.chosen(arguments)
        _, checked = gpt2_run(arguments, device)
        made = make_plan(peers, sets, device, device == "cuda", {})
        assert made.not_measured == {} and all(
            any(arm.peer.startswith(peer) for arm in arms) for arms in made.sets.values()
        )
        if device == "cuda":
            assert arguments.repeats == 5, "fewer rounds make no claim"
            assert checked.settings.shape.num_parameters > 100e6
    (rate,) = [json.loads(step.input[1]) for step in steps.values() if step.input]
    assert rate["out"] == f"{out}/matrix_rate.json"


@pytest.mark.parametrize("number", [1, 8])
def test_every_cuda_path_is_in_the_plan(number):
    commands = [" ".join(step.command) for step in plan(machine(gpus=number), "out") if step.left_out is None]
    for flag in (
        "--profile --save_every --deterministic --resume --backend=gloo --async_mode=async --precision=fp16 "
        "--precision=fp32 --precision=bf16 --matmul=fp8 --activation_checkpointing=block --compile=on --compile=off "
        "--activation_checkpointing=selective --attention=flash --attention=cudnn --attention=efficient "
        "--attention=math --micro_batch_size_per_gpu=auto --optimizer=muon --run_inference_benchmark "
        "--run_type=allreduce --run_type=ddp --run_type=fsdp --zero_stage=0 --zero_stage=1 --zero_stage=2 "
        "--zero_stage=3"
    ).split():
        assert any(flag.replace("=", " ") in command for command in commands), flag
    across = ("--run_type=pipeline", "--run_type=tensor", "--run_type=model_parallel", "--run_type=dp")
    for flag in across:
        assert any(flag.replace("=", " ") in command for command in commands) == (number > 1), flag


def test_a_compiled_run_has_another_attention_kernel_than_auto_takes():
    """A graph that was compiled with one kernel must not be taken from disk for another."""
    steps = {step.name: step for step in plan(machine(), "out")}
    compiled, reference = steps["efficient_compiled"], steps["large_compiled"]
    assert "--compile on --attention efficient" in " ".join(compiled.command)
    assert compiled.check == table.Check("large_compiled", "bf16") and "--attention" not in reference.command
    assert set(compiled.cold).isdisjoint(reference.cold), "its graphs are compiled apart"
    assert FUSED[-1] == "efficient", "auto prefers each of the others"


@pytest.mark.parametrize("number", [1, 8])
def test_parts_fit_into_nine_minutes_and_all_of_them_into_45(number):
    steps = plan(machine(gpus=number), "out")
    found = parts(steps)
    seconds = [estimate_s(part, steps) for part in found]
    assert max(seconds) <= PART_S < DEADLINE_S <= 9 * 60 and sum(seconds) <= 45 * 60
    names = [step.name for part in found for step in part]
    assert sorted(names) == sorted(step.name for step in steps if step.left_out is None), "each step once"
    assert names[:4] == ["corpus", "tokens", "cpu_fp32", "fp32"], "whether it computes right comes first"
    for part in found:
        inside = [step.name for step in part]
        for step in part:
            read = [name for name, _ in step.needs if name not in ("corpus", "tokens")]
            assert all(name in inside[: inside.index(step.name)] for name in read)


def test_a_part_pays_the_compiler_once_and_a_bare_machine_again():
    steps = [Step("a", "", seconds=10, cold=("large",)), Step("b", "", seconds=10, cold=("large",))]
    cold = table.COLD_S["large"]
    both, alone = estimate_s(steps, steps), estimate_s(steps[1:], steps)
    assert both - alone == 10 and alone - estimate_s([Step("b", "", seconds=10)], steps) == cold
    assert [len(part) for part in parts(steps, most_s=both)] == [2]
    assert [len(part) for part in parts(steps, most_s=both - 1)] == [1, 1]


def test_what_cannot_run_is_left_out_with_the_reason():
    def left_out(**changes) -> dict[str, str]:
        return {step.name: step.left_out for step in plan(machine(**changes), "out") if step.left_out is not None}

    assert left_out(gpus=8) == {}
    assert set(left_out()) == {"model_parallel_1rank", "pipeline_1rank", "gpipe_1rank", "tensor_1rank", "dp"}
    bare = left_out(packages=frozenset(), nanogpt_dir=None)
    assert bare["fp8"] == "the package torchao is not installed"
    assert bare["zero3_1rank"] == "the package deepspeed is not installed" and "NANOGPT_DIR" in bare["peers_nanogpt"]
    assert bare["peers_transformers"] == "the package transformers is not installed"
    on_cpu = left_out(device="cpu", gpus=0)
    assert {"fp8", "fp16", "profile_ddp_1rank", "attention_cudnn"} <= set(on_cpu) and all(on_cpu.values())
    assert len(plan(machine("cpu", 0), "out")) - len(on_cpu) > 20, "what a CPU can do"


def test_every_comparison_names_a_run_and_a_tolerance():
    for number in (1, 8):
        steps = plan(machine(gpus=number), "out")
        names = {step.name for step in steps}
        assert len(names) == len(steps)
        for step in steps:
            assert step.check is None or (step.check.reference in names and step.check.within in table.TOLERANCES)
            assert all(name in names for name, _ in step.needs) and set(step.cold) <= set(table.COLD_S)


# --- going on where it ended


TOKENS = Step("tokens", "", ("python", "make"), 5)
FIRST = Step("first", "", ("python", "a"), 5, needs=(("tokens", "data/train_small.bin"),))
SECOND = Step("second", "", ("python", "b"), 5, needs=(("tokens", "data/train_small.bin"), ("first", "runs/first/x")))


def names_to_run(content: dict, folder: Path, *wanted: str) -> list[str]:
    steps = [TOKENS, FIRST, SECOND]
    rows = {row["name"]: row for row in content["steps"]}
    return [step.name for step in record.to_run(steps, rows, set(wanted), folder)]


def test_what_is_done_is_not_run_again_unless_its_files_are_gone(tmp_path):
    steps = [TOKENS, FIRST, SECOND]
    everything = ("tokens", "first", "second")
    assert names_to_run(content_of(steps), tmp_path, *everything) == list(everything)
    half = done_rows(content_of(steps), "tokens", "first")
    assert names_to_run(half, tmp_path, *everything) == ["tokens", "first", "second"], "a bare machine has no files"
    for file in ("data/train_small.bin", "runs/first/x"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    assert names_to_run(half, tmp_path, *everything) == ["second"]
    assert names_to_run(half, tmp_path, "first") == []
    assert names_to_run(done_rows(half, "second"), tmp_path, *everything) == []


def test_a_changed_command_or_another_machine_is_run_again(tmp_path):
    steps = [TOKENS, FIRST, SECOND]
    earlier = done_rows(content_of(steps), "tokens", "first", "second")

    def taken_over(content: dict) -> tuple[list[str], list[str]]:
        again = record.take_over(content, json.loads(json.dumps(earlier)))
        return again, [row["name"] for row in content["steps"] if row["status"] == DONE]

    assert taken_over(content_of(steps)) == ([], ["tokens", "first", "second"])
    changed = [TOKENS, Step("first", "", ("python", "a", "--more"), 5), SECOND]
    assert taken_over(content_of(changed)) == (["first is run again: its command changed"], ["tokens", "second"])
    again, kept = taken_over(content_of(steps, name="NVIDIA H200"))
    assert kept == [] and "it ran on NVIDIA H100 80GB HBM3, torch 2.11.0, and this is NVIDIA H200" in again[0]
    assert taken_over(content_of(steps, torch_version="2.13.0"))[1] == []
    earlier["steps"][0].update(status=FAILED)
    assert taken_over(content_of(steps)) == ([], ["first", "second"])


class Processes:
    """Stands in for the runner of processes: what each command does, by its second word."""

    def __init__(self, monkeypatch, **ends: Ended) -> None:
        self.ends, self.ran, self.limits = ends, [], {}
        monkeypatch.setattr(running, "run", self.run)

    def run(self, command, log, stop, timeout_s=None, typed=None, **options) -> Ended:
        assert command[0] == sys.executable and typed[0] == "python" and options["cwd"] == REPOSITORY
        self.ran.append(log.stem)
        self.limits[log.stem] = timeout_s
        ended = self.ends.get(log.stem, Ended(0, 1.0))
        if ended.was_stopped:
            stop.signal_number = signal.SIGINT
        return ended


def run_all(folder: Path, steps: list[Step], **options) -> dict[str, str]:
    content = content_of(steps)
    stop = SimpleNamespace(signal_number=None)
    running.Runner(folder, content, stop, {}, **options).run_all(steps)
    written = record.STEPS_FILE.read(folder)
    return {row["name"]: row["status"] for row in written["steps"]}


def test_a_failure_does_not_end_the_benchmark_but_what_reads_its_files(tmp_path, monkeypatch):
    processes = Processes(monkeypatch, first=Ended(1, 2.0))
    third = Step("third", "", ("python", "c"), 5)
    found = run_all(tmp_path, [TOKENS, FIRST, SECOND, third])
    assert found == {"tokens": DONE, "first": FAILED, "second": FAILED, "third": DONE}
    assert processes.ran == ["tokens", "first", "third"]


def test_a_signal_ends_it_and_the_rest_stays_to_be_run(tmp_path, monkeypatch):
    Processes(monkeypatch, first=Ended(-2, 2.0, was_stopped=True))
    assert run_all(tmp_path, [TOKENS, FIRST, SECOND]) == {"tokens": DONE, "first": INTERRUPTED, "second": PENDING}


def test_no_step_begins_that_would_end_after_the_deadline(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(running.time, "monotonic", lambda: now[0])
    processes = Processes(monkeypatch)
    long = Step("long", "", ("python", "l"), 10, cold=("large",))
    found = run_all(tmp_path, [long, TOKENS], ends_s=100.0 + table.COLD_S["large"])
    assert found == {"long": LATE, "tokens": DONE}, "its kernels are not in the cache"
    assert processes.limits == {"tokens": 2 * 5 + running.SPARE_S}
    (tmp_path / "compiled" / "large.warm").touch()
    assert run_all(tmp_path, [long], ends_s=100.0 + 20)["long"] == DONE
    assert processes.limits["long"] == 20, "not beyond the deadline"
    Processes(monkeypatch, tokens=Ended(-9, 40.0, was_late=True))
    assert run_all(tmp_path, [TOKENS]) == {"tokens": FAILED}


def test_a_run_is_made_from_the_beginning(tmp_path, monkeypatch):
    """--resume would go on with what an earlier try left."""
    Processes(monkeypatch)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    run_all(tmp_path, [Step("first", "", ("python", "a"), 5, input=("work.json", "{}\n"))])
    assert not (tmp_path / "runs" / "first").exists() and (tmp_path / "work.json").read_text() == "{}\n"
