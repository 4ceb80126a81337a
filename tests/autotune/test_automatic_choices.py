"""What the program decides by itself: the micro batch, compilation, the attention kernel; and 8-bit products."""

from __future__ import annotations

import json
import re

import pytest
import torch
from support.programs import SEQUENCE, TINY_RUN, data_flags
from support.settings import launch, settings_of

from testbed.autotune import choices, micro_batch
from testbed.autotune.choices import as_decided_before
from testbed.autotune.micro_batch import (
    Finding,
    available_bytes,
    find_micro_batch,
    micro_batch_candidates,
    predicted_bytes,
    with_micro_batch,
)
from testbed.config.run_types import STRATEGIES, WITH_AUTOMATIC_MICRO_BATCH
from testbed.config.table import FLAGS
from testbed.memory_model.job import DenseModel
from testbed.memory_model.memory import SPARE
from testbed.memory_model.model_states import whole

CPU = torch.device("cpu")
WIDE = ["--embedding_size", "512"]  # states outweigh logits


@pytest.mark.parametrize(
    ("ranks", "run_type", "data_ranks"),
    [(1, "ddp", 1), (2, "ddp", 2), (4, "ddp", 4), (4, "tensor", 1), (4, "mesh", 4)]
    + [(4, f"mesh --{axis}_parallel_size 2", 2) for axis in ("tensor", "context")],
)
def test_auto_is_a_divisor_of_a_ranks_share_and_keeps_the_global_batch(token_files, ranks, run_type, data_ranks):
    flags = ["--num_heads", "4", "--run_type", *run_type.split(), "--micro_batch_size_per_gpu", "auto"]
    settings = settings_of(token_files, *flags, world_size=ranks)
    assert settings.batch.micro_batch_size_per_gpu is None is settings.batch.grad_accum_steps
    candidates = micro_batch_candidates(settings)
    assert candidates[0] == 1 and candidates[-1] == 32 // data_ranks
    for size in candidates:
        chosen = with_micro_batch(settings, size)
        assert not chosen.finds_micro_batch and chosen.plan.total_steps == settings.plan.total_steps
        assert size * chosen.batch.grad_accum_steps * data_ranks == chosen.batch.global_batch_size == 32


def test_ranks_of_a_mesh_take_what_fits_on_the_fullest_of_them(token_files, monkeypatch):
    """Each predicts for its own free memory, and the axes of the mesh share what is predicted."""
    flags = ["--run_type", "mesh", "--micro_batch_size_per_gpu", "auto"]
    two, four = (
        settings_of(token_files, *flags, *axes.split(), world_size=4)
        for axes in ("--tensor_parallel_size 2", "--tensor_parallel_size 2 --context_parallel_size 2")
    )
    assert predicted_bytes(four, 8) < predicted_bytes(two, 8) < predicted_bytes(two, 16)
    monkeypatch.setattr(micro_batch, "available_bytes", lambda *_: predicted_bytes(two, 8))
    alone, words = find_micro_batch(two, launch(4), CPU)
    assert alone == 8 and "the largest that fits (predicted" in words
    full = micro_batch.Finding(2, 1, 1)
    monkeypatch.setattr(micro_batch.process_group, "gather_objects", lambda mine: [mine, full, mine, mine])
    assert find_micro_batch(two, launch(4), CPU)[0] == 2


def test_what_was_found_is_recorded_as_if_it_had_been_given(settings, token_files):
    found = with_micro_batch(settings, 8)
    given = settings_of(token_files, "--micro_batch_size_per_gpu", "8")
    assert found.with_values(given=given.origin.given) == given
    assert found.as_config()["micro_batch_size_per_gpu"] == 8


