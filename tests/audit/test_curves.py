"""Curves: a state of transformers' Trainer, a CSV with a column of steps, TensorBoard's event files."""

from __future__ import annotations

import json

import pytest
from support.real_logs import FOLDER
from support.tables import saved

from testbed.audit.claims import FAILS, answered, audit
from testbed.audit.readers import read_reported
from testbed.errors import InputError


def only(*paths):
    (run,) = read_reported(paths)
    return run


def test_a_real_state_is_read_under_any_name(tmp_path):
    for name in ("trainer_state.json", "whisper.json"):  # known by its content where it is typed
        path = tmp_path / name
        path.write_bytes((FOLDER / "trainer_state.json").read_bytes())
        run = only(path)
        assert (run.optimizer_steps, run.train_loss, run.val_loss) == (12030, 0.0549, None)
        assert [finding for finding in audit([path]) if finding.severity == FAILS] == []


def test_the_end_of_a_state_has_the_time_of_the_whole_call(tmp_path):
    path = tmp_path / "trainer_state.json"
    end = {"step": 100, "train_loss": 3.1, "train_runtime": 200.0, "train_samples_per_second": 4.0}
    rows = [{"step": 50, "loss": 3.5}, {"step": 100, "eval_loss": 3.2}, {"step": 100, "loss": 3.0}, end]
    path.write_text(json.dumps({"global_step": 100, "log_history": rows}), encoding="utf-8")
    run = only(path)
    assert (run.time_s, run.rate, run.rate_unit, run.train_loss, run.val_loss) == (200.0, 4.0, "samples/s", 3.0, 3.2)
    assert run.time_meaning == "time of the whole train() call"


