"""The audit of tables: metrics in rows, HTML, columns that compare two others, and rates against a model's size."""

from __future__ import annotations

import pytest

from testbed.audit.claims import FAILS, audit
from testbed.audit.tables.counts import count_in, most_in
from testbed.audit.tables.figures import figures_of
from testbed.audit.tables.grid import markdown_tables
from testbed.audit.tables.html import html_tables
from testbed.audit.tables.turned import turned

METRICS = """
| Metric | 1 GPU | 2 GPUs | 4 GPUs | 8 GPUs |
|---|---|---|---|---|
| Throughput (samples/s) | 54.2 | 84.9 | 160.3 | 301.7 |
| Speedup | 1.0x | 1.57x | 2.96x | 5.57x |
| Scaling efficiency | 100% | 78.3% | 73.9% | 69.6% |
| Peak memory (GB) | 14.1 | 14.3 | 14.3 | 14.4 |
"""
PAIR = """
| Metric | 1 GPU | 2 GPUs |
|---|---|---|
| Throughput (samples/s) | 54.2 | 84.9 |
| Speedup | 1.0x | 1.57x |
| Wall time (s) | 1,244 | 793 |
"""
PER_METRIC = """
| Metric | 1 GPU | 2 GPU DDP | Speedup |
|---|---|---|---|
| Time per epoch | 8m 00s | 4m 30s | **1.78x** |
| Total time | 24m 00s | 13m 45s | **1.74x** |
| Throughput | 250 samples/s | 444 samples/s | **1.78x** |
| Train loss | 2.75 | 3.17 | - |
"""
KERNELS = """
| Kernel | eager (us) | fused (us) | Saved | Change |
|---|---|---|---|---|
| layer norm | 84.1 | 31.3 | 63% | -62.8% |
| softmax | 120.4 | 66.9 | 44% | -44.4% |
| cross entropy | 310.9 | 95.2 | 69% | -69.4% |
| gelu | 55.0 | 40.1 | 27% | -27.1% |
| Average | | | 51% | -50.9% |
"""
RATES = """
## Training on A100 80GB

| Model | GPUs | tokens/s/GPU | MFU | TFLOP/s/GPU |
|---|---|---|---|---|
| Llama-7B | 8 | 3,800 | 52% | 162 |
| Llama-13B | 64 | 2,100 | 54% | 168 |
"""
SPANNED = """
## Results

<table>
<tr><th rowspan="2">GPUs</th><th colspan="2">fp16</th></tr>
<tr><th>samples/s</th><th>Speedup</th></tr>
<tr><td>1</td><td><a href="x.log">100.0</a></td><td>1.00</td></tr>
<tr><td>2</td><td>190.0</td><td>1.90</td></tr>
<tr><td>4</td><td>352.0</td><td>3.52</td></tr>
</table>
"""
# name -> (the table, what stands in a row, what it is changed to, words of the message, words of the correction)
CHANGED = {
    "a speed-up in a column": (METRICS, "2.96x", "3.96x", "does not follow from the column '4 GPUs'", "Speedup 2.96x"),
    "an efficiency in a column": (METRICS, "73.9%", "93.9%", "column '4 GPUs'", "efficiency 74.0%"),
    "a speed-up of two runs": (PAIR, "1.57x", "1.37x", "Speedup does not follow from the column '2 GPUs'", "1.57x"),
    "a ratio of two columns": (PER_METRIC, "1.74x", "1.47x", "in 2 other rows it follows", "1.745x would follow"),
    "a time of two columns": (PER_METRIC, "13m 45s", "10m 45s", "1 GPU 24m 00s and 2 GPU DDP 10m 45s", "2.233x"),
    "a saving": (KERNELS, "69%", "49%", "Saved 49% does not follow from eager (us) 310.9", "69.4% would follow"),
    "a change": (KERNELS, "-44.4%", "-74.4%", "Change -74.4% does not follow", "44.4% would follow"),
    "MFU below what the rate needs": (RATES, "| 52%", "| 5%", "does not follow from MFU 5% of the peak of a100", None),
    "MFU over what the rate needs": (RATES, "| 3,800 | 52%", "| 38 | 52%", "they leave at least", None),
    "FLOP/s below what the rate needs": (RATES, "| 162", "| 46", "TFLOP/s/GPU 46: they leave at most", None),
    "FLOP/s over what the rate needs": (RATES, "2,100 | 54% | 168", "21 | - | 168", "they leave at least", None),
    "a rate over the peak": (RATES, "2,100 | 54% | 168", "21,000 | - | -", "from the peak of a100", None),
    "HTML": (SPANNED, "<td>3.52", "<td>3.92", "fp16 Speedup does not follow", "Speedup 3.52"),
}  # fmt: skip


def saved(folder, text: str):
    path = folder / "table.md"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("table", "old", "new", "words", "corrected"), CHANGED.values(), ids=CHANGED)
def test_a_changed_figure_is_found_in_its_line(tmp_path, table, old, new, words, corrected):
    path = saved(tmp_path, table)
    assert audit([path]) == []
    changed = table.replace(old, new, 1)
    line = 1 + next(i for i, (a, b) in enumerate(zip(table.split("\n"), changed.split("\n"), strict=True)) if a != b)
    saved(tmp_path, changed)
    found = [f for f in audit([path]) if f.runs[0] == f"{path}:{line}"]
    assert found and found[0].severity == FAILS, audit([path])
    assert words in found[0].message
    assert corrected is None or corrected in found[0].corrected