def test_prediction_touches_neither_random_numbers_nor_memory(settings):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    find_micro_batch(settings, launch(), CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert not isinstance(torch.ones(2), torch._subclasses.FakeTensor)


@pytest.mark.parametrize(("factor", "fits"), [(0.5, 1), (1.01, 8), (2.01, 16), (100, 32)])
def test_the_largest_that_fits_is_chosen_and_the_line_says_what_the_next_needs(settings, monkeypatch, factor, fits):
    needs = {size: 1_000 * size for size in micro_batch_candidates(settings)}
    monkeypatch.setattr(micro_batch, "predicted_bytes", lambda _, size: needs[size])
    monkeypatch.setattr(micro_batch, "available_bytes", lambda *_: int(8_000 * factor) if fits > 1 else 500)
    monkeypatch.setitem(micro_batch.ENOUGH_TOKENS, "cpu", 10**9)
    chosen, words = find_micro_batch(settings, launch(), CPU)
    assert chosen == fits
    assert words.startswith(f"micro batch {fits}:")
    assert ("may not fit" in words) == (fits == 1)
    assert (f"; {2 * fits} needs about" in words) == (1 < fits < 32)
    assert ("whole share" in words) == (fits == 32)


def test_a_gpu_gets_the_largest_useful_micro_batch_unless_one_is_given(token_files, monkeypatch):
    """The CPU's default is too small there. Nothing is found out where a flag gives it."""

    def micro_batch_of(*flags: str, ranks: int = 1) -> int:
        settings = settings_of(token_files, "--attention", "math", "--compile", "off", *flags, world_size=ranks)
        settings = settings.with_values(device="cuda", precision="bf16")
        decided, _ = choices.decide_open_settings(settings, launch(), torch.device("cuda"))
        resumed = choices.as_decided_before(settings, decided.as_dict() | {"micro_batch_size_per_gpu": 2})
        expected = 2 if "micro_batch_size_per_gpu" in decided.origin.chosen else settings.batch.micro_batch_size_per_gpu
        assert resumed.batch.micro_batch_size_per_gpu == expected, "a resumed run goes on with what was decided"
        return decided.batch.micro_batch_size_per_gpu

    monkeypatch.setattr(choices, "find_micro_batch", lambda *_: (8, "micro batch 8"))
    assert micro_batch_of("--run_type", "baseline") == 8
    assert micro_batch_of("--run_type", "ddp", ranks=2) == 8
    assert micro_batch_of("--run_type", "baseline", "--micro_batch_size_per_gpu", "2") == 2
    assert micro_batch_of("--run_type", "baseline", "--grad_accum_steps", "16", "--micro_batch_size_per_gpu", "1") == 1
    assert micro_batch_of("--run_type", "mesh", "--tensor_parallel_size", "2", ranks=4) == 8
    assert micro_batch_of("--run_type", "pipeline", ranks=2) <= 4, "whose schedule wants several"
    assert micro_batch_of("--run_type", "mesh", "--pipeline_stages", "2", ranks=4) <= 4


def test_a_micro_batch_on_a_gpu_ends_where_it_gets_no_faster(settings):
    assert micro_batch.useful_candidates(settings, torch.device("cuda")) == micro_batch_candidates(settings)
    long = settings.with_values(seq_length=8192)
    assert micro_batch.useful_candidates(long, torch.device("cuda")) == [1, 2, 4]
    assert micro_batch.useful_candidates(settings.with_values(seq_length=65536), torch.device("cuda")) == [1]


class FakeCuda:
    """PyTorch's functions of a GPU with 80 GiB, and a step that fails as it is told from the third candidate on."""

    def __init__(self, monkeypatch, error: Exception):
        self.tried: list[int] = []
        self.error = error
        for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * 2**30, 80 * 2**30))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.tried[-1] * 2**30)
        monkeypatch.setattr(micro_batch.torch, "empty", lambda *size, **options: None)
        monkeypatch.setattr(micro_batch, "_throw_away", lambda settings, device: None)
        monkeypatch.setattr(micro_batch, "_step", self.step)

    def step(self, strategy, settings, size: int) -> None:
        if len(self.tried) == 2:
            raise self.error
        self.tried.append(size)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
)
def test_every_way_to_run_out_of_memory_and_no_other_error_ends_the_trial(settings, monkeypatch, error):
    FakeCuda(monkeypatch, error)
    found = micro_batch._try(settings, torch.device("cuda"), [1, 2, 4, 8])
    assert (found.micro_batch, found.too_large, found.too_large_needs) == (2, 4, 4 * 2**30) and found.is_tried
    FakeCuda(monkeypatch, RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        micro_batch._try(settings, torch.device("cuda"), [1, 2, 4, 8])


def test_on_the_cpu_no_micro_batch_is_larger_than_it_helps(token_files):
    settings = settings_of(token_files, "--micro_batch_size_per_gpu", "auto", "--global_batch_size", "256")
    chosen, words = find_micro_batch(settings, launch(), CPU)
    assert chosen * SEQUENCE == micro_batch.ENOUGH_TOKENS["cpu"]
    assert "no faster" in words


def test_ranks_take_the_smallest_that_any_of_them_found(settings, monkeypatch):
    others = [Finding(16, 5, 10), Finding(4, 5, 6), Finding(8, 5, 8)]
    monkeypatch.setattr(micro_batch.process_group, "gather_objects", lambda mine: [mine, *others])
    monkeypatch.setattr(micro_batch, "available_bytes", lambda *_: 2**60)
    assert find_micro_batch(settings, launch(), CPU)[0] == 4


def test_ranks_of_a_host_share_its_memory_and_a_container_limits_it(tmp_path, monkeypatch):
    monkeypatch.setattr(micro_batch.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    monkeypatch.setattr(micro_batch, "memory_of_container", lambda root: (2**63, 2**63))
    assert available_bytes(CPU, launch(4)) == int(1000 * 0.95 / 4)
    monkeypatch.setattr(micro_batch, "memory_of_container", lambda root: (900, 800))
    assert available_bytes(CPU, launch(4)) == int(800 * 0.95 / 4)
    monkeypatch.undo()
    (tmp_path / "memory.max").write_text("900\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 650\ninactive_file 50\n")
    assert micro_batch.memory_of_container(tmp_path) == (900, 250)
    (tmp_path / "memory.max").write_text("max\n")
    assert micro_batch.memory_of_container(tmp_path) == (2**63, 2**63)


def test_what_sharding_saves_is_in_the_prediction(token_files):
    """On 8 ranks: an eighth of the model states of a single process and its whole activations."""

    def predicted(run_type: str, ranks: int) -> int:
        flags = ["--run_type", run_type, "--global_batch_size", str(8 * ranks), "--device", "cpu", *WIDE]
        flags += ["--micro_batch_size_per_gpu", "auto"]
        settings = settings_of(token_files, *flags, world_size=ranks).with_values(device="cuda")
        return predicted_bytes(settings, 4)

    states = 16 * whole(DenseModel.of_gpt2(settings_of(token_files, *WIDE).shape, SEQUENCE)).elements
    assert predicted("baseline", 1) - states < predicted("fsdp", 8) < predicted("baseline", 1) - 0.3 * states
    assert predicted("ddp", 8) - predicted("baseline", 1) == pytest.approx(SPARE * states / 4, rel=0.05)


@pytest.mark.launches
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "found"), [("ddp --dropout 0.1", 16), ("mesh --context_parallel_size 2", 32)], ids=["ddp", "mesh"]
)
def test_a_run_with_auto_learns_bit_for_bit_what_the_number_by_hand_does(ranks, token_files, tmp_path, flags, found):
    """On two ranks: weights, random numbers of dropout and the order of the data are those of the plain run."""
    work = [*TINY_RUN, *data_flags(token_files), "--run_type", *flags.split(), "--max_train_steps", "3"]
    work += ["--sample_tokens", "0", "--max_val_steps", "1"]
    losses, said = {}, {}
    for name in ("auto", str(found)):
        folder = tmp_path / name
        flags = ["--micro_batch_size_per_gpu", name, "--checkpoint_path", str(folder)]
        done = ranks.run_program([*work, *flags], tmp_path / f"ranks_{name}", 2)
        assert done.returncode == 0, done.stderr[-2000:]
        metrics = json.loads((folder / "training_metrics.json").read_text())
        assert metrics["training_config"]["micro_batch_size_per_gpu"] == found
        assert metrics["training_config"]["compile"] is False
        assert metrics["settings"]["micro_batch_size_per_gpu"] == found
        chosen = metrics["training_config"]["automatic_choices"]
        assert chosen["compile"] is False and chosen.get("micro_batch_size_per_gpu") == (
            found if name == "auto" else None
        )
        losses[name] = [(row["loss"], row["grad_norm"]) for row in metrics["steps"]]
        said[name] = done.stdout
    assert losses["auto"] == losses[str(found)]
    assert said["auto"].count(f"micro batch {found}:") == 1 and f"micro batch {found}:" not in said[str(found)]


