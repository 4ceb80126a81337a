"""The tables of nsys stats: exact numbers in every locale's digits, and no damage that passes unnoticed."""

from __future__ import annotations

import re
import statistics

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import nsys_examples as example
from support.nsight_cases import text_file

from testbed.analysis.profiles.nsight import REPORTS, read_stats


def rows(table) -> list[tuple]:
    return [
        (r.name, r.style, r.time_percent, r.total, r.count, r.avg, r.med, r.min, r.max, r.stddev) for r in table.rows
    ]


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
            assert row.name == (name if len(name) <= 100 else name[:99] + "…")
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


# Rows that nsys 2025.1.3 printed on a machine with India's digit groups.
RECORDED = {
    "nvtx_sum": (
        "     24.5  62,14,25,70,603        320    19,41,95,533.1    14,19,66,898.0     3,14,93,573  4,34,96,37,896  "
        "34,82,10,643.2  PushPop  :train/backward                     ",
        (24.5, 62_142_570_603, 320, 194_195_533.1, 141_966_898.0, 31_493_573, 4_349_637_896, 348_210_643.2),
    ),
    "osrt_sum": (
        "     21.9  5,62,65,05,87,29,882     3,46,812     16,22,35,040.1           2,857.0        1,493      "
        "5,00,50,61,007       29,81,22,921.2  poll                  ",
        (21.9, 56_265_058_729_882, 346_812, 162_235_040.1, 2857.0, 1493, 5_005_061_007, 298_122_921.2),
    ),
    "cuda_api_sum": (
        "     36.1  10,25,89,64,41,697     3,27,612    31,31,437.3      2,284.0      1,430    22,71,40,032  "
        "1,73,49,894.4  cudaEventSynchronize                      ",
        (36.1, 1_025_896_441_697, 327_612, 3_131_437.3, 2284.0, 1430, 227_140_032, 17_349_894.4),
    ),
    "cuda_gpu_kern_sum": (
        "     42.0  12,99,26,91,52,536     14,244  9,12,15,189.0  6,43,40,685.0  6,28,09,633  1,01,78,64,651  "
        "4,30,03,647.9  " + example.NCCL,
        (42.0, 1_299_269_152_536, 14_244, 91_215_189.0, 64_340_685.0, 62_809_633, 1_017_864_651, 43_003_647.9),
    ),
    "cuda_gpu_mem_time_sum": (
        "      3.1     60,88,14,731     44,953  13,543.4   1,504.0     1,343  12,34,63,783   7,04,892.9  "
        "[CUDA memcpy Device-to-Host]  ",
        (3.1, 608_814_731, 44_953, 13_543.4, 1504.0, 1343, 123_463_783, 704_892.9),
    ),
    "cuda_gpu_mem_size_sum": (
        " 60,91,998.755  32,15,547     1.895     0.002     0.000    77.195        8.481  "
        "[CUDA memcpy Device-to-Device]",
        (None, 6_091_998.755, 3_215_547, 1.895, 0.002, 0.0, 77.195, 8.481),
    ),
}


@pytest.mark.parametrize("report", RECORDED)
def test_recorded_rows_are_read_to_the_last_digit(tmp_path, report):
    raw, expected = RECORDED[report]
    cells = [example.table(report)[0], re.split("  +", raw.strip())]
    if expected[0] is not None:  # one more row, that takes the rest of the time
        value = example.grouped(round(expected[1] * 100 / expected[0]) - expected[1], "indian")
        rest = [f"{100 - expected[0]:.1f}", value, "1", value + ".0", value + ".0", value, value, "0.0"]
        cells.append([*rest, *["PushPop"] * (report == "nvtx_sum"), "the rest"])
    text = f" ** Title ({report}):\n\n{example.text_table(cells)}\n"
    row = read_stats(text_file(tmp_path, text)).tables[report].rows[0]
    numbers = (row.time_percent, row.total, row.count, row.avg, row.med, row.min, row.max, row.stddev)
    assert (numbers, row.name) == (expected, cells[1][-1])


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
        (lambda lines: lines.__setitem__(8, lines[8][:40]), "line 9: nothing stands under"),
        (lambda lines: lines.__setitem__(8, lines[8] + "  more"), "line 9: does not fit the ruler"),
        (replaced(5, "Med (ns)", "Mid (ns)"), "line 6: nvtx_sum has unknown columns 'Mid .ns.' and lacks 'Med .ns.'"),
        (replaced(5, "Total Time (ns)", "Total Time (us)"), "leave --timeunit out"),
        (replaced(8, "18.0", "18.2"), "line 9: Time .* is 18.2, but its time is 18.05 %"),
        (replaced(8, "288,000,864", "28,8000,864"), "which is not a whole number"),
        (replaced(8, "288,000,864", "2,88,00,864"), "Avg .ns. is 48000144.0, but 28800864 / 6"),
        (replaced(8, "288,000,864", "283,000,864"), "line 9: Avg .ns. is 48000144.0, but 283000864 / 6"),
        (replaced(8, "48,000,144.0   48,000,144.0", "48,000,144.0   49,000,144.0"), "should lie between"),
        (lambda lines: lines.extend(lines[2:16]), "a second nvtx_sum table"),
        (lambda lines: lines.append(lines[1].replace("nsys_17", "nsys_18")), "several traces"),
        (lambda lines: lines.__delitem__(slice(4, None)), "line 4: the file ends before the table of nvtx_sum"),
        (lambda lines: lines.__delitem__(slice(0, None)), "holds no table"),
    ],
)
def test_a_malformed_table_names_file_and_line(tmp_path, change, message):
    lines = example.stats_text("us", reports=("nvtx_sum",)).split("\n")
    change(lines)
    path = text_file(tmp_path, "\n".join(lines))
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


def test_a_report_without_data_is_passed_over_and_an_unknown_one_is_named(tmp_path):
    text = (
        example.stats_text("us", reports=("osrt_sum",))
        + example.processing("nvtx_sum")
        + "SKIPPED: /data/profiles/nsys_17_node0.sqlite does not contain NV Tools Extension (NVTX) data.\n\n"
        + example.processing("openmp_sum")
        + "\n ** OpenMP Summary (openmp_sum):\n\n A   B  \n --  ---\n  1    2\n\n"
    )
    stats = read_stats(text_file(tmp_path, text))
    assert (list(stats.tables), stats.not_read) == (["osrt_sum"], ("openmp_sum",))


def test_tables_of_nsys_profile_stats_and_of_old_versions_are_read(tmp_path):
    """`nsys profile --stats=true` has headings of its own, and until 2022 the reports had other names."""
    body = example.text_table(example.table("cuda_gpu_kern_sum", "us"))
    for heading in ("[6/8] Executing 'cuda_gpu_kern_sum' stats report", " ** CUDA GPU Kernel Summary (gpukernsum):"):
        stats = read_stats(text_file(tmp_path, f"{heading}\n\n{body}\n"))
        assert stats.tables["cuda_gpu_kern_sum"].rows[0].name == example.GEMM


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
