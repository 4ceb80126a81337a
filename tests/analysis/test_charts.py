"""Pictures of runs: what is drawn is what the files say, with its unit, and nothing is drawn that does not compare."""

import itertools
import re
from dataclasses import replace

import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from support.charts_cases import EVERY_CHART, INFERENCE_CHART, text_of
from support.metrics_examples import example_metrics, save, v1_metrics, v20_metrics

from testbed.analysis.charts import training
from testbed.analysis.charts.style import DPI, STYLE, WARNING_COLOUR, WIDTH_INCHES, colour, figure_with_footer, wrapped
from testbed.analysis.runs.comparability import warnings
from testbed.analysis.runs.load import load_runs


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
    saved = training.write_charts(runs, tmp_path / "out")
    assert {path.name for path in saved.values()} == EVERY_CHART == {path.name for path in (tmp_path / "out").iterdir()}
    for path in saved.values():
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert image.width == WIDTH_INCHES * DPI
            assert 300 < image.height < 2000
            assert len(image.convert("RGB").getcolors(1 << 24)) > 50  # something is drawn


def test_a_footer_stays_inside_the_picture():
    notes = ["W" * 300, "12,345,678 " * 40, "some/long/folder" * 30, "words of small letters " * 20, ""]
    with rc_context(STYLE):
        figure, _ = figure_with_footer([], "title", [1.0], notes, are_single=False)
    figure.set_dpi(DPI)
    renderer = FigureCanvasAgg(figure).get_renderer()
    lines = [text for text in figure.texts if text.get_text() != "title"]
    assert "".join(line.get_text() for line in lines).replace(" ", "") == "".join(notes).replace(" ", "")
    ends = [line.get_window_extent(renderer).x1 / figure.bbox.x1 for line in lines]
    assert max(ends) <= 1 and min(ends[:3]) > 0.97, ends  # inside, and the cut word's lines are full


def test_labels_of_seven_runs_stay_clear_of_one_another(load):
    """Names as long as files have them: a status, an instrument, and the settings in which the runs differ."""
    config, failure = {"run_type": "pipeline"}, {"reason": "x", "step": 3}
    runs = load(
        *[
            example_metrics(
                world_size=1, status="failed", failure=failure, instrumented=True, training_config=config,
                settings={"pipeline_schedule": "interleaved_1f1b"}, hardware={"cpu_threads_per_rank": threads},
            )
            for threads in range(1, 8)
        ]
    )  # fmt: skip
    runs = [replace(run, label=f"{run.label}, a setting of this run alone 1234567890") for run in runs]
    for name, (_, quantity, build) in training.CHARTS.items():
        figure = build(runs)
        if figure is None:
            assert quantity == "inference"
            continue
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw(renderer)
        labels = (
            [text for axis in figure.axes for text in axis.get_yticklabels()] if quantity or name == "step time" else []
        )
        labels += [text for legend in figure.legends for text in legend.get_texts()]
        boxes = [label.get_window_extent(renderer) for label in labels if label.get_text()]
        assert len(boxes) == 7, name
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2)), name


@pytest.mark.parametrize("count", [2, 4])
def test_the_numbers_in_a_warning_stand_on_the_picture(load, count):
    runs = load(*[example_metrics(training_config={"seed": min(seed, 3)}) for seed in range(1, count + 1)])
    for name, (_, _, build) in training.CHARTS.items():
        if figure := build(runs):
            text = text_of(figure)
            assert ("seed 1 [1] / 2 [2] / 3 [3-4]" in text) == (count == 4), name
            assert [f"[{number}] baseline" in text for number in (1, 2, 3, 4)] == [count == 4] * 4, name
    bars = text_of(
        training.plot_results({"a": [1.0], **{run.path.parent.name: [run] for run in runs}}, "training_time")
    )
    assert ("[4] run3" in bars) == (count == 4) and "[1] a" not in bars


def test_the_time_chart_of_a_v1_pair_says_that_losses_differ(load):
    first, second = v1_metrics(1), v1_metrics(4)
    second["val_loss_per_epoch"] = [first["val_loss_per_epoch"][-1] + 0.5]
    text = text_of(training.training_time_figure(load(first, second)))
    assert "Final validation losses differ by 0.5000 at work that is not shown to be equal." in text
    second["val_loss_per_epoch"] = first["val_loss_per_epoch"]
    assert "losses differ" not in text_of(training.training_time_figure(load(first, second)))


