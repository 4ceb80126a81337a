"""Profiles by Nsight Systems and torch.profiler: read exactly or refused, and summarised per rank and step."""

from __future__ import annotations

import json
import shutil
import sqlite3
import statistics
import subprocess
import sys
from pathlib import Path

import nsys_examples as example
import pytest
from conftest import REPOSITORY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from metrics_examples import example_metrics, save, v20_metrics
from nsys_examples import UNIT

from testbed.analysis.profiles.diff import diff, diff_text, read_summary
from testbed.analysis.profiles.nesting import innermost
from testbed.analysis.profiles.nsight import REPORTS, read_stats
from testbed.analysis.profiles.nsight_sqlite import read_export
from testbed.analysis.profiles.summary import PER_STEP, summarize, write_summary
from testbed.analysis.profiles.text import summary_text
from testbed.analysis.profiles.trace_operators import read_operators

PARSE = REPOSITORY / "scripts" / "profiling" / "parse_nsys_stats.py"
DIFF = REPOSITORY / "scripts" / "profiling" / "diff_profiles.py"


def text_file(folder: Path, text: str, name: str = "nsys_stats_node0.txt") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(text.encode())
    return path


def rows(table) -> list[tuple]:
    return [
        (r.name, r.style, r.time_percent, r.total, r.count, r.avg, r.med, r.min, r.max, r.stddev) for r in table.rows
    ]


# Numbers


@pytest.mark.parametrize("locale", example.LOCALES)
def test_numbers_of_every_locale_are_exact_in_all_six_tables(tmp_path, locale):
    """Totals, extremes and counts to the last digit, the others as rounded by nsys: against the events themselves."""
    tables = read_stats(text_file(tmp_path, example.stats_text(locale))).tables
    assert list(tables) == list(REPORTS)
    for report, by_name in example.values().items():
        is_size = report == "cuda_gpu_mem_size_sum"
        everything = sum(map(sum, by_name.values()))
        assert len(tables[report].rows) == len(by_name)
        for row in tables[report].rows:
            name = next(n for n, style in by_name if style == row.style and n[:99] == row.name[:99])
            mine = by_name[name, row.style]
            mean, median = statistics.mean(mine), statistics.median(mine)
            stddev = statistics.stdev(mine) if len(mine) > 1 else 0.0
            if is_size:
                found = (row.total, row.avg, row.med, row.min, row.max, row.stddev)
                expected = [value / 1e6 for value in (sum(mine), mean, median, min(mine), max(mine), stddev)]
                assert found == tuple(float(f"{value:.3f}") for value in expected)
                assert row.time_percent is None
            else:
                assert (row.total, row.min, row.max) == (sum(mine), min(mine), max(mine))
                assert all(isinstance(value, int) for value in (row.total, row.min, row.max, row.count))
                assert (row.avg, row.med, row.stddev) == tuple(float(f"{v:.1f}") for v in (mean, median, stddev))
                assert row.time_percent == float(f"{100 * sum(mine) / everything:.1f}")
            assert row.count == len(mine)


def test_names_keep_their_spaces_commas_digits_and_the_mark_of_a_cut(tmp_path):
    tables = read_stats(text_file(tmp_path, example.stats_text("us"))).tables
    kernels = [row.name for row in tables["cuda_gpu_kern_sum"].rows]
    assert kernels == [example.GEMM, example.NCCL, example.ADAM[:99] + "…"]
    assert {row.name for row in tables["nvtx_sum"].rows} >= {":train/backward", "NCCL:ncclAllReduce"}
    assert {row.style for row in tables["nvtx_sum"].rows} == {"PushPop"}


# Rows that nsys 2025.1.3 printed on a machine with India's digit groups, with the widths of their tables.
RECORDED = {
    "nvtx_sum": (
        [8, 15, 9, 16, 16, 14, 14, 14, 7, 36],
        "     24.5  62,14,25,70,603        320    19,41,95,533.1    14,19,66,898.0     3,14,93,573  4,34,96,37,896  "
        "34,82,10,643.2  PushPop  :train/backward                     ",
        (24.5, 62_142_570_603, 320, 194_195_533.1, 141_966_898.0, 31_493_573, 4_349_637_896, 348_210_643.2),
    ),
    "osrt_sum": (
        [8, 20, 11, 17, 16, 11, 18, 19, 22],
        "     21.9  5,62,65,05,87,29,882     3,46,812     16,22,35,040.1           2,857.0        1,493      "
        "5,00,50,61,007       29,81,22,921.2  poll                  ",
        (21.9, 56_265_058_729_882, 346_812, 162_235_040.1, 2857.0, 1493, 5_005_061_007, 298_122_921.2),
    ),
    "cuda_api_sum": (
        [8, 18, 11, 13, 11, 9, 14, 13, 42],
        "     36.1  10,25,89,64,41,697     3,27,612    31,31,437.3      2,284.0      1,430    22,71,40,032  "
        "1,73,49,894.4  cudaEventSynchronize                      ",
        (36.1, 1_025_896_441_697, 327_612, 3_131_437.3, 2284.0, 1430, 227_140_032, 17_349_894.4),
    ),
    "cuda_gpu_kern_sum": (
        [8, 18, 9, 13, 13, 11, 14, 13, 100],
        "     42.0  12,99,26,91,52,536     14,244  9,12,15,189.0  6,43,40,685.0  6,28,09,633  1,01,78,64,651  "
        "4,30,03,647.9  " + example.NCCL.ljust(100),
        (42.0, 1_299_269_152_536, 14_244, 91_215_189.0, 64_340_685.0, 62_809_633, 1_017_864_651, 43_003_647.9),
    ),
    "cuda_gpu_mem_time_sum": (
        [8, 15, 9, 8, 8, 8, 12, 11, 30],
        "      3.1     60,88,14,731     44,953  13,543.4   1,504.0     1,343  12,34,63,783   7,04,892.9  "
        "[CUDA memcpy Device-to-Host]  ",
        (3.1, 608_814_731, 44_953, 13_543.4, 1504.0, 1343, 123_463_783, 704_892.9),
    ),
    "cuda_gpu_mem_size_sum": (
        [13, 9, 8, 8, 8, 8, 11, 30],
        " 60,91,998.755  32,15,547     1.895     0.002     0.000    77.195        8.481  "
        "[CUDA memcpy Device-to-Device]",
        (None, 6_091_998.755, 3_215_547, 1.895, 0.002, 0.0, 77.195, 8.481),
    ),
}


