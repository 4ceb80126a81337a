"""Charts say what they show: read from the figure's own text. And the program: files, exit codes, sentences."""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from metrics_examples import example_metrics, save, v1_metrics, v20_metrics
from PIL import Image

from testbed.analysis import charts
from testbed.analysis.runs import find_runs, load_run, load_runs
from testbed.analysis.statistics import median_interval

ROOT = Path(__file__).resolve().parents[1]
EVERY_CHART = {
    "training_time_comparison.png",
    "training_throughput_comparison.png",
    "loss_vs_steps.png",
    "loss_vs_time.png",
    "memory_comparison.png",
    "step_time_distribution.png",
}
INFERENCE_CHART = "inference_performance_comparison.png"


def text_of(figure: Figure) -> str:
    """All that a reader can read on a figure, line breaks as spaces."""
    texts = [text.get_text() for text in figure.texts]
    texts += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    for axis in figure.axes:
        texts += [axis.get_title(loc="left"), axis.get_xlabel(), axis.get_ylabel()]
        texts += [text.get_text() for text in [*axis.texts, *axis.get_yticklabels()]]
        if legend := axis.get_legend():
            texts += [text.get_text() for text in legend.get_texts()]
    return " ".join(" ".join(texts).split())


@pytest.fixture
def load(tmp_path):
    def loader(*files: dict) -> list:
        return load_runs([save(tmp_path / f"run{index}", metrics) for index, metrics in enumerate(files)])

    return loader


@pytest.fixture
def pair(load):
    """Equal work; the second run takes two thirds of the time."""
    return load(
        example_metrics(world_size=1, step_time_s=0.3),
        example_metrics(world_size=2, step_time_s=0.2, training_config={"run_type": "ddp"}),
    )


@pytest.mark.parametrize("count", [1, 6])
def test_every_chart_is_a_png_of_the_stated_width(load, tmp_path, count):
    runs = load(
        *[
            example_metrics(num_steps=60, step_time_s=0.1 + 0.1 * index, settings={"bucket_cap_mb": index})
            for index in range(count)
        ]
    )
    saved = charts.write_charts(runs, tmp_path / "out")
    assert {path.name for path in saved.values()} == EVERY_CHART == {path.name for path in (tmp_path / "out").iterdir()}
    for path in saved.values():
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert image.width == charts.WIDTH_INCHES * charts.DPI
            assert 300 < image.height < 2000
            assert len(image.convert("RGB").getcolors(1 << 24)) > 50  # something is drawn


def test_equal_runs_show_their_speed_up_and_no_warning(pair):
    text = text_of(charts.throughput_figure(pair))
    assert "1.50x" in text
    assert "Not equal work" not in text
    assert "n = 15 steps" in text
    assert "One run each: no interval" in text
    assert "baseline, 1 x CPU (1 thread), fp32" in text


def test_every_picture_of_unequal_work_says_so(load):
    runs = load(example_metrics(), example_metrics(training_config={"global_batch_size": 16, "seed": 7}))
    for name, (_, build) in charts.CHARTS.items():
        if name == "inference performance":
            continue
        figure = build(runs)
        assert "Not equal work: seq len" not in text_of(figure)
        assert "global batch size 8 / 16" in text_of(figure), name
        loud = [text for text in figure.texts if "Not equal work" in text.get_text()]
        assert [text.get_color() for text in loud] == [charts.WARNING_COLOUR], name
    assert "x (n =" not in text_of(charts.throughput_figure(runs))


def test_training_time_says_what_is_timed(pair):
    text = text_of(charts.training_time_figure(pair))
    assert "evaluation, logging and start-up excluded" in text
    assert "n = 20 steps" in text
    assert f"{pair[0].training_time_s:.3f} s" in text


