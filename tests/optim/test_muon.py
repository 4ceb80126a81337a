"""Muon against torch.optim.Muon and against singular value decompositions; its AdamW half against torch.optim.AdamW;
the flags that choose it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.settings import settings_of, stand_in

from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape
from testbed.optim import muon
from testbed.optim.muon import COEFFICIENTS, ROUNDS, batches_of_a_shape, orthogonalised
from testbed.optim.optimizer import Muon, build_optimizer, set_learning_rate

SHAPES = [(24, 8), (8, 24), (8, 8), (8, 24), (16, 8)]  # tall, wide, square; two pairs that pass together
ADAM = {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_eps": 1e-6}
RATES = {"learning_rate": 0.01, "muon_learning_rate": 0.03, "muon_momentum": 0.9, "weight_decay": 0.1}


def matrices(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def tiny_model(**changes) -> tuple[GPT2, SimpleNamespace]:
    torch.manual_seed(0)
    model = GPT2(ModelShape(num_layers=2, num_heads=2, embedding_size=8, vocab_size=20, max_position_embeddings=8))
    return model, stand_in(**{"optimizer": "muon", "precision": "fp32", **ADAM, **RATES, **changes})


def test_a_loss_scaler_leaves_out_a_step_that_overflowed_and_changes_no_other():
    """As --precision fp16 trains; both kinds of groups."""
    start = [torch.randn(4, 8, generator=torch.Generator().manual_seed(1)), torch.ones(4)]
    gradients = [torch.randn(4, 8, generator=torch.Generator().manual_seed(2)), torch.full((4,), 0.5)]

    def step(scale: float, factor: float) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(tensor.clone()) for tensor in start]
        groups = [{"params": parameters[:1], "momentum": 0.95}, {"params": parameters[1:]}]
        optimizer = Muon([{"weight_decay": 0.1, **group} for group in groups], 0.1, (0.9, 0.95), 1e-8)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1)
        scaler.scale(torch.zeros(()))  # the scale lies on the device from here on
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient * scale * factor
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return [parameter.detach() for parameter in parameters]

    assert all(map(torch.equal, step(1024.0, 1.0), step(1.0, 1.0)))
    assert not any(map(torch.equal, step(1024.0, 1.0), start))
    assert all(map(torch.equal, step(1024.0, float("inf")), start))


@pytest.mark.parametrize("batch_elements", [0, 2**20], ids=["one by one", "together"])
@pytest.mark.parametrize("seed", range(3))
def test_it_is_torchs_own_muon(seed, batch_elements, monkeypatch):
    """Four steps in bf16, as torch orthogonalises. A batched product may round otherwise than a single one, and bf16
    keeps 8 bits: 2 percent of what the steps changed. Without Nesterov's momentum, 80 percent; with the other
    adjustment of the learning rate, more than 100."""
    monkeypatch.setitem(muon.BATCH_ELEMENTS, "cpu", batch_elements)
    ours = [torch.nn.Parameter(matrix) for matrix in matrices(seed)]
    theirs = [torch.nn.Parameter(matrix.clone()) for matrix in ours]
    begin = [matrix.detach().clone() for matrix in ours]
    group = {"params": ours, "weight_decay": 0.1, "momentum": 0.9}
    optimizer = Muon([group], 0.03, (0.9, 0.95), 1e-8, dtype=torch.bfloat16)
    reference = torch.optim.Muon(theirs, lr=0.03, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        for mine, other, gradient in zip(ours, theirs, matrices(100 * seed + step + 1), strict=True):
            mine.grad, other.grad = gradient, gradient.clone()
        optimizer.step()
        reference.step()
    for mine, other, start in zip(ours, theirs, begin, strict=True):
        assert (mine - other).norm() < 0.02 * (other - start).norm()
        assert torch.equal(optimizer.state[mine]["momentum_buffer"], reference.state[other]["momentum_buffer"])


def test_singular_vectors_stay_and_singular_values_go_through_the_polynomial():
    """Against a decomposition in float64: the iteration must do nothing else than move singular values."""
    wide = [matrix for matrix in matrices(7) if sorted(matrix.shape) == [8, 24]]
    for matrix, direction in zip(wide, orthogonalised(wide, torch.float32), strict=True):
        u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
        s = s / matrix.double().norm()
        for _ in range(ROUNDS):
            a, b, c = COEFFICIENTS
            s = a * s + b * s**3 + c * s**5
        assert direction.shape == matrix.shape and direction.dtype == torch.float32
        assert torch.allclose(direction.double(), u @ torch.diag(s) @ vt, atol=1e-4)
        assert s.min() > 0.6 and s.max() < 1.3
    assert torch.equal(orthogonalised([torch.zeros(3, 5)], torch.float32)[0], torch.zeros(3, 5))


def test_matrices_pass_together_up_to_a_limit(monkeypatch):
    assert [len(batch) for batch in batches_of_a_shape(matrices(0))] == [1] * len(SHAPES), "a CPU has no use for it"
    monkeypatch.setitem(muon.BATCH_ELEMENTS, "cpu", 2 * 8 * 24)
    found = [[tuple(matrix.shape) for matrix in batch] for batch in batches_of_a_shape(matrices(0))]
    assert found == [[(24, 8), (8, 24)], [(8, 24)], [(8, 8)], [(16, 8)]]


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest():
    (ours, settings), (theirs, of_adamw) = tiny_model(), tiny_model(optimizer="adamw")
    optimizer = build_optimizer(ours, settings)
    reference = build_optimizer(theirs, of_adamw)
    assert isinstance(reference, torch.optim.AdamW) and isinstance(optimizer, Muon)
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        for each in (optimizer, reference):
            set_learning_rate(each, 0.01 / (step + 1))
            each.step()
    others = dict(theirs.named_parameters())
    differing = {name for name, mine in ours.named_parameters() if not torch.equal(mine, others[name])}
    inside = {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
    assert differing == {f"h.{block}.{name}.weight" for block in (0, 1) for name in inside}
    kinds = [sorted(optimizer.state[mine]) for name, mine in ours.named_parameters() if name in differing]
    assert kinds == [["momentum_buffer"]] * len(differing), "one moment"


def test_muons_rate_follows_the_schedule_in_proportion():
    optimizer = build_optimizer(*tiny_model())
    set_learning_rate(optimizer, 0.004)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.012, 0.004, 0.004])
    plain = build_optimizer(*tiny_model(optimizer="adamw"))
    set_learning_rate(plain, 0.004)
    assert [group["lr"] for group in plain.param_groups] == [0.004, 0.004]


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("fp16", torch.float32), ("bf16", torch.bfloat16)]
)
def test_it_orthogonalises_in_bf16_only_where_the_run_does(precision, dtype):
    assert build_optimizer(*tiny_model(precision=precision)).dtype == dtype


def test_the_flags_have_their_defaults(token_files):
    settings = settings_of(token_files, "--optimizer", "muon", "--learning_rate", "0.002")
    assert (settings.optimizer.muon_learning_rate, settings.optimizer.muon_momentum) == (0.002, 0.95)
    assert settings.as_config()["muon_learning_rate"] is None, "it follows again where the file is used"
    plain = settings_of(token_files)
    assert (plain.optimizer.name, plain.optimizer.muon_learning_rate, plain.optimizer.muon_momentum) == (
        "adamw",
        None,
        None,
    )


def test_a_deepspeed_file_that_names_adamw_contradicts_muon(token_files, tmp_path):
    path = tmp_path / "deepspeed.json"
    path.write_text('{"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 0}}')
    flags = ["--run_type", "optimized", "--deepspeed_config", str(path)]
    assert settings_of(token_files, *flags).optimizer.name == "adamw"
    with pytest.raises(ValueError, match=r"--optimizer muon contradicts optimizer\.type"):
        settings_of(token_files, *flags, "--optimizer", "muon")