@pytest.mark.parametrize("report", RECORDED)
def test_recorded_rows_are_read_to_the_last_digit(tmp_path, report):
    widths, raw, expected = RECORDED[report]
    header = example.table(report)[0]
    lines = [" " + "  ".join(name.center(width) for name, width in zip(header, widths, strict=True))]
    lines += [" " + "  ".join("-" * width for width in widths), raw]
    if expected[0] is not None:  # one more row, that takes the rest of the time
        pieces, start = [], 1
        for width in widths:
            pieces.append(raw[start : start + width].strip())
            start += width + 2
        value = example.grouped(round(expected[1] * 100 / expected[0]) - expected[1], "indian")
        cells = [f"{100 - expected[0]:.1f}", value, "1", value + ".0", value + ".0", value, value, "0.0"]
        cells += ["PushPop"] * ("Style" in header) + ["the rest"]
        lines = example.text_table([header, pieces, cells]).splitlines()
    found = read_stats(text_file(tmp_path, f" ** Title ({report}):\n\n" + "\n".join(lines) + "\n\n")).tables[report]
    row = found.rows[0]
    numbers = (row.time_percent, row.total, row.count, row.avg, row.med, row.min, row.max, row.stddev)
    assert numbers == expected
    assert raw.strip().endswith(row.name)


@pytest.mark.parametrize(("locale", "expected"), [("us", 1.895), ("german", 1.895)])
def test_a_number_that_could_be_two_is_decided_by_its_column_and_the_file(tmp_path, locale, expected):
    """1.895 and 1,895 are megabytes with three decimals here; among grouped whole numbers they would be thousands."""
    text = example.stats_text(locale, reports=("cuda_gpu_mem_size_sum",))
    assert "1.895 " in text if locale == "us" else "1,895 " in text
    assert read_stats(text_file(tmp_path, text)).tables["cuda_gpu_mem_size_sum"].rows[1].total == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("288,000,864", "288.000.864"), "more than one group separator"),
        (lambda text: text.replace("48,000,144.0", "48,000,144,0"), "more than one decimal mark"),
        (lambda text: text.replace("288,000,864", "  288000864"), "digits are grouped in .* but not in line"),
        (lambda text: text.replace("288,000,864", "28,8000,864"), "not grouped as in any number"),
        (lambda text: text.replace("288,000,864", "2,88,00,864"), "more than one size of groups"),
        (lambda text: text.replace(",", "."), "separates groups in line .* and decimals in line"),
        (lambda text: text.replace("288,000,864", "288,0x0,864"), "Total Time .* which is not a whole number"),
        (lambda text: text.replace("48,000,144.0", "  48,000,144"), "not a number with 1 decimal"),
        (lambda text: text.replace("  288,000,864", "-288,000,864 "), "does not fit the ruler|not a whole number"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(tmp_path, change, message):
    text = example.stats_text("us", reports=("nvtx_sum",))
    assert change(text) != text
    with pytest.raises(ValueError, match=message) as caught:
        read_stats(text_file(tmp_path, change(text)))
    assert str(tmp_path) in str(caught.value)


# Tables


def lines_changed(text: str, change) -> str:
    lines = text.split("\n")
    change(lines)
    return "\n".join(lines)


def replaced(number: int, old: str, new: str):
    def change(lines: list[str]) -> None:
        assert old in lines[number]
        lines[number] = lines[number].replace(old, new)

    return change


# In the file of the nvtx table alone: 0 generating, 1 processing, 3 heading, 5 header, 6 ruler, 7 to 14 rows.
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines.pop(3), "line 6: a table without the heading"),
        (lambda lines: lines.pop(6), "line 7: under the header of nvtx_sum should be a ruler"),
        (lambda lines: lines.__delitem__(slice(7, 15)), "has no rows"),
        (lambda lines: lines.pop(9), "line 6: the percentages of nvtx_sum add up to 86.9"),
        (lambda lines: lines.insert(10, ""), "line 12: a row outside of a table|percentages"),
        (lambda lines: lines.__setitem__(8, " " * 3 + lines[8]), "line 9: does not fit the ruler"),
        (lambda lines: lines.__setitem__(8, lines[8][:40]), "line 9: nothing stands under"),
        (lambda lines: lines.__setitem__(8, lines[8] + "  more"), "line 9: does not fit the ruler"),
        (replaced(5, "Med (ns)", "Mid (ns)"), "line 6: nvtx_sum has unknown columns 'Mid .ns.' and lacks 'Med .ns.'"),
        (replaced(5, "Total Time (ns)", "Total Time (us)"), "leave --timeunit out"),
        (replaced(8, "18.0", "18.2"), "line 9: Time .* is 18.2, but its time is 18.05 %"),
        (replaced(8, "288,000,864", "283,000,864"), "line 9: Avg .ns. is 48000144.0, but 283000864 / 6"),
        (replaced(8, "48,000,144.0   48,000,144.0", "48,000,144.0   49,000,144.0"), "should lie between"),
        (lambda lines: lines.extend(lines[2:16]), "a second nvtx_sum table"),
        (lambda lines: lines.append(lines[1].replace("nsys_17", "nsys_18")), "several traces"),
        (lambda lines: lines.__delitem__(slice(4, None)), "line 4: the file ends before the table of nvtx_sum"),
        (lambda lines: lines.__delitem__(slice(0, None)), "holds no table"),
    ],
)
def test_a_malformed_table_names_file_and_line(tmp_path, change, message):
    text = lines_changed(example.stats_text("us", reports=("nvtx_sum",)), change)
    path = text_file(tmp_path, text)
    with pytest.raises(ValueError, match=message) as caught:
        read_stats(path)
    assert str(path) in str(caught.value)


