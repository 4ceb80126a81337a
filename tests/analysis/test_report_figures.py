"""The report's pictures and breakdowns: bars, laws and dots are where the numbers are."""

import itertools
import json
import statistics

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from support.metrics_examples import example_metrics, save
from support.report_cases import arms, load, markdown, repeats, run_metrics, write_sweep

from testbed.analysis.document.model import plain
from testbed.analysis.report.breakdown import Breakdown, breakdown
from testbed.analysis.report.build import report_of
from testbed.analysis.report.figures import breakdown_figure, loss_figure, repeats_figure, scaling_figure
from testbed.analysis.runs.comparability import LOSS_NOISE
from testbed.analysis.runs.load import load_run
from testbed.analysis.scaling.tables import fit_lines
from testbed.metrics.file import read_metrics


def test_the_breakdown_adds_up_to_the_step(tmp_path):
    profiled = save(tmp_path / "p", run_metrics("ddp", 2, 1, is_profiled=True))
    timed = save(tmp_path / "t", run_metrics("ddp", 2, 1))
    attributed, phases = breakdown([load_run(profiled)]), breakdown([load_run(timed)])
    step = load_run(profiled).record["attribution"]["per_rank"][0]["steps"][0]
    assert attributed.is_attributed and not phases.is_attributed
    assert sum(attributed.seconds.values()) == pytest.approx(step["step_time_s"])
    assert attributed.seconds["exposed communication"] == pytest.approx(0.08 * step["step_time_s"])
    rows = [row for row in read_metrics(timed)["steps"] if not row["is_warmup"]]
    assert sum(phases.seconds.values()) == pytest.approx(np.mean([row["per_rank_step_time_s"] for row in rows]))
    assert phases.seconds["synchronise"] == pytest.approx(0.06 * np.mean([row["per_rank_step_time_s"] for row in rows]))
    assert breakdown([load_run(save(tmp_path / "n", example_metrics()))]) is None


def test_labels_of_seven_configurations_stay_clear_of_one_another(tmp_path):
    """Names of three lines: settings in which runs of one run type differ."""
    config = {"pipeline_schedule": "interleaved_1f1b", "activation_checkpointing": "selective", "deterministic": True}
    subject = arms(
        tmp_path,
        **{
            f"arm_{n}": repeats("pipeline", 0.2, count=1, settings=config | {"stages_per_rank": n, "bucket_cap_mb": n})
            for n in range(7)
        },
    )
    names = [entry.name for entry in subject.entries]
    assert len(set(names)) == 7 and min(map(len, names)) > 64, names
    figures = [
        loss_figure(subject.workloads[0]),
        breakdown_figure([(name, Breakdown("clock", False, {"forward": 0.1, "backward": 0.2})) for name in names]),
        repeats_figure(subject.entries, lambda entry: entry.tokens_per_s, lambda entry: "", "tokens/s"),
    ]
    for figure in figures:
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
        labels = [axis.get_yticklabels() for axis in figure.axes] + [legend.get_texts() for legend in figure.legends]
        for together in labels:
            boxes = [label.get_window_extent(renderer) for label in together if label.get_text()]
            assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2)), figure
            assert all(0 <= box.x0 < box.x1 <= figure.bbox.x1 for box in boxes)


def test_a_target_gives_the_time_to_it(tmp_path):
    """Half-way between the losses of two validations: half-way between their times."""
    write_sweep(tmp_path, ("baseline",), ranks=(1,), repeats=1, is_profiled=False)
    (run,) = load(tmp_path)
    before, after = run.validation_losses[2:4]
    target = (before.loss + after.loss) / 2
    text = markdown([run], tmp_path, target_val_loss=target)
    assert f"Validation loss {target:.4f} is the target" in text
    assert f"| 1 of 1 | {(before.train_time_s + after.train_time_s) / 2:#.4g} |" in text