def test_equal_runs_show_their_speed_up_and_no_warning(pair):
    text = text_of(training.throughput_figure(pair))
    assert "1.50x" in text
    assert "Not equal work" not in text
    assert "n = 15 steps" in text
    assert "One run each: no interval" in text
    assert "baseline, 1 x CPU (1 thread), fp32" in text


def test_every_picture_of_unequal_work_says_so(load):
    runs = load(example_metrics(), example_metrics(training_config={"global_batch_size": 16, "seed": 7}))
    for name, (_, _, build) in training.CHARTS.items():
        if name == "inference performance":
            continue
        figure = build(runs)
        assert "Not equal work: seq len" not in text_of(figure)
        assert "global batch size 8 / 16" in text_of(figure), name
        loud = [text for text in figure.texts if "Not equal work" in text.get_text()]
        assert [text.get_color() for text in loud] == [WARNING_COLOUR], name
    assert "x (n =" not in text_of(training.throughput_figure(runs))


def test_training_time_says_what_is_timed(pair):
    text = text_of(training.training_time_figure(pair))
    assert "evaluation, logging and start-up excluded" in text
    assert "n = 20 steps" in text
    assert f"{pair[0].training_time_s:.3f} s" in text


def test_a_bar_is_as_long_as_its_value(pair):
    (axis,) = training.training_time_figure(pair).axes
    assert [bar.get_width() for bar in axis.patches] == pytest.approx([run.training_time_s for run in pair])
    (axis,) = training.throughput_figure(pair).axes
    assert [bar.get_width() for bar in axis.patches] == pytest.approx([run.tokens_per_s for run in pair])
    (axis,) = training.memory_figure(pair).axes
    assert [bar.get_width() for bar in axis.patches] == [700, 701]  # MiB
    assert axis.collections[1].get_offsets()[:, 0].tolist() == [700, 701]


def test_numbers_have_a_unit_and_digits_that_can_be_read(load):
    """A run of an hour and one of seconds, a slow rate, a single step, thousands of milliseconds."""
    runs = load(
        example_metrics(step_time_s=4000),
        example_metrics(step_time_s=3),
        example_metrics(num_steps=1, warmup_steps=0, step_time_s=7000),
    )
    times = text_of(training.training_time_figure(runs))
    assert f"{runs[0].training_time_s / 3600:#.4g} h (n = 20 steps)" in times
    assert f"{runs[1].training_time_s:#.4g} s (n = 20 steps)" in times
    assert "(n = 1 step)" in times
    rates = text_of(training.throughput_figure(runs))
    assert f"{runs[0].tokens_per_s:.3g} " in rates  # 0.12, not 0
    assert f"{runs[2].tokens_per_s:.3g} (n = 1 step)" in rates
    assert f"{runs[2].tokens_per_s:.3g}" in training.comparison_table(runs)
    steps = text_of(training.step_time_figure(runs))
    assert f"median {runs[0].step_time_median_s:,.0f} s |" in steps
    assert "step time (s, log scale)" in steps and "e+" not in steps
    assert "median 9,036 ms" in text_of(training.step_time_figure(load(example_metrics(step_time_s=9))))


def test_versions_that_measure_differently_get_panels_of_their_own(load):
    runs = load(example_metrics(), v20_metrics(), v1_metrics(4))
    for build in (training.training_time_figure, training.throughput_figure):
        figure = build(runs)
        assert len(figure.axes) == 3
        assert "do not compare" in text_of(figure)
    assert "PER RANK" in text_of(training.throughput_figure(runs))
    assert "Not shown (not in the file): run2, devices unknown (v1)" in text_of(training.loss_vs_steps_figure(runs))


def test_loss_charts_draw_every_step_and_every_evaluation(pair):
    figure = training.loss_vs_steps_figure(pair)
    lines = [line for line in figure.axes[0].lines if line.get_linestyle() != "None"]
    markers = [line for line in figure.axes[0].lines if line.get_linestyle() == "None"]
    assert [list(line.get_xdata()) for line in lines] == [list(range(1, 21))] * 2
    assert [list(line.get_xdata()) for line in markers] == [[10, 20]] * 2