def test_a_bar_is_as_long_as_its_value(pair):
    (axis,) = charts.training_time_figure(pair).axes
    assert [bar.get_width() for bar in axis.patches] == pytest.approx([run.training_time_s for run in pair])
    (axis,) = charts.throughput_figure(pair).axes
    assert [bar.get_width() for bar in axis.patches] == pytest.approx([run.tokens_per_s for run in pair])
    (axis,) = charts.memory_figure(pair).axes
    assert [bar.get_width() for bar in axis.patches] == [700, 701]  # MiB
    assert axis.collections[1].get_offsets()[:, 0].tolist() == [700, 701]


def test_numbers_have_a_unit_and_digits_that_can_be_read(load):
    """A run of an hour and one of seconds, a slow rate, a single step, thousands of milliseconds."""
    runs = load(
        example_metrics(step_time_s=4000),
        example_metrics(step_time_s=3),
        example_metrics(num_steps=1, warmup_steps=0, step_time_s=7000),
    )
    times = text_of(charts.training_time_figure(runs))
    assert f"{runs[0].training_time_s / 3600:#.4g} h (n = 20 steps)" in times
    assert f"{runs[1].training_time_s:#.4g} s (n = 20 steps)" in times
    assert "(n = 1 step)" in times
    rates = text_of(charts.throughput_figure(runs))
    assert f"{runs[0].tokens_per_s:.3g} " in rates  # 0.12, not 0
    assert f"{runs[2].tokens_per_s:.3g} (n = 1 step)" in rates
    assert f"{runs[2].tokens_per_s:.3g}" in charts.comparison_table(runs)
    steps = text_of(charts.step_time_figure(runs))
    assert f"median {runs[0].step_time_median_s:,.0f} s |" in steps
    assert "step time (s, log scale)" in steps and "e+" not in steps
    assert "median 9,036 ms" in text_of(charts.step_time_figure(load(example_metrics(step_time_s=9))))


def test_versions_that_measure_differently_get_panels_of_their_own(load):
    runs = load(example_metrics(), v20_metrics(), v1_metrics(4))
    for build in (charts.training_time_figure, charts.throughput_figure):
        figure = build(runs)
        assert len(figure.axes) == 3
        assert "do not compare" in text_of(figure)
    assert "PER RANK" in text_of(charts.throughput_figure(runs))
    assert "Not shown (not in the file): run2, devices unknown (v1)" in text_of(charts.loss_vs_steps_figure(runs))


def test_loss_charts_draw_every_step_and_every_evaluation(pair):
    figure = charts.loss_vs_steps_figure(pair)
    lines = [line for line in figure.axes[0].lines if line.get_linestyle() != "None"]
    markers = [line for line in figure.axes[0].lines if line.get_linestyle() == "None"]
    assert [list(line.get_xdata()) for line in lines] == [list(range(1, 21))] * 2
    assert [list(line.get_xdata()) for line in markers] == [[10, 20]] * 2


def test_time_is_the_sum_of_steps_and_beside_it_the_wall_clock(pair):
    left, right = charts.loss_vs_time_figure(pair).axes
    lines = [line for line in left.lines if line.get_linestyle() != "None"]
    markers = [line for line in left.lines if line.get_linestyle() == "None"]
    for run, line, marker, wall in zip(pair, lines, markers, right.lines, strict=True):
        assert list(line.get_xdata()) == pytest.approx(run.train_times_s)
        assert list(marker.get_xdata()) == pytest.approx([run.train_times_s[9], run.train_times_s[19]])
        assert list(wall.get_xdata()) == pytest.approx([run.train_times_s[9] + 0.4, run.train_times_s[19] + 0.4])
        assert list(wall.get_ydata()) == list(marker.get_ydata())
    assert "wall time" in right.get_xlabel()


def test_a_file_without_wall_times_gives_one_panel(load):
    (axis,) = charts.loss_vs_time_figure(load(v20_metrics(), v1_metrics(4))).axes
    assert "v1 and 2.0: wall time of the training loops" in axis.get_title(loc="left")


def test_a_single_step_is_a_dot_and_more_are_a_line(load):
    one, many = load(example_metrics(num_steps=1, warmup_steps=0), example_metrics())
    markers = [charts.loss_vs_steps_figure([run]).axes[0].lines[0].get_marker() for run in (one, many)]
    assert markers == [".", "None"]