def test_a_file_that_was_cut_off_anywhere_in_a_table_is_refused(tmp_path):
    """Cut after a whole row only the percentages can tell, and what is below their rounding is below a reader's."""
    text = example.stats_text("us", reports=("nvtx_sum",))
    start, end = text.index("-----"), text.rindex("NCCL:")
    cut_in_a_name = [text.rindex("ncclAllReduce") + 4]
    for length in [*range(start, end, 19), *cut_in_a_name]:
        with pytest.raises(ValueError, match="nsys_stats_node0"):
            read_stats(text_file(tmp_path, text[:length]))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_a_file_becomes_another_number(tmp_path, data):
    """Any character of the columns of percentage, total and count replaced: the same numbers, or one sentence."""
    text = example.stats_text("us", reports=("nvtx_sum", "cuda_gpu_mem_size_sum"))
    expected = {report: rows(table) for report, table in read_stats(text_file(tmp_path, text)).tables.items()}
    body = [n for n, character in enumerate(text) if character.isdigit() and "\n     " in text[max(0, n - 35) : n]]
    place = data.draw(st.sampled_from(body))
    other = data.draw(st.sampled_from("0123456789,. x-\u00a0"))
    try:
        found = read_stats(text_file(tmp_path, text[:place] + other + text[place + 1 :])).tables
    except ValueError as error:
        assert "\n" not in str(error)
        return
    for report, expected_rows in expected.items():
        for row, expected_row in zip(rows(found[report]), expected_rows, strict=True):
            assert row[2] == pytest.approx(expected_row[2], abs=0.1)  # a percentage of a tiny share may round both ways
            total, count = expected_row[3:5]
            rounding = 0.0021 if isinstance(total, float) else 0.1 * count  # of what the average can tell
            assert row[4] == count and row[3] == pytest.approx(total, abs=rounding, rel=0)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_what_windows_shells_write_is_read(tmp_path, encoding):
    path = tmp_path / "nsys_stats.txt"
    path.write_bytes(example.stats_text("us").replace("\n", "\r\n").encode(encoding))
    assert read_stats(path).tables["nvtx_sum"].total == sum(map(sum, example.values()["nvtx_sum"].values()))


def test_other_bytes_are_refused_with_their_line(tmp_path):
    path = tmp_path / "nsys_stats.txt"
    path.write_bytes(b"\n\n\xa0 1\xa0234\n")
    with pytest.raises(ValueError, match="line 3: this is not UTF-8 text"):
        read_stats(path)


def test_reports_without_data_and_unknown_ones_are_named(tmp_path):
    text = (
        example.stats_text("us", reports=("osrt_sum",))
        + example.processing("nvtx_sum")
        + "SKIPPED: /data/profiles/nsys_17_node0.sqlite does not contain NV Tools Extension (NVTX) data.\n\n"
        + example.processing("openmp_sum")
        + "\n ** OpenMP Summary (openmp_sum):\n\n A   B  \n --  ---\n  1    2\n\n"
    )
    stats = read_stats(text_file(tmp_path, text))
    assert (list(stats.tables), stats.without_data, stats.not_read) == (["osrt_sum"], ("nvtx_sum",), ("openmp_sum",))


def test_tables_of_nsys_profile_stats_and_of_old_versions_are_read(tmp_path):
    """`nsys profile --stats=true` has headings of its own, and until 2022 the reports had other names."""
    body = example.text_table(example.table("cuda_gpu_kern_sum", "us"))
    for heading in ("[6/8] Executing 'cuda_gpu_kern_sum' stats report", " ** CUDA GPU Kernel Summary (gpukernsum):"):
        stats = read_stats(text_file(tmp_path, f"{heading}\n\n{body}\n"))
        assert stats.tables["cuda_gpu_kern_sum"].rows[0].name == example.GEMM


# CSV and SQLite


