"""The audit reads trackers' files: trainer_state.json, event files, folders of W&B and MLflow, Lightning's tables."""

from __future__ import annotations

import json

import pytest
from hypothesis import strategies as st
from support import tracker_files as files
from support.fuzz import READ, REFUSED, Fuzz
from support.mutations import broken_bytes, broken_json, broken_words

from testbed.audit.claims import FAILS, NOTE, audit, read_reported
from testbed.errors import InputError

LOSSES = [4.0, 3.5, 3.2, 3.0, 2.9, 2.8, 2.7, 2.65, 2.62, 2.6]


def fails(*paths) -> list:
    return [finding for finding in audit(paths) if finding.severity == FAILS]


def only(*paths):
    (run,) = read_reported(paths)
    return run


def test_a_state_of_transformers_trainer_is_read(tmp_path):
    path = files.trainer_state(tmp_path, LOSSES)
    run = only(path)
    assert (run.optimizer_steps, run.time_s, run.rate, run.rate_unit) == (1000, 100.0, 80.0, "samples/s")
    assert not run.rate_is_per_rank
    assert run.train_loss == 2.6  # of the last log, not the mean of all
    assert fails(path) == []


def test_a_real_state_is_read(tmp_path):
    path = tmp_path / "trainer_state.json"
    path.write_text(files.TRAINER_STATE, encoding="utf-8")
    run = only(path)
    assert (run.optimizer_steps, run.time_s, run.rate) == (6000, 52040.1074, 3.689)
    assert (run.train_loss, run.val_loss) == (0.0004, 0.32118794322013855)
    assert fails(path) == []


def test_copies_of_states_are_read_under_any_name_and_each_is_a_run_of_its_own(tmp_path):
    names = ("one_trainer_state.json", "two__trainer_state.json", "trainer_state (1).json")
    for name in names:
        (tmp_path / name).write_text(files.TRAINER_STATE, encoding="utf-8")
    assert [run.path.name for run in read_reported([tmp_path])] == sorted(names)
    other = tmp_path / "whisper.json"  # known by its content where it is typed
    other.write_text(files.TRAINER_STATE, encoding="utf-8")
    assert only(other).optimizer_steps == 6000


def test_a_typed_log_is_read_under_any_name(tmp_path):
    path = tmp_path / "train.log.1"
    path.write_text("| GPUs | tokens/s |\n|---|---|\n| 1 | 10 |\n| 2 | 20 |\n")
    assert only(path).form == "table"


def test_rates_that_count_steps_of_the_schedule_that_were_not_done_are_named(tmp_path):
    """Before transformers 5 the rates count the schedule's steps, however early the run ends."""
    path = files.trainer_state(tmp_path, LOSSES, max_steps=4000, train_steps_per_second=40.0,
                               train_samples_per_second=320.0)  # fmt: skip
    (found,) = fails(path)
    assert found.rule == "throughput is global"
    assert "count all 4,000 steps of the schedule, and the run ended after 1,000" in found.message
    assert "320 x 1,000 / 4,000 = 80 samples/s" in found.corrected


@pytest.mark.parametrize("changed", [{"train_runtime": 120.0}, {"train_steps_per_second": 11.5}, {"train_runtime": 80}])
def test_a_rate_that_does_not_follow_from_steps_and_seconds_is_named(tmp_path, changed):
    (found,) = fails(files.trainer_state(tmp_path, LOSSES, **changed))
    assert "steps/s x" in found.message


def test_a_rounded_rate_is_no_fault(tmp_path):
    """0.095 steps/s over 472 s is 44.8 steps, of 45."""
    assert fails(files.trainer_state(tmp_path, [3.0, 2.0, 1.5], every=15, train_runtime=472.0904,
                                     train_steps_per_second=0.095, train_samples_per_second=0.763)) == []  # fmt: skip


