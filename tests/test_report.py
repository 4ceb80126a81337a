"""The report: what it says of known numbers, that it loads nothing, and that a browser shows it without complaint."""

import base64
import copy
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from metrics_examples import example_metrics, save, v1_metrics, v20_metrics
from PIL import Image

from testbed.analysis.comparability import LOSS_NOISE
from testbed.analysis.report import scaling
from testbed.analysis.report.breakdown import Breakdown, breakdown
from testbed.analysis.report.cautions import warnings_of
from testbed.analysis.report.figures import NARROW, WIDE, breakdown_figure, loss_figure, scaling_figure
from testbed.analysis.report.headlines import headlines
from testbed.analysis.report.markdown import markdown, write_markdown
from testbed.analysis.report.page import report_of, write_html
from testbed.analysis.report.sections import Table
from testbed.analysis.report.subject import Subject, subject_of
from testbed.analysis.report.words import NO_CLAIM, NOT_COMPARED, WORSE, compared, verdicts
from testbed.analysis.runs import Run, find_runs, load_run
from testbed.analysis.statistics import compare

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
STEP_TIME_S = {"baseline": 0.3, "allreduce": 0.2, "ddp": 0.187, "fsdp": 0.215, "pipeline": 0.29}
PARTS = {"data_wait_s": 0.01, "forward_s": 0.27, "backward_s": 0.5, "optimizer_s": 0.06, "idle_s": 0.04}


def attribution(ranks: int, step_time_s: float, exposed: float, is_pipeline: bool) -> dict:
    """Parts that add up to the step: `exposed` of it is communication, idle takes the bubble of a pipeline."""
    shares = dict(PARTS)
    if is_pipeline:
        shares["idle_s"] = 0.24
    scale = (1 - exposed) / sum(shares.values())
    step = {name: share * scale * step_time_s for name, share in shares.items()}
    step |= {
        "step_time_s": step_time_s,
        "exposed_communication_s": exposed * step_time_s,
        "communication_s": exposed * step_time_s * 1.6,
        "compute_s": (step["forward_s"] + step["backward_s"] + step["optimizer_s"]),
        "num_collectives": 0 if ranks == 1 else 7,
        "collective_bytes": 0 if ranks == 1 else 2_529_792,
    }
    per_rank = [{"rank": rank, "steps": [step | {"step": number} for number in (11, 12, 13)]} for rank in range(ranks)]
    seconds = exposed * step_time_s * 1.6
    return {
        "source": "torch.profiler, 3 steps",
        "timeline": "host",
        "per_rank": per_rank,
        "collectives": []
        if ranks == 1
        else [
            {
                "name": "gloo:all_reduce",
                "num_per_step": 7,
                "bytes_per_step": 2_529_792,
                "bus_bytes_per_step": 2_529_792,
                "seconds_per_step": seconds,
            }
        ],
        "bound": None
        if ranks == 1
        else {
            "bus_bytes_per_step": 2_529_792,
            "bus_bandwidth_bytes_per_s": 9e8,
            "seconds_per_step": 2_529_792 / 9e8,
            "source": "measured: largest all-reduce over gloo",
        },
        "pipeline": {
            "stages": 2,
            "micro_batches": 4,
            "per_rank_bubble_fraction": [0.24, 0.27],
            "bubble_fraction": 0.255,
            "ideal_bubble_fraction": 0.2,
        }
        if is_pipeline
        else None,
    }


def utilization(ranks: int) -> dict:
    return {
        "interval_s": 0.5,
        "per_rank": [
            {
                "rank": rank,
                "num_samples": 12,
                "cpu_percent_mean": 97.5 - rank,
                "rss_bytes_mean": 640.0 * 2**20,
                "rss_bytes_max": 700 * 2**20,
                "gpu_percent_mean": None,
                "gpu_memory_used_bytes_max": None,
            }
            for rank in range(ranks)
        ],
    }


