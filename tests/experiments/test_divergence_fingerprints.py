"""What the fingerprints of scripts/first_divergence.py promise, and what its answers say, without any run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.programs import run_here
from torch.testing import assert_close

from testbed.distributed.processes import Ended
from testbed.errors import InputError
from testbed.experiments.divergence import run_sides, sides
from testbed.experiments.divergence.answer import answer_of, lines_of
from testbed.experiments.divergence.causes import ratio_of
from testbed.experiments.divergence.comparison import SQUARES_OF_ALL, Comparison, size_of
from testbed.experiments.divergence.layouts import positions_of, print_of
from testbed.experiments.divergence.projections import fingerprint
from testbed.experiments.divergence.run_sides import Request, check, facts_of
from testbed.experiments.divergence.sides import (
    FIRST,
    PRECISION,
    SQUARES,
    SUM,
    Place,
    Side,
    file_name,
    read_file,
    read_folder,
    save,
)
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


def updated(**factors: float) -> Side:
    """Six matrices, and their updates in one step times a factor."""
    first, update = whole(torch.zeros(64, 8)), whole(torch.ones(64, 8))
    records = {Place(0, "update", name): {"all": {0: first}} for name in "abcdef"}
    records |= {Place(1, "update", name): {"all": {0: first + factors.get(name, 1.0) * update}} for name in "abcdef"}
    return Side(records, {"precision": "bf16", "max_grad_norm": 0.0, "data_ranks": 1, "work": {}})


def test_a_few_updates_may_differ_as_the_largest_of_the_noise_run_and_not_most_of_them():
    """Where a gradient is smaller than its rounding, Adam's update of it flips: in other weights each time."""
    noisy = updated(a=1.1)
    assert Comparison(updated(b=1.3, c=1.3), updated(), noisy).first() is None
    assert Comparison(updated(b=1.9), updated(), noisy).first().place == Place(1, "update", "b")
    for factor in (0.5, 1.5):
        assert Comparison(updated(**dict.fromkeys("abcdef", factor)), updated(), noisy).first().place.step == 1


def test_a_sum_that_is_not_that_of_its_summands_is_named():
    found = Comparison(side(1.0, (2.0, 2.0)), side(1.0)).first()
    assert (found.place.phase, found.ranks) == ("synchronisation", [])
    assert ratio_of(found.a, found.b) == pytest.approx(2.0)


def test_the_rank_whose_copy_differs_is_named():
    found = Comparison(side(1.0, (1.0, 1.3)), side(1.0)).first()
    assert (found.place.phase, found.ranks) == ("synchronisation", [1])


@pytest.mark.parametrize(("name", "said"), [("ln_f.bias", "ln_f.bias"), (SQUARES_OF_ALL, "all weights")])
def test_a_rank_that_brings_no_gradient_to_the_optimizer_skips_the_update(name, said):
    """It is not said that clipping scaled the gradients by what the rank's part is of them."""
    a, clipped = side(1.0, (1.0, 1.0)), Place(1, "clipping", name)
    x = whole(torch.ones(64, 8))
    squares = np.array([x[:, SQUARES].sum() / 2])
    brought = {"rank0": {0: squares}, "rank1": {1: squares}} if name == SQUARES_OF_ALL else {"all": {0: x, 1: x}}
    a.records[clipped] = brought
    assert Comparison(a, side(1.0)).first() is None
    a.records[clipped] = {part: {0: of[0]} for part, of in brought.items() if 0 in of}
    found = answer_of(a, side(1.0), None)["divergence"]
    assert (found["phase"], found["name"], found["ranks"]) == ("update", said, [1])
    assert found["cause"].startswith("rank 1 skips the optimizer's step")