def test_a_resumed_run_of_old_versions_divides_the_schedule_by_the_seconds_of_the_rest(tmp_path):
    """Resumed at 600 of 1,000 steps: the rest took 40 s, and the rates are of 1,000 steps in them."""
    path = files.trainer_state(tmp_path, LOSSES, train_loss=sum(LOSSES[6:]) / 10, train_runtime=40.0,
                               train_steps_per_second=25.0, train_samples_per_second=200.0)  # fmt: skip
    (found,) = fails(path)
    assert "resumed there" in found.message and "after step 600" in found.message
    assert "= 10 steps/s" in found.corrected


def test_a_resumed_run_of_new_versions_is_no_fault(tmp_path):
    """transformers 5 counts the steps of the call, and takes their mean loss."""
    path = files.trainer_state(tmp_path, LOSSES, train_loss=sum(LOSSES[6:]) / 4, train_runtime=40.0)
    assert not any("train_loss" in finding.message for finding in audit([path]))


def test_a_history_with_lines_left_out_tells_no_mean(tmp_path):
    """Whoever shortens a file leaves the first lines and the last."""
    path = files.trainer_state(tmp_path, LOSSES)
    state = json.loads(path.read_text(encoding="utf-8"))
    del state["log_history"][2:8]
    path.write_text(json.dumps(state), encoding="utf-8")
    assert not any("train_loss" in finding.message for finding in audit([path]))


def evaluated(folder, **changes):
    """Write a state with five evaluations of 8,693 samples; `changes` are figures of the third."""
    path = files.trainer_state(folder, LOSSES, best_metric=1.5)
    state = json.loads(path.read_text(encoding="utf-8"))
    for number, seconds in enumerate((4481.6137, 4477.0926, 4468.4473, 4478.9685, 4480.0)):
        row = {
            "eval_loss": 1.9 - number / 10, "eval_runtime": seconds, "step": 200 * (number + 1),
            "eval_samples_per_second": round(8693 / seconds, 3), "epoch": 0.2 * (number + 1),
        }  # fmt: skip
        state["log_history"].insert(-1, row | (changes if number == 2 else {}))  # before the entry of the end
    path.write_text(json.dumps(state), encoding="utf-8")
    return path


def test_evaluations_of_one_set_have_one_number_of_samples(tmp_path):
    assert fails(evaluated(tmp_path / "sound")) == []
    for changes in ({"eval_runtime": 4000.0}, {"eval_samples_per_second": 2.1}):
        (found,) = fails(evaluated(tmp_path / "broken", **changes))
        assert "the line of step 600: eval_runtime x eval_samples_per_second" in found.message


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("best_metric", 1.234, "best_metric 1.234 is the result of no evaluation"),
        ("global_step", 900, "its log goes on to step 1,000"),
        ("max_steps", 800, "of 800 in max_steps"),
        ("total_flos", 3e15, "total_flos is 3e+15, and 2e+15 where the log ends"),
    ],
)
def test_a_state_that_contradicts_its_history_is_named(tmp_path, field, value, words):
    path = evaluated(tmp_path)
    state = json.loads(path.read_text(encoding="utf-8")) | {"total_flos": 2e15}
    next(row for row in state["log_history"] if "train_loss" in row)["total_flos"] = 2e15
    path.write_text(json.dumps(state), encoding="utf-8")
    assert fails(path) == []
    path.write_text(json.dumps(state | {field: value}), encoding="utf-8")
    assert any(words in finding.message for finding in fails(path))


def test_a_loss_that_is_not_a_number_is_named(tmp_path):
    path = files.trainer_state(tmp_path, [*LOSSES[:8], float("nan"), float("nan")], train_loss=0.0)
    assert any("not a number in the last 2 of" in finding.message for finding in fails(path))