def test_time_is_the_sum_of_steps_and_beside_it_the_wall_clock(pair):
    left, right = training.loss_vs_time_figure(pair).axes
    lines = [line for line in left.lines if line.get_linestyle() != "None"]
    markers = [line for line in left.lines if line.get_linestyle() == "None"]
    for run, line, marker, wall in zip(pair, lines, markers, right.lines, strict=True):
        assert list(line.get_xdata()) == pytest.approx(run.train_times_s)
        assert list(marker.get_xdata()) == pytest.approx([run.train_times_s[9], run.train_times_s[19]])
        assert list(wall.get_xdata()) == pytest.approx([run.train_times_s[9] + 0.4, run.train_times_s[19] + 0.4])
        assert list(wall.get_ydata()) == list(marker.get_ydata())
    assert "wall time" in right.get_xlabel()


def test_a_file_without_wall_times_gives_one_panel(load):
    (axis,) = training.loss_vs_time_figure(load(v20_metrics(), v1_metrics(4))).axes
    assert "v1 and 2.0: wall time of the training loops" in axis.get_title(loc="left")


def test_a_single_step_is_a_dot_and_more_are_a_line(load):
    one, many = load(example_metrics(num_steps=1, warmup_steps=0), example_metrics())
    markers = [training.loss_vs_steps_figure([run]).axes[0].lines[0].get_marker() for run in (one, many)]
    assert markers == [".", "None"]


def test_the_legend_keeps_off_the_lines(load):
    """Losses that rise to the upper right corner, where a fixed legend would cover them."""
    metrics = example_metrics()
    for row in metrics["steps"]:
        row["loss"] = 6 + 0.1 * row["step"]
    for row in metrics["evaluations"]:
        row["val_loss"] = 6.1 + 0.1 * row["step"]
    figure = training.loss_vs_steps_figure(load(metrics))
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
    lines = training.loss_vs_time_figure(runs).axes[1].lines
    assert len({(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}) == 9
    first, ninth = lines[0], lines[8]
    assert first.get_color() != ninth.get_color() and first.get_marker() != ninth.get_marker()
    assert first._dash_pattern != ninth._dash_pattern


def test_bars_of_many_runs_repeat_no_colour():
    assert len({colour(number) for number in range(24)}) == 24
    figure = training.plot_results({str(number): [1.0] for number in range(24)}, "training_time")
    assert len({patch.get_facecolor() for patch in figure.axes[0].patches}) == 24


def test_a_picture_of_mixed_runs_says_in_few_lines_that_their_work_differs(load):
    """The printed warnings hold every value."""
    fields = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "max_grad_norm")
    changes = [dict.fromkeys(fields, value) for value in (0.25, 0.5, 0.75, 0.125)]
    runs = load(*[example_metrics(training_config=changed) for changed in changes for _ in range(3)])
    loud = [text.get_text() for text in training.training_time_figure(runs).texts if text.get_color() == WARNING_COLOUR]
    assert len(loud) <= 3 and "[1-3]" in loud[0], loud
    text = " ".join(loud)
    assert "also " in text and all(name.replace("_", " ") in text for name in fields)
    assert text.count("0.125") == 2 and warnings(runs)[0].count("0.125") == len(fields)


@pytest.mark.parametrize(
    ("label", "lines"),
    [
        (
            "[3] baseline on 1 rank (CPU (1 thread), fp32), work 1",
            ["[3] baseline on 1 rank", "(CPU (1 thread), fp32), work 1"],
        ),
        ("[1] baseline, 1 x CPU (1 thread), fp32", ["[1] baseline, 1 x CPU (1 thread),", "fp32"]),
        ("optimized ZeRO-1, 2 x CPU (1 thread), fp32 (a) #3", ["optimized ZeRO-1,", "2 x CPU (1 thread), fp32 (a) #3"]),
        (
            "a name of many words that has neither commas nor more",
            ["a name of many words that has", "neither commas nor more"],
        ),
        (
            "[1] ddp on 1 rank (CPU (1 thread), fp32) (median of 5 runs)",
            ["[1] ddp on 1 rank", "(CPU (1 thread), fp32)", "(median of 5 runs)"],
        ),
        ("", [""]),
    ],
)
def test_a_label_breaks_between_its_parts(label, lines):
    assert wrapped(label, 36).split("\n") == lines
    assert re.sub(r"\s+", " ", wrapped(label, 36)) == label


def test_the_legend_of_many_runs_stays_clear_of_the_notes(load):
    runs = load(*[example_metrics(num_steps=12) for _ in range(24)])
    figure = training.loss_vs_steps_figure([replace(run, label=f"{run.label} " + "and more " * 4) for run in runs])
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    (legend,) = figure.legends
    notes = [text for text in figure.texts if text.get_text().startswith("Line")]
    assert legend.get_window_extent(renderer).y0 > notes[0].get_window_extent(renderer).y1


