"""What the program decides by itself: the micro batch, compilation, the attention kernel; and 8-bit products."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.programs import (
    REPOSITORY,
    SEQUENCE,
    TINY_RUN,
    data_flags,
    python_command,
    run_program,
    script,
    torchrun_command,
)
from support.settings import refusal, settings_of
from support.variants import BF16, VARIANTS

from testbed.autotune import attention, choices, micro_batch
from testbed.autotune.attention import Trial, check_backend, fastest_backend, own_choice, why_not
from testbed.autotune.choices import ChoiceContradicts, as_decided_before, decide
from testbed.autotune.device import check_float8, choose_device
from testbed.autotune.memory_model import elements_held, model_state_bytes
from testbed.autotune.micro_batch import (
    Finding,
    available_bytes,
    find_micro_batch,
    micro_batch_candidates,
    more_than_alone,
    predicted_bytes,
    with_micro_batch,
)
from testbed.config.compatibility import PROVEN_COMPILED
from testbed.config.flags import parse_command_line
from testbed.distributed.launch import Launch
from testbed.distributed.mesh import MeshSizes
from testbed.model.float8 import convert_to_float8_
from testbed.model.gpt2 import BACKENDS, GPT2
from testbed.model.shape import MODEL_SIZES, ModelShape

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ALONE = Launch(0, 1, 0, 1)


@pytest.fixture
def settings(token_files):
    """Of a run that leaves the micro batch to the program."""
    return settings_of(token_files, "--micro_batch_size_per_gpu", "auto")


# --- the micro batch


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_auto_is_a_divisor_of_a_ranks_share_and_keeps_the_global_batch(token_files, ranks):
    settings = settings_of(token_files, "--run_type", "ddp", "--micro_batch_size_per_gpu", "auto", world_size=ranks)
    assert settings.plan.finds_micro_batch and settings.batch.micro_batch_size_per_gpu == 1
    candidates = micro_batch_candidates(settings)
    assert candidates[0] == 1 and candidates[-1] == 32 // ranks
    for size in candidates:
        chosen = with_micro_batch(settings, size)
        assert not chosen.plan.finds_micro_batch and chosen.plan.total_steps == settings.plan.total_steps
        assert (
            chosen.batch.micro_batch_size_per_gpu * chosen.batch.grad_accum_steps * ranks
            == chosen.batch.global_batch_size
            == 32
        )


def test_what_was_found_is_recorded_as_if_it_had_been_given(settings, token_files):
    found = with_micro_batch(settings, 8)
    given = settings_of(token_files, "--micro_batch_size_per_gpu", "8")
    assert found.with_values(given=given.origin.given) == given
    assert found.as_config()["micro_batch_size_per_gpu"] == 8 and "finds_micro_batch" not in found.as_config()


REFUSED = {
    "auto and a number of micro batches": (
        "baseline --micro_batch_size_per_gpu auto --grad_accum_steps 4",
        ["auto", "--grad_accum_steps 4", "--global_batch_size"],
    ),
    "auto in a pipeline": ("pipeline --micro_batch_size_per_gpu auto", ["auto", "pipeline", "fsdp"]),
    "auto and tensor": ("tensor --micro_batch_size_per_gpu auto", ["auto", "tensor", "give a number"]),
    "a micro batch that is no number": ("ddp --micro_batch_size_per_gpu many", ["micro_batch_size_per_gpu", "many"]),
    "8 bits on the CPU": ("ddp --matmul fp8 --device cpu", ["--matmul fp8", "--device cpu"]),
    "8 bits and stages": ("pipeline --matmul fp8 --device auto", ["--matmul fp8", "pipeline", "fsdp"]),
    "8 bits and fp32": ("ddp --matmul fp8 --precision fp32 --device auto", ["--precision fp32", "--precision bf16"]),
    "8 bits and native": (
        "fsdp --matmul fp8 --device auto --precision bf16 --mixed_precision native",
        ["--mixed_precision native", "autocast"],
    ),
    "8 bits and an odd width": (
        "ddp --matmul fp8 --device auto --precision auto --embedding_size 24 --num_heads 2",
        ["--embedding_size 24", "16", "give 32"],
    ),
    "two kernels": ("ddp --use_flash_attention --attention math", ["--use_flash_attention", "--attention math"]),
    "compile what": ("ddp --compile maybe", ["--compile", "maybe", "auto, on, off"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_in_a_sentence(token_files, name):
    flags, words = REFUSED[name]
    message = refusal(token_files, "--run_type", *flags.split(), world_size=1 if flags.startswith("baseline") else 2)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_the_prediction_is_what_pytorch_really_allocates(settings):
    """The same step with memory: the profiler counts every allocation, in another way."""
    predicted = predicted_bytes(settings, 8)
    with torch.profiler.profile(profile_memory=True) as profile:
        strategy = micro_batch._throw_away(settings, CPU)
        micro_batch._step(strategy, settings, 8)
    held, peak = 0, 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert predicted == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("flags", ["--attention cudnn", "--attention efficient", "--matmul fp8", "--precision fp16"])
def test_what_only_a_gpu_computes_is_predicted_as_what_a_cpu_can(settings, flags):
    """The sharded run types on CUDA, whose step is run on tensors without memory."""
    name, value = flags.removeprefix("--").split()
    at_16_bits = settings.with_values(precision="bf16" if value in ("fp8", "fp16") else "fp32")
    expected = predicted_bytes(at_16_bits, 4)
    assert predicted_bytes(at_16_bits.with_values(**{name: value}), 4) == expected


def test_the_prediction_grows_by_the_activations_alone(settings):
    """From size to size the same bytes for every sequence; at least the logits' and the residual stream's."""
    sizes = [predicted_bytes(settings, size) for size in (4, 8, 12)]
    assert sizes[1] - sizes[0] == pytest.approx(sizes[2] - sizes[1], rel=0.01)
    logits = 4 * SEQUENCE * settings.shape.padded_vocab_size
    assert (sizes[1] - sizes[0]) / 4 > 2 * logits + 4 * 2 * 16 * SEQUENCE * settings.model.embedding_size


def test_prediction_touches_neither_random_numbers_nor_memory(settings):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    find_micro_batch(settings, ALONE, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert not isinstance(torch.ones(2), torch._subclasses.FakeTensor)


@pytest.mark.parametrize(("factor", "fits"), [(0.5, 1), (1.01, 8), (2.01, 16), (100, 32)])
def test_the_largest_that_fits_is_chosen_and_the_line_says_what_the_next_needs(settings, monkeypatch, factor, fits):
    needs = {size: 1_000 * size for size in micro_batch_candidates(settings)}
    monkeypatch.setattr(micro_batch, "predicted_bytes", lambda _, size: needs[size])
    monkeypatch.setattr(micro_batch, "available_bytes", lambda *_: int(8_000 * factor) if fits > 1 else 500)
    monkeypatch.setattr(micro_batch, "ENOUGH_TOKENS_ON_CPU", 10**9)
    chosen, words = find_micro_batch(settings, ALONE, CPU)
    assert chosen == fits
    assert words.startswith(f"micro batch {fits}:")
    assert ("may not fit" in words) == (fits == 1)
    assert (f"; {2 * fits} needs about" in words) == (1 < fits < 32)
    assert ("whole share" in words) == (fits == 32)


def test_on_the_cpu_no_micro_batch_is_larger_than_it_helps(token_files):
    settings = settings_of(token_files, "--micro_batch_size_per_gpu", "auto", "--global_batch_size", "256")
    chosen, words = find_micro_batch(settings, ALONE, CPU)
    assert chosen * SEQUENCE == micro_batch.ENOUGH_TOKENS_ON_CPU
    assert "no faster on a CPU" in words


def test_ranks_take_the_smallest_that_any_of_them_found(settings, monkeypatch):
    others = [Finding(16, 5, 10), Finding(4, 5, 6), Finding(8, 5, 8)]
    monkeypatch.setattr(micro_batch.process_group, "gather_objects", lambda mine: [mine, *others])
    monkeypatch.setattr(micro_batch, "available_bytes", lambda *_: 2**60)
    assert find_micro_batch(settings, ALONE, CPU)[0] == 4


def test_ranks_of_a_host_share_its_memory_and_a_container_limits_it(tmp_path, monkeypatch):
    monkeypatch.setattr(micro_batch.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    monkeypatch.setattr(micro_batch, "_left_in_cgroup", lambda root: 2**63)
    assert available_bytes(CPU, Launch(0, 4, 0, 4)) == int(1000 * 0.95 / 4)
    monkeypatch.undo()
    (tmp_path / "memory.max").write_text("900\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 650\ninactive_file 50\n")
    assert micro_batch._left_in_cgroup(tmp_path) == 250
    (tmp_path / "memory.max").write_text("max\n")
    assert micro_batch._left_in_cgroup(tmp_path) == 2**63


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_sharding_saves_is_in_the_prediction(token_files, optimizer):
    """On 8 ranks: an eighth of the model states, and what is gathered and on its way."""
    flags = ["--micro_batch_size_per_gpu", "auto", "--device", "cpu", "--optimizer", optimizer]
    settings = settings_of(token_files, "--run_type", "fsdp", *flags, world_size=8)
    alone = sum(model_state_bytes(settings.shape, MeshSizes(), optimizer=optimizer).values())
    shards = sum(model_state_bytes(settings.shape, settings.plan.mesh, optimizer=optimizer).values())
    parameters = elements_held(settings.shape)
    assert shards - alone < more_than_alone(settings, alone) < shards - alone + 2 * 4 * parameters
    ddp = settings_of(token_files, "--run_type", "ddp", *flags, world_size=8)
    assert more_than_alone(ddp, alone) == 4 * parameters


@pytest.mark.launches
@pytest.mark.slow
def test_a_run_with_auto_learns_bit_for_bit_what_the_number_by_hand_does(token_files, tmp_path):
    """On two ranks with dropout: weights, random numbers and the order of the data are those of the plain run."""
    work = [*TINY_RUN, *data_flags(token_files), "--run_type", "ddp", "--max_train_steps", "3", "--dropout", "0.1"]
    work += ["--sample_tokens", "0", "--max_val_steps", "1"]
    losses, said = {}, {}
    for name in ("auto", "16"):
        folder = tmp_path / name
        flags = ["--micro_batch_size_per_gpu", name, "--checkpoint_path", str(folder)]
        done = run_program([*torchrun_command(2), *work, *flags])
        assert done.returncode == 0, done.stderr[-2000:]
        metrics = json.loads((folder / "training_metrics.json").read_text())
        assert metrics["training_config"]["micro_batch_size_per_gpu"] == 16
        assert metrics["training_config"]["compile"] is False
        assert metrics["settings"]["micro_batch_size_per_gpu"] == 16
        chosen = metrics["training_config"]["automatic_choices"]
        assert chosen["compile"] is False and chosen.get("micro_batch_size_per_gpu") == (16 if name == "auto" else None)
        losses[name] = [(row["loss"], row["grad_norm"]) for row in metrics["steps"]]
        said[name] = done.stdout
    assert losses["auto"] == losses["16"]
    assert said["auto"].count("micro batch 16:") == 1 and "micro batch 16:" not in said["16"]


# --- decided when the run began


def test_a_resumed_run_goes_on_with_what_was_decided(settings):
    recorded = {"precision": "bf16", "compile": True, "attention": "cudnn", "micro_batch_size_per_gpu": 4}
    again = as_decided_before(settings.with_values(precision="auto"), recorded)
    assert (
        again.compute.precision,
        again.compute.compile,
        again.model.attention,
        again.batch.micro_batch_size_per_gpu,
    ) == (
        *("bf16", True, "cudnn"),
        4,
    )
    assert again.batch.grad_accum_steps == 8 and not again.plan.finds_micro_batch
    assert again.origin.chosen == {"precision", "compile", "attention", "micro_batch_size_per_gpu"}
    given = settings.with_values(compile=False, attention="math")
    kept = as_decided_before(given, recorded)
    assert (kept.compute.precision, kept.compute.compile, kept.model.attention) == ("fp32", False, "math"), (
        "what was typed stands"
    )
    assert kept.origin.chosen == {"micro_batch_size_per_gpu"}
    old = {"precision": "fp32", "compile": True, "use_flash_attention": True, "micro_batch_size_per_gpu": 4}
    assert as_decided_before(settings, old).model.attention == "flash"


# --- compilation


@pytest.mark.parametrize(
    ("typed", "meant"),
    [([], None), (["--compile"], True), (["--compile", "on"], True), (["--compile", "off"], False)],
)
def test_compile_in_its_three_forms(token_files, typed, meant):
    assert settings_of(token_files, *typed).compute.compile is meant


@pytest.mark.parametrize(("value", "meant"), [(True, True), (False, False), (None, None), ("auto", None), ("on", True)])
def test_a_config_file_of_an_earlier_version_is_still_read(tmp_path, value, meant):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"compile": value, "use_flash_attention": False}))
    assert parse_command_line(["--config", str(path)]).values["compile"] is meant


def test_auto_compiles_nothing_on_the_cpu(settings):
    decided, said = decide(settings.with_values(finds_micro_batch=False), ALONE, CPU)
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
    decided, _ = decide(settings_of(token_files), ALONE, CUDA)
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
    assert decide(on_the_cpu, ALONE, CPU)[0].compute.compile is False


@pytest.mark.usefixtures("on_cuda")
def test_what_was_given_stays_in_the_file(token_files):
    given = ["--attention", "math", "--compile", "off", "--num_workers", "3"]
    config = decide(settings_of(token_files, *given), ALONE, CUDA)[0].as_config()
    assert (config["attention"], config["compile"], config["num_workers"]) == ("math", False, 3)


def test_the_kernel_is_timed_with_the_micro_batch_that_the_run_will_have(settings, monkeypatch):
    timed_with = []

    def trial(settings, device):
        timed_with.append((settings.plan.finds_micro_batch, settings.batch.micro_batch_size_per_gpu))
        return "cudnn", []

    monkeypatch.setattr(choices, "fastest_backend", trial)
    monkeypatch.setattr(choices, "find_micro_batch", lambda *_: (8, "micro batch 8"))
    decide(settings.with_values(compile=False), ALONE, CUDA)
    assert timed_with == [(False, 8)]


def test_auto_compiles_only_what_an_agreement_test_compiles():
    """Each pair of run type and recomputation is a case there, and one is in bf16."""
    compiled = [(run_type, flags) for run_type, _, flags, _ in VARIANTS.values() if "--compile" in flags]
    compiled += [(run_type, flags) for run_type, flags, _ in BF16.values() if "--compile" in flags]
    assert all("--attention" in flags for _, flags in compiled), "auto always names a kernel on CUDA"
    assert any("--precision bf16" in flags for _, flags in compiled)
    for run_type, recomputed in ((run_type, each) for run_type, all_ in PROVEN_COMPILED.items() for each in all_):
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
        ("optimized --zero_stage 2", 2, "--run_type optimized"),
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


def test_a_compiler_that_fails_without_a_word_is_no_failure(token_files, monkeypatch):
    def broken(function):
        raise RuntimeError

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(torch, "ones", lambda *shape, device, requires_grad: torch.full(shape, 1.0, requires_grad=True))
    assert "(RuntimeError)" in choices._compiles(settings_of(token_files), CUDA)[1]


def test_a_compiler_that_does_not_work_is_no_failure(token_files, monkeypatch):
    def broken(function):
        raise RuntimeError("no C compiler\nand a long story")

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(torch, "ones", lambda *shape, device, requires_grad: torch.full(shape, 1.0, requires_grad=True))
    compiles, words = choices._compiles(settings_of(token_files), torch.device("cuda"))
    assert not compiles and "no C compiler" in words and "\n" not in words


# --- the attention kernel


def test_every_kernel_name_has_its_flag(token_files):
    assert settings_of(token_files, "--use_flash_attention").model.attention == "flash"
    assert settings_of(token_files, "--use_flash_attention").as_config()["attention"] == "flash"
    for name in (*BACKENDS, "auto"):
        assert settings_of(token_files, "--attention", name).model.attention == name


def test_on_the_cpu_there_are_two_kernels(token_files):
    settings = settings_of(token_files)
    there = [name for name in BACKENDS if why_not(name, settings, CPU, torch.float32) is None]
    assert there == ["flash", "math"]
    assert own_choice(settings, CPU) == "flash"
    assert own_choice(settings.with_values(dropout=0.5), CPU) == "math", "flash for CPU has no dropout"
    with pytest.raises(ValueError, match=r"--attention cudnn.*cpu.*leave --attention out"):
        check_backend(settings.with_values(attention="cudnn"), CPU)


def test_the_trial_takes_the_fastest_and_leaves_no_trace(token_files, monkeypatch):
    """Flash is real here; the times and a wrong kernel are planted."""
    settings = settings_of(token_files)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    chosen, trials = fastest_backend(settings, CPU)
    found = {trial.backend: trial.seconds is not None for trial in trials}
    assert chosen == "flash" and found == {"flash": True, "cudnn": False, "efficient": False}
    assert torch.equal(torch.get_rng_state(), before)
    for seconds, expected in (
        ({"flash": 3.0, "cudnn": 1.0, "efficient": 2.0}, "cudnn"),
        ({"flash": 2.0, "cudnn": 3.0, "efficient": 1.0}, "efficient"),
        ({"flash": 1.0, "cudnn": 1.04, "efficient": 1.02}, "cudnn"),  # within noise: always the same
        ({"flash": 1.04, "cudnn": 1.06, "efficient": 1.0}, "flash"),
    ):
        monkeypatch.setattr(attention, "_check_result", lambda *_: None)
        monkeypatch.setattr(attention, "_seconds_of_pass", lambda name, *_, s=seconds: s[name])
        assert fastest_backend(settings, CPU)[0] == expected


def test_a_machine_that_is_busy_for_a_while_does_not_move_the_choice_of_a_kernel(token_files, monkeypatch):
    """Kernels take turns and the least time counts: whichever pass other work falls on, cudnn is the fastest by far."""
    settings = settings_of(token_files)
    own_s, order = {"cudnn": 1.0, "flash": 2.0, "efficient": 3.0}, []
    monkeypatch.setattr(attention, "_check_result", lambda *_: None)
    for slow_from in range(24):
        passes = iter(range(100))

        def seconds(name, *_, slow_from=slow_from, passes=passes):
            order.append(name)
            return own_s[name] * (10 if slow_from <= next(passes) < slow_from + 15 else 1)

        monkeypatch.setattr(attention, "_seconds_of_pass", seconds)
        assert fastest_backend(settings, CPU)[0] == "cudnn"
    assert order[:6] == ["cudnn", "flash", "efficient"] * 2


def plant_kernel(monkeypatch, *dtypes: torch.dtype) -> None:
    """A device whose kernels run in these dtypes only, and say nothing where they do not."""

    def run(backend, settings, heads):
        if heads[0].dtype not in dtypes:
            raise RuntimeError

    monkeypatch.setattr(attention, "_forward_and_backward", run)


def test_a_kernel_that_has_one_precision_is_refused_only_once_the_other_was_chosen(token_files, monkeypatch):
    """No kernel of FlashAttention or cuDNN on CUDA computes in fp32, and --precision auto means bf16 there."""
    named = settings_of(token_files, "--use_flash_attention").with_values(precision="auto", compile=False)
    plant_kernel(monkeypatch, torch.bfloat16)
    check_backend(named, CPU)
    for chosen in ("bf16", "fp32"):
        monkeypatch.setattr(
            choices,
            "with_precision_resolved",
            lambda s, *_, p=chosen: (s.with_values(precision=p), "said"),
        )
        if chosen == "bf16":
            assert decide(named, ALONE, CPU)[0].compute.precision == "bf16"
            continue
        with pytest.raises(ChoiceContradicts, match=r"--attention flash.*--precision fp32.*give --precision bf16"):
            decide(named, ALONE, CPU)
    plant_kernel(monkeypatch)
    with pytest.raises(ValueError, match=r"bf16 or fp32.*\(RuntimeError\); leave --attention out"):
        check_backend(named, CPU)


def test_a_kernel_that_computes_something_else_takes_no_part(token_files, monkeypatch):
    settings = settings_of(token_files)
    plain = attention._forward_and_backward

    def wrong(backend, *arguments, **options):
        output, *gradients = plain(backend, *arguments, **options)
        return output, *((gradient * 1.1 if backend == "flash" else gradient) for gradient in gradients)

    monkeypatch.setattr(attention, "_forward_and_backward", wrong)
    chosen, trials = fastest_backend(settings, CPU)
    assert chosen == "auto" and "wrong by" in next(str(trial) for trial in trials if trial.backend == "flash")


@pytest.mark.parametrize("backend", ["flash", "math"])
def test_the_model_computes_with_the_kernel_that_was_chosen(backend):
    shape = ModelShape(num_layers=1, num_heads=2, embedding_size=32, vocab_size=50, max_position_embeddings=16)
    model = GPT2(shape, attention=backend)
    with torch.profiler.profile() as profile:
        model(torch.zeros(1, 16, dtype=torch.int64))
    names = {event.name for event in profile.events()}
    assert any("flash_attention_for_cpu" in name for name in names) == (backend == "flash")


# --- 8 bits


def test_a_device_that_does_not_multiply_in_8_bits_is_refused_before_ranks_meet(token_files, monkeypatch):
    settings = settings_of(token_files).with_values(matmul="fp8")
    with pytest.raises(ValueError, match=r"--matmul fp8.*compute capability 8\.9.*CPU"):
        choose_device(settings, ALONE)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    for capability, is_refused in (((8, 0), True), ((8, 9), False), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        if is_refused:
            with pytest.raises(ValueError, match=r"Old GPU has 8\.0"):
                check_float8(settings, torch.device("cuda"))
        else:
            check_float8(settings, torch.device("cuda"))


def test_8_bits_without_the_package_are_refused_with_what_to_install(token_files, monkeypatch):
    plain = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else plain(name))
    message = refusal(token_files, "--matmul", "fp8", "--device", "auto", "--precision", "auto")
    assert "torchao" in message and "pip install" in message


def test_8_bits_are_recorded_as_other_mathematics_with_the_rest_in_bf16(token_files, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    settings = settings_of(token_files, "--matmul", "fp8", "--device", "auto", "--precision", "auto")
    assert settings.compute.precision == "bf16"
    assert settings.plan.math_changes == ("the linear layers of the blocks multiply in fp8",)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao, an extra, is not installed")
def test_exactly_the_linear_layers_of_the_blocks_multiply_in_8_bits():
    """Emulated: rounded as float8 is. The model still learns the same function, roughly, under the same names."""
    shape = ModelShape(num_layers=2, num_heads=2, embedding_size=32, vocab_size=50, max_position_embeddings=16)
    torch.manual_seed(0)
    plain = GPT2(shape)
    model = GPT2(shape)
    model.load_state_dict(plain.state_dict())
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert sorted(convert_to_float8_(model, emulate=True)) == [f"h.{n}.{name}" for n in range(2) for name in layers]
    converted = {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}
    assert converted == {f"h.{n}.{name}" for n in range(2) for name in layers}
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
        name: tensor.shape for name, tensor in plain.state_dict().items()
    }
    ids = torch.arange(32).view(2, 16)
    ours, exact = (each(ids, ids) / ids.numel() for each in (model, plain))
    assert 0 < (ours - exact).abs().item() < 0.01
    ours.backward()
    exact.backward()
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        away = (parameter.grad - other.grad).norm() / other.grad.norm()
        assert away < 0.3 or name.endswith("c_attn.bias"), name


# --- what a GPU machine runs


@pytest.mark.launches
def test_the_gpu_benchmark_prints_its_plan_and_runs_nothing(tmp_path):
    script = REPOSITORY / "scripts" / "benchmark_gpu.sh"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    done = subprocess.run(
        ["bash", str(script), "--dry_run", str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    names = [line.split()[0] for line in done.stdout.splitlines()]
    for name in "tokens agree_fp32 agree_ddp peers largest compile_on attention_cudnn fp8 time_to_loss_muon".split():
        assert name in names
    assert not (tmp_path / "out").exists()
    program = python_command()[-1]
    for line in done.stdout.splitlines():  # what it would type is what gpt2.py takes
        words = line.split()
        if "src/gpt2.py" in words:
            parse_command_line(words[words.index("src/gpt2.py") + 1 :])
    assert Path(program).exists()
    wrong = subprocess.run(["bash", str(script), "--quick"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "--dry_run" in wrong.stderr


@pytest.mark.launches
def test_a_failed_step_or_a_loss_that_does_not_agree_fails_the_benchmark(tmp_path):
    (tmp_path / "steps.tsv").write_text("a\tdone\t3\t0\t\tpython a\nb\tskipped\t0\t-\tno time\tpython b\n")
    (tmp_path / "checks.tsv").write_text("a\tb\t1e-4\n")
    command = ["python", "--device", "cpu", "--seconds", "3", "--deadline_s", "9", str(tmp_path)]
    command[:1] = [python_command()[0], str(REPOSITORY / "scripts" / "summarise_benchmark.py")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    with (tmp_path / "steps.tsv").open("a") as steps:
        steps.write("c\tfailed\t9\t124\tlonger than its 9 s\tpython c\n")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["failed"] == ["c"] and found["agreement"][0]["holds"] is None
    runs = {
        name: SimpleNamespace(status="complete", train_losses=np.array([3.0, last]))
        for name, last in (("a", 2.0), ("b", 2.00005), ("c", 2.1), ("d", float("nan")))
    }
    held = [script("summarise_benchmark.py").agreement(runs, "a", name, 1e-4)["holds"] for name in ("b", "c", "d", "e")]
    assert held == [True, False, False, None]


def test_sizes_are_divisible_for_8_bits():
    assert all(shape.embedding_size % 16 == 0 for shape in MODEL_SIZES.values())