def test_csv_gives_what_the_text_gives(tmp_path):
    text = read_stats(text_file(tmp_path, example.stats_text("indian")))
    table = read_stats(text_file(tmp_path, example.stats_csv(), "nsys.csv"))
    assert (text.kind, table.kind, text.trace) == ("text", "csv", table.trace)
    for report in REPORTS:
        assert [row[1:] for row in rows(table.tables[report])] == [row[1:] for row in rows(text.tables[report])]
    assert table.tables["cuda_gpu_kern_sum"].rows[2].name == example.ADAM  # CSV does not cut


def test_csv_files_of_single_reports_are_known_by_name_and_columns(tmp_path):
    """`nsys stats --format csv --output base` writes base_<report>.csv, without a line that names the trace."""
    for report in ("osrt_sum", "cuda_api_sum"):  # the same columns
        body = example.stats_csv(reports=(report,)).split("\n", 1)[1]
        stats = read_stats(text_file(tmp_path, body, f"run_17_{report}.csv"))
        assert (list(stats.tables), stats.trace) == ([report], "run_17")
        with pytest.raises(ValueError, match="which report has the columns"):
            read_stats(text_file(tmp_path, body, "some.csv"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"void  gemm', "void  gemm"), "line 25: 12 cells under 9 columns"),
        (lambda text: text.replace("1.5>(int, long)", '1.5>(int, long"x'), "this is not CSV|cells under"),
        (lambda text: text.replace("65.8,", "six,"), "Time .* is 'six', which is not a number with 1 decimal"),
        (lambda text: text.replace("Med (ns)", "Median"), "has unknown columns 'Median'"),
    ],
)
def test_malformed_csv_is_refused(tmp_path, change, message):
    text = example.stats_csv()
    assert change(text) != text
    with pytest.raises(ValueError, match=message):
        read_stats(text_file(tmp_path, change(text), "nsys.csv"))


def test_the_sqlite_export_gives_the_tables_of_nsys_stats(tmp_path):
    export = read_export(example.write_sqlite(tmp_path / "nsys_17_node0.sqlite"))
    expected = read_stats(text_file(tmp_path, example.stats_csv(), "nsys.csv"))
    assert export.stats.trace == expected.trace
    for report in REPORTS:
        found = {(row.name, row.style): row for row in export.stats.tables[report].rows}
        for row in expected.tables[report].rows:
            mine, tolerance = found.pop((row.name, row.style)), 0.0006 if "size" in report else 0.051  # nsys rounds
            for name in ("total", "count", "avg", "med", "min", "max", "stddev"):
                assert getattr(mine, name) == pytest.approx(getattr(row, name), abs=tolerance, rel=1e-15), (row, name)
            assert mine.time_percent == pytest.approx(row.time_percent, abs=0.051)
        assert not found


def test_exclusive_ranges_of_the_steps_add_up_to_the_steps(tmp_path):
    """By hand, of each step of 100: 4 in no range inside it, backward 48 without the 4 in which it calls NCCL."""
    export = read_export(example.write_sqlite(tmp_path / "a.sqlite"))
    parts = {":train/step": 4, ":train/dataload": 10, ":train/forward": 30, ":train/backward": 44}
    parts |= {"NCCL:ncclAllReduce": 4, ":train/optimizer_step": 8}
    assert export.in_steps == {name: 6 * value * UNIT for name, value in parts.items()}
    assert (export.num_ranks, export.num_steps) == (2, 3)
    assert export.exclusive_ns["NCCL:ncclAllReduce"] == 6 * 5 * UNIT  # with the one in validation
    assert export.exclusive_ns[":hook"] == 6 * 35 * UNIT  # on a thread of its own, so inside nothing


def test_exposed_nccl_is_what_no_computation_of_the_device_covers(tmp_path):
    """By hand: computation 20-50, 52-75, 90-95, 105-110; NCCL 65-92, so 75-90 is exposed. Validation is in no step."""
    export = read_export(example.write_sqlite(tmp_path / "a.sqlite"))
    assert len(export.device_steps) == 6
    for step in export.device_steps:
        found = (step.step_ns, step.compute_ns, step.nccl_ns, step.exposed_nccl_ns, step.nccl_instances)
        assert found == (100 * UNIT, 63 * UNIT, 27 * UNIT, 15 * UNIT, 2)


def test_a_range_that_never_ended_is_counted_and_a_half_step_is_no_step(tmp_path):
    path = example.write_sqlite(tmp_path / "a.sqlite")
    database = sqlite3.connect(path)
    database.execute("UPDATE NVTX_EVENTS SET end = NULL WHERE text = 'train/step' AND start > 3000000000")
    database.commit()
    database.close()
    export = read_export(path)
    assert (export.num_steps, export.num_unclosed) == (2, 2)
    assert "2 ranges were open when the trace ended" in " ".join(summarize(tmp_path)["warnings"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_text("no database, but long enough to look at" * 9), "is not an SQLite export"),
        (lambda path: sqlite3.connect(path).execute("CREATE TABLE other (a)"), "holds no events"),
        (lambda path: sqlite3.connect(path).execute("CREATE TABLE OSRT_API (start, end)"), "OSRT_API lacks nameId"),
    ],
)
def test_a_database_of_something_else_is_refused(tmp_path, make, message):
    make(tmp_path / "a.sqlite")
    with pytest.raises(ValueError, match=message):
        read_export(tmp_path / "a.sqlite")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 12)), max_size=7))
