"""Tables of published figures: columns by exact headings or --columns, and rows that contradict each other."""

from __future__ import annotations

import contextlib
import random
import re
import time

import pytest
from support.programs import run_here
from support.tables import saved, table

from testbed.audit.claims import FAILS, NOTE, audit
from testbed.audit.readers import read_reported
from testbed.audit.tables.columns import quantity_of
from testbed.audit.tables.figures import figure_of
from testbed.audit.tables.read import columns_named
from testbed.errors import InputError

PROGRAM = "scripts/audit_runs.py"


SPEED_UP = table("GPUs | tokens/s | Speed-up | Efficiency", "1 | 503,225 | 1.00x | 100%", "2 | 982,114 | 1.95x | 97.6%",
                 "4 | 1,921,000 | 3.82x | 95.4%", "8 | 3,716,000 | 7.38x | 92.3%")  # fmt: skip
BATCHES = table("GPUs | micro batch | accumulation | global batch size", "1 | 4 | 8 | 32", "2 | 4 | 4 | 32",
                "4 | 4 | 2 | 32")  # fmt: skip
STEPS = table("GPUs | tokens/s | step time (ms) | global batch size | seq len", "1 | 16,384 | 500 | 8 | 1024",
              "2 | 30,340 | 540 | 16 | 1024", "4 | 58,514 | 560 | 32 | 1024")  # fmt: skip
PARALLEL = table("GPUs | DP | TP | PP | MFU", "8 | 2 | 2 | 2 | 41%", "16 | 4 | 2 | 2 | 40%", "32 | 8 | 2 | 2 | 39%")
EACH = table("GPUs | tokens/s | tokens/s/GPU", "1 | 101 | 101", "2 | 198 | 99", "4 | 392 | 98")
TOTALS = table("steps | global batch size | seq len | tokens", "1000 | 512 | 1024 | 524,288,000",
               "2000 | 512 | 1024 | 1,048,576,000", "4000 | 512 | 1024 | 2,097,152,000")  # fmt: skip
TIMES = table("tokens/s | training time | tokens", "100,302 | 997 s | 100M", "200,802 | 498 s | 100M",
              "400,011 | 250 s | 100M")  # fmt: skip
SAMPLES = table("GPUs | images/s | step time (s) | global batch size", "1 | 64 | 0.50 | 32", "2 | 128 | 0.50 | 64",
                "4 | 250 | 0.51 | 128")  # fmt: skip
MICRO = table("DP | micro batch | global batch", "1 | 4 | 32", "2 | 4 | 32", "4 | 4 | 32")
# name -> (table, its figure, the changed one, words)
PLANTED = {
    "speed-up": (SPEED_UP, "3.82x", "4.32x", "does not follow from the figures of its row"),
    "efficiency": (SPEED_UP, "92.3%", "82.3%", "does not follow from the figures of its row"),
    "more than linear": (SPEED_UP, "1.95x", "2.95x", "on 2 times the devices is more than linear"),
    "a batch": (BATCHES, "4 | 2 | 32", "4 | 4 | 32", "global batch = micro batch x accumulation x data ranks"),
    "a rate": (STEPS, "58,514", "78,514", "tokens/s x time of a step = global batch x length"),
    "ranks": (PARALLEL, "32 | 8", "32 | 4", "devices = data x tensor x pipeline ranks"),
    "a rate of one device": (EACH, "392", "492", "tokens/s of all = tokens/s of one device x devices"),
    "tokens": (TOTALS, "1,048,576,000", "1,148,576,000", "tokens = steps x global batch x length"),
    "a time": (TIMES, "250 s", "350 s", "tokens/s x time = tokens"),
    "samples": (SAMPLES, "250", "350", "samples/s x time of a step = global batch"),
    "an MFU": (PARALLEL, "41%", "141%", "no device does more than its peak"),
    "a micro batch": (MICRO, "4 | 4 | 32", "4 | 5 | 32", "is not a multiple of micro batch x data ranks = 20"),
}


