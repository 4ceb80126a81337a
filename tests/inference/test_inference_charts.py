"""inference_metrics.json as tables and pictures: what they say is what the file says, slower is called slower."""

from __future__ import annotations

import pytest
from support.inference_examples import NOTHING_MEASURED, example_inference, load, quality, scheme, unavailable

from testbed.analysis.document.model import Table
from testbed.inference import charts, report
from testbed.inference.report import check_inference


def cells(table: Table, name: str) -> list[str]:
    (row,) = [row for row in table.rows if row[0] == name]
    return list(map(str, row))


def test_the_size_table_has_what_was_counted_and_the_paired_interval():
    content = example_inference()
    row = cells(report.size_table(content), "int4_weight_only")
    assert row[1:6] == ["4", "16 of 17", f"{5_050_000 / 2**20:.3f}", "101.0%", f"{5_062_000 / 2**20:.3f}"]
    value = content["schemes"]["int4_weight_only"]["perplexity"]["value"]
    assert row[6] == "2.5000"
    assert row[7].startswith(f"{value:.1f} [") and row[8:] == ["1.0800x [1.0795, 1.0805]", "worse"]
    assert cells(report.size_table(content), "int8_weight_only")[-1] == "no detectable difference"
    assert cells(report.size_table(content), "none")[8:] == ["", ""]


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.0001, 1.0039, "worse, but by too little to matter (under 0.4%)"),  # a difference, but none to choose by
        (0.9999, 1.0000001, "no detectable difference"),
        (0.9981, 0.9990, "better, but by too little to matter (under 0.4%)"),
        (0.9999, 1.0060, "no detectable difference"),
        (1.0030, 1.0060, "worse"),
        (0.9940, 0.9990, "better"),
    ],
)
def test_a_verdict_on_perplexity_says_when_the_difference_is_small(low, high, verdict):
    assert report.quality_verdict({"value": (low + high) / 2, "low": low, "high": high}) == verdict


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        ((1.00001, 1.000004, 1.00002), "equal within 0.01%"),
        ((0.99999, None, None), "equal within 0.01%"),
        ((1.0001, 1.00004, 1.0002), "1.0001x [1.0000, 1.0002]"),
        ((1.08, None, None), "1.0800x"),
    ],
)
def test_a_ratio_that_would_read_one_is_said_in_words(ratio, said):
    assert str(report.quality_ratio(dict(zip(("value", "low", "high"), ratio, strict=True)))) == said


def test_the_speed_table_has_percentiles_in_milliseconds_and_the_verdict():
    content = example_inference()
    slow = cells(report.speed_table(content), "int8_dynamic")
    of = content["schemes"]["int8_dynamic"]["latency"]["percentiles"]["per_token_s"]
    assert slow[3] == " / ".join(f"{of[name] * 1e3:.3f}" for name in ("p50", "p95", "p99"))
    assert slow[5] == "500" and slow[6].startswith("0.6") and slow[7] == "slower"
    assert slow[8].startswith(f"{500 / 560:.2f}x [") and slow[9] == "slower"  # against bf16, which is slower than fp32
    int4 = cells(report.speed_table(content), "int4_weight_only")
    assert int4[7] == "no detectable difference" and int4[9] == "faster"
    assert cells(report.speed_table(content), "bf16")[8:] == ["", ""]


def test_the_load_table_has_a_row_for_every_load_and_counts_what_was_refused():
    table = report.load_table(example_inference())
    assert len(table.rows) == 5 + 4
    assert cells(table, "4 at once")[1:5] == ["20", "20", "0", "1,800"]
    assert cells(table, "110 requests/s")[1:5] == ["20", "17", "3", "1,800"]


def test_wrapped_modules_stand_beside_the_plain_one():
    table = report.wrapped_table(example_inference())
    assert cells(table, "DeepSpeed's training engine")[4:] == ["slower", "yes"]
    assert len(table.rows) == 2, "init_inference did not run"
    assert report.unmeasured(example_inference()) == [
        "deepspeed.init_inference: it needs a kernel that is not built here."
    ]


def test_the_report_says_what_was_not_measured_and_how_the_rest_was():
    schemes = {"int4_weight_only": unavailable("int4_weight_only", "its kernel needs CUDA")}
    text = report.report(example_inference(schemes=schemes, status="failed", failure="out of memory"))
    assert "- NOT MEASURED, int4_weight_only: its kernel needs CUDA.\n" in text
    assert "- UNFINISHED: the file's status is failed.\n" in text
    assert "20 windows of 1024 tokens, one every 512" in text and "10,240 tokens predicted" in text
    assert "| int4_weight_only |" not in text


def test_the_notes_say_what_a_speed_does_not_show():
    text = report.report(example_inference())
    assert text.count("all in one process: the interval says nothing of another start") == 2  # schemes, and wrapped
    eager = "- Eager, not compiled: torchao widens or sums int8 weights again for each product"
    assert eager in text and "slower here says nothing of compiled models." in text
    plain = {"schemes": {name: scheme(name) for name in ("none", "bf16")}}
    assert "Eager" not in report.report(example_inference() | plain)


def test_few_windows_make_no_claim_and_the_report_says_so():
    small = scheme("none") | {"perplexity": quality(1.0) | {"low": None, "high": None}}
    assert "Too few windows for an interval" in report.report(example_inference(schemes={"none": small}))
    assert "Too few windows" not in report.report(example_inference())


def test_the_memory_of_a_load_is_said():
    assert "- 3.000 MiB of keys and values for 8 slots, allocated beforehand.\n" in report.report(example_inference())
    on_device = report.report(example_inference(load=load(peak_allocated_bytes=50 * 2**20)))
    assert "at most 50.00 MiB on the device, the weights of all schemes included" in on_device


def test_a_file_without_measurements_gives_a_report_and_no_picture(tmp_path):
    content = example_inference() | NOTHING_MEASURED | {"status": "running"}
    check_inference(content)
    saved = charts.write_inference_charts(content, tmp_path)
    assert set(saved) == {"tables"} and "UNFINISHED" in saved["tables"].read_text()