def test_every_moment_belongs_to_the_range_that_began_last(spans):
    intervals = [(start, start + duration) for start, duration in spans]
    parts = innermost(intervals)
    for moment in range(40):
        open_ones = [number for number, (start, end) in enumerate(intervals) if start <= moment < end]
        owners = [number for number, mine in enumerate(parts) if any(start <= moment < end for start, end in mine)]
        latest = max((intervals[n][0], -intervals[n][1]) for n in open_ones) if open_ones else None
        assert [(intervals[n][0], -intervals[n][1]) for n in owners] == ([latest] if open_ones else [])


# The summary


def run_folder(folder: Path, *, sqlite: bool = False, text: str | None = None, metrics: dict | None = None) -> Path:
    text_file(folder / "profiles", example.stats_text("indian") if text is None else text)
    if sqlite:
        example.write_sqlite(folder / "profiles" / "nsys_17_node0.sqlite")
    if metrics is not None:
        save(folder, metrics)
    return folder


def instances(summary: dict, name: str) -> float:
    return next(row[PER_STEP] for row in summary["nccl"]["instances"] if row["name"] == name)


def test_the_fields_of_earlier_summaries_keep_their_names_and_forms(tmp_path):
    folder = run_folder(
        tmp_path / "run", metrics=v20_metrics(env={"deepspeed_version": "0.18.3", "cuda_version": "12.8"})
    )
    slurm = {"job_id": "17", "hosts": "gn-0011\ngn-0014"}
    (folder / "launcher_metadata.json").write_text(json.dumps({"world_size": 8, "slurm": slurm}))
    (folder / "profiles" / "nsys_17_gn-0011.nsys-rep").touch()
    path, summary = write_summary(folder)
    assert path == folder / "profiles" / "profile_summary.json"
    assert json.loads(path.read_text(encoding="utf-8")) == json.loads(json.dumps(summary))
    expected = {
        "run_dir": str(folder),
        "slurm_job_id": "17",
        "hosts": ["gn-0011", "gn-0014"],
        "world_size": 8,
        "gpu": "Tesla V100-SXM2-16GB",
        "cuda": "12.8",
        "torch": "2.1.0",
        "deepspeed": "0.18.3",
        "seq_length": 512,
        "micro_batch_size_per_gpu": 4,
        "grad_accum_steps": 1,
        "tokens_per_sec": 100_791.0,
        "total_wall_time_sec": 296.1,
        "nsys_report": "nsys_17_gn-0011.nsys-rep",
        "inputs": ["nsys_stats_node0.txt"],
        "likely_bottleneck": {"allreduce_gradients_over_20pct": False},
    }
    assert {name: summary[name] for name in expected} == expected
    top = {"kind": "osrt", "name": "poll", "time_percent": 99.3, "total_time": f"{5_626_513 * UNIT} ns"}
    raw = next(line for line in example.stats_text("indian").split("\n") if line.endswith("poll             "))
    assert summary["osrt_top5"][0] == {**top, "raw": raw}
    assert [item["time_percent"] for item in summary["nvtx_top5"]] == [37.6, 18.0, 13.2, 11.3, 11.3]
    assert summary["per_file"] == {
        "nsys_stats_node0.txt": {name: summary[name] for name in ("nvtx_top5", "osrt_top5")},
    }
    assert summary["generated_at_utc"][10] == "T" and summary["generated_at_utc"][-1] == "Z"


def published(folder: Path, *, steps: int, accumulation: int, nvtx: list[tuple], kernels: list[tuple]) -> Path:
    """A run of two machines with four ranks each, one of them profiled, with (name, total, instances) as published."""
    parts = [example.processing("nvtx_sum", folder.name)]
    for report, found in (("nvtx_sum", nvtx), ("cuda_gpu_kern_sum", kernels)):
        header = example.table(report)[0]
        everything = sum(total for _, total, _ in found)
        cells = []
        for name, total, count in found:
            mean = example.written(total / count, 1, "indian")
            low, high = example.grouped(0, "indian"), example.grouped(total, "indian")
            numbers = [example.grouped(total, "indian"), example.grouped(count, "indian"), mean, mean, low, high, "0.0"]
            style = ["PushPop"] if report == "nvtx_sum" else []
            cells.append([f"{100 * total / everything:.1f}", *numbers, *style, name])
        parts.append(f"\n ** {example.REPORTS[report][0]} ({report}):\n\n{example.text_table([header, *cells])}\n")
    metrics = v20_metrics(hardware={"world_size": 8}, training_config={"grad_accum_steps": accumulation})
    metrics["training_config"]["global_batch_size"] = 16 * accumulation
    metrics["epochs"][0]["optimizer_steps"] = steps
    run_folder(folder, text="".join(parts), metrics=metrics)
    (folder / "launcher_metadata.json").write_text(json.dumps({"world_size": 8, "slurm": {"hosts": "a\nb"}}))
    return folder