LEFT_ALONE = {
    "active parameters": RATES.replace("Llama-13B", "Mixtral 8x7B").replace("2,100", "9,100"),
    "adapters": RATES.replace("Llama-7B", "Llama-7B LoRA").replace("3,800", "9,900"),
    "inference": RATES.replace("Training on", "Inference on").replace("3,800", "93,800"),
    "no device": RATES.replace("A100 80GB", "a cluster").replace("| 3,800 | 52% | 162", "| 38,000 | 52% | -"),
    "a faster variant": RATES.replace("A100 80GB", "RTX 3090 Ti").replace("162", "-").replace("168", "-"),
    "a peak with sparsity": RATES.replace("52%", "26%").replace("54%", "27%").replace("| 162", "| -"),
    "a long context": RATES.replace("## Training", "Sequence length 131072.\n\n## Training").replace(
        "Training on A100 80GB", "Training on A100 80GB, 128K").replace("3,800 | 52% | 162", "130 | 52% | -"),
    "rates of all devices": RATES.replace("tokens/s/GPU", "tokens/s").replace("3,800", "30,400").replace(
        "2,100", "134,400"),
    "a mean of speed-ups": KERNELS.replace("| Average | | |", "| Average | 100.0 | 90.0 |"),
    "another unit": PER_METRIC.replace("444 samples/s", "0.444 ksamples/s"),
    "two metrics that differ": PER_METRIC.replace("| Total time | 24m 00s | 13m 45s | **1.74x** |\n", ""),
    "columns that are nearly equal": """
| GPUs | Accuracy - fp32 | Accuracy - fp16 | Memory (GB) | Speedup |
|---|---|---|---|---|
| 1 | 0.271 | 0.272 | 1.91 | 99% |
| 4 | 0.270 | 0.270 | 1.93 | 99% |
| 8 | 0.270 | 0.269 | 1.95 | 99% |
| 16 | 0.272 | 0.270 | 1.92 | 99% |
| 32 | 0.271 | 0.271 | 1.94 | 62% |
""",
    "a latency of requests": """
### Inference performance
| Batch size | Throughput [img/s] | Latency Avg [ms] | Latency 95% [ms] |
|---|---|---|---|
| 1 | 91.9 | 13.94 | 14.94 |
| 2 | 180.1 | 11.10 | 12.10 |
| 4 | 360.5 | 11.10 | 12.00 |
| 8 | 719.5 | 11.12 | 12.00 |
""",
    "a percentile of steps": """
| Batch size | Samples/s | Step time (ms) | Step time p95 (ms) |
|---|---|---|---|
| 1 | 90.1 | 11.10 | 14.9 |
| 2 | 180.1 | 11.10 | 11.2 |
| 4 | 360.5 | 11.10 | 11.2 |
| 8 | 719.5 | 11.12 | 11.2 |
""",
    "one suffix is missing": """
| GPUs | Throughput - FP32 | Throughput - mixed | Speedup (FP32 to mixed) |
|---|---|---|---|
| 1 | 1.30M | 1.31 | 1.01 |
| 8 | 9.21M | 13.80M | 1.50 |
| 16 | 16.2M | 24.9M | 1.54 |
""",
    "labels that say the devices": """
| Config | Throughput | Efficiency |
|---|---|---|
| 1x A100 | 43,470 tok/s | 100% |
| 4x A100 | 152,142 tok/s | 87.5% |
""",
}  # fmt: skip


@pytest.mark.parametrize("table", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_what_is_not_certain_is_left_alone(tmp_path, table):
    assert audit([saved(tmp_path, table)]) == []


def test_metrics_in_rows_become_columns():
    table = turned(markdown_tables(METRICS)[0])
    assert table.header == (
        "Metric", "Throughput (samples/s)", "Speedup", "Scaling efficiency", "Peak memory (GB)"
    )  # fmt: skip
    assert [row.cells[:2] for row in table.rows][:2] == [("1 GPU", "54.2"), ("2 GPUs", "84.9")]
    assert table.lines_of_columns == (2, 4, 5, 6, 7)
    assert turned(markdown_tables(RATES)[0]) is None


def test_cells_of_html_that_span_others_are_repeated():
    table = html_tables(SPANNED)[0]
    assert table.header == ("GPUs", "fp16 samples/s", "fp16 Speedup")
    assert table.rows[0].cells == ("1", "100.0", "1.00")
    assert [row.line for row in table.rows] == [7, 8, 9] and table.title == "Results"


@pytest.mark.parametrize(
    "text", ["<table><tr><td>1", "<table><table><td></tr></table>", "<td rowspan=9999999>x<table>"]
)
def test_broken_html_holds_no_table(text):
    assert html_tables(text) == []


@pytest.mark.parametrize(
    ("label", "count", "most"),
    [
        ("1 GPU", 1, 1),
        ("8x H100", 8, 8),
        ("4-GPU DDP fp16", 4, 4),
        ("single GPU", 1, 1),
        ("A100 x 4", 4, 4),
        ("2 nodes, 16 GPUs", None, 32),
        ("128 steps", None, None),
    ],
)
def test_a_label_says_how_many_devices(label, count, most):
    assert (count_in(label), most_in(label)) == (count, most)


@pytest.mark.parametrize(
    ("cell", "seconds"), [("2h 15min", 8100), ("24m 00s", 1440), ("1:02:03.5", 3723.5), ("1 day 2 hours", 93600)]
)
def test_a_time_of_several_units_is_read(cell, seconds):
    figure = figures_of([cell], "time")[0]
    assert figure.value == seconds and figure.low < seconds < figure.high