def test_curves_of_one_program_are_held_against_each_other(tmp_path):
    rates, flops = [1000.0, 1010.0, 990.0, 1005.0, 1001.0], 3.5e-2
    curves = {"lm loss": LOSSES[:5], "throughput(tps)": rates, "tflops": [rate * flops for rate in rates]}
    assert fails(files.event_file(tmp_path / "sound", curves)) == []
    curves["tflops"][2] *= 1.2
    (found,) = fails(files.event_file(tmp_path / "broken", curves))
    assert "the line of step 2: tflops / throughput(tps)" in found.message


def test_a_rate_in_a_summary_is_held_against_the_settings(tmp_path):
    path = files.wandb_folder(tmp_path, files.NANOCHAT_SUMMARY.replace("1089236", "1189236"))
    (found,) = fails(path)
    assert "total_batch_size says 524,288" in found.message


def test_checkpoints_of_a_run_are_one_run(tmp_path):
    files.trainer_state(tmp_path / "checkpoint-500", LOSSES[:5])
    files.trainer_state(tmp_path / "checkpoint-1000", LOSSES)
    assert only(tmp_path).optimizer_steps == 1000
    last = files.trainer_state(tmp_path, LOSSES)
    assert only(tmp_path).path == last
    files.event_file(tmp_path / "runs" / "Nov23", {"train/loss": LOSSES})
    assert only(tmp_path).form == "trainer_state.json"


def test_event_files_are_read(tmp_path):
    path = files.event_file(
        tmp_path, {"loss_metrics/global_avg_loss": LOSSES, "throughput(tps)": [100.0, 1000.0, 1010.0, 990.0, 1005.0]}
    )
    for run in (only(path), only(tmp_path)):
        assert run.train_loss == pytest.approx(2.6)
        assert (run.rate, run.rate_is_per_rank, run.rate_unit) == (1000.0, True, "tokens/s")  # the median
        assert run.optimizer_steps == 9
    assert fails(tmp_path) == []


def test_real_event_files_of_megatron_are_read(tmp_path):
    """Its arguments are in the file, each a text."""
    path = tmp_path / "events.out.tfevents.1774532589.nid006827.122730.0"
    path.write_bytes(files.EVENTS)
    run = only(tmp_path)
    assert (run.world_size, run.global_batch_size, run.optimizer_steps) == (1, 80, 15)
    assert (round(run.time_s, 2), round(run.rate, 1), run.rate_unit) == (13.71, 375.5, "TFLOP/s")
    assert run.train_loss == pytest.approx(8.368310928344727)
    assert fails(path) == []


def test_a_restart_takes_the_place_of_what_was_written_beyond_its_first_step(tmp_path):
    files.event_file(tmp_path, {"lm loss": [4.0, 3.0, 2.0, 1.0]}, suffix=".a")
    files.event_file(tmp_path, {"lm loss": [2.5, 2.4]}, start=2, suffix=".b")
    points = only(tmp_path).details["curves"]["lm loss"]
    assert [(point.step, round(point.value, 3)) for point in points] == [(0, 4), (1, 3), (2, 2.5), (3, 2.4)]