@pytest.mark.parametrize("protocol", ["weak", "time_to_loss"])
def test_a_protocol_that_compares_unequal_work_has_its_own_verdict(tmp_path, protocol):
    """Twice the batch on two ranks at the same step time is twice the work per second, and no unequal comparison."""
    write_sweep(tmp_path, ("baseline", "ddp"), is_profiled=False)
    plan = json.loads((tmp_path / "sweep.json").read_text()) | {"protocol": protocol, "target_val_loss": 6.9}
    (tmp_path / "sweep.json").write_text(json.dumps(plan))
    if protocol == "weak":
        for path in tmp_path.glob("ddp_2/*/training_metrics.json"):
            metrics = json.loads(path.read_text())
            metrics["training_config"]["global_batch_size"] = 16
            metrics["summary"]["mean_tokens_per_sec_global"] *= 2
            path.write_text(json.dumps(metrics))
    runs = load(tmp_path)
    said = [verdict.sentence for verdict in report_of(runs, tmp_path).verdicts]
    rates = {
        key: statistics.median(run.tokens_per_s for run in runs if (run.run_type, run.world_size) == key)
        for key in (("ddp", 2), ("baseline", 1))
    }
    if protocol == "weak":
        ratio = rates["ddp", 2] / rates["baseline", 1]
        assert ratio > 3
        start = f"Weak scaling: ddp on 2 ranks does {ratio:.2f}x as much per second as baseline on 1 rank (efficiency"
    else:
        start = "ddp on 2 ranks reaches validation loss 6.9 1.6"
    assert any(text.startswith(start) for text in said), said


def test_communication_stands_by_axis_without_a_profile(tmp_path):
    """Of the watched steps alone: what ranks wait for between the steps and before them is no part of a step."""

    def collective(axes: str, phase: str, blocked_s: float) -> dict:
        row = {"name": "allreduce", "axes": axes, "phase": phase, "num": 20, "bytes": 40 * 2**20, "call_s": 0.0}
        return {**row, "blocked_s": blocked_s}

    ranks = [
        [collective("tensor", "forward", 0.2), collective("tensor", "backward", 0.3), collective("", "forward", 9.0)],
        [collective("tensor", "forward", 0.1), collective("copies", "between", 9.0)],
    ]
    watched = [
        {"rank": rank, "own_start_up_s": 1.0, "num_steps": 10, "collectives": rows} for rank, rows in enumerate(ranks)
    ]
    save(tmp_path / "watched", {**run_metrics("ddp", 2, 1), "watched": {"per_rank": watched}})
    cells = [line.split("|")[2:-1] for line in markdown(load(tmp_path)).splitlines() if "| tensor " in line]
    found = [[cell.strip() for cell in row] for row in cells if "backward and forward" in row[1]]
    assert found == [["tensor", "backward and forward", "3.0", "6.000", "30.00"]]


def test_collectives_of_unknown_groups_have_no_bandwidth(tmp_path):
    """Where several groups of ranks could be meant, a file holds null, and no bandwidth is made of it."""
    metrics = run_metrics("pipeline", 2, 1, is_profiled=True)
    known = dict(metrics["attribution"]["collectives"][0])
    metrics["attribution"]["collectives"] = [{**known, "bus_bytes_per_step": None}]
    save(tmp_path / "unknown", metrics)
    text = markdown(load(tmp_path))
    assert "gloo:all_reduce" in text and "bus bandwidth (GB/s)" not in text
    metrics["attribution"]["collectives"].append(known)
    save(tmp_path / "unknown", metrics)
    row = next(line for line in markdown(load(tmp_path)).splitlines() if "gloo:all_reduce" in line)
    assert [cell.strip() for cell in row.split("|")][5:8:2] == ["n/a", "n/a"]