@pytest.fixture
def before(tmp_path) -> Path:
    return published(
        tmp_path / "before",
        steps=3561,
        accumulation=1,
        nvtx=[
            (":DeepSpeedEngine.backward", 2_765_967_562_725, 14_244),
            (":DeepSpeedEngine.allreduce_gradients", 2_093_359_690_089, 14_244),
            (":DeepSpeedEngine.forward", 254_776_282_703, 15_680),
            ("NCCL:ncclAllReduce", 9_145_940_528, 42_748),
        ],
        kernels=[(example.NCCL, 1_299_269_152_536, 14_244), ("gemm", 218_583_000_000, 4_000)],
    )


@pytest.fixture
def after(tmp_path) -> Path:
    return published(
        tmp_path / "after",
        steps=40,
        accumulation=2,
        nvtx=[
            (":train/backward", 62_142_570_603, 320),
            (":DeepSpeedEngine.backward", 62_133_803_775, 320),
            (":DeepSpeedEngine.allreduce_gradients", 42_592_466_395, 320),
            (":train/optimizer_step", 27_130_209_280, 320),
            ("NCCL:ncclAllReduce", 21_123_057_501, 520),
            ("everything else", 38_811_725_150, 10),
        ],
        kernels=[(example.NCCL, 34_282_013_530, 160), ("gemm", 4_721_000_000, 400)],
    )


def test_published_all_reduce_counts_come_out_per_rank_and_step(before, after):
    """42,748 against 520 instances, of 3,561 and 40 steps on four ranks, are 3.00 and 3.25: more, not fewer."""
    first, second = summarize(before), summarize(after)
    assert (first["num_optimizer_steps"], first["ranks_in_profile"]) == (3561, 4)
    assert instances(first, "NCCL:ncclAllReduce") == pytest.approx(3.00, abs=0.005)
    assert instances(second, "NCCL:ncclAllReduce") == 3.25
    # one f16 all-reduce per rank and step in both, whatever the bucket size
    kernel = "ncclDevKernel_AllReduce_Sum_f16_TREE_LL"
    assert instances(first, kernel) == instances(second, kernel) == 1.0
    assert first["nccl"]["percent_of_kernel_time"] == pytest.approx(85.6, abs=0.05)
    assert second["nccl"]["percent_of_kernel_time"] == pytest.approx(87.9, abs=0.05)


def test_nested_ranges_do_not_dilute_the_share_of_all_reduce(before, after):
    """nsys says 40.8 and 16.8 %, because the second trace counts backward twice; of the outermost ranges it is more."""
    first, second = summarize(before)["likely_bottleneck"], summarize(after)["likely_bottleneck"]
    assert first["matched"]["time_percent"] == pytest.approx(40.9, abs=0.11)
    assert first["allreduce_gradients_over_20pct"] and not second["allreduce_gradients_over_20pct"]
    share = "allreduce_gradients_percent_of_outermost_ranges"
    assert first[share] == pytest.approx(100 * 2_093_359_690_089 / (2_765_967_562_725 + 254_776_282_703))
    assert second[share] == pytest.approx(100 * 42_592_466_395 / (62_142_570_603 + 27_130_209_280))
    nested = {row["name"]: row["nested_in"] for row in summarize(after)["tables"]["nvtx_sum"]["rows"]}
    assert nested[":DeepSpeedEngine.backward"] == ":train/backward"
    assert nested[":DeepSpeedEngine.allreduce_gradients"] == ":DeepSpeedEngine.backward"


def test_the_diff_compares_steps_and_labels_what_differs(before, after):
    changes = diff(*(read_summary(write_summary(folder)[0]) for folder in (before, after)))
    assert "Unequal length: 3,561 and 40 optimizer steps; everything is per step." in changes["notes"]
    assert "NOT THE SAME: grad accum steps 1 and 2." in changes["notes"]
    assert "NOT THE SAME: global batch size 16 and 32." in changes["notes"]
    assert "no difference is significant" in changes["notes"][0]
    ranges = {row["name"]: row for row in changes["tables"]["nvtx_sum"]}
    backward = ranges[":DeepSpeedEngine.backward"]
    assert backward["ns"] == pytest.approx([2_765_967_562_725 / 14_244, 62_133_803_775 / 160])
    assert ranges[":train/backward"]["ns"][0] is None  # a range that is new is no time that is new
    said = diff_text(changes)
    assert "nvtx  NCCL:ncclAllReduce                         3.00  3.25  +0.25" in said
    assert "85.6 % and 87.9 %" in said


@pytest.mark.parametrize("sqlite", [False, True])
def test_phases_of_a_step_are_exclusive_and_add_up_to_it(tmp_path, sqlite):
    """From the text the trainer's own ranges, from the events also what lies inside them (NCCL's calls)."""
    phases = summarize(run_folder(tmp_path, sqlite=sqlite, metrics=example_metrics()))["phases"]
    found = {part["name"]: part["ns"] / UNIT for part in phases["parts"]}
    nccl = {"NCCL:ncclAllReduce": 4.0, ":train/backward": 44.0} if sqlite else {":train/backward": 48.0}
    rest = {":train/forward": 30.0, ":train/dataload": 10.0, ":train/optimizer_step": 8.0, ":train/step": 4.0}
    assert found == pytest.approx(rest | nccl)
    assert phases["step_ns"] == pytest.approx(100 * UNIT)
    assert sum(part["percent_of_step"] for part in phases["parts"]) == pytest.approx(100)