def test_a_smoothed_loss_is_a_mean_of_steps_of_the_run(load):
    (run,) = load(example_metrics(num_steps=200))
    pale, mean = [line for line in training.loss_vs_steps_figure([run]).axes[0].lines if len(line.get_xdata()) > 100]
    assert list(pale.get_ydata()) == list(run.train_losses)
    assert mean.get_xdata()[0] == 3  # the middle of steps 1 to 5
    assert mean.get_ydata()[0] == pytest.approx(run.train_losses[:5].mean())
    assert mean.get_ydata()[-1] == pytest.approx(run.train_losses[-5:].mean())


def test_step_times_leave_warm_up_out_and_say_so(pair):
    figure = training.step_time_figure(pair)
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
    assert training.step_time_figure(runs).axes[0].get_xscale() == "log"
    assert training.step_time_figure(runs[:1]).axes[0].get_xscale() == "linear"


def test_memory_names_its_kind_and_shows_each_rank(pair):
    figure = training.memory_figure(pair)
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
    for build in (training.throughput_figure, training.loss_vs_time_figure, training.step_time_figure):
        assert mark in text_of(build(runs))


def test_inference_comes_from_v1_alone_and_a_stale_picture_goes(load, pair, tmp_path):
    assert training.inference_figure(pair) is None
    training.write_charts(load(v1_metrics(1), v1_metrics(4)), tmp_path / "out")
    assert (tmp_path / "out" / INFERENCE_CHART).exists()
    training.write_charts(pair, tmp_path / "out")
    assert not (tmp_path / "out" / INFERENCE_CHART).exists()


def test_a_picture_that_cannot_be_written_leaves_the_earlier_one(pair, tmp_path, monkeypatch):
    out = tmp_path / "out"
    training.write_charts(pair, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def half_written(self, path, **_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", half_written)
    with pytest.raises(OSError, match="No space"):
        training.write_charts(pair, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_the_table_gives_a_speed_up_for_equal_work_only(load):
    runs = load(
        example_metrics(world_size=1, step_time_s=0.3),
        example_metrics(step_time_s=0.2),
        example_metrics(training_config={"seed": 7}),
        v1_metrics(4),
    )
    table = training.comparison_table(runs)
    (row,) = [line for line in table.splitlines() if line.startswith("speed-up")]
    assert [cell.strip() for cell in row.split("   ") if cell.strip()] == [
        "speed-up over [1], n = 1",
        "1.00x",
        "1.50x",
        "n/a (work differs)",
        "n/a (work not known)",
    ]
    assert "11,214 per rank" in table
    assert "701 RSS" in table


def test_a_ratio_between_unequally_many_cores_says_so_where_it_stands(load):
    """Two ranks against one thread are mostly the second core; one process with both is as many cores as they are."""
    one, both = ({"hardware": {"cpu_threads_per_rank": threads}} for threads in (1, 2))
    runs = load(
        example_metrics(world_size=1, step_time_s=0.3, **one),
        example_metrics(world_size=1, step_time_s=0.2, **both),
        example_metrics(world_size=2, step_time_s=0.2, **one),
    )
    table = training.comparison_table(runs)
    (row,) = [line.split() for line in table.splitlines() if line.startswith("cores (ranks x threads)")]
    assert row[-3:] == ["1", "2", "2"]
    said = "One core is one device: these runs compute on 1, 2 and 2 cores in turn"
    assert said in " ".join(table.split())
    for build in (training.throughput_figure, training.training_time_figure, training.loss_vs_time_figure):
        assert said in text_of(build(runs))
    assert text_of(training.throughput_figure(runs)).count("1.50x on 2 cores for 1") == 2
    as_many = runs[1:]
    assert "One core" not in training.comparison_table(as_many) + text_of(training.throughput_figure(as_many))
    assert "1.00x (n" in text_of(training.throughput_figure(as_many))
    assert "cores" not in training.comparison_table(load(v1_metrics(4)))


def test_plot_results_mixes_no_meanings(load):
    with pytest.raises(ValueError, match="do not measure tokens_per_second alike"):
        training.plot_results(dict(zip("ab", load(example_metrics(), v1_metrics(4)), strict=True)), "tokens_per_second")