def run_metrics(run_type: str, ranks: int, repeat: int, *, is_profiled: bool = False, noise: float = 0.01) -> dict:
    """A run of a sweep with known noise: the repeats of one configuration differ as a quiet machine's do."""
    number = sorted(STEP_TIME_S).index(run_type)
    draws = np.random.default_rng([number, ranks, repeat, is_profiled]).normal(size=4)
    step_time_s = STEP_TIME_S[run_type] * (1 + noise * float(draws[0])) * (1.3 if is_profiled else 1)
    if ranks == 1 and run_type != "baseline":
        step_time_s *= 1.62
    metrics = example_metrics(
        num_steps=40,
        world_size=ranks,
        step_time_s=step_time_s,
        run_id=f"20260101T12{number:02}{ranks:02}Z-{repeat:04x}{int(is_profiled):04x}",
        git_commit="2524a8e0c3a1f00dfeedbeefcafe0123456789ab",
        command_line=f"python src/gpt2.py --run_type {run_type} --seed {repeat} --max_train_steps 40",
        training_config={"run_type": run_type, "seed": repeat},
        settings={"run_type": run_type, "seed": repeat, "profile": is_profiled},
        instrumented=is_profiled,
        attribution=attribution(ranks, step_time_s, 0.0 if ranks == 1 else 0.08, run_type == "pipeline")
        if is_profiled
        else None,
        utilization=None if is_profiled else utilization(ranks),
    )
    shift = 0.0008 * float(draws[1])
    for row in metrics["steps"]:
        row["loss"] += shift
        share = {"forward": 0.28, "backward": 0.58, "synchronise": 0.06 if ranks > 1 else 0.0, "optimizer": 0.06}
        for name, part in share.items():
            row[f"per_rank_{name}_s"] = [part * time for time in row["per_rank_step_time_s"]]
    times = np.cumsum([row["step_time_s"] for row in metrics["steps"]])
    metrics["evaluations"] = [
        metrics["evaluations"][0]
        | {
            "step": step,
            "val_loss": 9.1 - 3.0 * step / (step + 10) + shift,
            "train_time_s": float(times[step - 1]),
            "elapsed_s": float(times[step - 1]) + 0.04 * step,
        }
        for step in range(5, 41, 5)
    ]
    for rank, row in enumerate(metrics["memory"]["per_rank"]):
        row["peak_rss_bytes"] = int((660 + 30 * number - 40 * rank + 2 * draws[2]) * 2**20)
    metrics["timing"]["step_time_p95_above_median"] = 0.03
    return metrics


