"""The course of a race, by runs that a list gives: who runs when, who leaves, how it ends, and how it goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from support.programs import TINY_RUN, data_flags
from support.sweep_cases import as_sweep, finish, request

from testbed.errors import InputError
from testbed.experiments.made_up_tokens import write_made_up_tokens
from testbed.planner.automatic import MESH, job_on
from testbed.planner.machines import machine_here
from testbed.planner.step_time import published_constants, step_time
from testbed.sweep.field import OVER, Prediction, field_of, prune
from testbed.sweep.plan import COMPLETE, FAILED, PENDING, again
from testbed.sweep.race import (
    EQUIVALENT,
    ONE_LEADS,
    STOPPED,
    TIME_IS_UP,
    TOO_CLOSE,
    Difference,
    Race,
    RunStopped,
    TimeIsUp,
)
from testbed.sweep.race_runs import MOST_PAIRS, Budget, Fresh, Starts, measure_afresh, moved, opened
from testbed.sweep.request import Machine


@dataclass
class ListedTrack:
    """Speeds from a formula; what happened, in order."""

    speeds: dict[str, float]
    most_runs: int = 10**6
    failing: frozenset[tuple[str, int]] = frozenset()
    made: list[tuple[str, int]] = field(default_factory=list)
    wobble: float = 0.01
    end: type[Exception] = TimeIsUp
    rounds: int = 1000

    def rounds_left(self, names, done: int) -> int:
        return self.rounds - done

    def run(self, name: str, number: int) -> float | str:
        if len(self.made) >= self.most_runs:
            raise self.end
        self.made.append((name, number))
        if (name, number) in self.failing:
            return "out of memory"
        sign = math.cos(7.0 * number + 3.0 * sorted(self.speeds).index(name))
        return self.speeds[name] * math.exp(self.wobble * sign)


def test_every_configuration_runs_once_and_what_is_far_slower_leaves_before_its_second_run():
    track = ListedTrack({"slowest": 10, "a": 100, "b": 97, "slow": 30, "c": 95})
    race = Race(list(track.speeds), 0.02)
    race.hold(track)
    assert [name for name, number in track.made if number == 1] == list(track.speeds), "in the order of the field"
    second = [name for name, number in track.made if number == 2]
    assert second[:3] == ["a", "b", "c"] and set(second) < set(track.speeds), "the fastest first, and not all"
    assert race.end == ONE_LEADS and race.left == ["a"]
    assert race.out["slow"].startswith("slower than ") and set(race.out) == {"b", "c", "slow", "slowest"}
    assert race.first_two() == ["a", "b"]


def test_later_rounds_take_turns():
    track = ListedTrack(dict.fromkeys("abc", 100.0), wobble=0.05, most_runs=18)
    race = Race(list("abc"), 0.0)
    race.hold(track)
    orders = ["".join(name for name, number in track.made if number == turn) for turn in (3, 4, 5)]
    assert len(set(orders)) == 3 and {order[0] for order in orders} == set("abc")
    assert race.end == TIME_IS_UP and set(race.left) == set("abc")


def test_a_race_that_the_budget_cannot_decide_ends_early():
    speeds = {"a": 100, "b": 99.5, "c": 98}
    short = Race(list("abc"), 0.001)
    short.hold(track := ListedTrack(speeds, wobble=0.05, rounds=6))
    assert short.end == TOO_CLOSE and max(number for _, number in track.made) == 3 and short.left
    longer = Race(list("abc"), 0.001)
    longer.hold(ListedTrack(speeds, wobble=0.05, rounds=10**6, most_runs=40))
    assert longer.end == TIME_IS_UP, "with enough rounds it may be told"


def test_what_fails_leaves_with_its_reason_and_is_no_runner_up():
    track = ListedTrack({"a": 100, "b": 99, "c": 50}, failing=frozenset({("b", 2)}))
    race = Race(list("abc"), 0.02)
    race.hold(track)
    assert race.out["b"] == "failed: out of memory" and ("b", 3) not in track.made
    assert race.first_two() == ["a", "c"]


def test_a_race_in_which_all_fail_ends_without_a_winner():
    track = ListedTrack({"a": 1, "b": 1}, failing=frozenset({("a", 1), ("b", 1)}))
    race = Race(["a", "b"], 0.02)
    race.hold(track)
    assert (race.first_two(), race.left, race.end) == ([], [], ONE_LEADS)


def test_one_configuration_alone_runs_once():
    track = ListedTrack({"a": 100})
    race = Race(["a"], 0.02)
    race.hold(track)
    assert track.made == [("a", 1)] and race.end == ONE_LEADS and race.first_two() == ["a"]


def test_equal_ones_end_the_race():
    track = ListedTrack({"a": 100.0, "b": 100.05, "c": 20.0}, wobble=0.002)
    race = Race(list("abc"), 0.02)
    race.hold(track)
    assert race.end == EQUIVALENT and set(race.left) == {"a", "b"} and len(track.made) < 20


@pytest.mark.parametrize("end, word", [(TimeIsUp, TIME_IS_UP), (RunStopped, STOPPED)])
def test_a_race_that_was_cut_off_goes_on_to_the_same_end(end, word):
    speeds = {"a": 100, "b": 99.5, "c": 97, "d": 60}
    whole = ListedTrack(speeds, wobble=0.03, most_runs=30)
    Race(list("abcd"), 0.001).hold(whole)
    for cut in range(len(whole.made)):
        first = ListedTrack(speeds, wobble=0.03, most_runs=cut, end=end)
        race = Race(list("abcd"), 0.001)
        race.hold(first)
        assert race.end == word and first.made == whole.made[:cut]


# --- the field


@pytest.fixture
def in_folder_with_data(token_files, monkeypatch):
    monkeypatch.chdir(token_files[0].parent)
    return [*TINY_RUN, *data_flags(token_files)]


def a_field(passed_on: list[str], variants: str, over=(), ranks=(1, 2), cores=2):
    asked = request(variants, ranks=ranks, machine=Machine(cores), passed_on=passed_on, repeats=1)
    return field_of(asked, over, published_constants())


def test_the_field_uses_all_cores_and_leaves_out_what_makes_no_sense(in_folder_with_data):
    found = a_field(in_folder_with_data, "baseline,dp,ddp,tensor", ranks=(1, 2), cores=4)
    assert [(cell.variant, cell.ranks) for cell in found.cells] == [
        ("baseline:threads_per_rank=4", 1), ("ddp:threads_per_rank=2", 2), ("tensor:threads_per_rank=2", 2),
    ]  # fmt: skip
    assert not any(cell.oversubscribed for cell in found.cells)
    assert "the baseline with more work" in found.left_out["ddp on 1 rank"]
    assert "one process" in found.left_out["baseline on 2 ranks"]
    assert "CUDA" in found.left_out["dp on 2 ranks"]


def test_over_adds_one_flag_at_a_time(in_folder_with_data):
    found = a_field(in_folder_with_data, "ddp,optimized,pipeline", over=OVER, ranks=(2,))
    variants = {cell.variant for cell in found.cells}
    assert {"ddp:compile=off", "ddp:compile=on", "ddp:compile=off+bucket_cap_mb=5"} <= variants
    assert {f"optimized:compile=off+zero_stage={stage}" for stage in (0, 2, 3)} <= variants
    assert "optimized:compile=off+zero_stage=1" not in variants, "the default"
    assert "pipeline:compile=off+pipeline_schedule=zero_bubble" in variants
    sizes = {text.rpartition("=")[2] for text in variants if "micro_batch" in text and text.startswith("ddp")}
    assert sizes == {"1", "2"}, "a rank's share is 4, and 4 is the default"
    # what src/gpt2.py refuses is left out in its words
    ((name, reason),) = found.left_out.items()
    assert "micro_batch_size_per_gpu=8" in name and "at least as many micro batches as pipeline ranks" in reason
    assert len({cell.folder for cell in found.cells}) == len(found.cells)


def test_of_a_mesh_without_axes_the_plans_best_three_race(in_folder_with_data):
    found = a_field(in_folder_with_data, "ddp,mesh", ranks=(1, 2, 8))
    meshes = [cell for cell in found.cells if cell.run_type == MESH]
    assert [cell.ranks for cell in meshes] == [8, 8, 8]
    machine, constants = machine_here(8, None, None), published_constants()

    def seconds(settings) -> float:
        return step_time(job_on(settings, machine), machine, constants).seconds

    chosen = {}
    for cell in meshes:
        mesh = found.settings[cell.name].plan.mesh
        assert sum(size > 1 for size in (mesh.shard, mesh.pipeline, mesh.tensor, mesh.context)) > 1, "no other run type"
        named = dict(word.split("=") for word in cell.variant.partition(":")[2].split("+"))
        assert named["shard_size"] == str(mesh.shard), "each is named by its mesh"
        assert all(named.get(flag, "1") == str(size) for flag, size in mesh.flags().items())
        chosen[mesh] = seconds(found.settings[cell.name])
    assert len(chosen) == 3, "with one schedule of each"
    assert "the baseline with more work" in found.left_out["mesh on 1 rank"]
    assert "does on 2 devices what another run type does" in found.left_out["mesh on 2 ranks"]
    named = "mesh:shard_size={}+tensor_parallel_size=2+sequence_parallel=on"
    named = f"{named},{named}+pipeline_stages=2"
    others = a_field(in_folder_with_data, named.format(2, 1), ranks=(8,)).settings.values()
    slower = [seconds(settings) for settings in others if settings.plan.mesh not in chosen]
    assert slower and min(slower) >= max(chosen.values())


def test_meshes_race_where_the_batch_is_too_small_for_copies(in_folder_with_data):
    asked = request("mesh", ranks=(8,), machine=Machine(2), passed_on=in_folder_with_data, repeats=1, batch_sizes=(4,))
    assert len(field_of(asked, (), published_constants()).cells) == 3


def test_a_named_axis_is_kept_and_two_ranks_may_share_a_long_sequence(in_folder_with_data, tmp_path):
    (cell,) = a_field(in_folder_with_data, "mesh:tensor_parallel_size=2", ranks=(4,)).cells
    assert cell.variant == "mesh:tensor_parallel_size=2"
    write_made_up_tokens(tmp_path, 50, 200_000)
    data = data_flags((tmp_path / "train.bin", tmp_path / "val.bin"))
    work = [*TINY_RUN, *data, "--seq_length", "16384", "--max_position_embeddings", "16384"]
    cells = a_field(work, "mesh", ranks=(2,)).cells
    assert {cell.variant for cell in cells} == {f"mesh:shard_size={size}+context_parallel_size=2" for size in (1, 2)}


def test_unequal_work_does_not_race(in_folder_with_data):
    with pytest.raises(InputError, match="would do other work than"):
        a_field(in_folder_with_data, "ddp,ddp:gradient_compression=bf16", ranks=(2,))


def said(seconds: float, **changes) -> Prediction:
    return Prediction(seconds, 0.9 * seconds, 1.1 * seconds, "uncalibrated", **changes)


def test_the_plan_prunes_what_cannot_win_and_what_does_not_fit(in_folder_with_data):
    found = a_field(in_folder_with_data, "allreduce,ddp,fsdp,optimized,tensor", ranks=(2,))
    names = [cell.name for cell in found.cells]
    predictions = dict(
        zip(names, [said(1.2), said(1.0), said(1.3), said(0.5, does_not_fit="it needs 9 GiB of 8")], strict=False)
    )
    left = prune(found, predictions)
    # fsdp at best 1.17 s against 1.1 s of ddp at worst; allreduce may still win; nothing is known of tensor
    assert [cell.run_type for cell in left.cells] == ["ddp", "allreduce", "tensor"]
    assert "at best" in left.left_out[names[2]] and "9 GiB" in left.left_out[names[3]]


# --- its runs


@dataclass
class StandInRunner:
    """A `Runner` whose runs are files that appear, after seconds that nobody waits for."""

    sweep: object
    out_dir: object
    speeds: dict[str, float]
    seconds: float = 10.0
    made: list[str] = field(default_factory=list)
    settings: dict = field(default_factory=dict)
    machine: object = None
    stop: object = field(default_factory=lambda: SimpleNamespace(signal_number=None))

    def make(self, cell) -> None:
        self.made.append(cell.folder)
        wobble = 0.05 * math.cos(7.0 * cell.repeat + len(cell.run_type))
        finish(cell, self.out_dir, self.speeds[cell.run_type] * math.exp(wobble))
        cell.status, cell.seconds = COMPLETE, self.seconds
        self.sweep.write(self.out_dir)

    def outcome(self, cell) -> str:
        return cell.status


@pytest.fixture
def expected_10_s(monkeypatch):
    monkeypatch.setattr("testbed.sweep.race_runs.seconds_left", lambda cells, settings, machine: 10.0)


def starts_in(folder, seconds: float, speeds: dict[str, float], out="race"):
    asked = request(",".join(speeds), ranks=(2,), repeats=1, folder=str(folder / out))
    sweep = as_sweep(asked)
    first = {cell.name: cell for cell in sweep.cells}
    opened(sweep, first, folder / out, allow_mismatch=False)
    runner = StandInRunner(sweep, folder / out, speeds)
    return Starts(runner, first, Budget(seconds, [sweep]))


SPEEDS = {"ddp": 1000.0, "fsdp": 990.0, "tensor": 400.0}


def test_the_budget_counts_what_was_spent_and_the_race_goes_on_with_a_larger_one(tmp_path, expected_10_s):
    (tmp_path / "race").mkdir()
    starts = starts_in(tmp_path, 45.0, SPEEDS)
    race = Race(list(starts.first), 0.0)
    race.hold(starts)
    assert race.end == TIME_IS_UP and len(starts.runner.made) == 4 and starts.budget.spent == 40.0
    again_starts = starts_in(tmp_path, 75.0, SPEEDS)
    assert again_starts.budget.spent == 40.0
    longer = Race(list(again_starts.first), 0.0)
    longer.hold(again_starts)
    assert len(again_starts.runner.made) == 3 and again_starts.budget.spent == 70.0
    assert longer.runs[:4] == race.runs, "the runs that were there are not made again"
    assert not set(again_starts.runner.made) & set(starts.runner.made)


def test_another_race_in_the_folder_is_refused(tmp_path, expected_10_s):
    (tmp_path / "race").mkdir()
    starts = starts_in(tmp_path, 1000.0, SPEEDS)
    Race(list(starts.first), 0.5).hold(starts)
    with pytest.raises(InputError, match=r"holds a race with .*tensor"):
        starts_in(tmp_path, 1000.0, {"ddp": 1.0, "fsdp": 1.0})


def test_room_for_the_second_measurement_is_kept(tmp_path, expected_10_s):
    (tmp_path / "race").mkdir()
    starts = starts_in(tmp_path, 85.0, SPEEDS)
    starts.reserve = lambda name, number: 0.0 if number == 1 else 40.0
    Race(list(starts.first), 0.0).hold(starts)
    assert starts.budget.left == 45.0


def test_the_winner_is_measured_again_until_it_is_decided(tmp_path, expected_10_s):
    (tmp_path / "fresh").mkdir()
    starts = starts_in(tmp_path, 1000.0, {"ddp": 1000.0, "tensor": 400.0}, out="fresh")
    ddp, tensor = starts.first
    fresh = measure_afresh(starts, ddp, tensor, equivalent=0.02)
    assert fresh.is_decided and 3 <= fresh.pairs < MOST_PAIRS
    assert math.exp(fresh.ratio.estimate) == pytest.approx(2.5, rel=0.1)
    made = [(folder.split("_")[0], folder.rpartition("/")[2]) for folder in starts.runner.made]
    assert made[:4] == [("ddp", "run_1"), ("tensor", "run_1"), ("tensor", "run_2"), ("ddp", "run_2")], "in turn"
    assert made[-2:] == [("ddp", "profiled_1"), ("tensor", "profiled_1")]


def test_no_half_pair_is_begun(tmp_path, expected_10_s):
    (tmp_path / "fresh").mkdir()
    starts = starts_in(tmp_path, 55.0, {"ddp": 1000.0, "tensor": 999.0}, out="fresh")
    fresh = measure_afresh(starts, *starts.first, equivalent=0.0)
    assert (fresh.pairs, starts.budget.spent) == (2, 40.0)


def test_a_runner_up_that_is_faster_in_fresh_runs_takes_the_place():
    fresh = Fresh("a", "b", 5, Difference(-0.1, -0.15, -0.05), 0.02).fastest_first()
    assert (fresh.winner, fresh.runner_up, fresh.ratio) == ("b", "a", Difference(0.1, 0.05, 0.15))
    unsure = Fresh("a", "b", 5, Difference(-0.1, -0.25, 0.05), 0.02)
    assert unsure.fastest_first() is unsure


def test_another_run_of_a_cell_differs_in_its_folder_alone():
    (cell,) = as_sweep(request("ddp", ranks=(2,), repeats=1)).cells
    cell.status, cell.seconds = FAILED, 3.0
    second = again(cell, 2)
    assert second.gpt2_arguments == cell.gpt2_arguments and second.folder == f"{cell.name}/run_2"
    assert second.command[-2:] == [f"sweep/{cell.name}/run_2", "--overwrite"]
    assert (second.status, second.seconds) == (PENDING, None)
    assert moved([cell], "sweep/fresh")[cell.name].command[-2] == f"sweep/fresh/{cell.name}/run_1"
    profiled = again(cell, 1, profiled=True)
    assert "--profile" in profiled.gpt2_arguments and profiled.folder.endswith("/profiled_1")