def test_an_event_file_that_ends_in_a_record_is_read_and_a_damaged_one_says_so(tmp_path):
    path = files.event_file(tmp_path, {"lm loss": LOSSES})
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    assert only(path).train_loss == pytest.approx(2.62)
    assert not any("damaged" in words for words in only(path).unread)
    path.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])  # in the last number
    assert any("damaged" in words for words in only(path).unread)
    path.write_bytes(content[:-40] + bytes([content[-40] ^ 1]) + content[-39:])
    assert any("damaged" in words for words in only(path).unread)
    for content, words in (
        (b"version https://git-lfs.github.com/spec/v1\n", "pointer of git lfs"),
        (b"x" * 99, "no event"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=words):
            read_reported([path])
        files.trainer_state(tmp_path / "other", LOSSES)
        (found,) = [finding for finding in audit([tmp_path]) if words in finding.message]
        assert found.severity == NOTE  # in a folder it ends nothing


def test_a_wandb_folder_is_read(tmp_path):
    """Real: a run of nanochat."""
    files.wandb_folder(tmp_path / "run-20251015_024018-z9s7cd4f")
    run = only(tmp_path)
    assert (run.rate, run.rate_is_per_rank) == (1089236, False)
    assert (run.train_loss, run.time_s) == (2.71014912564309, 0.4813351631164551)
    assert any("curves" in words for words in run.unread)
    assert fails(tmp_path) == []


def test_the_history_of_a_real_wandb_log_is_read(tmp_path):
    """The rate is the median of its steps, the summary has the last one."""
    files.wandb_folder(tmp_path / "run-20251015_183235-md4wekyz")
    log = tmp_path / "run-20251015_183235-md4wekyz" / "run-md4wekyz.wandb"
    log.write_bytes(files.WANDB_LOG)
    run = only(tmp_path)
    assert (run.rate, run.time_s) == (1085519, 0.4829835891723633)
    points = run.details["curves"]["train/loss"]
    assert [point.step for point in points] == [10, 410, 760]
    assert points[0].time_s == pytest.approx(1760553205.445276)
    assert only(log).rate == 1085519  # typed, or without a summary
    log.write_bytes(files.WANDB_LOG[:-5])
    assert [point.step for point in only(log).details["curves"]["train/loss"]] == [10, 410]
    log.write_bytes(files.WANDB_LOG[:700] + b"x" + files.WANDB_LOG[701:])
    assert any("damaged" in words for words in only(log).unread)


def test_a_copy_of_a_wandb_folder_is_no_second_run(tmp_path):
    """wandb/latest-run is a link; in an archive it is a copy."""
    for name in ("latest-run", "run-20251015_024018-z9s7cd4f"):
        files.wandb_folder(tmp_path / name)
    assert only(tmp_path).form == "W&B folder"


def test_transformers_figures_are_checked_wherever_they_are_kept(tmp_path):
    """In W&B's summary the schedule's length is not known, so fewer steps than counted are a fault of the rate."""
    summary = {"train/global_step": 1000, "train/train_runtime": 100.0, "train/train_loss": 2.0,
               "train/train_steps_per_second": 40.0, "train/train_samples_per_second": 320.0}  # fmt: skip
    path = files.wandb_folder(tmp_path / "run", json.dumps(summary))
    assert "1,000 steps of the run" in fails(path)[0].message
    assert only(path).optimizer_steps == 1000


def test_an_mlflow_folder_is_read(tmp_path):
    """Real: a run whose one metric has one value."""
    (tmp_path / "meta.yaml").write_text("experiment_id: '0'\nname: Default\n", encoding="utf-8")
    files.mlflow_run(tmp_path / "cb0096518b0e4c66a94428555f05420b")
    run = only(tmp_path)
    assert (run.form, run.train_loss) == ("MLflow folder", 3.2727866172790527)
    with pytest.raises(InputError, match="no MLflow run"):
        read_reported([tmp_path / "meta.yaml"])


def test_curves_and_parameters_of_mlflow_are_read(tmp_path):
    curve = "".join(f"{1_700_000_000_000 + 1000 * step} {2 / (step + 1)} {step}\n" for step in range(5))
    meta = files.mlflow_run(
        tmp_path / "run",
        {"train/loss": curve, "eval/loss": "1700000000000 nan 0\n1700000001000 1.5 4\n", "old": "1 2\n"},
        {"world_size": "4", "per_device_train_batch_size": "8", "gradient_accumulation_steps": "2"},
    )
    run = only(meta)
    assert (run.world_size, run.global_batch_size, run.train_loss, run.val_loss) == (4, 64, 0.4, 1.5)
    assert run.details["curves"]["train/loss"][1][2] == 1_700_000_001.0


def test_a_table_of_lightning_is_read(tmp_path):
    """Real: two rows of a run, steps counted from 0."""
    path = tmp_path / "metrics.csv"
    path.write_text(files.LIGHTNING_CSV, encoding="utf-8")
    run = only(path)
    assert (run.form, run.optimizer_steps, run.train_loss) == ("Lightning metrics.csv", 20, 6.386987686157227)
    path.with_name("hparams.yaml").write_text("world_size: 2\nmodel: !!python/object:a.B {}\n", encoding="utf-8")
    assert only(path).world_size == 2
    files.event_file(tmp_path, {"train_loss_step": [6.5, 6.4]})
    assert only(tmp_path).form == "Lightning metrics.csv"


def test_steps_of_litgpt_are_micro_batches(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("iter,step,loss,device/items_per_sec\n8,7,3.5,1000\n16,15,3.4,1010\n", encoding="utf-8")
    assert (only(path).optimizer_steps, only(path).rate, only(path).rate_is_per_rank) == (None, 1005, True)


def test_a_rate_whose_scope_no_name_tells_is_not_taken(tmp_path):
    curves = {"train/loss": [3.0], "perf/tokens_per_sec": [1000.0]}
    run = only(files.event_file(tmp_path / "a", curves))
    assert run.rate is None
    assert "whether perf/tokens_per_sec is of one rank or of all" in run.unread


def test_runs_of_a_folder_are_compared_only_where_they_are_typed(tmp_path):
    one, other = (files.trainer_state(tmp_path / name, losses) for name, losses in (("a", LOSSES), ("b", LOSSES[:5])))
    assert audit([tmp_path]) == audit([one]) + audit([other])
    for paths in ((one, other), (one.parent, other.parent)):
        assert any("optimizer steps 1,000 against 500" in finding.message for finding in audit(paths))


def test_files_of_other_programs_in_a_folder_are_passed_over(tmp_path):
    (tmp_path / "meta.yaml").write_text("title: a page\n", encoding="utf-8")
    (tmp_path / "metrics.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    files.wandb_folder(tmp_path / "run", '{"accuracy": 0.5}')
    with pytest.raises(InputError, match="no run was found"):
        read_reported([tmp_path])


def test_no_broken_file_of_a_folder_breaks_the_audit(tmp_path):
    folder = tmp_path / "files"
    state = files.trainer_state(folder, LOSSES)
    summary = files.wandb_folder(folder / "run")
    table = folder / "lightning" / "metrics.csv"
    table.parent.mkdir()
    table.write_text(files.LIGHTNING_CSV, encoding="utf-8")
    meta = files.mlflow_run(folder / "mlflow")
    events = files.event_file(folder / "events", {"train/loss": LOSSES, "throughput(tps)": LOSSES})
    valid = {path: path.read_bytes() for path in (state, summary, table, events, meta)}
    log = summary.parent.parent / "run-id.wandb"
    log.write_bytes(files.WANDB_LOG)
    valid[log] = files.WANDB_LOG
    valid[meta.parent / "metrics" / "loss"] = files.MLFLOW_LOSS.encode() * 3
    valid[summary.with_name("config.yaml")] = files.NANOCHAT_CONFIG.encode()
    read = {meta.parent / "metrics" / "loss": meta, summary.with_name("config.yaml"): summary}
    fuzz = Fuzz("files of trackers", (InputError,), folder, str(folder))

    def broken(path):
        text = valid[path]
        if path in (events, log):
            return st.tuples(st.just(path), broken_bytes(text))
        if path.suffix == ".json":
            return st.tuples(st.just(path), broken_json(json.loads(text)))
        return st.tuples(st.just(path), broken_words(text))

    def one_file(drawn):
        path, content = drawn
        path.write_bytes(content)
        fuzz.case(lambda: [f"{f.message}{f.corrected}".encode() for f in audit([read.get(path, path)])], drawn)
        path.write_bytes(valid[path])

    fuzz.draw(st.sampled_from(sorted(valid)).flatmap(broken), 1000, one_file)
    fuzz.check(READ, REFUSED)
