"""Repeats in pictures, plot_results, and generate_charts.py as a program."""

import statistics
from functools import partial
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image
from support.charts_cases import EVERY_CHART, INFERENCE_CHART, text_of
from support.metrics_examples import example_metrics, save, v1_metrics
from support.programs import run_here

from testbed.analysis.charts import training
from testbed.analysis.runs.load import find_runs, load_run
from testbed.analysis.statistics import median_interval


@pytest.fixture
def repeated(tmp_path):
    """Three repeats of two configurations, one run of them failed."""
    for number in range(3):
        for run_type, step_time_s in (("baseline", 0.3), ("ddp", 0.2)):
            unfit = (
                {"status": "failed", "failure": {"reason": "x", "step": 1}} if (run_type, number) == ("ddp", 2) else {}
            )
            metrics = example_metrics(
                num_steps=12, step_time_s=step_time_s + 0.01 * number, training_config={"run_type": run_type},
                settings={"run_type": run_type}, run_id=f"{run_type}-{number}", **unfit,
            )  # fmt: skip
            save(tmp_path / "sweep" / f"{run_type}_2" / f"run_{number}", metrics)
    return tmp_path / "sweep"


def test_plot_results_draws_the_median_of_runs_paths_and_numbers(repeated):
    """Each form of the same repeats gives the same bar and the same dots."""
    paths = [repeated / "baseline_2" / f"run_{number}" for number in range(3)]
    runs = [load_run(path) for path in paths]
    rates = [run.tokens_per_s for run in runs]
    figure = training.plot_results(
        {"runs": runs, "paths": paths, "numbers": rates, "one": runs[0]}, "tokens_per_second"
    )
    (axis,) = figure.axes
    widths = [bar.get_width() for bar in axis.patches]
    assert widths == pytest.approx([statistics.median(rates)] * 3 + [rates[0]])
    assert sorted(axis.collections[0].get_offsets()[:, 0]) == pytest.approx(sorted(rates))
    assert "(n = 3)" in text_of(figure) and "(n = 1)" in text_of(figure)
    times = training.plot_results({"a": runs}, "training_time")
    assert times.axes[0].patches[0].get_width() == pytest.approx(statistics.median(run.training_time_s for run in runs))


def test_plot_results_saves_a_picture(tmp_path):
    figure = training.plot_results({"a": [3.0, 5.0, 4.0], "b": 2.0}, "training_time", tmp_path / "times.png")
    assert [bar.get_width() for bar in figure.axes[0].patches] == [4.0, 2.0]
    with Image.open(tmp_path / "times.png") as image:
        assert image.format == "PNG" and image.width == 1500
    assert [path.name for path in tmp_path.iterdir()] == ["times.png"]


def test_plot_results_draws_the_interval_from_five_runs_on():
    values = [10.0, 11.0, 10.5, 10.2, 10.8]
    lines = training.plot_results({"five": values, "four": values[:4]}, "training_time").axes[0].lines
    _, low, high = median_interval(values)
    whiskers = [tuple(line.get_xdata()) for line in lines if line.get_xdata()[0] != line.get_xdata()[-1]]
    assert whiskers == [pytest.approx((low, high))]


def test_plot_results_leaves_out_what_may_not_enter_a_headline(repeated):
    paths = [repeated / "ddp_2" / f"run_{number}" for number in range(3)]
    figure = training.plot_results({"ddp": paths}, "tokens_per_second")
    assert "(n = 2)" in text_of(figure)
    assert "Left out, not finished, instrumented or not recorded: ddp: 1 run." in text_of(figure)


@pytest.mark.parametrize(
    ("metrics", "quantity", "sentence"),
    [
        ({"a": [1.0]}, "loss", "draws 'training_time' or"),
        ({}, "training_time", "no training_time to plot"),
        ({"a": [float("nan")]}, "training_time", "a measurement is finite"),
        ({"a": [True]}, "training_time", "not bool"),
        ({"a": "nowhere"}, "training_time", "nowhere does not exist"),
    ],
)
def test_plot_results_says_what_is_wrong(metrics, quantity, sentence):
    with pytest.raises(ValueError, match=sentence):
        training.plot_results(metrics, quantity)