@pytest.mark.parametrize(("last_stage", "is_said"), [(0, False), (1, True)])
def test_only_stages_have_an_embedding_with_two_ends(last_stage, is_said):
    x, other = whole(torch.ones(300, 32)), whole(torch.randn(300, 32))
    local = {f"all:context0stage{stage}:row{stage}": {stage: x} for stage in (0, last_stage)}
    total, mine = Place(1, "synchronisation", "wte.weight"), {Place(1, "backward", "wte.weight"): local}
    a, b = (Side({**mine, total: {"all": {0: found}}}, {}) for found in (other, x * len(local)))
    assert ("two ends" in answer_of(a, b, None)["divergence"]["cause"]) == is_said


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
        (["--a", "transformers --learning_rate 0.1"], "--learning_rate is 0.1"),
        (["--a", "--run_type 'ddp"], "close the quotation"),
        (["--a", "--run_type ddp", "--json", "no/such/folder/a.json"], "--json no/such/folder/a.json"),
        (["--a", "--run_type ddp", "--save", "."], "--save ."),
        (["--a", "--run_type ddp", "--json", "/dev/null"], "--json /dev/null cannot be written"),
        (["--a", "--run_type ddp", "--json", "x", "--save", "./x"], "--save and --json are both x"),
        (["--a", "--run_type baseline", "--", "--precision", "fp16"], "--precision fp16"),
        (["--a", "--run_type ddp", "--ranks_a", "2", "--", "--dropout", "0.1"], "is 2 of side A and 1 of side B"),
        (["--a", "--run_type baseline", "--", "--resume"], "--resume begins with weights"),
        (["--a", "--run_type baseline --no_such_flag"], "no_such_flag"),
        (["--a", "--run_type baseline", "--", "--eval_only"], "--eval_only makes no step"),
        (["--a", "x" * 5000], "is neither flags"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_before_anything_starts(words, said):
    ended = run_here(PROGRAM, *words)
    assert ended.returncode == 2
    assert said in ended.stderr


def test_a_side_is_not_written_over_and_its_name_may_have_a_space(tmp_path):
    path = tmp_path / "my side.npz"
    save(side(1.0), path)
    before = path.read_bytes()
    for flag in ("--json", "--save"):
        ended = run_here(PROGRAM, "--a", path, "--b", path, flag, path)
        assert ended.returncode == 2 and "is one of the sides" in ended.stderr
    assert path.read_bytes() == before
    assert run_here(PROGRAM, "--a", path, "--b", path).returncode == 0


@pytest.mark.parametrize("forged", [np.ones(0), np.ones((2, 2, 2, 2, 2)), np.ones(3, dtype=complex), np.array("a"), 1])
def test_a_forged_side_is_one_sentence(tmp_path, forged, monkeypatch):
    mine = side(1.0)
    mine.records[Place(1, "forward", "wte")] = {"0": {0: np.asarray(forged)}}
    save(mine, tmp_path / "a.npz")
    with pytest.raises(InputError, match="no file of fingerprints"):
        read_file(tmp_path / "a.npz")
    save(side(1.0), tmp_path / "b.npz")
    monkeypatch.setattr(sides, "LARGEST_FILE", 100)  # a few megabytes may unpack to any size
    with pytest.raises(InputError, match="no file of fingerprints"):
        read_file(tmp_path / "b.npz")


def test_a_side_whose_facts_are_forged_is_one_sentence(tmp_path):
    mine = side(1.0)
    mine.facts["max_grad_norm"], mine.facts["precision"] = "a", [1]
    save(mine, tmp_path / "a.npz")
    ended = run_here(PROGRAM, "--a", tmp_path / "a.npz", "--b", tmp_path / "a.npz")
    assert ended.returncode == 2 and "the file of --save does not hold together" in ended.stderr


def test_a_file_is_compared_with_as_many_steps_as_it_holds(tmp_path):
    words = ["--run_type", "baseline"]
    start, *_ = check(Request((words, words), (1, 1), [], 4, tmp_path))
    saved = side(1.0)
    saved.facts["work"] = facts_of(start)["work"]
    save(saved, tmp_path / "a.npz")
    with pytest.raises(InputError, match=r"--steps is 5, and the file holds 1, .* give --steps 1"):
        check(Request(([str(tmp_path / "a.npz")], words), (1, 1), [], 5, tmp_path))


def test_any_other_split_shows_the_noise(tmp_path):
    words = ["--run_type", "baseline", "--global_batch_size", "9", "--micro_batch_size_per_gpu", "1"]
    *_, again = check(Request((words, words), (1, 1), [], 3, tmp_path))
    assert again.settings.batch.micro_batch_size_per_gpu == 3


@pytest.mark.parametrize("kind", ["empty", "other", "half", "array", "no work"])
def test_a_file_that_holds_no_fingerprints_is_refused(tmp_path, kind):
    path = tmp_path / "a.npz"
    without_work = side(1.0)
    del without_work.facts["work"]
    save(without_work if kind == "no work" else side(1.0), path)
    content = {"empty": b"", "other": b"no", "half": path.read_bytes()[:900]}.get(kind)
    if content is not None:
        path.write_bytes(content)
    if kind == "array":
        with path.open("wb") as file:
            np.save(file, np.ones(3))
    ended = run_here(PROGRAM, "--a", path)
    assert ended.returncode == 2
    assert "no file of fingerprints" in ended.stderr


def test_a_file_of_settings_wins_over_the_tiny_model_and_a_flag_over_the_file(tmp_path):
    (tmp_path / "mine.toml").write_text("num_layers = 1\nembedding_size = 64\nmax_train_steps = 7\n")
    side = ["--config", str(tmp_path / "mine.toml")]
    a, b, *_ = check(Request((side, side), (1, 1), ["--embedding_size", "16"], 1, tmp_path))
    assert (a.settings.model.num_layers, a.settings.model.embedding_size, a.settings.last_step) == (1, 16, 7)
    assert a.settings.model.num_heads == 2
    assert b.settings.shape == a.settings.shape


def test_a_saved_side_from_before_a_flag_has_its_default(tmp_path):
    words = ["--run_type", "baseline"]
    start, b, _ = check(Request((words, words), (1, 1), [], 1, tmp_path))
    saved = side(1.0)
    saved.facts["work"] = {name: value for name, value in facts_of(start)["work"].items() if name != "dropout"}
    save(saved, tmp_path / "a.npz")
    assert check(Request(([str(tmp_path / "a.npz")], words), (1, 1), [], 1, tmp_path))[1] == b


def write_steps(folder: Path, rank: int, steps: int) -> None:
    x = whole(torch.ones(64, 8))
    for step in range(steps):
        np.savez(folder / file_name(step, rank), **{f"{step}|{rank}|update|ln_f.bias|{rank}": (1 + step) * x})


def test_steps_that_not_all_ranks_wrote_are_left_out(tmp_path):
    write_steps(tmp_path, 0, 4)
    write_steps(tmp_path, 1, 3)
    (tmp_path / PRECISION).write_text("bf16")
    found = read_folder(tmp_path, {"precision": "auto"}, ranks=2)
    assert (found.steps, found.facts["precision"]) == (2, "bf16")


def test_a_side_that_failed_is_not_said_to_be_right():
    failed = side(1.0)
    failed.facts["failed"] = "out of memory"
    answer = answer_of(failed, side(1.0), None)
    assert (answer["divergence"], answer["failed"]) == (None, ["A"])
    assert "Side A failed" in lines_of(answer)[-1]


def test_what_one_side_alone_computes_is_a_divergence():
    """A gradient that came past the hooks is not, nor what a side has none of its kind of."""
    a, b = side(1.0), side(1.0)
    local, total = Place(1, "backward", "wte.weight"), Place(1, "synchronisation", "wte.weight")
    for each in (a, b):
        each.records[total] = each.records[Place(1, "synchronisation", "ln_f.bias")]
    b.records[local] = b.records[total]
    b.records[Place(1, "update", "weight decay of wte.weight")] = {"": {0: np.array([0.1])}}
    inside = Place(1, "forward", "h.0.ln_1")
    b.records[inside] = b.records[total]
    for each in (a, b):
        each.records[Place(1, "forward", "h.0")] = each.records[total]
    answer = answer_of(a, b, None)
    assert (answer["divergence"], answer["left_out"]) == (None, 3)
    a.records[Place(1, "forward", "ln_f")] = b.records[inside]
    assert answer_of(a, b, None)["divergence"]["name"] == "h.0.ln_1"
    a.records[inside], b.records[Place(1, "forward", "ln_f")] = b.records[inside], b.records[inside]
    del a.records[total]
    answer = answer_of(a, b, None)
    assert lines_of(answer)[0] == "First divergence: step 1, backward, wte.weight: side B alone computes this."
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer


def test_sides_without_a_common_step_are_refused():
    with pytest.raises(InputError, match="no step that could be compared"):
        answer_of(Side({}, {"work": {}}), side(1.0), None)


@pytest.mark.parametrize(("name", "other"), [("learning rate", 0.0100001), ("weight decay of wte.weight", 0.1001)])
def test_rounding_to_bf16_explains_no_other_learning_rate(name, other):
    place = Place(1, "update", name)
    a, b = (Side({place: {"": {0: np.array([x])}}}, {"precision": "bf16"}) for x in (other, round(other, 3)))
    assert Comparison(a, b).first().place == place


def test_initial_weights_are_called_so():
    a, b = (Side({Place(0, "update", "ln_f.bias"): {"all": {0: f * whole(torch.ones(64, 8))}},
                  Place(1, "update", "learning rate"): {"": {0: np.ones(1)}}}, {}) for f in (1.0, 1.1))  # fmt: skip
    assert answer_of(a, b, None)["divergence"]["phase"] == "initial weights"


def test_attention_that_is_off_everywhere_is_not_taken_for_a_mask():
    """The first position attends to itself alone, so nothing changes there."""
    place, x = Place(1, "forward", "h.0.attention"), torch.randn(2, 32, 8)
    other = x * torch.cat([torch.ones(1, 1), 1 + torch.rand(31, 1)])
    a, b = (Side({place: {"0:all": {0: whole(each)}}}, {}) for each in (other, x))
    assert "its scale" in answer_of(a, b, None)["divergence"]["cause"]


def test_the_page_of_results_follows_from_its_file():
    from support.divergence import BELOW, RESULTS, table

    assert (RESULTS / "README.md").read_text(encoding="utf-8").partition(f"{BELOW}\n\n")[2] == f"{table()}\n"


@pytest.mark.parametrize(("fails", "code"), [("b_again", 0), ("a", 1), ("b", 1)])
def test_a_run_that_fails_ends_as_its_place_asks(tmp_path, monkeypatch, fails, code):
    """Only side B's second run, for the noise, may fail unharmed. A is saved before B runs."""

    def pretend(command, log, stop, env):
        prints = Path(command[command.index(run_sides.WORKER) + 1])
        assert not any(prints.iterdir()) and env["PYTHONSAFEPATH"] == "1"
        write_steps(prints, 0, 3)
        log.write_text("")
        return Ended(1 if prints.parent.name == fails else 0, 1.0)

    monkeypatch.setattr(run_sides, "run", pretend)
    for _ in range(2):
        files = ["--save", tmp_path / "a.npz", "--json", tmp_path / "answer.json"]
        ended = run_here(PROGRAM, "--a", "--run_type baseline", "--out_dir", tmp_path / "runs", *files)
        assert ended.returncode == code, ended.stdout + ended.stderr
        assert ("noise of rounding is not measured" in ended.stdout) == (fails == "b_again")
    assert read_file(tmp_path / "a.npz").steps == 2
    if fails != "b":
        answer = json.loads((tmp_path / "answer.json").read_text())
        assert (answer["divergence"], answer["failed"]) == (None, ["A"] if fails == "a" else [])