def test_a_resumed_run_goes_on_with_what_was_decided(settings):
    recorded = {"precision": "bf16", "compile": True, "attention": "cudnn", "micro_batch_size_per_gpu": 4}
    again = as_decided_before(settings.with_values(precision="auto"), recorded)
    names = ("precision", "compile", "attention", "micro_batch_size_per_gpu", "grad_accum_steps")
    assert [again.value(name) for name in names] == ["bf16", True, "cudnn", 4, 8]
    assert again.origin.chosen == {"precision", "compile", "attention", "micro_batch_size_per_gpu"}
    given = settings.with_values(compile=False, attention="math")
    kept = as_decided_before(given, recorded)
    assert [kept.value(name) for name in names[:3]] == ["fp32", False, "math"], "what was typed stands"
    assert kept.origin.chosen == {"micro_batch_size_per_gpu"}
    old = {"precision": "fp32", "compile": True, "use_flash_attention": True, "micro_batch_size_per_gpu": 4}
    assert as_decided_before(settings, old).model.attention == "flash"
    assert as_decided_before(settings.with_values(precision="auto"), {}).compute.precision == "auto", "it is not known"


def test_help_names_the_run_types_whose_micro_batch_is_chosen_on_a_gpu(token_files):
    """And no others are left open there."""
    said = FLAGS["micro_batch_size_per_gpu"].help
    named = re.search(r"default: auto on CUDA with (.*?), unless --grad_accum_steps is given", said)[1]
    assert tuple(named.split(", ")) == WITH_AUTOMATIC_MICRO_BATCH
    for run_type, entry in STRATEGIES.items():
        flags = ["--run_type", run_type, "--device", "cuda"]
        settings = settings_of(token_files, *flags, world_size=2 if entry.is_distributed else 1)
        left_open = choices.with_micro_batch_left_open(settings).finds_micro_batch
        assert left_open == (run_type in WITH_AUTOMATIC_MICRO_BATCH), run_type