@pytest.mark.parametrize(("text", "old", "new", "words"), PLANTED.values(), ids=PLANTED)
def test_a_changed_figure_is_found_in_its_row(tmp_path, text, old, new, words):
    path = saved(tmp_path, text)
    assert audit([path]) == []
    line = 1 + text[: text.index(old)].count("\n")
    found = audit([saved(tmp_path, text.replace(old, new, 1))])
    assert any(words in f.message and f.runs == (f"{path}:{line}",) and f.severity == FAILS for f in found), found


def test_a_row_of_other_work_is_noted(tmp_path):
    rows = ("1 | 4 | 1024 | 100 | 1.0", "4 | 16 | 1024 | 290 | 2.9", "4 | 4 | 2048 | 290 | 2.9")
    path = saved(tmp_path, table("GPUs | global batch | seq len | tokens/s | speedup", *rows))
    said = [(f.severity, f.runs[0][-1], f.message.partition(": ")[2]) for f in audit([path])]
    devices = "ranks 1 against 4 (4 times)"
    assert said == [(NOTE, "4", f"{devices}; global batch size 4 against 16 (4 times); 0.725x per device"),
                    (NOTE, "5", f"{devices}; sequence length 1024 against 2048; 0.725x per device")]  # fmt: skip


def test_what_has_to_be_guessed_is_not_read(tmp_path):
    known = {"#GPUs": "devices", "Number of GPUs": "devices", "Step time (ms)": "step_s", "tokens/sec/GPU":
             "device_token_rate", "Throughput (tokens/s)": "token_rate", "**Global batch size**": "batch",
             "GlobalBatchSize": "batch", "GPUNum": "devices", "TimePerIter (s)": "step_s", "bsz/gpu": "micro_batch",
             "mean_step_ms": "step_s", "iter (ms)": "step_s", "Training Speed (tok/s)": "token_rate",
             "train time (s/iter)": "step_s", "Val. loss": "val_loss", "num_params": "params", "train_hours": "time_s",
             "Epoch (s)": "time_s", "Seconds": "time_s", "time to 300B tokens": "time_s", "kTok/s/GPU":
             "device_token_rate", "loss @ 20B tokens": "train_loss", "gpus_per_node": "per_node",
             "Number of A100s": "devices"}  # fmt: skip
    assert {heading: quantity_of(heading) for heading in known} == known
    for heading in (
        "latency",
        "memory",
        "Projected tokens/s",
        "Config",
        "speed",
        "relative cost",
        "epoch",
        "total",
        "num_workers",
    ):
        assert quantity_of(heading) is None, heading
    headed = SPEED_UP.replace("Speed-up", "vs 1 GPU")
    assert "4.32x does not follow" in audit([saved(tmp_path, headed.replace("3.82x", "4.32x"))])[0].message
    shares = table("params | GPUs | speedup", "100% | 1 | 1.0", "30% | 1 | 1.5", "10% | 1 | 1.9")
    assert audit([saved(tmp_path, shares)]) == [], "a share of a model is not its size"
    other = table("Layer | Params | vs Linear", "linear | 98,304 | 1.00x", "conv | 589,824 | 0.44x")
    with pytest.raises(InputError):  # a ratio, and not of speed
        audit([saved(tmp_path, other)])
    smaller = table("Model | Parameters | Speed-up", "teacher | 109M | 1.0x", "student | 4M | 46.5x")
    assert audit([saved(tmp_path, smaller)]) == [], "a distilled model is meant to be smaller"
    commas = SPEED_UP.replace("Speed-up", "Speed\N{NON-BREAKING HYPHEN}up").replace("3.82x", "4,32x")
    assert "4,32x does not follow" in audit([saved(tmp_path, commas)])[0].message
    estimates = SPEED_UP.replace("3.82x", "~4.32x")
    assert audit([saved(tmp_path, estimates)]) == []
    path = saved(tmp_path, table("Name | Colour", "a | red"))
    with pytest.raises(InputError, match="--columns"):
        audit([path])


