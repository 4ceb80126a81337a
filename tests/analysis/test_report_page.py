"""The page: what it says of known numbers, that it loads nothing, and that a browser shows it without complaint."""

import base64
import json
import os
import re
import statistics
from pathlib import Path
from urllib.parse import unquote

import pytest
from support.browser import Page
from support.metrics_examples import example_metrics, save, v1_metrics, v20_metrics
from support.report_cases import STEP_TIME_S, load, markdown, table, write_sweep

from testbed.analysis.report.build import report_of, write_html, write_markdown
from testbed.analysis.report.verdicts import verdicts
from testbed.analysis.runs.entries import subject_of
from testbed.analysis.statistics import compare


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The report of a small sweep: everything that a page can hold, drawn once."""
    folder = tmp_path_factory.mktemp("sweep")
    write_sweep(folder / "out", ("baseline", "ddp", "pipeline"))
    write_html(load(folder / "out"), folder / "report.html")
    return folder / "report.html"


def test_the_page_loads_nothing(page):
    found = Page(page)
    assert len(found.addresses) > 6
    assert all(address.startswith("data:") for address in found.addresses)
    assert "default-src 'none'" in found.policy and "script" not in found.policy
    assert "script" not in found.tags and "iframe" not in found.tags
    assert "url(" not in page.read_text() and "@import" not in page.read_text()
    for address in found.addresses:
        if address.startswith("data:image/svg+xml;base64,"):
            svg = base64.b64decode(address.partition(",")[2]).decode()
            assert not re.search(r'(?:href|src)="(?!#)', svg)


def test_every_link_inside_leads_somewhere_and_every_file_is_there(page):
    found = Page(page)
    inside = {link.removeprefix("#") for link in found.links if link.startswith("#")}
    assert inside <= set(found.ids) and len(found.ids) == len(set(found.ids))
    files = [link for link in found.links if not link.startswith("#")]
    assert len(files) == len(load(page.parent / "out"))
    assert all((page.parent / unquote(file)).is_file() for file in files)


def test_every_run_is_there_with_id_commit_command_and_file(page):
    text = Page(page).text
    for run in load(page.parent / "out"):
        assert run.run_id in text
        assert run.command_line in text
        assert os.path.relpath(run.path, page.parent) in text
    assert text.count("2524a8e0c3a1") == len(load(page.parent / "out"))


def test_the_page_says_what_is_known_of_the_sweep(page):
    """The numbers by hand: medians of the files, verdicts of compare, the parts that were written into the trace."""
    text = Page(page).text
    runs = load(page.parent / "out")

    def rates(run_type: str, ranks: int) -> list[float]:
        return [
            run.tokens_per_s
            for run in runs
            if (run.run_type, run.world_size, run.instrumented) == (run_type, ranks, False)
        ]

    ratio = compare(rates("ddp", 2), rates("baseline", 1))
    assert statistics.median(rates("ddp", 2)) / statistics.median(rates("baseline", 1)) == pytest.approx(ratio.ratio)
    claim = f"ddp on 2 ranks is {ratio.ratio:.2f}x as fast as baseline on 1 rank"
    assert f"{claim} (95 % interval {ratio.low:.2f} to {ratio.high:.2f}, n = 5 and 5)" in text
    assert f"{statistics.median(rates('ddp', 2)):,.0f}" in text
    assert "strong scaling" in text
    assert "a rank idles 25.5% of the schedule on average; with 2 equal stages, 4 micro batches" in text
    assert "measured: largest all-reduce over gloo" in text
    bandwidth = 2_529_792 / (0.08 * STEP_TIME_S["ddp"] * 1.3 * 1.6) / 1e9
    assert re.search(rf"gloo:all_reduce 7 2\.413 2\.413 [\d.]+ {bandwidth:.2f}", text)
    assert "4 of 24 runs had a profiler or a debug switch on" in text
    assert "measured: 2048^3 matrix product" in text


EVIL = '"><script>alert(1)</script><img src=http://evil.example/x onerror=alert(1)>'


def test_names_and_commands_are_inert(tmp_path):
    """Run type, command, commit and folder are written by whoever made the file."""
    folder = "javascript:alert(1)"
    for number, run_type in enumerate((f"ddp{EVIL}", "baseline")):
        save(
            tmp_path / folder / str(number),
            example_metrics(
                num_steps=8,
                training_config={"run_type": run_type},
                command_line=f"python {EVIL} ``` | $(rm) [x](http://evil.example)",
                run_id=EVIL + str(number),
                git_commit=EVIL,
                flops={"peak_source": EVIL},
                host={"hostname": EVIL},
            ),
        )
    write_html(load(tmp_path), tmp_path / "report.html")
    found = Page(tmp_path / "report.html")
    assert "script" not in found.tags
    assert not [address for address in found.addresses if not address.startswith("data:")]
    assert all(link.startswith(("#", "./")) for link in found.links)
    assert f"ddp{EVIL} on 2 ranks" in found.text  # shown as it is, not run
    text = markdown(load(tmp_path), tmp_path)
    outside_code = re.sub(r"(`{3,}).*?\n\1\n", "", text, flags=re.S)
    assert "<script" not in outside_code and "<img" not in outside_code
    assert re.search(r"^`{4,}\npython .*\n`{4,}$", text, flags=re.M)


def test_files_of_every_version_and_single_runs_make_a_report(tmp_path):
    save(tmp_path / "one", example_metrics(num_steps=6))
    save(tmp_path / "four", v20_metrics())
    save(tmp_path / "old", v1_metrics(4))
    text = markdown(load(tmp_path), tmp_path)
    assert "PER RANK" in markdown(load(tmp_path), tmp_path, pictures="p")
    assert "Work not known" in text
    assert "Not in these files:" in text
    assert "faster" not in text.split("## Strategies")[0]


def test_markdown_has_the_same_verdicts_and_real_tables(tmp_path):
    write_sweep(tmp_path / "out", ("baseline", "ddp"), ranks=(1,), is_profiled=False)
    runs = load(tmp_path / "out")
    write_markdown(runs, tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text()
    for verdict in verdicts(subject_of(runs)):
        assert verdict.sentence in text
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        assert len({line.count("|") for line in block.splitlines()}) == 1
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert pictures and all((tmp_path / unquote(picture)).read_text().startswith("<?xml") for picture in pictures)
    anchors = re.findall(r"\]\(#(.*?)\)", text)
    assert anchors and all(f'<a id="{anchor}"></a>' in text for anchor in anchors)


@pytest.mark.parametrize("broken", ["{", '{"cells": 1}', '{"protocol": "odd", "cells": []}'])
def test_a_broken_plan_is_one_sentence(tmp_path, broken):
    save(tmp_path / "cell" / "run_1", example_metrics(num_steps=6))
    (tmp_path / "sweep.json").write_text(broken)
    with pytest.raises(ValueError, match=r"sweep\.json is not a sweep's file"):
        subject_of(load(tmp_path))


def test_a_report_that_cannot_be_written_leaves_the_earlier_one(tmp_path, monkeypatch):
    save(tmp_path / "run", example_metrics(num_steps=6))
    path = tmp_path / "report.html"
    path.write_text("earlier")

    def half_written(self, text, **_):
        self.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half_written)
    with pytest.raises(OSError, match="No space"):
        write_html(load(tmp_path), path)
    assert path.read_bytes() == b"earlier"
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["report.html"]


def test_every_row_of_every_table_leads_to_its_runs(page):
    tables = re.findall(r"<table>.*?</table>", page.read_text(), flags=re.S)
    rows = [row for table in tables for row in re.findall(r"<tr>.*?</tr>", table, flags=re.S) if "<td" in row]
    assert len(tables) > 8 and len(rows) > 20
    assert all(re.search(r'href="#(configuration|run)-\d+"', row) for row in rows)
    figures = re.findall(r"<figure .*?</figure>", page.read_text(), flags=re.S)
    assert figures and all('href="#configuration-' in figure for figure in figures)
    style = page.read_text().partition("<style>")[2].partition("</style>")[0]
    assert re.search(r"figure img \{[^}]*width: 100%", style) and "min-width: 40rem" not in style
    assert not any('class="scroll"' in figure for figure in figures), "a picture is as wide as the page, never cut"
    assert len(re.findall(r'class="scroll"', page.read_text())) == len(tables), "a wide table scrolls in its own box"


def test_a_known_row_of_each_table(page):
    """By hand from the files and from what this file wrote into them."""
    folder = page.parent / "out"
    subject = subject_of(load(folder))

    def raw(cell: str, *keys) -> float:
        found = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{cell}/run_*/training_metrics.json"))]
        for key in keys:
            found = [each[key] for each in found]
        return statistics.median(found)

    def row(title: str, name: str) -> list[str]:
        return next(each for each in table(subject, folder, title) if each[0] == name)

    one, two = (raw(cell, "summary", "mean_tokens_per_sec_global") for cell in ("baseline_1", "ddp_2"))
    of_ddp = row("Equal work", "ddp on 2 ranks")
    assert of_ddp[:4] == ["ddp on 2 ranks", "5", f"{two:,.0f}", f"{two / one:.2f}x"]
    assert of_ddp[5:9] == [
        "faster",
        "further apart",
        f"{raw('ddp_2', 'evaluations', -1, 'val_loss'):.4f}",
        f"{3.8e6 * two / 2e11:.1%}",
    ]
    assert of_ddp[10] == f"{raw('ddp_2', 'memory', 'per_rank', 0, 'peak_rss_bytes') / 2**20:,.0f}"
    assert of_ddp[9] == f"{1e3 * raw('ddp_2', 'timing', 'step_time_p50_sec'):.1f}"
    scaled = row("Speed-up and efficiency", "ddp on 2 ranks")
    assert scaled[:2] == ["ddp on 2 ranks", "5"] and scaled[2].startswith(f"{two:,.0f} [")
    assert scaled[3].startswith(f"{two / one:.2f}x [") and scaled[4].startswith(f"{two / one / 2:.2f} [")
    assert scaled[5:] == ["faster", "baseline on 1 rank"]
    exposed = row("Communication against its bound", "ddp on 2 ranks, instrumented")
    assert exposed[1:4] == ["2.413", "0.9", f"{2_529_792 / 9e8 * 1e3:.3f}"]
    assert float(exposed[4]) / float(exposed[6]) == pytest.approx(1.6, rel=1e-3)
    ranks = row("Peak memory per rank", "ddp on 2 ranks")
    assert ranks[1] == of_ddp[10] and int(ranks[1]) - int(ranks[2]) == 40
    assert row("Model FLOPs", "ddp on 2 ranks")[1:4] == [of_ddp[8], f"{3.8e6 * two / 1e9:#.4g}", "100.0"]
    bubble = next(part for part in report_of(subject.runs, folder).sections if part.anchor == "pipeline").blocks[-1]
    assert list(map(str, bubble.rows[0][1:])) == ["2", "4", "20.0%", "25.5%", "24.0%, 27.0%"]


def test_captions_name_what_exposed_communication_contains(page):
    text = Page(page).text
    assert "all of the synchronisation after backward, the packing of gradients included" in text
    assert "under ddp, fsdp and optimized, backward contains their communication" in text
    assert text.count("Of each configuration the first profiled run") == 3