def test_steps_come_from_the_trace_before_the_metrics_file(tmp_path):
    """A window of the run is profiled: 3 of its 20 steps, so nothing may be divided by 20."""
    summary = summarize(run_folder(tmp_path, metrics=example_metrics()))
    assert (summary["num_optimizer_steps"], summary["ranks_in_profile"]) == (3, 2)
    assert summary["num_optimizer_steps_source"] == "6 :train/step ranges over 2 ranks"
    assert "The profile covers 3 of the run's 20 optimizer steps." in summary["warnings"]
    kernels = {row["name"]: row[PER_STEP] for row in summary["tables"]["cuda_gpu_kern_sum"]["rows"]}
    assert kernels[example.GEMM] == {"total_ns": 79 * UNIT, "count": 4.0}


def test_without_steps_or_ranks_nothing_is_given_per_step(tmp_path):
    folder = run_folder(tmp_path, text=example.stats_text("us", reports=("cuda_gpu_kern_sum",)))
    summary = summarize(folder)
    assert (summary["num_optimizer_steps"], summary["ranks_in_profile"], summary["world_size"]) == (None, None, None)
    assert all(row[PER_STEP] is None for row in summary["tables"]["cuda_gpu_kern_sum"]["rows"])
    assert any(warning.startswith("Nothing is given per rank and step") for warning in summary["warnings"])
    assert "whole profile" in summary_text(summary)
    write_summary(folder)
    with pytest.raises(ValueError, match="write it anew with --optimizer_steps"):
        read_summary(folder)
    assert summarize(folder, 3, 2)["tables"]["cuda_gpu_kern_sum"]["rows"][0][PER_STEP]["count"] == 4.0


def test_a_trace_counts_once_however_many_files_show_it(tmp_path):
    """Text twice, CSV and the database of one trace; then a second machine's trace, which is added."""
    folder = run_folder(tmp_path / "run", sqlite=True, metrics=example_metrics())
    text_file(folder / "profiles", example.stats_text("us", reports=("nvtx_sum",)), "nsys_stats_more.txt")
    text_file(folder / "profiles", example.stats_csv(), "nsys_all.csv")
    once = summarize(folder)
    assert [row["count"] for row in once["nccl"]["instances"]] == [18, 18]
    assert len(once["nvtx_top5"]) == 5 and len({item["name"] for item in once["nvtx_top5"]}) == 5
    text_file(folder / "profiles", example.stats_text("us", trace="nsys_17_node1"), "nsys_stats_node1.txt")
    both = summarize(folder)
    assert [row["count"] for row in both["nccl"]["instances"]] == [36, 36]
    assert [item["raw"].split()[0] for item in both["nvtx_top5"]] == ["37.6", "37.6", "18.0", "18.0", "13.2"]
    row = both["tables"]["nvtx_sum"]["rows"][0]
    assert (row["total_ns"], row["avg_ns"], row["med_ns"]) == (1200 * UNIT, 100.0 * UNIT, None)


def test_files_of_one_trace_that_differ_are_refused(tmp_path):
    folder = run_folder(tmp_path, metrics=example_metrics())
    other = example.stats_text("us", reports=("cuda_api_sum",)).replace("cuda_api_sum", "osrt_sum")
    text_file(folder / "profiles", other, "nsys_stats_other.txt")
    with pytest.raises(ValueError, match="made from one trace, but their osrt_sum differs"):
        summarize(folder)


def test_warnings_name_what_proves_nothing(tmp_path):
    metrics = v20_metrics(deepspeed_config={"selected": {"wall_clock_breakdown": True}})
    folder = run_folder(tmp_path, metrics=metrics)
    (folder / "launcher_metadata.json").write_text(json.dumps({"nccl_env": {"NCCL_DEBUG": "INFO"}}))
    said = " ".join(summarize(folder, 3, 2)["warnings"])
    for part in ("poll first", "idle helpers", "Made under a profiler", "must not be added", "wall_clock_breakdown",
                 "NCCL_DEBUG was on", "2 of 4 ranks"):  # fmt: skip
        assert part in said


# torch.profiler


def chrome_trace(folder: Path, rank: int = 0, **changes) -> Path:
    """Two steps of 1 ms; in each a linear of 400 us that calls an addmm of 300 us, and on the device a kernel."""
    events = []
    for start in (1000.5, 3000.5):
        span = {"ph": "X", "pid": 1, "tid": 1}
        events += [
            {**span, "cat": "user_annotation", "name": "train/step", "ts": start, "dur": 1000.0},
            {**span, "cat": "cpu_op", "name": "aten::linear", "ts": start + 100, "dur": 400.125},
            {**span, "cat": "cpu_op", "name": "aten::addmm", "ts": start + 150, "dur": 300.0},
            {**span, "cat": "cpu_op", "name": "aten::linear", "ts": start + 1200, "dur": 50.0},  # outside
            {**span, "cat": "kernel", "name": "gemm", "ts": start + 200, "dur": 80.0, "pid": 0, "tid": 7},
        ]
    path = folder / "profiler_logs" / f"rank{rank}.pt.trace.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, **changes}), encoding="utf-8")
    return path


def test_operators_of_a_torch_trace_have_their_own_time_inside_the_steps(tmp_path):
    trace = read_operators(chrome_trace(tmp_path))
    found = {row.name: (row.total, row.count) for row in trace.tables["operators"].rows}
    assert found == {"aten::addmm": (600_000, 2), "aten::linear": (2 * 100_125, 2)}
    assert trace.num_steps == 2
    assert trace.tables["cuda_gpu_kern_sum"].rows[0].total == 160_000