def test_nodes_are_as_good_as_devices_for_a_ratio(tmp_path):
    header, rows = (
        "Nodes | Time per epoch (s) | Speedup | Efficiency",
        ("1 | 611.0 | 1.00 | 1.00", "2 | 318.2 | 1.92 | 0.96"),
    )
    said = [f.message for f in audit([saved(tmp_path, table(header, *rows, "4 | 130.0 | 4.70 | 1.18"))])]
    assert said == ["Speedup 4.70 on 4 times the nodes is more than linear"]
    rows = ("1 node | 100 | 1.0x | 100 %", "2 nodes | 195 | 1.95x | 97.5 %", "4 nodes | 374 | 3.74x | 83.5 %")
    (found,) = audit([saved(tmp_path, table("| seq/s | speed-up | efficiency", *rows))])
    assert "efficiency 83.5 % does not follow" in found.message


def test_a_table_with_its_quantities_in_the_first_column_is_turned(tmp_path):
    text = table(
        "| old | new", "GPUs | 8 | 8", "Global batch size | 32 | 64", "tokens/s | 100 | 210", "Speed-up | 1.0x | 2.1x"
    )
    (found,) = audit([saved(tmp_path, text)])
    assert "global batch size 32 against 64 (2 times)" in found.message


def test_columns_are_named_where_headings_leave_a_doubt(tmp_path):
    path = saved(tmp_path, SPEED_UP.replace("GPUs", "Karten").replace("tokens/s", "Tempo").replace("7.38x", "6.38x"))
    done = run_here(PROGRAM, path, "--columns", "gpus=Karten,token_rate=Tempo")
    assert done.returncode == 1 and "Speed-up 7.38x would follow" in done.stdout
    text = STEPS.replace("| seq len ", "").replace("| 1024 ", "").replace("58,514", "78,514")
    found = audit([saved(tmp_path, text)], columns={"length": "1024"})
    assert any("= global batch x length" in f.message for f in found)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("gpus", "write QUANTITY=HEADING"),
        ("colour=GPUs", "no such quantity"),
        ("devices=Cards", "has no column 'Cards'"),
        ("gpus=GPUs,devices=Efficiency", "devices is 'GPUs' already"),
        ("gpus=GPUs,tp=GPUs", "'GPUs' is another quantity already"),
        ("length=0", "has no figure that can be read under '0'"),
    ],
)
def test_wrong_columns_are_refused_in_one_sentence(tmp_path, typed, words):
    done = run_here(PROGRAM, saved(tmp_path, SPEED_UP), "--columns", typed)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_columns_without_a_table_are_refused(tmp_path):
    done = run_here(PROGRAM, tmp_path, saved(tmp_path, "step 1", "a.log"), "--columns", "gpus=GPUs")
    assert done.returncode == 2 and "type one, as .md, .csv, .tsv" in done.stderr


def test_csv_is_read_like_markdown(tmp_path):
    named = columns_named(["GPUs=run, token_rate=Tempo, gesamt", "speedup=faktor"])
    assert named == {"devices": "run", "token_rate": "Tempo, gesamt", "speedup": "faktor"}
    path = saved(tmp_path, "run;Tempo, gesamt;faktor\n1;100;1.00x\n2;190;1.90x\n4;301;3.70x\n8;701;7.01x\n", "a.csv")
    assert [finding.runs for finding in audit([path], columns=named)] == [(f"{path}:4",)]


@pytest.mark.parametrize(
    ("cell", "kind", "value", "low", "high"),
    [
        ("503,225", "number", 503225, 503224, 503226),
        ("2.49e+02", "number", 249, 248, 250),
        ("108K", "number", 108e3, 107e3, 109e3),
        ("2,9x", "factor", 2.9, 2.8, 3.0),
        ("45.0%", "share", 0.45, 0.449, 0.451),
        ("607 ms", "time", 0.607, 0.606, 0.608),
        ("1.5 h", "time", 5400, 5040, 5760),
        ("8", "count", 8, 8, 8),
        ("~40 min", "time", 2400, 0.85 * 2340, 1.15 * 2460),
        ("7d", "time", 604800, 518400, 691200),
    ],
)
def test_a_cell_is_an_interval(cell, kind, value, low, high):
    figure = figure_of(cell, kind)
    assert (figure.value, figure.low, figure.high) == pytest.approx((value, low, high))


