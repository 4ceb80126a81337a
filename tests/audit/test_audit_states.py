"""States of transformers' Trainer: a changed figure that the others determine is found, and an explained one is not."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import pytest
from support import tracker_files as files
from support.real_logs import FOLDER
from support.trainer_simulation import simulated_state

from testbed.audit.claims import FAILS, NOTE, Finding, audit, read_reported

STATE = json.loads((FOLDER / "trainer_state.json").read_text(encoding="utf-8"))
WHOLE = json.loads(files.TRAINER_STATE)


def found_in(folder: Path, state: dict, name: str = "trainer_state.json") -> list[Finding]:
    path = folder / name
    path.write_text(json.dumps(state), encoding="utf-8")
    return [finding for finding in audit([path]) if not finding.unknown]


def built(folder: Path, *, resumed_at: int = 0, **changes) -> dict:
    """Return a state of 20 logged losses, 100 steps apart on a falling learning rate, with an evaluation each fifth."""
    losses = [round(3.0 / (1 + number / 8), 4) for number in range(20)]
    rest = losses[resumed_at:]
    path = files.trainer_state(
        folder, losses, num_train_epochs=1, train_loss=sum(rest) / len(rest), train_runtime=10.0 * len(rest), **changes
    )
    state = json.loads(path.read_text(encoding="utf-8"))
    *rows, end = state["log_history"]
    state["log_history"] = []
    for number, row in enumerate(rows, start=1):
        state["log_history"].append(row | {"learning_rate": 1e-4 * (1 - number / 20)})
        if number % 5 == 0:
            seconds = 20 + number / 100
            state["log_history"].append(
                {"eval_loss": row["loss"], "eval_runtime": seconds, "step": row["step"], "epoch": row["epoch"],
                 "eval_samples_per_second": round(1000 / seconds, 3),
                 "eval_steps_per_second": round(63 / seconds, 3)}
            )  # fmt: skip
    state["log_history"].append(end)
    return state


def test_real_and_built_states_contradict_nothing(tmp_path):
    for state in (STATE, WHOLE, built(tmp_path), built(tmp_path, resumed_at=12)):
        assert found_in(tmp_path, state) == []


EVALUATION = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
# of the state itself, and of an entry: what the rest of the file determines by more than 3 %
DETERMINED = {
    "STATE": (
        ("epoch", "global_step", "max_steps"),
        ("step", "epoch", *(name.replace("eval", "eval_g0") for name in EVALUATION)),
    ),
    "WHOLE": (
        ("best_metric", "total_flos", "global_step"),
        ("train_runtime", "train_steps_per_second", "train_samples_per_second", "total_flos"),
    ),
    "built": (
        ("epoch", "global_step", "max_steps"),
        ("step", "epoch", "learning_rate", "train_runtime", "train_steps_per_second", *EVALUATION),
    ),
}


def places(name: str, state: dict) -> list[tuple[dict, str]]:
    """Return the determined figures. A learning rate needs two on both sides."""
    of_state, of_entry = DETERMINED[name]
    with_rate = [row for row in state["log_history"] if "learning_rate" in row]
    return [(state, field) for field in of_state] + [
        (row, field)
        for row in state["log_history"]
        for field in of_entry
        if row.get(field) and not (field == "learning_rate" and row not in with_rate[2:-2])
    ]


def changed(value: float, choose: random.Random) -> float:
    """Return another number of as many places: 6 % to 50 % away, twice, half or ten times as much."""
    factor = choose.choice([1 + choose.uniform(0.06, 0.5), 1 / (1 + choose.uniform(0.06, 0.5)), 2, 0.5, 10])
    if isinstance(value, int):
        return round(value * factor)
    return float(f"{value * factor:.5g}") if abs(value) < 1e-2 else round(value * factor, 4)


@pytest.mark.parametrize("name", DETERMINED)
def test_one_changed_figure_of_a_state_is_found(tmp_path, name):
    sound = {"STATE": STATE, "WHOLE": WHOLE, "built": built(tmp_path)}[name]
    choose, missed, number = random.Random(22), [], 0
    for index in range(len(places(name, sound))):
        for _ in range(3):
            state = copy.deepcopy(sound)
            row, field = places(name, state)[index]
            before, row[field] = row[field], changed(row[field], choose)
            number += 1
            if not found_in(tmp_path, state):
                missed.append((field, before, row[field]))
    assert len(missed) <= 0.1 * number, (number, missed)


def test_what_is_whole_is_known_of_a_single_evaluation(tmp_path):
    """1,000 samples in batches of 16 are 63 steps; no whole batch gives 1,000 samples in 70."""
    state = built(tmp_path)
    rows = [row for row in state["log_history"] if "eval_runtime" in row]
    for row in rows[2:]:
        state["log_history"].remove(row)
    assert found_in(tmp_path, state) == []
    rows[0]["eval_steps_per_second"] = round(70 / rows[0]["eval_runtime"], 3)
    (found,) = found_in(tmp_path, state)
    assert "49.875 samples/s x 20.05 s = 999.994 samples and 3.491 steps/s x 20.05 s = 69.9946 steps" in found.message


def test_another_set_behind_the_training_is_no_fault(tmp_path):
    """Whoever evaluates a test set at the end logs it under the same names."""
    state = built(tmp_path)
    last = {"eval_loss": 1.0, "eval_runtime": 10.0, "eval_samples_per_second": 50.0, "eval_steps_per_second": 3.2,
            "step": 2000, "epoch": 1.0}  # fmt: skip
    assert found_in(tmp_path, state | {"log_history": [*state["log_history"], last]}) == []
    broken = found_in(tmp_path, state | {"log_history": [*state["log_history"], last | {"eval_runtime": 10.9}]})
    assert any("the line of step 2,000: eval_runtime x eval_samples_per_second" in each.message for each in broken)


def test_a_batch_that_is_no_whole_number_is_noted(tmp_path):
    (found,) = found_in(tmp_path, built(tmp_path, train_samples_per_second=83.6))
    assert (found.severity, "8.36 a step, and no whole batch gives that" in found.message) == (NOTE, True)
    assert found_in(tmp_path, built(tmp_path, train_samples_per_second=79.96)) == []  # the last batch is smaller


def test_data_without_a_length_count_their_own_epochs(tmp_path):
    """Eighteen passes of 830 steps, and then the share of all steps."""
    state = built(tmp_path) | {"num_train_epochs": 2**63 - 1}
    for row in state["log_history"]:
        whole, rest = divmod(row["step"], 830)
        row["epoch"] = round(whole + rest / 2000, 2)
    state["epoch"] = 2 + 340 / 2000
    assert found_in(tmp_path, state) == []
    state["log_history"][12]["epoch"] = 1.09
    assert [finding.severity for finding in found_in(tmp_path, state)] == [FAILS]


def test_a_resumed_run_whose_losses_are_level_tells_no_steps(tmp_path):
    """The mean of the rest is the mean of all: the seconds may be of the rest alone, as in transformers 5."""
    path = files.trainer_state(tmp_path, [2.0] * 10, train_loss=2.0, train_runtime=40.0)
    assert [finding.message for finding in audit([path]) if finding.severity == FAILS] == []


def test_steps_that_go_back_once_are_named_and_a_second_run_is_not(tmp_path):
    state = built(tmp_path)
    rows = state["log_history"]
    again = [row for row in rows if row["step"] > 1500]
    assert found_in(tmp_path, state | {"log_history": [*rows[:-1], *again]}) == []
    for row in rows:
        del row["epoch"]  # which would tell it too
    for at, step, around in ((3, 410, "300 and 500"), (5, 900, "500 and 600")):
        found = found_in(tmp_path, state | {"log_history": [*rows[:at], rows[at] | {"step": step}, *rows[at + 1 :]]})
        assert f"the log has step {step} between the steps {around}" in found[0].message


def test_the_best_result_is_of_its_step(tmp_path):
    state = built(tmp_path)
    best = next(row for row in state["log_history"] if "eval_loss" in row and row["step"] == 1500)
    state |= {"best_metric": best["eval_loss"], "best_model_checkpoint": "out/checkpoint-1500"}
    assert found_in(tmp_path, state) == []
    (found,) = found_in(tmp_path, state | {"best_model_checkpoint": "out/checkpoint-1000"})
    assert "said to be of step 1,000" in found.message and "is of step 1,500" in found.message


def test_evaluations_in_event_files_are_held_against_each_other(tmp_path):
    seconds = [20.0, 20.1, 20.2, 20.3, 20.4, 20.5]
    curves = {"train/loss": [3.0] * 6, "eval/runtime": seconds, "eval/samples_per_second": [1000 / s for s in seconds]}
    assert not [f for f in audit([files.event_file(tmp_path / "sound", curves)]) if f.severity == FAILS]
    curves["eval/runtime"][2] = 24.2
    (found,) = [f for f in audit([files.event_file(tmp_path / "broken", curves)]) if f.severity == FAILS]
    assert "the line of step 2: eval_runtime x eval_samples_per_second" in found.message


@pytest.mark.parametrize("name", ["trainer_state (1).json", "a__run__trainer_state.json"])
def test_a_copy_under_a_longer_name_is_a_state_too(tmp_path, name):
    (tmp_path / name).write_text(json.dumps(WHOLE), encoding="utf-8")
    (run,) = read_reported([tmp_path / name])
    assert run.optimizer_steps == 6000


@pytest.mark.parametrize(("max_steps", "epochs"), [(14_030, 30), (12_030, 32), (12_030, 27)])
def test_a_schedule_of_other_epochs_is_named(tmp_path, max_steps, epochs):
    (found,) = found_in(tmp_path, STATE | {"max_steps": max_steps, "num_train_epochs": epochs})
    assert f"max_steps {max_steps:,} are" in found.message and f"num_train_epochs is {epochs}" in found.message


def test_states_of_any_settings_contradict_nothing(tmp_path):
    """Batches that do not divide the data, dropped ones, accumulation, both versions, parts of epochs, test sets."""
    for seed in range(300):
        state = simulated_state(random.Random(seed))
        assert [finding.message for finding in found_in(tmp_path, state)] == [], seed