def write_sweep(folder: Path, run_types=tuple(STEP_TIME_S), ranks=(1, 2), repeats=5, is_profiled=True) -> Path:
    """A finished sweep as run_scaling_benchmarks.py leaves it, one profiled run of each configuration beside it."""
    cells = []
    for run_type, count in itertools.product(run_types, ranks):
        if (run_type == "baseline" and count > 1) or (run_type == "pipeline" and count == 1):
            continue
        name = f"{run_type}_{count}"
        for repeat in range(1, repeats + 1):
            save(folder / name / f"run_{repeat}", run_metrics(run_type, count, repeat))
            cells.append(
                {
                    "name": name, "variant": run_type, "run_type": run_type, "ranks": count, "batch_size": 8,
                    "repeat": repeat, "seed": repeat, "folder": f"{name}/run_{repeat}", "command": [],
                    "status": "complete", "reason": None, "seconds": 9.0,
                }
            )  # fmt: skip
        if is_profiled:
            save(folder / "profiled" / name, run_metrics(run_type, count, 1, is_profiled=True))
    plan = {
        "schema": 1, "protocol": "strong", "target_val_loss": None, "command_line": "scripts/run_scaling_benchmarks.py",
        "created_utc": "2026-01-01T12:00:00Z", "git_commit": "0" * 40, "cells": cells,
    }  # fmt: skip
    (folder / "sweep.json").write_text(json.dumps(copy.deepcopy(plan)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The report of a small sweep: everything that a page can hold, drawn once."""
    folder = tmp_path_factory.mktemp("sweep")
    write_sweep(folder / "out", ("baseline", "ddp", "pipeline"))
    write_html(load(folder / "out"), folder / "report.html")
    return folder / "report.html"


def load(folder: Path) -> list[Run]:
    return [load_run(path) for path in find_runs(folder)]


class Page(HTMLParser):
    """What a browser would make of a page: its words, its addresses and its identifiers."""

    def __init__(self, path: Path):
        super().__init__()
        self.words, self.addresses, self.links, self.ids, self.tags, self.policy = [], [], [], [], [], ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes["href"]] if tag == "a" else []
        if attributes.get("http-equiv") == "Content-Security-Policy":
            self.policy = attributes["content"]
        loaded = ("src", "srcset", "data", "poster", "action", "background", *(["href"] if tag != "a" else []))
        self.addresses += [attributes[name] for name in loaded if attributes.get(name)]

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_loads_nothing(page):
    found = Page(page)
    assert len(found.addresses) > 10
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


@pytest.mark.skipif(not BROWSER, reason="no chromium or chrome on PATH: the page is not shown in a browser")
def test_a_browser_shows_it_without_complaint(page, tmp_path):
    """Both widths: the screenshot is a picture of a page, and the console stays empty."""
    for name, width in (("desktop", 1200), ("phone", 400)):
        shot = tmp_path / f"{name}.png"
        done = subprocess.run(
            [
                *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *("--enable-logging=stderr", "--v=0", f"--user-data-dir={tmp_path / name}"),
                *(f"--window-size={width},3000", f"--screenshot={shot}", page.as_uri()),
            ],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
        with Image.open(shot) as image:
            assert image.size == (width, 3000)
            colours = {colour for count, colour in image.convert("RGB").getcolors(1 << 24) if count > 200}
            assert {(0x0B, 0x5A, 0x8F), (0xFD, 0xF3, 0xF4)} & colours  # links, the box of warnings
            assert len(colours) > 20


@pytest.mark.skipif(not BROWSER, reason="no chromium or chrome on PATH: the check of the check is not made")
def test_a_page_that_loads_something_would_be_noticed(tmp_path):
    """The console is read in the same way as above: a page with a picture that the policy forbids must show there."""
    page = tmp_path / "bad.html"
    policy = """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:">"""
    page.write_text(f"<html><head>{policy}</head><body><img src='other.png'></body></html>")
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0",
         f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={tmp_path / 'x.png'}", page.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert any("CONSOLE" in line and "Content Security Policy" in line for line in done.stderr.splitlines())


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


def arms(tmp_path: Path, **arms_of_metrics: list[dict]) -> Subject:
    for name, files in arms_of_metrics.items():
        for number, metrics in enumerate(files):
            save(tmp_path / name / f"run_{number}", metrics)
    return subject_of(load(tmp_path))


def repeats(run_type: str, step_time_s: float, count: int = 5, loss: float = 0.0, **overrides) -> list[dict]:
    """Runs whose step times differ by up to 1 %, with `loss` added to every validation loss."""
    files = []
    for number in range(count):
        metrics = example_metrics(
            num_steps=12,
            step_time_s=step_time_s * (1 + 0.0025 * (number - 2)),
            run_id=f"{run_type}-{number}-{step_time_s}",
            **{
                **overrides,
                "training_config": {"run_type": run_type, **overrides.get("training_config", {})},
                "settings": {"run_type": run_type, **overrides.get("settings", {})},
            },
        )
        for row in metrics["evaluations"]:
            row["val_loss"] += loss
        files.append(metrics)
    return files


def kinds(subject: Subject) -> list[str]:
    return [verdict.kind for verdict in verdicts(subject)]


def test_a_difference_and_none(tmp_path):
    subject = arms(tmp_path, a=repeats("baseline", 0.3), b=repeats("ddp", 0.2), c=repeats("fsdp", 0.3003))
    said = [verdict.sentence for verdict in verdicts(subject)]
    assert any(
        re.match(r"ddp on 2 ranks is 1\.50x as fast as baseline on 2 ranks \(95 % interval", text) for text in said
    )
    assert any(text.startswith("No detectable difference between fsdp on 2 ranks and baseline") for text in said)
    assert any(text.startswith("On 2 ranks ddp is the fastest; it beats baseline by 1.50x and fsdp") for text in said)


def test_slower_is_said_as_such(tmp_path):
    subject = arms(tmp_path, a=repeats("baseline", 0.2), b=repeats("tensor", 0.3))
    assert "tensor on 2 ranks is slower: 0.67x as fast as baseline on 2 ranks" in verdicts(subject)[0].sentence


def test_four_repeats_make_no_claim(tmp_path):
    subject = arms(tmp_path, a=repeats("baseline", 0.3), b=repeats("ddp", 0.2, count=4))
    assert kinds(subject) == [NO_CLAIM]
    assert "n = 4 and 5; a claim takes 5 each" in verdicts(subject)[0].sentence
    assert [warning.title for warning in warnings_of(subject)] == ["Unquiet machine", "n < 5"][::-1]


def test_faster_but_learns_worse_is_not_faster(tmp_path):
    subject = arms(tmp_path, a=repeats("baseline", 0.3), b=repeats("ddp", 0.2, loss=0.05))
    first = verdicts(subject)[0]
    assert first.kind == WORSE
    assert "ddp on 2 ranks is faster than baseline on 2 ranks but learns worse" in first.sentence
    assert "faster" not in kinds(subject)
    better = arms(tmp_path / "other", a=repeats("baseline", 0.3), b=repeats("ddp", 0.2, loss=-0.05))
    assert WORSE not in kinds(better)


def test_unequal_work_is_not_compared(tmp_path):
    other_batch = {"training_config": {"global_batch_size": 16}}
    subject = arms(tmp_path, a=repeats("baseline", 0.3), b=repeats("ddp", 0.2, **other_batch))
    assert kinds(subject) == ["not compared"]
    assert [workload.title for workload in subject.workloads] == ["global batch size 8", "global batch size 16"]
    assert "global batch size 8 / 16" in next(w.text for w in warnings_of(subject) if w.title == "Unequal work")


WARNINGS = {
    "Instrumented": {"instrumented": True},
    "Not complete": {"status": "failed", "failure": {"reason": "x", "step": 3}},
    "Dirty checkout": {"git_dirty": True},
    "Commit unknown": {"git_commit": None},
    "Several commits": {"git_commit": "1" * 40},
    "Several machines": {"host": {"hostname": "node1"}},
    "Several versions": {"env": {"torch_version": "2.14.0"}},
    "Copied files": {"run_id": "20260101T120000Z-0123abcd"},
    "Unquiet machine": {"timing": {"step_time_p95_above_median": 0.2}},
}


@pytest.mark.parametrize("title", WARNINGS)
def test_what_spoils_a_run_is_told_with_its_number(tmp_path, title):
    """One run of ten is spoilt: the warning appears, and not without it."""
    quiet = {"timing": {"step_time_p95_above_median": 0.02}}
    files = [
        example_metrics(num_steps=8, step_time_s=0.2 + 0.001 * number, run_id=f"run-{number}", **quiet)
        for number in range(5)
    ]
    save(tmp_path / "twin", example_metrics(num_steps=8, run_id="20260101T120000Z-0123abcd", **quiet))
    clean = warnings_of(arms(tmp_path, a=files))
    assert [warning.title for warning in clean] == []
    save(tmp_path / "spoilt", example_metrics(num_steps=8, **({"run_id": "spoilt", **quiet} | WARNINGS[title])))
    found = {warning.title: warning for warning in warnings_of(subject_of(load(tmp_path)))}
    assert title in found
    number = next(n for n, run in enumerate(subject_of(load(tmp_path)).runs, 1) if "spoilt" in str(run.path))
    assert not found[title].runs or number in found[title].runs


def test_the_breakdown_adds_up_to_the_step(tmp_path):
    profiled = save(tmp_path / "p", run_metrics("ddp", 2, 1, is_profiled=True))
    timed = save(tmp_path / "t", run_metrics("ddp", 2, 1))
    attributed, phases = breakdown([load_run(profiled)]), breakdown([load_run(timed)])
    step = load_run(profiled).record["attribution"]["per_rank"][0]["steps"][0]
    assert attributed.is_attributed and not phases.is_attributed
    assert sum(attributed.seconds.values()) == pytest.approx(step["step_time_s"])
    assert attributed.seconds["exposed communication"] == pytest.approx(0.08 * step["step_time_s"])
    rows = [row for row in load_run(timed).record["steps"] if not row["is_warmup"]]
    assert sum(phases.seconds.values()) == pytest.approx(np.mean([row["per_rank_step_time_s"] for row in rows]))
    assert phases.seconds["synchronise"] == pytest.approx(0.06 * np.mean([row["per_rank_step_time_s"] for row in rows]))
    assert breakdown([load_run(save(tmp_path / "n", example_metrics()))]) is None


def test_one_strategy_has_one_colour_and_a_name_of_its_own(tmp_path):
    write_sweep(tmp_path, ("baseline", "allreduce", "ddp"), repeats=2)
    subject = subject_of(load(tmp_path))
    colours = {(entry.strategy, entry.colour) for entry in subject.entries}
    assert len(colours) == 3 == len({colour for _, colour in colours})
    names = [entry.name for entry in subject.entries]
    assert len(set(names)) == len(names)
    assert "ddp on 2 ranks" in names and "ddp on 2 ranks, instrumented" in names
    assert [entry.ranks for entry in subject.measured] == [1, 1, 1, 2, 2]


def test_settings_that_tell_two_arms_apart_are_in_their_names(tmp_path):
    files = {f"b{size}": repeats("ddp", 0.2, settings={"bucket_cap_mb": size}) for size in (25, 50)}
    assert {entry.name for entry in arms(tmp_path, **files).entries} == {
        "ddp, bucket_cap_mb 25 on 2 ranks",
        "ddp, bucket_cap_mb 50 on 2 ranks",
    }


def test_files_of_every_version_and_single_runs_make_a_report(tmp_path):
    save(tmp_path / "one", example_metrics(num_steps=6))
    save(tmp_path / "four", v20_metrics())
    save(tmp_path / "old", v1_metrics(4))
    text = markdown(load(tmp_path), tmp_path)
    assert "PER RANK" in markdown(load(tmp_path), tmp_path, pictures="p")
    assert "Work not known" in text
    assert "Not in these files:" in text
    assert "faster" not in text.split("## Strategies")[0]


def test_one_configuration_has_nothing_to_compare(tmp_path):
    assert verdicts(arms(tmp_path, a=repeats("baseline", 0.2))) == []
    with pytest.raises(ValueError, match="at least one run"):
        subject_of([])


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


def test_a_target_gives_the_time_to_it(tmp_path):
    """Half-way between the losses of two validations: half-way between their times."""
    write_sweep(tmp_path, ("baseline",), ranks=(1,), repeats=1, is_profiled=False)
    (run,) = load(tmp_path)
    before, after = run.validation_losses[2:4]
    target = (before.loss + after.loss) / 2
    text = markdown([run], tmp_path, target_val_loss=target)
    assert f"Validation loss {target:.4f} is the target" in text
    assert f"| 1 of 1 | {(before.train_time_s + after.train_time_s) / 2:#.4g} |" in text


@pytest.mark.parametrize("broken", ["{", '{"cells": 1}', '{"protocol": "odd", "cells": []}'])
def test_a_broken_plan_is_one_sentence(tmp_path, broken):
    save(tmp_path / "cell" / "run_1", example_metrics(num_steps=6))
    (tmp_path / "sweep.json").write_text(broken)
    with pytest.raises(ValueError, match=r"sweep\.json is not the plan of a sweep"):
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
    assert len(tables) > 8 and len(rows) > 30
    assert all(re.search(r'href="#(configuration|run)-\d+"', row) for row in rows)
    figures = re.findall(r"<figure .*?</figure>", page.read_text(), flags=re.S)
    assert figures and all('href="#configuration-' in figure for figure in figures)


@pytest.mark.parametrize("protocol", ["weak", "time_to_loss"])
def test_a_protocol_that_compares_unequal_work_has_its_own_verdict(tmp_path, protocol):
    """Twice the batch on two ranks at the same step time is twice the work per second, and no unequal comparison."""
    write_sweep(tmp_path, ("baseline", "ddp"), is_profiled=False)
    plan = json.loads((tmp_path / "sweep.json").read_text()) | {"protocol": protocol, "target_val_loss": 6.9}
    (tmp_path / "sweep.json").write_text(json.dumps(plan))
    if protocol == "weak":
        for path in tmp_path.glob("ddp_2/*/training_metrics.json"):
            metrics = json.loads(path.read_text())
            metrics["training_config"]["global_batch_size"] = 16
            metrics["timing"]["tokens_per_sec_global"] *= 2
            path.write_text(json.dumps(metrics))
    runs = load(tmp_path)
    said = [verdict.sentence for verdict in report_of(runs, tmp_path).verdicts]
    rates = {
        key: statistics.median(run.tokens_per_s for run in runs if (run.run_type, run.world_size) == key)
        for key in (("ddp", 2), ("baseline", 1))
    }
    if protocol == "weak":
        ratio = rates["ddp", 2] / rates["baseline", 1]
        assert ratio > 3
        start = f"Weak scaling: ddp on 2 ranks does {ratio:.2f}x as much per second as baseline at 1 rank (efficiency"
    else:
        start = "ddp on 2 ranks reaches validation loss 6.9 1.6"
    assert any(text.startswith(start) for text in said), said


def test_collectives_of_unknown_groups_have_no_bandwidth(tmp_path):
    """Where several groups of ranks could be meant, a file holds null, and no bandwidth is made of it."""
    metrics = run_metrics("pipeline", 2, 1, is_profiled=True)
    metrics["attribution"]["collectives"][0]["bus_bytes_per_step"] = None
    save(tmp_path, metrics)
    (row,) = [line for line in markdown(load(tmp_path)).splitlines() if "gloo:all_reduce" in line]
    assert [cell.strip() for cell in row.split("|")][5:8:2] == ["n/a", "n/a"]


def test_the_same_strategy_on_other_work_has_a_name_of_its_own(tmp_path):
    other_batch = {"training_config": {"global_batch_size": 16}, "settings": {"global_batch_size": 16}}
    subject = arms(tmp_path, a=repeats("ddp", 0.2), b=repeats("ddp", 0.4, **other_batch))
    assert [entry.name for entry in subject.entries] == [
        "ddp on 2 ranks, global batch size 8",
        "ddp on 2 ranks, global batch size 16",
    ]
    assert len({entry.colour for entry in subject.entries}) == 1


def test_arms_that_only_the_micro_batch_tells_apart_are_accused_by_side(tmp_path):
    """The arm that learns worse is the slower one: both names must differ, and the good arm is not called worse."""
    subject = arms(
        tmp_path,
        a=repeats("baseline", 0.3),
        b=repeats("ddp", 0.2, settings={"micro_batch_size_per_gpu": 4}),
        c=repeats("ddp", 0.25, loss=0.05, settings={"micro_batch_size_per_gpu": 2}),
    )
    good, bad = "ddp, micro_batch_size_per_gpu 4 on 2 ranks", "ddp, micro_batch_size_per_gpu 2 on 2 ranks"
    assert [entry.name for entry in subject.entries] == [good, bad, "baseline on 2 ranks"]
    by_name = {entry.name: entry for entry in subject.entries}
    pair = compared(by_name[good], by_name[bad])
    assert pair.kind == "faster" and pair.worse is by_name[bad]
    assert compared(by_name[bad], by_name["baseline on 2 ranks"]).kind == WORSE


def test_names_that_no_setting_tells_apart_are_numbered(tmp_path):
    other_cpu = {"hardware": {"cpu_threads_per_rank": 7}}
    names = [entry.name for entry in arms(tmp_path, a=repeats("ddp", 0.2), b=repeats("ddp", 0.3, **other_cpu)).entries]
    assert len(set(names)) == 2
    same = {"hardware": {"cpu_name": "Another CPU"}}
    names = [e.name for e in arms(tmp_path / "x", a=repeats("ddp", 0.2), b=repeats("ddp", 0.3, **same)).entries]
    assert names == ["ddp on 2 ranks [1]", "ddp on 2 ranks [2]"]


def seeded(files: list[dict], first: int) -> list[dict]:
    for number, metrics in enumerate(files):
        metrics["training_config"]["seed"] = first + number
    return files


def test_seeds_that_no_run_shares_are_not_compared(tmp_path):
    """A faster arm that learns worse: without shared seeds nobody knows that it does, so no claim is made."""
    subject = arms(tmp_path, a=seeded(repeats("baseline", 0.3), 1), b=seeded(repeats("ddp", 0.2, loss=0.05), 11))
    said = [verdict.sentence for verdict in verdicts(subject)]
    assert kinds(subject) == [NOT_COMPARED]
    assert said[0].startswith("ddp on 2 ranks is not compared with baseline on 2 ranks: seed 11, 12, 13, 14, 15 ag")
    (row,) = [row for row in table(subject, tmp_path, "Equal work") if row[0] == "ddp on 2 ranks"]
    assert row[3:6] == ["n/a", "", NOT_COMPARED]
    assert "no claim" in headlines(subject)[0].sentence


def table(subject: Subject, folder: Path, title: str) -> list[list[str]]:
    """The rows of the first table whose title begins with `title`, names as text."""
    parts = [part for section in report_of(subject.runs, folder).sections for part in section.parts]
    found = next(part for part in parts if isinstance(part, Table) and part.title.startswith(title))
    return [[getattr(cell, "name", cell) for cell in row] for row in found.rows]


def on_two_ranks(subject: Subject) -> str:
    return next(v.sentence for v in verdicts(subject) if v.claim.startswith("On 2 ranks"))


def test_a_short_arm_does_not_silence_the_leader(tmp_path):
    subject = arms(
        tmp_path,
        a=repeats("baseline", 0.3),
        b=repeats("ddp", 0.2),
        c=repeats("fsdp", 0.3),
        d=repeats("tensor", 0.25, 4),
    )
    text = on_two_ranks(subject)
    assert "On 2 ranks ddp is the fastest; it beats" in text
    assert "left out: tensor (n < 5)" in text


def test_an_arm_that_learns_worse_is_not_at_the_top(tmp_path):
    files = {"a": repeats("baseline", 0.3), "b": repeats("ddp", 0.2), "c": repeats("fsdp", 0.2005, loss=0.05)}
    text = on_two_ranks(arms(tmp_path, **files))
    assert "On 2 ranks ddp is the fastest; it beats baseline by 1.50x; left out: fsdp (learn worse)" in text
    files["c"] = repeats("fsdp", 0.1995, loss=0.05)
    said = [verdict.sentence for verdict in verdicts(arms(tmp_path / "other", **files))]
    assert said[0] == (
        "On 2 ranks fsdp has the highest throughput but learns worse than ddp and baseline: it is not the fastest."
    )
    assert any("On 2 ranks ddp is the fastest" in text for text in said)


def test_slower_than_what_the_leader_beats_is_not_level_with_the_leader(tmp_path):
    """fsdp scatters so that nothing is known of it, but its median lies below that of allreduce, which ddp beats."""
    scattered = [metrics for time in (0.18, 0.29, 0.3, 0.32, 0.5) for metrics in repeats("fsdp", time, 1)]
    for number, metrics in enumerate(scattered):
        metrics["run_id"] = f"fsdp-{number}"
    subject = arms(
        tmp_path, a=repeats("baseline", 0.4), b=repeats("ddp", 0.2), c=repeats("allreduce", 0.23), d=scattered
    )
    by_name = {entry.strategy: entry for entry in subject.entries}
    assert compared(by_name["ddp"], by_name["fsdp"]).kind == "no detectable difference"
    text = on_two_ranks(subject)
    assert text.startswith(
        "On 2 ranks ddp has the highest throughput; it beats allreduce by 1.15x and baseline by 2.00x"
    )
    assert "left out: fsdp (not to be placed" in text


def test_the_leader_line_is_corrected_for_its_comparisons(tmp_path):
    """Against Student's t from a table: at 4 degrees of freedom 2.776 for 95 % and 5.598 for 1 - 0.05 / 10."""
    subject = arms(tmp_path, a=repeats("baseline", 0.2), b=repeats("ddp", 0.195))
    pair = compared(*sorted(subject.entries, key=lambda entry: entry.strategy != "ddp"))
    low, high = pair.interval_among(10)
    middle, plain = np.log(pair.ratio.ratio), np.log(pair.ratio.high)
    assert np.log(high) - middle == pytest.approx((plain - middle) * 5.598 / 2.776, rel=1e-3)
    assert middle - np.log(low) == pytest.approx(np.log(high) - middle)
    assert pair.interval_among(1) == pytest.approx((pair.ratio.low, pair.ratio.high))
    close = arms(
        tmp_path / "more",
        **{kind: repeats(kind, 0.2 * step) for kind, step in (("baseline", 1.5), ("ddp", 1), ("fsdp", 1.009))},
    )
    by_name = {entry.strategy: entry for entry in close.entries}
    pair = compared(by_name["ddp"], by_name["fsdp"])
    assert pair.kind == "faster" and pair.interval_among(3)[0] < 1
    assert "it beats baseline by 1.50x; left out: fsdp" in on_two_ranks(close)
    assert "at 95 % over 3 comparisons together" in on_two_ranks(close)


def test_a_lead_that_does_not_hold_among_all_is_no_lead(tmp_path):
    files = {kind: repeats(kind, 0.2 * step) for kind, step in (("baseline", 1.009), ("ddp", 1), ("fsdp", 1.0085))}
    assert on_two_ranks(arms(tmp_path, **files)).startswith("On 2 ranks no lead is sure among ddp, fsdp and baseline")


def test_several_that_cannot_be_told_apart_are_one_sentence(tmp_path):
    files = {kind: repeats(kind, 0.3 + 0.0003 * number) for number, kind in enumerate(("baseline", "ddp", "fsdp"))}
    said = [v.sentence for v in verdicts(arms(tmp_path, **files)) if v.claim.startswith("No detectable")]
    assert len(said) == 1
    assert re.match(
        r"No detectable difference between baseline on 2 ranks and each of ddp on 2 ranks \(0\.999, ", said[0]
    )
    assert "and fsdp on 2 ranks (0.998, " in said[0]


def test_the_first_lines_say_what_is_best_what_was_learned_and_the_mfu(tmp_path):
    files = {"a": repeats("baseline", 0.3), "b": repeats("ddp", 0.2, loss=0.001)}
    best, learning, mfu = (line.sentence for line in headlines(arms(tmp_path, **files)))
    assert best.startswith("Best: ddp on 2 ranks, 1.50x the throughput of baseline on 2 ranks (95 % interval 1.4")
    assert learning.startswith("Learning: both configurations learn alike; final validation losses differ by at most ")
    assert f"0.0010, limit {LOSS_NOISE:.4f} (what seeds explain" in learning
    rates = [statistics.median(run.tokens_per_s for run in load(tmp_path / name)) for name in files]
    rates = [3_800_000 * rate / 2e11 for rate in rates]  # the example's FLOPs per token, and two peaks
    assert mfu.startswith(
        f"MFU: {rates[0]:.1%} to {rates[1]:.1%}, medians of 2 of 2 configurations; source of the peak"
    )
    assert mfu.endswith("measured: 2048^3 matrix product.")
    files["c"] = repeats("fsdp", 0.25, loss=0.003, flops={"peak_source": "data sheet"})
    _, learning, mfu = (line.sentence for line in headlines(arms(tmp_path / "three", **files)))
    assert "all configurations learn alike; final validation losses differ by at most 0.0030" in learning
    assert mfu.endswith("source of the peak: data sheet and measured, in 2 ways (table of MFU).")
    files["b"] = repeats("ddp", 0.2, loss=0.05)
    del files["c"]
    best, learning, _ = (line.sentence for line in headlines(arms(tmp_path / "worse", **files)))
    assert best == "Best: none is shown to beat baseline on 2 ranks."
    assert "not alike; ddp on 2 ranks learns worst, its final validation loss is 0.0500 above" in learning


def test_one_order_by_the_median_of_all_runs(tmp_path):
    """allreduce has the single fastest run and the lower median: profiled arms must not follow that run."""
    lucky = repeats("allreduce", 0.25)
    lucky[0] = repeats("allreduce", 0.1, 1)[0]
    profiled = {"instrumented": True, "settings": {"profile": True}}
    subject = arms(
        tmp_path, a=lucky, b=repeats("ddp", 0.2), c=repeats("allreduce", 0.4, 1, **profiled),
        d=repeats("ddp", 0.4, 1, **profiled),
    )  # fmt: skip
    assert [entry.strategy for entry in subject.entries] == ["ddp", "allreduce"] * 2


def test_the_breakdown_is_drawn_in_milliseconds_one_part_after_the_other():
    seconds = {"forward": 0.1, "backward": 0.2, "exposed communication": 0.05}
    bars = [("a", Breakdown("x", True, seconds, 3, 1)), ("b", Breakdown("x", True, {"forward": 0.3}, 3, 1))]
    for look in (WIDE, NARROW):
        drawn = breakdown_figure(bars, look).axes[0].patches
        first = [(bar.get_x(), bar.get_width()) for bar in drawn if round(bar.get_y() + bar.get_height() / 2) == 0]
        second = [bar.get_width() for bar in drawn if round(bar.get_y() + bar.get_height() / 2) == 1]
        assert np.ravel(first) == pytest.approx([0, 100, 100, 200, 300, 50])
        assert second == pytest.approx([300, 0, 0])


@pytest.mark.parametrize("law", ["amdahl", "gustafson"])
def test_the_law_is_drawn_from_its_formula(law):
    points = {"ddp": [(1, 1.0, None, None), (4, 2.2, 2.0, 2.5)], "fsdp": [(4, 2.0, 1.9, 2.1)]}
    figure = scaling_figure(points, {"ddp": 0.25, "fsdp": None}, {"ddp": "#000000", "fsdp": "#ff0000"}, WIDE, law=law)
    lines = figure.axes[0].lines
    (curve,) = [line for line in lines if len(line.get_xdata()) == 60]
    at = {1: 1.0, 4: 1 / (0.25 + 0.75 / 4)} if law == "amdahl" else {1: 1.0, 4: 4 - 0.25 * 3}
    assert curve.get_color() == "#000000"
    assert [curve.get_xdata()[0], curve.get_xdata()[-1]] == [1, 4]
    assert [curve.get_ydata()[0], curve.get_ydata()[-1]] == pytest.approx(list(at.values()))
    ends = [tuple(line.get_ydata()) for line in lines if len(line.get_xdata()) == 2]
    assert ends == [(1, 4), (2.0, 2.5), (1.9, 2.1)]  # the ideal, then the intervals
    assert [line.get_ydata()[0] for line in lines if len(line.get_xdata()) == 1] == [1.0, 2.2, 2.0]


def test_the_losses_are_drawn_as_differences_from_the_reference(tmp_path):
    subject = arms(tmp_path, a=repeats("baseline", 0.3), b=repeats("ddp", 0.2, loss=0.003))
    (workload,) = subject.workloads
    panel = loss_figure(workload, WIDE).axes[1]
    dots = [line for line in panel.lines if line.get_marker() == "o"]
    rows = {entry.strategy: number for number, entry in enumerate(workload.measured)}
    assert list(dots[rows["ddp"]].get_xdata()) == pytest.approx([0.003] * 5)
    assert list(dots[rows["ddp"]].get_ydata()) == [rows["ddp"]] * 5
    assert list(dots[rows["baseline"]].get_xdata()) == pytest.approx([0.0] * 5)
    medians = [line.get_xdata()[0] for line in panel.lines if line.get_color() == "#111111"]
    assert medians[rows["ddp"]] == pytest.approx(0.003)
    (noise,) = panel.patches
    assert (noise.get_x(), noise.get_width()) == pytest.approx((-LOSS_NOISE, 2 * LOSS_NOISE))


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

    one, two = (raw(cell, "timing", "tokens_per_sec_global") for cell in ("baseline_1", "ddp_2"))
    of_ddp = row("Equal work", "ddp on 2 ranks")
    assert of_ddp[:4] == ["ddp on 2 ranks", "5", f"{two:,.0f}", f"{two / one:.2f}x"]
    assert of_ddp[5:8] == ["faster", f"{raw('ddp_2', 'evaluations', -1, 'val_loss'):.4f}", f"{3.8e6 * two / 2e11:.1%}"]
    assert of_ddp[9] == f"{raw('ddp_2', 'memory', 'per_rank', 0, 'peak_rss_bytes') / 2**20:,.0f}"
    assert of_ddp[8] == f"{1e3 * raw('ddp_2', 'timing', 'step_time_median_s'):.1f}"
    scaled = row("Speed-up and efficiency", "ddp on 2 ranks")
    assert scaled[:3] == ["ddp on 2 ranks", "5", f"{two / one:.2f}x"]
    assert scaled[4:] == [f"{two / one / 2:.0%}", "baseline at 1 rank"]
    exposed = row("Communication against its bound", "ddp on 2 ranks, instrumented")
    assert exposed[1:4] == ["2.413", "0.9", f"{2_529_792 / 9e8 * 1e3:.3f}"]
    assert float(exposed[4]) / float(exposed[6]) == pytest.approx(1.6, rel=1e-3)
    ranks = row("Peak memory per rank", "ddp on 2 ranks")
    assert ranks[1] == of_ddp[9] and int(ranks[1]) - int(ranks[2]) == 40
    assert row("Model FLOPs", "ddp on 2 ranks")[1:4] == [of_ddp[7], f"{3.8e6 * two / 1e9:#.4g}", "100.0"]
    assert row("Processors", "ddp on 2 ranks")[1:] == ["0", "98", "640", "700", "12"]
    bubble = next(part for part in report_of(subject.runs, folder).sections if part.anchor == "pipeline").parts[0]
    assert bubble.rows[0][1:] == ["2", "4", "20.0%", "25.5%", "24.0%, 27.0%"]


def test_the_limit_of_a_speed_up_needs_a_serial_fraction_above_0():
    fit = {"serial_fraction": 0.25, "limit_of_speedup": 4.0, "low": 0.2, "high": 0.5}
    assert scaling._limit(fit) == "4.0x (2.0 to 5.0)"
    assert scaling._limit(fit | {"low": -0.01}) == "n/a"
    assert scaling._limit(fit | {"low": None, "high": None}) == "n/a"


def test_captions_name_what_exposed_communication_contains(page):
    text = Page(page).text
    assert "all of the synchronisation after backward, the packing of gradients included" in text
    assert "under ddp, fsdp and optimized, backward contains their communication" in text
    assert text.count("Of each configuration the first profiled run") == 3