@pytest.mark.parametrize("cell", ["", "-", "OOM", "<37", "0.86^", "3-4", "8 / 4", "2h 30m", "-3", "nan", "1e999"])
def test_other_cells_are_no_figures(cell):
    assert figure_of(cell, "number") is None


def test_a_broken_table_is_read_or_refused(tmp_path):
    """Words of every table replaced by odd ones, cut short, and doubled: no error but a sentence."""
    odd = ["", "-", "nan", "-1", "0", "1e400", "9" * 5000, "0.1.2", '"', "\n", "|", "||", "\x00", "%", "x"]
    draw, outcomes = random.Random(1), []
    for number in range(300):
        words = re.split(r"(\W)", draw.choice(list(PLANTED.values()))[0])
        for _ in range(draw.randint(1, 4)):
            words[draw.randrange(len(words))] = draw.choice([*odd, draw.choice(words), draw.choice(words) * 2])
        text = "".join(words)[: draw.choice([None, None, draw.randrange(1, 200)])]
        path = saved(tmp_path, text, f"broken{number}.{draw.choice(['md', 'csv', 'tsv'])}")
        try:
            audit([path])
            outcomes.append("read")
        except InputError as error:
            assert len(str(error).splitlines()) == 1
            outcomes.append("refused")
    assert min(outcomes.count("read"), outcomes.count("refused")) > 8


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("letter.csv", "a" * 120_000),
        ("letter.md", "| a | b |\n|---|---|\n| 1 | " + "a" * 120_000),
        ("words.md", f"# {'h ' * 16_000}\n\n| {'step ' * 6_400} | tokens/s |\n|---|---|\n| 1 | 2 |\n"),
        ("brackets.md", f"| {'( ' * 16_000} | tokens/s |\n|---|---|\n| 1 | 2 |\n"),
        ("cell.csv", f"gpus,tokens/s\n1,{'1' * 32_000}\n2,{'a' * 32_000}"),
        ("spaces.csv", f"gpus,tokens/s\n1,{' ' * 32_000}1\n2,{'( ' * 16_000}"),
        ("digits.txt", "1" * 120_000),
    ],
)
def test_a_long_line_or_heading_takes_no_quadratic_time(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    began = time.perf_counter()
    with contextlib.suppress(InputError):
        audit([tmp_path / name])
    assert time.perf_counter() - began < 10


HTML = """# Results
<table>
<tr><th>GPUs</th><th>tokens/s</th><th>Speed-up</th></tr>
<tr><td>1</td><td>100</td><td>1.0x</td></tr>
<tr><td>2</td><td>190</td><td><b>2.9x</b></td></tr>
</table>
"""


@pytest.mark.parametrize(
    ("name", "text", "line", "words"),
    [
        ("a.md", HTML, 5, "Speed-up 2.9x does not follow"),
        ("a.csv", "# 8 nodes\n# bf16\ngpus,tokens/s,speedup\n1,100,1.0\n2,190,2.9\n", 5, "speedup 2.9 does not follow"),
        (
            "a.md",
            table("GPUs | Time | Speedup", "1 | 6 h 40 min | 1.0x", "4 | 2 h 30 min | 3.9x"),
            4,
            "3.9x does not follow",
        ),
        ("a.md", table("GPUs | images/s | Speedup", "1 | 4 310 | 1.0x", "2 | 8 100 | 2.5x"), 4, "2.5x does not follow"),
        (
            "a.md",
            table(
                "GPUs | global batch | step time [s] | efficiency", "8 | 64 | 1.22 | 100 %", "64 | 512 | 1.31 | 11.6 %"
            ),
            4,
            "divides the step time [s] of another batch",
        ),
    ],
)
def test_other_ways_to_write_a_table_are_read(tmp_path, name, text, line, words):
    path = saved(tmp_path, text, name)
    found = audit([path])
    assert any(words in each.message.lower() or words in each.message for each in found), found
    assert all(each.runs[0].startswith(f"{path}:{line}") for each in found), found


@pytest.mark.parametrize(
    ("row", "note", "words"),
    [
        ("ours (*)", "(*) 8 x the row above, assuming linear scaling", "does not call measured"),
        ("ours \N{DAGGER}", "\N{DAGGER} estimated from the rows above", "does not call measured"),
    ],
)  # fmt: skip
def test_a_mark_of_any_kind_ties_a_note_to_its_row(tmp_path, row, note, words):
    rows = table("Schedule | tokens/s | Speedup", "1F1B | 100 | 1.0x", f"{row} | 140 | 1.4x")
    (finding,) = audit([saved(tmp_path, f"{rows}\n{note}\n")])
    assert words in finding.message


def test_a_reference_whose_status_says_that_it_failed_is_none(tmp_path):
    rows = table(
        "run | status | tokens/s | speedup", "a | NaN from step 312, stopped | 171K | 1.0x", "b | done | 290K | 1.7x"
    )
    (finding,) = audit([saved(tmp_path, rows)])
    assert "refers to a row that was not measured: NaN from step 312" in finding.message


def test_workers_beside_a_speed_up_are_devices(tmp_path):
    (finding,) = audit([saved(tmp_path, table("workers | time | speedup", "1 | 100 s | 1.0x", "4 | 40 s | 3.9x"))])
    assert "3.9x does not follow" in finding.message
    assert quantity_of("workers") is None


def test_a_little_more_than_linear_is_noise(tmp_path):
    for speed_up, number in (("2.03x", 0), ("2.20x", 1)):
        rows = table("GPUs | model | speedup", "1 | 124M | 1.00x", f"2 | 124M | {speed_up}")
        assert len(audit([saved(tmp_path, rows)])) == number


@pytest.mark.parametrize(
    ("header", "base", "ours", "words"),
    [
        (
            "Method | GPUs | global batch | tokens/s",
            "DDP | 8 | 64 | 100",
            "ours | 8 | 128 | 190",
            "batch size 64 against 128",
        ),
        ("Method | GPUs | seq len | tokens/s", "DDP | 8 | 2048 | 100", "ours | 8 | 1024 | 190", "sequence length 2048"),
    ],
)
def test_methods_side_by_side_that_differ_in_more_are_noted(tmp_path, header, base, ours, words):
    (finding,) = audit([saved(tmp_path, table(header, base, ours))])
    assert words in finding.message and finding.severity == NOTE
    grid = (base, ours, base.replace("100", "102"), ours.replace("190", "192"))  # each method twice
    assert audit([saved(tmp_path, table(header, *grid))]) == []
    equal = [" | ".join([ours.split(" | ")[0], *base.split(" | ")[1:]]).replace("100", "190"), base]
    assert audit([saved(tmp_path, table(header, *equal))]) == []


# what a reader of a page sees -> (the page, words that a finding has, the same without it)
SEEN = {
    "other devices in one cell": (
        table("Loader | GPUs | images/s | speedup", "plain | 8x V100 | 315 | 1.0x", "ours | 8x A100 | 1420 | 4.5x"),
        "devices V100 against A100", ("A100", "V100")),
    "a batch behind a speed": (table("Config | Speed", "Small (BS=8) | 1x", "Large (BS=32) | 3.5x"),
                               "batch size 8 against 32 (4 times)", ("=32", "=8")),
    "half of the tokens": (table("name | training tokens (B) | hours | speedup",
                                 "base | 26.0 | 61 | 1.00", "new | 15.6 | 35 | 1.75"),
                           "training tokens 26,000,000,000 against 15,600,000,000", ("15.6", "26.0")),
    "a page of placeholders": ("All numbers are projected.\n\n" + SPEED_UP, "All numbers are projected",
                               ("projected", "measured")),
    "micro batches": (table("run | micro bs | accum | devices | sec/step | speedup", "all | 4 | 8 | 2 | 41.2 | 1.0x",
                            "none | 4 | 2 | 2 | 6.9 | 5.97x"), "global batch size 64 against 16",
                      ("4 | 2 |", "4 | 8 |")),
    "a batch with what it makes in all": (table("GPUs | Batch size | Speedup", "1 | 128 | 1.0x",
                                                "2 | 64 per GPU (256 effective) | 1.8x"),
                                          "128 against 256", ("256 effective", "128 effective")),
    "a batch of each GPU": (table("GPUs | Batch/GPU | Time/Epoch | Speedup", "1 | 128 | 218.5s | 1.00x",
                                  "4 | 128 | 65.0s | 3.36x"), "128 against 512", ("4 | 128", "4 | 32")),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_what_a_reader_sees_is_said_and_nothing_else(tmp_path, name):
    page, words, (old, new) = SEEN[name]
    found = [finding.message for finding in audit([saved(tmp_path, page)])]
    assert len(found) == 1 and words.lower() in found[0].lower(), found
    assert page != page.replace(old, new) and audit([saved(tmp_path, page.replace(old, new))]) == []


def test_a_batch_that_grows_is_held_against_what_is_called_strong_scaling(tmp_path):
    """Of weak scaling it is the point; where the text says nothing, it is noted."""
    rows = table("GPUs | global batch | images/s | speedup", "8 | 64 | 101 | 1.00x", "16 | 128 | 198 | 1.96x")
    for title, words in (("Weak scaling", []), ("Strong scaling", ["is called strong scaling, and the batch grows"]),
                         ("Scaling", ["compares rows of other work"])):  # fmt: skip
        found = audit([saved(tmp_path, f"# {title}\n\n{rows}")])
        assert len(found) == len(words) and all(word in each.message for word, each in zip(words, found, strict=True))


def test_examples_of_other_models_are_no_series_and_a_share_is_no_number_of_devices(tmp_path):
    rows = "4x A100 | 12,800", "32x A100 | 8,400"
    other = table("Model | Hardware | Tokens/sec", f"BERT-Base | {rows[0]}", f"LLaMA-7B | {rows[1]}")
    assert audit([saved(tmp_path, other)]) == []
    one = table("Model | Hardware | Tokens/sec", f"LLaMA-7B | {rows[0]}", f"LLaMA-7B | {rows[1]}")
    assert "more devices were slower" in audit([saved(tmp_path, one)])[0].message
    assert quantity_of("GPU (%)") is None and quantity_of("GPUs") == "devices"


@pytest.mark.parametrize(
    "sentence",
    [
        "MFU is relative to the theoretical peak performance of an A100.",
        "Theoretical peak throughput is 312 TFLOP/s.",
        "All results are within 2 % of the expected linear scaling.",
        "Models are described in this section; expected calibration error is not shown.",
    ],
)
def test_sentences_about_peaks_and_methods_say_nothing_of_the_figures(tmp_path, sentence):
    rows = table("GPUs | tokens/s | Speedup", "1 | 1000 | 1.0x", "2 | 1950 | 1.95x")
    assert audit([saved(tmp_path, f"{sentence}\n\n{rows}")]) == []


def test_a_loss_of_another_study_belongs_to_no_row(tmp_path):
    rows = table("GPUs | tokens/s | Speedup", "1 | 1000 | 1.0x", "2 | 1950 | 1.95x")
    for heading in ("Layers", "GPUs"):
        other = table(f"{heading} | Val loss", "1 | 3.0", "2 | 3.2")
        assert audit([saved(tmp_path, f"{rows}\n\nAnother study.\n\n{other}")]) == []


def test_a_configuration_is_no_ratio(tmp_path):
    turned = table("Metric | Configuration A | Configuration B", "Tokens/s | 1000 | 1500", "GPUs | 1 | 1")
    (found,) = read_reported([saved(tmp_path, turned)])
    assert [len(grid.lines) for grid in found.details["grids"]] == [2]