def test_of_several_checkpoints_of_a_run_the_last_is_read(tmp_path):
    for step in (100, 200):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        state = {"global_step": step, "log_history": [{"step": step, "loss": 400 / step}]}
        (folder / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    run = only(tmp_path)
    assert (run.optimizer_steps, run.train_loss) == (200, 2.0)


def test_a_csv_of_curves_is_a_run(tmp_path):
    """As W&B, MLflow and Lightning save it: a cell is empty where a step did not log it."""
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss,val_loss,tokens/s,device\n1,9.0,,10,A100\n2,8.0,8.5,30,A100\n3,7.5,,32,A100\n")
    run = only(path)
    assert (run.optimizer_steps, run.train_loss, run.val_loss, run.rate) == (3, 7.5, 8.5, 30)
    assert run.device_name == "A100" and run.losses == ((1, 9.0), (2, 8.0), (3, 7.5))
    path.write_text("step,loss\n1,9.0\n2,nan\n")
    (found,) = [finding for finding in audit([path]) if finding.severity == FAILS]
    assert "in the last 1 of 2 lines, from step 2 on" in found.message


def test_each_run_of_a_chart_that_wandb_exports_is_a_run(tmp_path):
    path = tmp_path / "loss.csv"
    path.write_text("Step,ddp 1GPU - loss,ddp 1GPU - loss__MIN,ddp 2GPU - loss\n1,9.0,9.0,8.5\n2,8.0,8.0,\n")
    one, two = read_reported([path])
    assert (one.name, one.world_size, one.train_loss) == (f"{path}#ddp 1GPU", 1, 8.0)
    assert (two.world_size, two.losses) == (2, ((1, 8.5),))


def test_charts_of_one_folder_are_joined_by_the_names_of_their_runs(tmp_path):
    """W&B exports one chart for each metric: loss and time of a run are in two files."""
    for metric, one, two in (("loss", 2.3, 2.4), ("throughput", 10.0, 9.5), ("iteration-time", 0.8, 0.4)):
        lines = [f"Step,ddp 1GPU - {metric},ddp 2GPU - {metric}", *(f"{step},{one},{two}" for step in range(3)), ""]
        saved(tmp_path, "\n".join(lines), f"{metric}.csv")
    runs = read_reported([tmp_path])
    told = [(run.name.partition("#")[2], run.train_loss, run.rate, run.rate_unit, run.time_s) for run in runs]
    assert told == [("ddp 1GPU", 2.3, 10.0, "throughput", 0.8), ("ddp 2GPU", 2.4, 9.5, "throughput", 0.4)]
    typed = read_reported([tmp_path / "loss.csv", tmp_path / "throughput.csv"])
    assert [(run.world_size, run.train_loss, run.rate, run.optimizer_steps) for run in typed] == [
        (1, 2.3, 10.0, 2), (2, 2.4, 9.5, 2)]  # fmt: skip
    said = [finding.message for finding in audit([tmp_path / "throughput.csv"])]
    assert not any("efficiency" in message for message in said), "nothing says whether it is of one device or of all"
    (tmp_path / "other").mkdir()
    other = (tmp_path / "loss.csv").rename(tmp_path / "other" / "loss.csv")
    assert len(read_reported([other, tmp_path / "throughput.csv"])) == 4, "of two folders"
    saved(tmp_path, other.read_text(), "loss.csv")
    saved(tmp_path, other.read_text(), "loss again.csv")
    assert len(read_reported([tmp_path / "loss.csv", tmp_path / "loss again.csv"])) == 4, "of one metric"


@pytest.mark.parametrize(
    ("header", "words"),
    [("step,velocity", "no metric beside 'step' is known; known are loss, train/loss,"), ("a,b", "no column 'step'")],
)
def test_a_csv_without_a_known_curve_is_refused_with_those_that_are(tmp_path, header, words):
    with pytest.raises(InputError, match=words):
        read_reported([saved(tmp_path, f"{header}\n1,2\n2,3\n", "a.csv")])


def test_event_files_of_a_folder_are_one_run(tmp_path):
    writers = pytest.importorskip("torch.utils.tensorboard")
    for first, losses in ((1, (9.0, 8.0, 7.0)), (3, (6.5, 6.0))):  # a restart from step 2
        with writers.SummaryWriter(tmp_path / "run") as writer:
            for step, loss in enumerate(losses, first):
                writer.add_scalar("train/loss", loss, step)
                writer.add_scalar("throughput(tps)", 100.0, step)
    run = only(tmp_path)
    assert (run.form, run.optimizer_steps, run.train_loss) == ("TensorBoard event files", 4, 6.0)
    assert run.losses == ((1, 9.0), (2, 8.0), (3, 6.5), (4, 6.0))
    assert run.rate == 100 and run.rate_is_per_rank


def test_folders_of_trackers_are_refused_with_the_way_out(tmp_path):
    path = tmp_path / "run-1.wandb"
    path.write_bytes(b":W&B\xe1\xbe\x00" + bytes(100))
    with pytest.raises(InputError, match="the curves of W&B, MLflow and Lightning are read as CSV"):
        read_reported([path])


def test_a_csv_of_runs_is_no_curve_whatever_its_columns_are_called(tmp_path):
    """W&B exports the last step of each run beside its name."""
    path = saved(tmp_path, "Name,State,_step,tokens/s,loss\nddp,crashed,2000,100,3.1\nfsdp,finished,2000,190,3.1\n",
                 "runs.csv")  # fmt: skip
    found = answered([path], 1.9, ("ddp", "fsdp"))
    assert found is not None and "A is not measured: crashed: a ratio needs two measurements." in found.reasons
    steps = "".join(f"{step},{100 + step},3.1,ckpt_{step}.pt\n" for step in range(9))
    curve = saved(tmp_path, f"step,tokens/s,loss,checkpoint\n{steps}", "curve.csv")
    assert read_reported([curve])[0].form == "CSV of curves"


def test_json_lines_are_curves_and_half_a_line_at_the_end_is_left(tmp_path):
    """LLaMA-Factory's trainer_log.jsonl of a run that was killed."""
    rows = [{"current_steps": step, "loss": 4.0 - step / 10, "tokens_per_sec": 100.0} for step in (1, 2, 3)]
    path = saved(tmp_path, "\n".join([*map(json.dumps, rows), '{"current_st']), "trainer_log.jsonl")
    run = only(path)
    assert (run.form, run.optimizer_steps, run.train_loss, run.rate) == ("JSON lines", 3, 3.7, 100.0)
    with pytest.raises(InputError, match="says no time"):
        only(saved(tmp_path, '{"a": 1}\n[]\nnull\n', "other.jsonl"))


def test_the_time_of_an_epoch_is_compared_with_that_of_an_epoch_alone(tmp_path):
    def curve(name: str, heading: str, seconds: float):
        return saved(tmp_path, f"step,loss,{heading}\n" + "".join(f"{n},3.0,{seconds}\n" for n in range(20)), name)

    one, other, steps = curve("a.csv", "epoch_time", 60), curve("b.csv", "epoch_time", 30), curve("c.csv", "dt", 30)
    end = {"step": 9, "train_loss": 3.0, "train_runtime": 90.0}
    whole = saved(tmp_path, json.dumps({"global_step": 9, "log_history": [end]}), "trainer_state.json")
    found = answered([one, other])
    assert found is not None and [(each.name, each.ratio) for each in found.measures] == [("time of one epoch, s", 2)]
    for unlike in (steps, whole):
        found = answered([one, unlike])
        assert found is not None and found.measures == ()
