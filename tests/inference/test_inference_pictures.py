"""Check the pictures of inference."""

from __future__ import annotations

import copy
import math

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image
from support.charts_cases import text_of
from support.inference_examples import (
    NOTHING_MEASURED,
    SCHEMES,
    comparison,
    example_inference,
    load,
    point,
    quality,
    ratio,
    scheme,
    speed,
    unavailable,
    wrapped,
)
from support.metrics_examples import save
from support.programs import run_here

from testbed.analysis.charts.style import DPI
from testbed.inference import charts, report
from testbed.inference.report import check_inference, decode_rates, read_inference
from testbed.run_folder import INFERENCE

PICTURES = {"quality_vs_bytes.png", "decode_rate.png", "latency_vs_load.png"}


def extents(figure, texts) -> list:
    figure.set_dpi(DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return [Text.get_window_extent(text, canvas.get_renderer()) for text in texts]  # of the words, not of an arrow


def test_every_picture_fits_and_is_left_out_with_its_data(tmp_path):
    saved = charts.write_inference_charts(example_inference(), tmp_path)
    assert {path.name for path in saved.values()} == PICTURES | {"inference_tables.md"}
    for name in PICTURES:
        with Image.open(tmp_path / name) as image:
            assert image.width == 1500 and 300 < image.height < 1500
            assert len(image.convert("RGB").getcolors(1 << 24)) > 50
    schemes = {name: scheme(name) | {"perplexity": None, "perplexity_ratio": None} for name in ("none", "bf16")}
    charts.write_inference_charts(example_inference() | {"schemes": schemes, "load": None}, tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {"decode_rate.png"}


QUALITY_TITLES = {
    "within noise": ({}, "int8_weight_only: 70% of the bytes, no detectable loss (at most +0.07%)"),
    "wide": (
        {"int4_weight_only": scheme("int4_weight_only") | {"perplexity_ratio": ratio(1.0, 0.01)}},
        "int4_weight_only: 66% of the bytes, no detectable loss (at most +1.00%)",
    ),
    "all worse": (
        {name: scheme(name, factor=1.02) for name in ("bf16", "int8_weight_only", "int8_dynamic")},
        "Every smaller scheme is worse, by 2.00% of perplexity or more",
    ),
    "better": (
        {"int4_weight_only": scheme("int4_weight_only", factor=0.99)},
        "int4_weight_only: 66% of the bytes, perplexity better",
    ),
    "too few windows for an interval": (
        {"bf16": scheme("bf16") | {"perplexity_ratio": ratio(1.0) | {"low": None, "high": None}}},
        "Quality against bytes",
    ),
}


@pytest.mark.parametrize(("change", "title"), QUALITY_TITLES.values(), ids=QUALITY_TITLES)
def test_the_title_of_quality_follows_the_intervals(change, title):
    schemes = {name: scheme(name) for name in SCHEMES}
    schemes["bf16"]["bytes_in_memory"] = 6_000_000  # not the smallest
    figure = charts.quality_figure(example_inference() | {"schemes": schemes | copy.deepcopy(change)})
    assert figure.texts[0].get_text().startswith(title)


def test_the_line_joins_the_schemes_that_no_other_one_beats():
    schemes = example_inference()["schemes"]
    assert set(charts.non_dominated(schemes)) == {"none", "bf16"}  # bf16 is the smallest, none the best
    same = {name: scheme("bf16") for name in ("bf16", "int8_dynamic")} | {"none": scheme("none", factor=1.1)}
    assert set(charts.non_dominated(same)) == {"bf16", "int8_dynamic"}, "equals beat each other in nothing"
    line = charts.quality_figure(example_inference()).axes[0].lines[0]
    assert list(line.get_xdata()) == [schemes[name]["bytes_in_memory"] / 2**20 for name in ("bf16", "none")]


def test_all_that_stands_in_a_picture_lies_in_it():
    """The longest names, the most schemes, every verdict."""
    schemes = {name: scheme(name) for name in SCHEMES}
    schemes["torch_dynamic"] = scheme("int8_dynamic", tokens_per_s=900.0)
    content = example_inference() | {"schemes": schemes}
    for _, build in charts.CHARTS.values():
        figure = build(content)
        texts = [*figure.texts, *(text for axis in figure.axes for text in [*axis.texts, axis.title, axis._left_title])]
        texts += [text for axis in figure.axes if axis.get_legend() for text in axis.get_legend().get_texts()]
        for text, box in zip(texts, extents(figure, texts), strict=True):
            assert box.x1 <= figure.bbox.x1 + 1 and box.x0 >= -1, text.get_text()


def test_titles_of_speed_call_slower_slower_and_noise_no_difference():
    text = text_of(charts.speed_figure(example_inference()))
    assert "Schemes: bf16, int8_dynamic, int8_weight_only slower than none; " in text
    assert "no detectable difference with int4_weight_only" in text
    assert "The same weights wrapped: DeepSpeed's training engine slower than plain module" in text
    same = charts.speed_figure(example_inference(wrapped=wrapped(800.0)))
    assert "no detectable difference with DeepSpeed's training engine" in text_of(same)
    assert "slower than plain" not in text_of(same) and "faster" not in text_of(same)
    few = example_inference(wrapped=wrapped(700.0, repeats=3))
    assert "no claim about DeepSpeed's training engine" in text_of(charts.speed_figure(few))


def test_a_faster_scheme_is_called_faster_and_bars_are_medians():
    content = example_inference(schemes={"bf16": scheme("bf16", tokens_per_s=1600.0)})
    figure = charts.speed_figure(content)
    assert "Schemes: bf16 faster, int8_dynamic" in text_of(figure)
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    latencies = [each["latency"] for each in content["schemes"].values()]
    assert widths == pytest.approx([sorted(decode_rates(each))[3] for each in latencies])


def test_one_token_asked_for_is_no_decode_rate():
    content = example_inference()
    for each in content["schemes"].values():
        each["latency"]["per_token_s"] = [[] for _ in each["latency"]["per_token_s"]]
    content["wrapped"] = None
    assert charts.speed_figure(content) is None


def test_the_load_picture_marks_saturation_and_refused_requests():
    figure = charts.load_figure(example_inference())
    assert figure.texts[0].get_text() == "Throughput stops growing at 4 requests at once: at most 1,840 tokens/s"
    assert "Up to 90 requests/s most requests start at once" in text_of(figure)
    assert "3.000 MiB of keys and values for 8 slots" in text_of(figure)
    assert "3 requests found the queue full" in text_of(figure)
    closed, opened = figure.axes[:2]
    for axis, where in ((closed, 4), (opened, 90)):
        assert where in [line.get_xdata()[0] for line in axis.lines if len(set(line.get_xdata())) == 1]
    p50, p95, _ = closed.lines[:3]
    points = example_inference()["load"]["closed"]
    assert list(p50.get_ydata()) == [each["latency_s"]["p50"] for each in points]
    assert list(p95.get_ydata()) == [each["latency_s"]["p95"] for each in points]
    throughput = figure.axes[2].lines[0]
    assert list(throughput.get_ydata()) == [each["tokens_per_s"] for each in points]


OPEN_ALONE = {"closed": [], "saturation": {"concurrency": None, "tokens_per_s": None}}
LOAD_TITLES = {
    "not reached": (
        {"saturation": {"concurrency": 16}},
        "Throughput still grows at 16 requests at once: 1,840",
    ),
    "open alone": (OPEN_ALONE, "Up to 90 requests/s most"),
    "none of the rates": (
        {"closed": [], "saturation": {**OPEN_ALONE["saturation"], "rate_per_s": None}},
        "At none of the rates do most requests start at once",
    ),
    "all rates": (
        {"closed": [], "saturation": {**OPEN_ALONE["saturation"], "rate_per_s": 110}},
        "Up to 110 requests/s, the most that was tried, most requests start at once",
    ),
    "one concurrency, which shows no growth": (
        {"closed": load()["closed"][:1], "saturation": {"concurrency": 1, "tokens_per_s": 800}},
        "800 tokens/s at 1 request at once",
    ),
    "closed alone": ({"open": []}, "Throughput stops growing at 4 requests at once: at most 1,840 tokens/s"),
    "unfinished": ({"saturation": None}, "Latency against load"),
}


@pytest.mark.parametrize(("change", "title"), LOAD_TITLES.values(), ids=LOAD_TITLES)
def test_what_the_loads_do_not_show_is_not_said(change, title):
    content = example_inference(load=load(**change))
    if change.get("saturation", 0) is None:
        content["load"]["saturation"] = None
    check_inference(content)
    figure = charts.load_figure(content)
    assert figure.texts[0].get_text().startswith(title)
    assert len(figure.axes) == (2 if [] in change.values() else 4)


def test_a_load_of_which_nothing_was_answered_is_drawn_without_latency():
    nothing = point(0.1, 100.0, concurrency=2) | {"completed": 0, "rejected": 20, "samples": [], "tokens_per_s": 0.0}
    nothing |= {name: dict.fromkeys(("p50", "p95", "p99")) for name in ("latency_s", "time_to_first_token_s")}
    content = example_inference(load=load(closed=[nothing], open=[], saturation=None))
    assert "n/a / n/a / n/a" in report.load_table(content).rows[0]
    assert charts.load_figure(content) is not None


def of_none(**fields) -> dict:
    return example_inference(schemes={"none": scheme("none") | fields})


FAULTS = {
    "no JSON": ("{", "is not JSON"),
    "another file": ({"schema_version": "2.1"}, "schema_version is '2.1'"),
    "a scheme of another name": (example_inference(schemes={"int3": scheme("bf16")}), "schemes has a field whose name"),
    "a negative time": (
        of_none(latency=speed(800, 7) | {"prefill_s": [-1.0]}),
        "schemes.none.latency.prefill_s[0] is -1",
    ),
    "NaN": (of_none(perplexity=quality(1.0) | {"bits_per_byte": math.nan}), "bits_per_byte is nan"),
}


@pytest.mark.parametrize(("content", "words"), FAULTS.values(), ids=FAULTS)
def test_what_is_no_such_file_is_refused_in_one_sentence(tmp_path, content, words):
    path = tmp_path / INFERENCE
    if isinstance(content, str):
        path.write_text(content)
    else:
        save(tmp_path, content, INFERENCE)
    with pytest.raises(ValueError, match=r"inference_metrics\.json") as caught:
        read_inference(tmp_path)
    assert words in str(caught.value) and "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_one_command_draws_all_of_several_checkpoints(tmp_path):
    small = {"load": None, "schemes": {name: scheme(name) for name in ("none", "bf16")}}
    for name in ("one", "two"):
        save(tmp_path / name, example_inference(checkpoint={"name": name}) | small, INFERENCE)
    two = tmp_path / "two" / INFERENCE
    done = run_here("generate_charts.py", "--inference", "one", two, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("one", "two"):
        pictures = {path.name for path in (tmp_path / "docs/charts" / name).glob("*.png")}
        assert pictures == PICTURES - {"latency_vs_load.png"}
        tables = (tmp_path / "docs/charts" / name / "inference_tables.md").read_text()
        assert tables == report.report(example_inference(checkpoint={"name": name}) | small) + "\n"
        assert tables in done.stdout
    assert "Saved decode rate chart to docs/charts/one/decode_rate.png" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--inference", "none"], "none does not exist"),
        (["--inference", "run", "--report", "r.html"], "--report and --markdown are about runs"),
        (["--inference", "run", "run"], "--inference run would be drawn into docs/charts/run too"),
        (["--inference", "broken.json"], "broken.json is not JSON"),
    ],
)
def test_what_was_typed_wrong_gives_one_sentence_and_exit_code_2(tmp_path, arguments, sentence):
    save(tmp_path / "run", example_inference(), INFERENCE)
    (tmp_path / "broken.json").write_text("{")
    done = run_here("generate_charts.py", *arguments, cwd=tmp_path)
    (error,) = [line for line in done.stderr.splitlines() if "error:" in line]
    assert done.returncode == 2 and sentence in error
    assert not (tmp_path / "docs").exists()


def test_examples_obey_the_schema():
    check_inference(example_inference())
    check_inference(example_inference(schemes={"int4_weight_only": unavailable("int4_weight_only", "no kernel")}))
    check_inference(example_inference() | NOTHING_MEASURED)
    assert comparison([1.0] * 5, [1.0] * 5)["verdict"] == "no detectable difference"
