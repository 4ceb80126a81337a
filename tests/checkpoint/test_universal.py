"""Universal checkpoints of DeepSpeed: the bits of weights and moments, in whose names and layout they may be."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.plain_loop import batch, losses_of
from support.programs import TINY_RUN, data_flags, run_here
from support.settings import refusal, typed

from testbed.checkpoint.adamw_state import MOMENTS, AdamWState, Rates
from testbed.checkpoint.formats import Checkpoint, read_checkpoint, read_start, write_checkpoint
from testbed.errors import InputError
from testbed.model.gpt2 import GPT2, to_transformers
from testbed.model.shape import ModelShape
from testbed.optim.optimizer import parameter_groups

SHAPE = ModelShape(num_layers=2, num_heads=2, embedding_size=16, vocab_size=300, max_position_embeddings=24)
CONVERTER = "scripts/convert_checkpoint.py"
QKV = "transformer.h.0.attn.c_attn.weight"


def drawn(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    tensors = {key: torch.rand_like(tensor) for key, tensor in GPT2(SHAPE).state_dict().items()}
    tensors["wte.weight"][300:] = 0
    return tensors


@pytest.fixture(scope="module")
def ours() -> Checkpoint:
    state = AdamWState({moment: drawn(seed) for seed, moment in enumerate(MOMENTS)}, 7, Rates())
    return Checkpoint(drawn(2), SHAPE, "bpe:300", 299, optimizer=state)


def write(folder: Path, ours: Checkpoint, prefix: str = "", is_theirs: bool = False, change=None) -> Path:
    """Write what ds_to_universal does, of a model under these names, and config.json beside it."""
    write_checkpoint(folder, dataclasses.replace(ours, optimizer=None))
    (folder / "model.safetensors").unlink()
    files = {}
    for kind, tensors in {"fp32": ours.weights, **ours.optimizer.moments}.items():
        named = to_transformers(tensors, SHAPE) if is_theirs else tensors
        for name, tensor in named.items():
            files[f"{prefix}{name}/{kind}"] = {"cat_dim": 0, "param": tensor}
            files[f"{prefix}{name}/step"] = torch.tensor(7.0)
    if change:
        change(files)
    for name, content in files.items():
        (folder / "zero" / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, folder / "zero" / f"{name}.pt")
    return folder


def same(found: Checkpoint, ours: Checkpoint) -> bool:
    pairs = [(found.weights, ours.weights)]
    pairs += [(found.optimizer.moments[moment], ours.optimizer.moments[moment]) for moment in MOMENTS]
    return all(torch.equal(one[key], other[key]) for one, other in pairs for key in other | one)


@pytest.mark.parametrize(("prefix", "is_theirs"), [("", False), ("module.", False), ("", True), ("module.", True)])
def test_weights_and_moments_are_read_bit_for_bit(tmp_path, ours, prefix, is_theirs):
    def tied(files: dict) -> None:
        files[f"{prefix}lm_head.weight/fp32"] = {"param": ours.weights["wte.weight"]}

    found = read_checkpoint(write(tmp_path / "universal", ours, prefix, is_theirs, tied), "it")
    assert same(found, ours) and found.optimizer.step == 7 and found.tokenizer == "bpe:300"
    assert "nanoGPT's defaults" in found.notes[0]


@pytest.mark.parametrize("is_theirs", [False, True])
def test_what_zero_3_saved_flat_gets_its_sizes_back(tmp_path, ours, is_theirs):
    prefix, sizes = "transformer." if is_theirs else "", {}

    def flat(files: dict) -> None:
        for name in [name for name in files if name.endswith("/step")]:
            files.pop(name)
        for name, content in files.items():
            sizes[name.rpartition("/")[0]] = content["param"].shape
            files[name] = content["param"].flatten()

    folder = write(tmp_path / "universal", ours, is_theirs=is_theirs, change=flat)
    states = {"param_shapes": [sizes], "global_steps": 9, "skipped_steps": 2}
    path = folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    torch.save(states, path)
    found = read_checkpoint(folder, "it")
    assert same(found, ours) and found.optimizer.step == 7
    wrapped = torch.Size([128, 2**57 + 3])  # 384 numbers, as wpe.weight has, if they are counted in 64 bits
    assert wrapped.numel() == ours.weights["wpe.weight"].numel()
    for size in (torch.Size([7, 7]), torch.Size([-24, -16]), torch.Size([384]), wrapped, None):
        torch.save({**states, "param_shapes": [{**sizes, f"{prefix}wpe.weight": size}] if size else None}, path)
        with pytest.raises(InputError, match=r"is flat; ZeRO 3 saves matrices flat, and zero_pp_rank_0"):
            read_checkpoint(folder, "it")
    for change in ({"global_steps": "9"}, {"global_steps": 10**400}, {"skipped_steps": -(10**400)}):
        torch.save({**states, **change}, path)
        found = read_checkpoint(folder, "it")
        assert found.optimizer is None and "number of steps" in found.notes[0]
    for name in sizes:
        torch.save(torch.tensor(5.0), folder / "zero" / name / "step.pt")
    torch.save(states, path)
    assert read_checkpoint(folder, "it").optimizer.step == 5, "a parameter's own number comes first"


def test_what_says_sizes_is_not_read_where_nothing_is_flat(tmp_path, ours):
    """It may be left from an earlier checkpoint, or damaged."""
    folder = write(tmp_path / "universal", ours)
    path = folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    sizes = {name: tensor.shape for name, tensor in ours.weights.items()}
    torch.save({"param_shapes": [sizes], "global_steps": 99, "skipped_steps": 0}, path)
    assert read_checkpoint(folder, "it").optimizer.step == 7
    path.write_bytes(b"damaged")
    assert same(read_checkpoint(folder, "it"), ours)
    (folder / "zero" / "wte.weight" / "step.pt").unlink()
    found = read_checkpoint(folder, "it")
    assert found.optimizer is None and "step.pt" in found.notes[0]


def test_training_begins_with_it_and_nothing_is_written_to_it(tmp_path, ours, token_files):
    folder = write(tmp_path / "universal", ours)
    flags = ["--seq_length", "16", "--device", "cpu", *data_flags(token_files), "--init_from", str(folder)]
    assert typed(flags).settings.shape == SHAPE
    assert torch.equal(read_start(str(folder), SHAPE)["wpe.weight"], ours.weights["wpe.weight"])
    words = ["--from", tmp_path / "no.pt", "--to", folder, "--overwrite"]
    done = run_here(CONVERTER, *words)
    assert done.returncode == 2 and "give --deepspeed, or name another" in done.stderr
    (folder / "config.json").unlink()
    assert "copy its config.json into the folder" in refusal(token_files, "--init_from", str(folder))


def test_a_universal_checkpoint_that_is_not_of_the_model_is_refused(tmp_path, ours):
    numbers = iter(range(100))

    def read(change) -> Checkpoint:
        folder = write(tmp_path / str(next(numbers)), ours, is_theirs=True, change=change)
        return read_checkpoint(folder, "it")

    def said(change) -> str:
        with pytest.raises(InputError, match=r"^it: ") as caught:
            read(change)
        assert "\n" not in str(caught.value) and str(tmp_path) not in str(caught.value)
        return str(caught.value)

    def becomes(content, kind: str = "fp32"):
        return lambda files: files.update({f"{QKV}/{kind}": content})

    def put(tensor, kind: str = "fp32"):
        return becomes({"param": tensor}, kind)

    assert "h.9.ln_1.weight is missing, or none" in said(lambda files: files.update({"h.9.ln_1.weight/fp32": 1}))
    assert "is flat; ZeRO 3" in said(becomes(torch.zeros(16 * 48)))
    assert "c_attn.weight is [48, 7]" in said(put(torch.zeros(48, 7)))
    assert "NaN" in said(put(torch.full((16, 48), float("nan"))))
    assert "is no plain tensor" in said(put(torch.zeros(1).expand(16, 48)))
    assert "is no plain tensor" in said(becomes({"other": 1}))
    assert "it names testbed" in said(becomes(ours))
    assert "is missing, or none" in said(lambda files: [files.pop(name) for name in list(files) if ".h.1." in name])
    for change, why in (
        (lambda files: files.pop(f"{QKV}/exp_avg"), "exp_avg.pt"),
        (put(torch.zeros(3, 3), "exp_avg"), "[3, 3]"),
        (put(torch.full((16, 48), -1.0), "exp_avg_sq"), "negative"),
        (becomes(torch.tensor(6.0), "step"), "number of steps"),
    ):
        found = read(change)
        assert found.optimizer is None and "is left out" in found.notes[0] and why in found.notes[0]


def test_layers_without_weights_are_refused_before_they_are_made(tmp_path, ours):
    folder = write(tmp_path / "universal", ours)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"n_layer": 2', '"n_layer": 900000'))
    never = mock.patch("testbed.checkpoint.universal.expected", side_effect=AssertionError("made"))
    with never, pytest.raises(InputError, match=r"^it: its weights have .* bytes, its config.json needs"):
        read_checkpoint(folder, "it")


def test_what_is_written_comes_back_bit_for_bit(tmp_path, ours):
    write_checkpoint(tmp_path / "folder", ours)
    words = ["--from", tmp_path / "folder", "--to", tmp_path / "universal", "--deepspeed"]
    done = run_here(CONVERTER, *words)
    assert done.returncode == 0 and "folder to DeepSpeed universal" in done.stdout, done.stderr
    assert "weight decay of its own" in done.stdout and "names another" not in done.stdout
    found = read_checkpoint(tmp_path / "universal", "it")
    assert same(found, ours) and (found.optimizer.step, found.tokenizer, found.end_of_text_id) == (7, "bpe:300", 299)
    assert (tmp_path / "latest_universal").read_text() == "universal"
    wte = torch.load(tmp_path / "universal" / "zero" / "transformer.wte.weight" / "fp32.pt")["param"]
    assert wte.shape == (300, 16) and wte.untyped_storage().nbytes() == wte.nbytes
    (tmp_path / "universal" / "zero" / "old").mkdir()
    assert run_here(CONVERTER, *words, "--overwrite").returncode == 0
    assert not (tmp_path / "universal" / "zero" / "old").exists()
    words[3] = tmp_path / "second"
    done = run_here(CONVERTER, *words)
    assert done.returncode == 0 and "names another checkpoint: load this one with tag='second'" in done.stdout
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    for to, said in ((tmp_path / "a.pt", "leave .pt out"), (tmp_path / "folder", "are both")):
        words[3] = to
        done = run_here(CONVERTER, *words, "--overwrite")
        assert done.returncode == 2 and said in done.stderr, done.stderr
    done = run_here(CONVERTER, *words[:1], tmp_path / "second", *words[2:], "--overwrite")
    assert (
        done.returncode == 2 and "holds no universal checkpoint, and --deepspeed replaces nothing else" in done.stderr
    )


def test_weights_without_a_state_are_written_with_one_that_begins_anew(tmp_path, ours):
    write_checkpoint(tmp_path / "universal", dataclasses.replace(ours, optimizer=None), is_universal_wanted=True)
    of_one = tmp_path / "universal" / "zero" / QKV
    assert torch.load(of_one / "step.pt") == 0 and not torch.load(of_one / "exp_avg_sq.pt")["param"].any()
    found = read_checkpoint(tmp_path / "universal", "it")
    assert torch.equal(found.weights["wte.weight"], ours.weights["wte.weight"]) and found.optimizer is None


@pytest.mark.slow
@pytest.mark.launches
def test_deepspeed_goes_on_from_what_is_written(ranks, tmp_path):
    """transformers' GPT-2 under each stage, loaded by DeepSpeed's own `load_universal`, against this program's model,
    uninterrupted."""
    pytest.importorskip("deepspeed")
    torch.manual_seed(0)
    model = GPT2(SHAPE)
    optimizer = torch.optim.AdamW(parameter_groups(model.parameters(), 0.2), lr=2e-3, betas=(0.8, 0.97), eps=1e-7)
    losses_of(model, optimizer, range(5))
    names = {parameter: name for name, parameter in model.named_parameters()}
    moments = {
        moment: {name: optimizer.state[parameter][moment] for parameter, name in names.items()} for moment in MOMENTS
    }
    state = AdamWState(moments, 5, Rates(2e-3, 0.8, 0.97, 1e-7, 0.2))
    made = Checkpoint(model.state_dict(), SHAPE, "bpe:300", 299, optimizer=state)
    write_checkpoint(tmp_path / "universal", made, is_universal_wanted=True)
    uninterrupted = losses_of(model, optimizer, range(5, 9))
    batches = [batch(step).tolist() for step in range(5, 9)]
    task = {"folder": str(tmp_path / "universal"), "lr": 2e-3, "weight_decay": 0.2, "batches": batches}
    tasks = [{**task, "stage": stage} for stage in (1, 2, 3)]
    of_stages = ranks.run("support.universal_worker", tmp_path / "ranks", tasks, 2)
    for stage, losses in enumerate(of_stages, 1):
        assert losses == pytest.approx(uninterrupted, abs=1e-5), stage


@pytest.mark.slow
@pytest.mark.launches
@pytest.mark.parametrize("stage", ["2", "3"])
def test_what_the_installed_deepspeed_writes_holds_the_bits_of_the_run(ranks, tmp_path, token_files, stage):
    """A run of ZeRO, converted by DeepSpeed's own program, against the run's checkpoint in its other form."""
    pytest.importorskip("deepspeed")
    run, universal = tmp_path / "run", tmp_path / "universal"
    flags = [
        *TINY_RUN,
        *data_flags(token_files),
        "--run_type",
        "optimized",
        "--zero_stage",
        stage,
        "--global_batch_size",
    ]
    flags += ["4", "--max_train_steps", "3", "--sample_tokens", "0", "--checkpoint_path", str(run)]
    done = ranks.run_program(flags, tmp_path / "start")
    assert done.returncode == 0, done.stderr
    saved = run / "checkpoints" / "step_000003"
    words = ["--input_folder", saved / "deepspeed", "--output_folder", universal, "--inject_missing_state"]
    words += ["--num_extract_workers", 1, "--num_merge_workers", 1]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *map(str, words)]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    (universal / "config.json").write_bytes((run / "config.json").read_bytes())
    found, expected = read_checkpoint(universal, "it"), read_checkpoint(saved, "it")
    assert found.optimizer.step == 3 and found.tokenizer == "bpe:300" and same(found, expected)