def test_the_legend_keeps_off_the_lines(load):
    """Losses that rise to the upper right corner, where a fixed legend would cover them."""
    metrics = example_metrics()
    for row in metrics["steps"]:
        row["loss"] = 6 + 0.1 * row["step"]
    for row in metrics["evaluations"]:
        row["val_loss"] = 6.1 + 0.1 * row["step"]
    figure = charts.loss_vs_steps_figure(load(metrics))
    figure.draw_without_rendering()
    (axis,) = figure.axes
    (legend,) = figure.legends
    legend = legend.get_window_extent()
    assert legend.y1 <= axis.get_tightbbox().y0 and legend.y0 > 0
    assert not any(
        legend.contains(*point) for line in axis.lines for point in axis.transData.transform(line.get_xydata())
    )


def test_nine_runs_look_different(load):
    runs = load(*[example_metrics(num_steps=12) for _ in range(9)])
    lines = charts.loss_vs_time_figure(runs).axes[1].lines
    assert len({(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}) == 9
    first, ninth = lines[0], lines[8]
    assert first.get_color() == ninth.get_color() and first.get_marker() != ninth.get_marker()
    assert first._dash_pattern != ninth._dash_pattern


def test_a_smoothed_loss_is_a_mean_of_steps_of_the_run(load):
    (run,) = load(example_metrics(num_steps=200))
    pale, mean = [line for line in charts.loss_vs_steps_figure([run]).axes[0].lines if len(line.get_xdata()) > 100]
    assert list(pale.get_ydata()) == list(run.train_losses)
    assert mean.get_xdata()[0] == 3  # the middle of steps 1 to 5
    assert mean.get_ydata()[0] == pytest.approx(run.train_losses[:5].mean())
    assert mean.get_ydata()[-1] == pytest.approx(run.train_losses[-5:].mean())


def test_step_times_leave_warm_up_out_and_say_so(pair):
    figure = charts.step_time_figure(pair)
    dots = figure.axes[0].collections[0].get_offsets()[:, 0]
    assert sorted(dots) == pytest.approx(sorted(pair[0].step_times_s * 1e3))
    assert "n = 15 (5 warm-up left out)" in text_of(figure)
    drawn = [line.get_xdata() for line in figure.axes[0].lines]
    values = [value * 1e3 for run in pair for value in (run.step_time_median_s, run.step_time_p95_s)]
    assert [list(x) for x in drawn] == [pytest.approx([value] * 2) for value in values]
    assert "warm-up steps are left out" in text_of(figure)


def test_one_slow_run_among_many_fast_ones_takes_a_log_scale(load):
    """The pooled median is that of the longer run: 0.9 s among hundreds of steps of 0.8 s would hide the quick ones."""
    runs = load(example_metrics(num_steps=200, step_time_s=0.9), example_metrics(num_steps=20, step_time_s=0.1))
    assert charts.step_time_figure(runs).axes[0].get_xscale() == "log"
    assert charts.step_time_figure(runs[:1]).axes[0].get_xscale() == "linear"


def test_memory_names_its_kind_and_shows_each_rank(pair):
    figure = charts.memory_figure(pair)
    assert "peak resident memory (RSS) per rank" in text_of(figure)
    assert "largest of 2 ranks" in text_of(figure)
    assert sum(len(dots.get_offsets()) for dots in figure.axes[0].collections) == 2


@pytest.mark.parametrize("mark", ["FAILED", "INSTRUMENTED"])
def test_unfit_runs_are_marked_on_the_picture(load, mark):
    unfit = {
        "FAILED": {"status": "failed", "failure": {"reason": "x", "step": 1}},
        "INSTRUMENTED": {"instrumented": True},
    }
    runs = load(example_metrics(), example_metrics(**unfit[mark]))
    for build in (charts.throughput_figure, charts.loss_vs_time_figure, charts.step_time_figure):
        assert mark in text_of(build(runs))


def test_inference_comes_from_v1_alone_and_a_stale_picture_goes(load, pair, tmp_path):
    assert charts.inference_figure(pair) is None
    charts.write_charts(load(v1_metrics(1), v1_metrics(4)), tmp_path / "out")
    assert (tmp_path / "out" / INFERENCE_CHART).exists()
    charts.write_charts(pair, tmp_path / "out")
    assert not (tmp_path / "out" / INFERENCE_CHART).exists()


def test_a_picture_that_cannot_be_written_leaves_the_earlier_one(pair, tmp_path, monkeypatch):
    out = tmp_path / "out"
    charts.write_charts(pair, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def half_written(self, path, **_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", half_written)
    with pytest.raises(OSError, match="No space"):
        charts.write_charts(pair, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_the_table_gives_a_speed_up_for_equal_work_only(load):
    runs = load(
        example_metrics(world_size=1, step_time_s=0.3),
        example_metrics(step_time_s=0.2),
        example_metrics(training_config={"seed": 7}),
        v1_metrics(4),
    )
    table = charts.comparison_table(runs)
    (row,) = [line for line in table.splitlines() if line.startswith("speed-up")]
    assert [cell.strip() for cell in row.split("   ") if cell.strip()] == [
        "speed-up over [1]",
        "1.00x",
        "1.50x",
        "n/a (work differs)",
        "n/a (work not known)",
    ]
    assert "11,214 per rank" in table
    assert "701 RSS" in table


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
    figure = charts.plot_results({"runs": runs, "paths": paths, "numbers": rates, "one": runs[0]}, "tokens_per_second")
    (axis,) = figure.axes
    widths = [bar.get_width() for bar in axis.patches]
    assert widths == pytest.approx([statistics.median(rates)] * 3 + [rates[0]])
    assert sorted(axis.collections[0].get_offsets()[:, 0]) == pytest.approx(sorted(rates))
    assert "(n = 3)" in text_of(figure) and "(n = 1)" in text_of(figure)
    times = charts.plot_results({"a": runs}, "training_time")
    assert times.axes[0].patches[0].get_width() == pytest.approx(statistics.median(run.training_time_s for run in runs))


def test_plot_results_takes_quantities_by_label_and_saves_a_picture(tmp_path):
    metrics = {"a": {"training_time": [3.0, 5.0, 4.0], "peak_memory": 7.0}, "b": {"training_time": 2.0}}
    figure = charts.plot_results(metrics, "training_time", tmp_path / "times.png")
    assert [bar.get_width() for bar in figure.axes[0].patches] == [4.0, 2.0]
    with Image.open(tmp_path / "times.png") as image:
        assert image.format == "PNG" and image.width == 1500
    assert [path.name for path in tmp_path.iterdir()] == ["times.png"]


def test_plot_results_draws_the_interval_from_five_runs_on():
    values = [10.0, 11.0, 10.5, 10.2, 10.8]
    lines = charts.plot_results({"five": values, "four": values[:4]}, "training_time").axes[0].lines
    _, low, high = median_interval(values)
    whiskers = [tuple(line.get_xdata()) for line in lines if line.get_xdata()[0] != line.get_xdata()[-1]]
    assert whiskers == [pytest.approx((low, high))]


def test_plot_results_leaves_out_what_may_not_enter_a_headline(repeated):
    paths = [repeated / "ddp_2" / f"run_{number}" for number in range(3)]
    figure = charts.plot_results({"ddp": paths}, "tokens_per_second")
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
        ({"training_time": [1.0]}, "training_time", "'training_time' is a quantity"),
        ({"a": {"peak_memory": 1.0}}, "training_time", "a has no 'training_time', but 'peak_memory'"),
    ],
)
def test_plot_results_says_what_is_wrong(metrics, quantity, sentence):
    with pytest.raises(ValueError, match=sentence):
        charts.plot_results(metrics, quantity)


def test_plot_results_mixes_no_meanings(load):
    with pytest.raises(ValueError, match="do not measure tokens_per_second alike"):
        charts.plot_results(dict(zip("ab", load(example_metrics(), v1_metrics(4)), strict=True)), "tokens_per_second")


def test_repeats_are_drawn_as_one_bar_each(repeated, tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: drawn.update({path.name: self}) or path.touch())
    charts.write_charts([load_run(path) for path in find_runs(repeated)], tmp_path / "out")
    by_name = {next(known for known in EVERY_CHART if known in name): figure for name, figure in drawn.items()}
    assert set(by_name) == EVERY_CHART
    for name in ("training_time", "training_throughput", "memory"):
        figure = by_name[f"{name}_comparison.png"]
        assert len(figure.axes[0].patches) == 2, name
        assert "ddp on 2 ranks" in text_of(figure)
    steps = text_of(by_name["step_time_distribution.png"])
    assert "baseline on 2 ranks (median of 3 runs)" in steps
    assert "Not equal work" not in steps


def program(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "generate_charts.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd, env=environment)


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


def bad_calls(folder: Path) -> dict[str, tuple[list, str]]:
    good = save(folder / "good", example_metrics())
    (folder / "empty").mkdir()
    broken = folder / "broken.json"
    broken.write_text('{"steps": [', encoding="utf-8")
    return {
        "no run": ([], "no run found under checkpoint/"),
        "missing": (["--runs", folder / "none"], "does not exist"),
        "broken": (["--runs", broken], "is not JSON"),
        "half a pair": (["--baseline-json", good], "needs --optimized-json"),
        "both ways": (["--runs", good, "--baseline-json", good, "--optimized-json", good], "--runs names all runs"),
        "nothing below": (["--runs", folder / "empty"], f"no run found under {folder / 'empty'}/"),
        "report is a folder": (["--runs", good, "--report", folder], f"--report {folder} is a directory"),
        "report in a file": (["--runs", good, "--report", broken / "r.html"], f"--report {broken} cannot be a folder"),
        "target alone": (["--runs", good, "--target_val_loss", "3"], "--target_val_loss is for the report"),
        "target nan": (["--runs", good, "--report", "r.html", "--target_val_loss", "nan"], "nan is no loss"),
        "target below 0": (["--runs", good, "--report", "r.html", "--target_val_loss=-1"], "-1 is no loss"),
        "target inf": (["--runs", good, "--report", "r.html", "--target_val_loss", "inf"], "inf is no loss"),
        "output is a file": (["--runs", good, "--output-dir", broken], f"--output-dir {broken}"),
    }


BAD_CALLS = [
    *("no run", "missing", "broken", "half a pair", "both ways", "output is a file"),
    *("nothing below", "report is a folder", "report in a file", "target alone"),
    *("target nan", "target below 0", "target inf"),
]


@pytest.mark.parametrize("case", BAD_CALLS)
def test_what_was_typed_wrong_gives_one_sentence_and_exit_code_2(tmp_path, case):
    arguments, sentence = bad_calls(tmp_path)[case]
    done = program(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert sentence in errors[0]
    assert not (tmp_path / "docs").exists()


def test_help_does_not_wait_for_matplotlib():
    """The promise is 1.5 s; the check of the modules does not depend on the machine."""
    times_s = []
    for _ in range(3):  # other work on the machine slows one or the other
        start_s = time.perf_counter()
        assert program("--help").returncode == 0
        times_s.append(time.perf_counter() - start_s)
    assert min(times_s) < 1.5
    code = (
        "import sys, runpy\nsys.argv = ['generate_charts.py', '--help']\n"
        f"try: runpy.run_path({str(ROOT / 'generate_charts.py')!r}, run_name='__main__')\n"
        "except SystemExit: pass\n"
        "heavy = {'matplotlib', 'numpy', 'scipy', 'jinja2', 'jsonschema'}\n"
        "print('LOADED', *(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1].strip() == "LOADED"
