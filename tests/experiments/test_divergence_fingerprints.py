"""What the fingerprints of scripts/first_divergence.py promise, and what its answers say, without any run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.programs import run_here
from torch.testing import assert_close

from testbed.experiments.divergence.causes import ratio_of
from testbed.experiments.divergence.comparison import Comparison, size_of
from testbed.experiments.divergence.layouts import positions_of, print_of, whole_shape
from testbed.experiments.divergence.projections import FIRST, SQUARES, SUM, fingerprint
from testbed.experiments.divergence.sides import Place, Side, read_file, save
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape
from testbed.strategies.context import order_of_rank

SHAPE = ModelShape(2, 2, 32, 300, 64)
PROGRAM = "scripts/first_divergence.py"


def whole(x: torch.Tensor) -> np.ndarray:
    return fingerprint(x, torch.arange(x.shape[-2]), torch.arange(x.shape[-1]), x.shape[-2])


@pytest.mark.parametrize("seed", range(5))
def test_pieces_add_up_to_the_whole_however_they_are_cut(seed):
    torch.manual_seed(seed)
    rows, columns = 70 + 13 * seed, 5 + seed
    x = torch.randn(rows, columns)
    found = np.zeros_like(whole(x))
    for some_rows in torch.randperm(rows).chunk(3 + seed):
        for some_columns in torch.randperm(columns).chunk(2):
            found += fingerprint(x[some_rows][:, some_columns], some_rows, some_columns, rows)
    np.testing.assert_allclose(found, whole(x), atol=1e-9)


def test_summands_add_up_to_the_sum_and_squares_do_not():
    one, other = torch.randn(100, 7, dtype=torch.float64), torch.randn(100, 7, dtype=torch.float64)
    difference = whole(one) + whole(other) - whole(one + other)
    np.testing.assert_allclose(np.delete(difference, SQUARES, -1), 0, atol=1e-9)
    assert np.abs(difference[:, SQUARES]).max() > 1


def test_a_fingerprint_is_about_as_large_as_its_tensor():
    x = torch.randn(500, 40)
    numbers = whole(x)
    assert_close(numbers[:, SUM].sum(), x.double().sum().item())
    assert_close(numbers[:, SQUARES].sum(), x.double().square().sum().item())
    assert np.sqrt((numbers[:, FIRST:] ** 2).mean(-1).sum()) == pytest.approx(float(x.norm()), rel=0.3)


def test_rows_that_fill_the_vocabulary_up_change_nothing():
    """transformers has none."""
    x = torch.randn(300, 32)
    filled = torch.cat([x, torch.zeros(84, 32)])
    pieces = [print_of("wte.weight", each, SHAPE)[1] for each in (x, filled)]
    np.testing.assert_array_equal(*pieces)


def test_every_parameter_has_the_shape_that_its_name_says():
    for name, parameter in GPT2(SHAPE).named_parameters():
        rows, columns = whole_shape(name, SHAPE)
        assert (rows, columns) == (*parameter.shape, 1)[:2], name


def test_the_positions_of_a_context_rank_are_written_out_right():
    for ranks in (1, 2, 4):
        for rank in range(ranks):
            assert_close(positions_of(32, ranks, rank), order_of_rank(32, ranks, rank))


def test_the_bias_of_keys_has_no_gradient_to_compare():
    numbers = print_of("h.0.attn.c_attn.bias", torch.ones(96), SHAPE)[1]
    has = fingerprint(torch.arange(96).unsqueeze(1) // 32 != 1, torch.arange(96), torch.arange(1), 96)
    np.testing.assert_array_equal(numbers, has)


def side(value: float, of_ranks: tuple[float, ...] = (), bins: tuple[float, ...] = ()) -> Side:
    """One gradient of ones times a value; copies and summands where they are given."""
    x = whole(torch.ones(64, 8))
    copies = {rank: factor * x for rank, factor in enumerate(of_ranks or (value,))}
    records = {
        Place(1, "backward", "ln_f.bias"): {"all": {0: value * x}},
        Place(1, "synchronisation", "ln_f.bias"): {"all": copies},
    }
    return Side(records, {"precision": "fp32", "max_grad_norm": 0.0, "data_ranks": max(1, len(of_ranks)), "work": {}})


def test_equal_sides_do_not_part():
    assert Comparison(side(1.0), side(1.0), side(1.0 + 1e-7)).first() is None


def test_what_is_within_the_noise_is_no_divergence():
    assert Comparison(side(1.0003), side(1.0), side(1.0001)).first() is None
    assert Comparison(side(1.0003), side(1.0), side(1.0 + 1e-7)).first().place.phase == "backward"


def test_a_sum_that_is_not_that_of_its_summands_is_named():
    found = Comparison(side(1.0, (2.0, 2.0)), side(1.0)).first()
    assert (found.place.phase, found.ranks) == ("synchronisation", [])
    assert ratio_of(found.a, found.b) == pytest.approx(2.0)


def test_the_rank_whose_copy_differs_is_named():
    found = Comparison(side(1.0, (1.0, 1.3)), side(1.0)).first()
    assert (found.place.phase, found.ranks) == ("synchronisation", [1])


def test_places_are_in_the_order_of_computation():
    places = [
        Place(1, "data", "inputs"), Place(1, "forward", "wte"), Place(1, "forward", "h.0.ln_1"),
        Place(1, "forward", "h.0.attn.c_attn"), Place(1, "forward", "h.0.attention"), Place(1, "forward", "h.0"),
        Place(1, "forward", "h.1.ln_1"), Place(1, "forward", "ln_f"), Place(1, "forward", "loss"),
        Place(1, "backward", "ln_f.bias"), Place(1, "backward", "h.1.ln_1.bias"), Place(1, "backward", "h.0.ln_1.bias"),
        Place(1, "backward", "wte.weight"), Place(1, "clipping", "norm"), Place(1, "clipping", "wte.weight"),
        Place(1, "update", "wte.weight"), Place(2, "data", "inputs"),
    ]  # fmt: skip
    shuffled = [places[number] for number in torch.randperm(len(places))]
    assert sorted(shuffled, key=Place.order) == places


def test_a_side_is_read_back_as_it_was_saved(tmp_path):
    save(side(1.0, (1.0, 2.0)), tmp_path / "a.npz")
    again = read_file(tmp_path / "a.npz")
    place = Place(1, "synchronisation", "ln_f.bias")
    assert again.facts == side(1.0, (1.0, 2.0)).facts
    assert size_of(again.records[place]["all"][1], side(2.0).whole(place)) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--a", "--run_type baseline --learning_rate 0.1"], "--learning_rate is 0.1"),
        (["--a", "nanogpt"], "--a nanogpt is neither"),
        (["--a", "--run_type baseline", "--", "--precision", "fp16"], "--precision fp16"),
        (["--a", "--run_type ddp", "--ranks_a", "2", "--", "--dropout", "0.1"], "is 2 of side A and 1 of side B"),
        (["--a", "--run_type baseline", "--", "--resume"], "--resume"),
        (["--a", "--run_type baseline --no_such_flag"], "no_such_flag"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_before_anything_starts(words, said):
    ended = run_here(PROGRAM, *words)
    assert ended.returncode == 2
    assert said in ended.stderr


def test_a_file_that_holds_no_fingerprints_is_refused(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"no")
    ended = run_here(PROGRAM, "--a", tmp_path / "a.npz")
    assert ended.returncode == 2
    assert "no file of fingerprints" in ended.stderr


def test_the_page_of_results_follows_from_its_file():
    from support.divergence import BELOW, RESULTS, table

    assert (RESULTS / "README.md").read_text(encoding="utf-8").partition(f"{BELOW}\n\n")[2] == f"{table()}\n"