def test_the_breakdown_is_drawn_in_milliseconds_one_part_after_the_other():
    seconds = {"forward": 0.1, "backward": 0.2, "exposed communication": 0.05}
    bars = [("a", Breakdown("x", True, seconds)), ("b", Breakdown("x", True, {"forward": 0.3}))]
    drawn = breakdown_figure(bars).axes[0].patches
    first = [(bar.get_x(), bar.get_width()) for bar in drawn if round(bar.get_y() + bar.get_height() / 2) == 0]
    second = [bar.get_width() for bar in drawn if round(bar.get_y() + bar.get_height() / 2) == 1]
    assert np.ravel(first) == pytest.approx([0, 100, 100, 200, 300, 50])
    assert second == pytest.approx([300, 0, 0])


@pytest.mark.parametrize("law", ["amdahl", "gustafson"])
def test_the_law_is_drawn_from_its_formula(law):
    points = {"ddp": [(1, 1.0, None, None), (4, 2.2, 2.0, 2.5)], "fsdp": [(4, 2.0, 1.9, 2.1)]}
    figure = scaling_figure(points, {"ddp": 0.25, "fsdp": None}, {"ddp": "#000000", "fsdp": "#ff0000"}, law=law)
    lines = figure.axes[0].lines
    (curve,) = [line for line in lines if len(line.get_xdata()) == 60]
    at = {1: 1.0, 4: 1 / (0.25 + 0.75 / 4)} if law == "amdahl" else {1: 1.0, 4: 4 - 0.25 * 3}
    assert curve.get_color() == "#000000"
    assert [curve.get_xdata()[0], curve.get_xdata()[-1]] == [1, 4]
    assert [curve.get_ydata()[0], curve.get_ydata()[-1]] == pytest.approx(list(at.values()))
    ends = [tuple(line.get_ydata()) for line in lines if len(line.get_xdata()) == 2]
    assert ends == [(1, 4), (2.0, 2.5), (1.9, 2.1)]  # the ideal, then the intervals
    assert [line.get_ydata()[0] for line in lines if len(line.get_xdata()) == 1] == [1.0, 2.2, 2.0]


def test_the_losses_are_drawn_as_differences_from_the_reference(tmp_path):
    subject = arms(tmp_path, a=repeats("baseline", 0.3), b=repeats("ddp", 0.2, loss=0.003))
    (workload,) = subject.workloads
    panel = loss_figure(workload).axes[1]
    dots = [line for line in panel.lines if line.get_marker() == "o"]
    rows = {entry.strategy: number for number, entry in enumerate(workload.measured)}
    assert list(dots[rows["ddp"]].get_xdata()) == pytest.approx([0.003] * 5)
    assert list(dots[rows["ddp"]].get_ydata()) == [rows["ddp"]] * 5
    assert list(dots[rows["baseline"]].get_xdata()) == pytest.approx([0.0] * 5)
    medians = [line.get_xdata()[0] for line in panel.lines if line.get_color() == "#111111"]
    assert medians[rows["ddp"]] == pytest.approx(0.003)
    (noise,) = panel.patches
    assert (noise.get_x(), noise.get_width()) == pytest.approx((-LOSS_NOISE, 2 * LOSS_NOISE))


def test_the_limit_of_a_speed_up_needs_a_serial_fraction_above_0():
    fit = {"serial_fraction": 0.25, "limit_of_speedup": 4.0, "low": 0.2, "high": 0.5, "law": "amdahl"}
    fit |= {"num_points": 10, "rank_counts": [1, 2], "notes": ["a note"]}

    def line(**changed) -> str:
        strategy = {"strategy_name": "ddp", "batch_size": 8, "fits": {"amdahl": fit | changed}}
        line, note = map(plain, fit_lines({"strategies": [strategy]}))
        assert note == "A note."
        return line

    of_ddp, source = "Amdahl, ddp, batch 8: serial share 0.250", "from 10 runs at 1, 2 ranks"
    assert line() == f"{of_ddp} [0.200, 0.500] {source}, speed-up at most 4.0x [2.0, 5.0]."
    assert line(low=-0.01) == f"{of_ddp} [-0.010, 0.500] {source}."
    assert line(low=None, high=None) == f"{of_ddp} {source}."