def test_without_nsight_the_summary_is_made_from_torch_traces(tmp_path):
    parts = {"data_wait_s": 0.1, "forward_s": 0.2, "backward_s": 0.4, "optimizer_s": 0.1}
    step = {"step": 6, "step_time_s": 1.0, **parts, "exposed_communication_s": 0.15, "idle_s": 0.05}
    step |= {"communication_s": 0.3, "compute_s": 0.7, "num_collectives": 3, "collective_bytes": 4096}
    attribution = {"source": "trace", "timeline": "host", "collectives": [], "bound": None, "pipeline": None}
    attribution["per_rank"] = [{"rank": rank, "steps": [step, {**step, "step": 7}]} for rank in range(2)]
    save(tmp_path, example_metrics(attribution=attribution, instrumented=True))
    for rank in range(2):
        chrome_trace(tmp_path, rank)
    path, summary = write_summary(tmp_path)
    assert path.exists() and summary["sources"] == ["torch.profiler"] and summary["nvtx_top5"] == []
    assert (summary["num_optimizer_steps"], summary["ranks_in_profile"]) == (2, 2)
    phases = {part["name"]: part["ns"] for part in summary["phases"]["parts"]}
    assert phases == pytest.approx({"backward": 4e8, "forward": 2e8, "exposed_communication": 1.5e8, "data_wait": 1e8,
                                    "optimizer": 1e8, "idle": 5e7})  # fmt: skip
    operators = {row["name"]: row[PER_STEP] for row in summary["tables"]["operators"]["rows"]}
    assert operators["aten::addmm"] == {"total_ns": 300_000.0, "count": 1.0}
    assert "Operators (own time), per rank and step" in summary_text(summary)
    assert diff(read_summary(tmp_path), summary)["tables"]["operators"][0]["ns"][0] == 300_000.0


@pytest.mark.parametrize(
    ("content", "message"),
    [("[1, 2", "is not a trace"), ("{}", "is not a trace"), ('{"traceEvents": []}', "holds no optimizer step")],
)
def test_a_torch_trace_that_is_none_is_refused(tmp_path, content, message):
    path = chrome_trace(tmp_path)
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        summarize(tmp_path)


# The programs


def ran(*command: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False)


def test_parse_nsys_stats_writes_or_leaves_everything_as_it_was(tmp_path):
    folder = run_folder(tmp_path / "run", metrics=example_metrics())
    done = ran(PARSE, "--run_dir", folder)
    path = folder / "profiles" / "profile_summary.json"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Wrote {path}\n")
    assert ":train/backward" in done.stdout and "per rank and step" in done.stdout
    content = path.read_text(encoding="utf-8")
    text_file(folder / "profiles", example.stats_text("indian").replace("28,80,00,864", "28,80,0?,864"))
    failed = ran(PARSE, "--run_dir", folder)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert "nsys_stats_node0.txt line 9: Total Time (ns) is '28,80,0?,864'" in failed.stderr
    assert path.read_text(encoding="utf-8") == content
    assert sorted(p.name for p in path.parent.iterdir()) == ["nsys_stats_node0.txt", "profile_summary.json"]


def test_wrong_flags_and_empty_folders_are_one_sentence(tmp_path):
    for command, said in (
        ((PARSE, "--run_dir", tmp_path / "none"), "is not a folder"),
        ((PARSE, "--run_dir", tmp_path), "holds no profile"),
        ((DIFF, tmp_path, tmp_path), "parse_nsys_stats.py --run_dir writes it"),
    ):
        done = ran(*command)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr and "Traceback" not in done.stderr


def test_diff_profiles_prints_and_writes_json(before, after, tmp_path):
    for folder in (before, after):
        write_summary(folder)
    done = ran(DIFF, before, after, "--json", tmp_path / "changes.json")
    assert done.returncode == 0 and "+0.25" in done.stdout
    assert json.loads((tmp_path / "changes.json").read_text())["nccl"][0][PER_STEP][1] == 3.25
    shutil.rmtree(before / "profiles")


def test_a_summary_that_lacks_what_is_compared_is_one_sentence(tmp_path):
    path = tmp_path / "profile_summary.json"
    whole = dict.fromkeys(("phases", "sources", "warnings", "run_dir", "run_id"))
    whole |= {"tables": {}, "num_optimizer_steps": 3, "ranks_in_profile": 1}
    for content, said in (({"tables": {}, "nccl": {}}, "num_optimizer_steps"), ({**whole, "nccl": {}}, "nccl.inst")):
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=said):
            read_summary(path)


def test_changes_that_cannot_be_written_are_one_sentence_and_exit_code_1(before, tmp_path):
    write_summary(before)
    for place in (tmp_path / "none" / "changes.json", "."):
        done = ran(DIFF, before, before, "--json", place)
        assert done.returncode == 1 and "cannot be written" in done.stderr and len(done.stderr.splitlines()) == 1
    shutil.rmtree(before / "profiles")


def test_summaries_without_a_common_table_do_not_compare(tmp_path, before):
    chrome_trace(tmp_path / "torch")
    trace = summarize(tmp_path / "torch")
    trace["tables"].pop("cuda_gpu_kern_sum")
    with pytest.raises(ValueError, match="no table in common"):
        diff(summarize(before), trace)
