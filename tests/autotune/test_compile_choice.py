"""Check when --compile auto compiles, and what a device's choices become elsewhere."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from support.settings import launch, settings_of
from support.variants import BF16, VARIANTS

from testbed.autotune import choices
from testbed.autotune.attention import Trial, check_backend
from testbed.autotune.choices import decide_open_settings
from testbed.config.flags import parse_command_line
from testbed.config.run_types import STRATEGIES

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [([], None), (["--compile"], True), (["--compile", "on"], True), (["--compile", "off"], False)],
)
def test_compile_in_its_three_forms(token_files, typed, meant):
    assert settings_of(token_files, *typed).compute.compile is meant


@pytest.mark.parametrize(("value", "meant"), [(True, True), (False, False), (None, None), ("auto", None), ("on", True)])
def test_a_config_file_of_an_earlier_version_is_still_read(tmp_path, value, meant):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"compile": value}))
    assert parse_command_line(["--config", str(path)]).values["compile"] is meant


def test_auto_compiles_nothing_on_the_cpu(token_files):
    decided, said = decide_open_settings(settings_of(token_files), launch(), CPU)
    assert decided.compute.compile is False and decided.model.attention == "auto" and said == []
    assert decided.data.num_workers == 0 and decided.origin.chosen == {"compile", "num_workers"}


@pytest.fixture
def on_cuda(monkeypatch):
    """What `decide` asks a GPU, answered without one: cuDNN is the fastest kernel, and the compiler works."""
    monkeypatch.setattr(choices, "fastest_backend", lambda *_: ("cudnn", [Trial("cudnn", 0.001)]))
    monkeypatch.setattr(choices, "check_backend", lambda *_: None)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(torch, "ones", lambda *shape, device, requires_grad: torch.full(shape, 1.0, requires_grad=True))


@pytest.mark.usefixtures("on_cuda")
def test_what_was_chosen_for_a_device_is_chosen_anew_where_the_file_is_used(token_files, tmp_path):
    """A baseline on CUDA comes to cuDNN and compiled blocks: on a CPU, or with ZeRO 3, nobody asked for either."""
    decided, _ = decide_open_settings(settings_of(token_files), launch(), CUDA)
    assert (decided.model.attention, decided.compute.compile, decided.data.num_workers) == ("cudnn", True, 1)
    config = decided.as_config()
    assert (config["attention"], config["compile"], config["num_workers"]) == (None, None, None)
    recorded = decided.as_recorded()
    assert (recorded["attention"], recorded["compile"], recorded["num_workers"]) == ("cudnn", True, 1)
    assert decided.as_dict()["attention"] == "cudnn", "a checkpoint says what a resumed run goes on with"
    path = tmp_path / "effective_config.json"
    path.write_text(json.dumps(config))
    again = ["--config", str(path), "--checkpoint_path", str(tmp_path / "again")]
    sharded = settings_of(token_files, *again, "--run_type", "optimized", "--zero_stage", "3", world_size=2)
    assert (sharded.model.attention, sharded.compute.compile, sharded.data.num_workers) == ("auto", None, None)
    on_the_cpu = settings_of(token_files, *again)
    check_backend(on_the_cpu, CPU)
    assert decide_open_settings(on_the_cpu, launch(), CPU)[0].compute.compile is False


@pytest.mark.usefixtures("on_cuda")
def test_what_was_given_stays_in_the_file(token_files):
    given = ["--attention", "math", "--compile", "off", "--num_workers", "3"]
    config = decide_open_settings(settings_of(token_files, *given), launch(), CUDA)[0].as_config()
    assert (config["attention"], config["compile"], config["num_workers"]) == ("math", False, 3)


def test_the_kernel_is_timed_with_the_micro_batch_that_the_run_will_have(settings, monkeypatch):
    timed_with = []

    def trial(settings, device):
        timed_with.append(settings.batch.micro_batch_size_per_gpu)
        return "cudnn", []

    monkeypatch.setattr(choices, "fastest_backend", trial)
    monkeypatch.setattr(choices, "find_micro_batch", lambda *_: (8, "micro batch 8"))
    decide_open_settings(settings.with_values(compile=False), launch(), CUDA)
    assert timed_with == [8]


def test_auto_compiles_only_what_an_agreement_test_compiles():
    """Each pair of run type and recomputation is a case there, and some run types in bf16 too."""
    compiled = [(run_type, flags) for run_type, _, flags, _ in VARIANTS.values() if "--compile" in flags]
    in_bf16 = [(run_type, flags) for run_type, flags in BF16.values() if "--compile" in flags]
    compiled += [case for case in in_bf16 if case[0] == "baseline"]  # what fp32 cases are compared with
    assert all("--attention" in flags for _, flags in compiled + in_bf16), "auto always names a kernel on CUDA"
    for run_type, recomputed in ((name, each) for name, entry in STRATEGIES.items() for each in entry.compiles_with):
        flag = f"--activation_checkpointing {recomputed}" if recomputed != "none" else ""
        cases = [flags for other, flags in compiled if other == run_type]
        assert any(flag in flags if flag else "recomput" not in flags for flags in cases), (run_type, recomputed)


@pytest.mark.parametrize(
    ("flags", "ranks", "why_not"),
    [
        ("baseline", 1, ""),
        ("ddp", 2, ""),
        ("ddp --activation_checkpointing block", 2, ""),
        ("fsdp --shard_size 1", 2, ""),
        ("fsdp --activation_checkpointing block", 2, "--activation_checkpointing block"),
        ("baseline --dropout 0.1", 1, "--dropout 0.1"),
        ("baseline --precision fp16 --device auto", 1, "--precision fp16"),
        ("fsdp --precision bf16 --mixed_precision native", 2, "--mixed_precision native"),
        ("optimized --zero_stage 2", 2, ""),
        ("pipeline", 2, ""),
        ("tensor", 2, ""),
        ("model_parallel", 2, ""),
        ("optimized --zero_stage 3", 2, "hooks inside the blocks"),
        ("pipeline --pipeline_schedule zero_bubble --num_layers 4", 2, "zero_bubble"),
    ],
)
@pytest.mark.usefixtures("on_cuda")
def test_auto_compiles_on_cuda_where_that_is_proven_and_says_where_not(token_files, flags, ranks, why_not):
    settings = settings_of(token_files, "--run_type", *flags.split(), world_size=ranks)
    compiles, words = choices._compiles(settings, CUDA)
    assert compiles is (why_not == "") and why_not in words
    assert words == "" or words.startswith("not compiled with ")


@pytest.mark.usefixtures("on_cuda")
def test_a_run_type_without_an_agreement_case_is_not_compiled(token_files, monkeypatch):
    unproven = dataclasses.replace(STRATEGIES["allreduce"], compiles_with=())
    monkeypatch.setitem(STRATEGIES, "allreduce", unproven)
    settings = settings_of(token_files, "--run_type", "allreduce", world_size=2)
    assert choices._compiles(settings, CUDA) == (
        False,
        "not compiled with --run_type allreduce: no test shows that compiled blocks compute the same there; give "
        "--compile to do it anyway",
    )


@pytest.mark.parametrize(("fault", "said"), [("", "(RuntimeError)"), ("no C compiler\nand more", "no C compiler)")])
def test_a_compiler_that_does_not_work_is_no_failure(token_files, monkeypatch, fault, said):
    def broken(function):
        raise RuntimeError(fault) if fault else RuntimeError

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(torch, "ones", lambda *shape, device, requires_grad: torch.full(shape, 1.0, requires_grad=True))
    compiles, words = choices._compiles(settings_of(token_files), CUDA)
    assert not compiles and said in words and "\n" not in words