def test_repeats_are_drawn_as_one_bar_each(repeated, tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: drawn.update({path.name: self}) or path.touch())
    training.write_charts([load_run(path) for path in find_runs(repeated)], tmp_path / "out")
    by_name = {next(known for known in EVERY_CHART if known in name): figure for name, figure in drawn.items()}
    assert set(by_name) == EVERY_CHART
    for name in ("training_time", "training_throughput", "memory"):
        figure = by_name[f"{name}_comparison.png"]
        assert len(figure.axes[0].patches) == 2, name
        assert "ddp on 2 ranks" in text_of(figure)
    steps = text_of(by_name["step_time_distribution.png"])
    assert "baseline on 2 ranks (the median run of 3)" in steps and "One run each" not in steps
    assert "Not equal work" not in steps


program = partial(run_here, "generate_charts.py")


def test_the_program_prints_the_table_and_the_paths(tmp_path):
    one = save(tmp_path / "baseline", v1_metrics(1), "baseline_metrics.json")
    two = save(tmp_path / "optimized", v1_metrics(4))
    done = program("--baseline-json", one, "--optimized-json", two, "--output-dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert f"Saved training time chart to {tmp_path}/out/training_time_comparison.png" in done.stdout
    assert f"Saved inference performance chart to {tmp_path}/out/{INFERENCE_CHART}" in done.stdout
    assert "[1] baseline_metrics, devices unknown (v1)" in done.stdout
    assert "Warning: Equal work cannot be shown" in done.stderr


def test_without_arguments_it_takes_every_run_under_checkpoint(tmp_path):
    save(tmp_path / "checkpoint" / "a", example_metrics())
    save(tmp_path / "checkpoint" / "b", example_metrics(settings={"bucket_cap_mb": 50}))
    save(tmp_path / "checkpoint" / "broken", {"schema_version": "2.1"})
    done = program(cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "(a)" in done.stdout
    assert "(b)" in done.stdout
    assert "Warning: left out: checkpoint/broken/training_metrics.json: the file lacks 'run_id'" in done.stderr
    assert {path.name for path in (tmp_path / "docs/charts").iterdir()} == EVERY_CHART


def test_a_folder_of_runs_is_searched_and_reported_on(repeated, tmp_path):
    """The --out_dir of a sweep is enough; each run counts once, however often it is named."""
    report, text = tmp_path / "new" / "report.html", tmp_path / "new" / "report.md"
    done = program(
        "--runs", repeated, repeated / "ddp_2" / "run_0", "--report", report, "--markdown", text, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "no claim: Not enough repeats for a claim about ddp on 2 ranks" in done.stdout
    assert f"Saved the report to {report}" in done.stdout
    assert "<h1>2 strategies on 2 ranks</h1>" in report.read_text()
    assert "6 runs of 2026-01-01" in text.read_text()
    assert not (tmp_path / "docs").exists()


def bad_calls(folder: Path) -> list[tuple[list, str]]:
    good = save(folder / "good", example_metrics())
    (folder / "empty").mkdir()
    broken = folder / "broken.json"
    broken.write_text('{"steps": [', encoding="utf-8")
    report = ["--runs", good, "--report", "r.html"]
    return [
        ([], "no run found under checkpoint/"),
        (["--runs", folder / "none"], "does not exist"),
        (["--runs", broken], "is not JSON"),
        (["--runs", folder / "empty"], f"no run found under {folder / 'empty'}/"),
        (["--baseline-json", good], "--baseline-json needs --optimized-json"),
        (["--optimized-json", good], "--optimized-json needs --baseline-json"),
        (["--runs", good, "--baseline-json", good, "--optimized-json", good], "--runs names all runs"),
        (["--runs", good, "--report", folder], f"--report {folder} is a directory"),
        (["--runs", good, "--report", broken / "r.html"], f"--report {broken} is a file, not a folder; name"),
        (["--runs", good, "--output-dir", broken], f"--output-dir {broken} is a file, not a folder; name"),
        (["--runs", good, "--target_val_loss", "3"], "--target_val_loss is for the report"),
        *(([*report, f"--target_val_loss={loss}"], f"{loss} is not a loss") for loss in ("nan", "-1", "inf")),
    ]


def test_what_was_typed_wrong_gives_one_sentence_and_exit_code_2(tmp_path):
    for arguments, sentence in bad_calls(tmp_path):
        done = program(*arguments, cwd=tmp_path)
        assert done.returncode == 2, arguments
        errors = [line for line in done.stderr.splitlines() if "error:" in line]
        assert len(errors) == 1 and sentence in errors[0], (arguments, done.stderr)
        assert not (tmp_path / "docs").exists()
