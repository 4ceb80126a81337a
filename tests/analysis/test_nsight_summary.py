"""The summary of a profile, from the tables of nsys stats and from traces of torch.profiler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import nsys_examples as example
from support.metrics_examples import example_metrics, save, v20_metrics
from support.nsight_cases import DIFF, chrome_trace, run_folder, text_file
from support.nsys_examples import UNIT
from support.programs import run_here

from testbed.analysis.profiles.diff import diff, read_summary
from testbed.analysis.profiles.summary import PER_STEP, summarize, summary_text, write_summary
from testbed.analysis.profiles.trace_operators import own_times, read_operators

PARSE = "scripts/profiling/parse_nsys_stats.py"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 12)), max_size=9))
def test_every_moment_belongs_to_the_call_that_began_last(drawn):
    spans: list[tuple[int, int]] = []
    for start, duration in drawn:
        end = start + duration
        if all(end <= a or b <= start or (a <= start and end <= b) or (start <= a and b <= end) for a, b in spans):
            spans.append((start, end))
    expected = [0] * len(spans)
    for moment in range(40):
        open_calls = [number for number, (start, end) in enumerate(spans) if start <= moment < end]
        if open_calls:  # of equal ones the last
            expected[max(open_calls, key=lambda number: (spans[number][0], -spans[number][1], number))] += 1
    assert own_times(spans) == expected


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


def test_phases_of_a_step_are_exclusive_and_add_up_to_it(tmp_path):
    phases = summarize(run_folder(tmp_path, metrics=example_metrics()))["phases"]
    found = {part["name"]: part["ns"] / UNIT for part in phases["parts"]}
    expected = {":train/forward": 30.0, ":train/dataload": 10.0, ":train/optimizer_step": 8.0, ":train/step": 4.0}
    assert found == pytest.approx(expected | {":train/backward": 48.0})
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
    with pytest.raises(ValueError, match=r"num_optimizer_steps is None.*with --optimizer_steps"):
        read_summary(folder)
    assert summarize(folder, 3, 2)["tables"]["cuda_gpu_kern_sum"]["rows"][0][PER_STEP]["count"] == 4.0


def test_a_trace_counts_once_however_many_files_show_it(tmp_path):
    """Text twice and CSV of one trace; then a second machine's trace, which is added."""
    folder = run_folder(tmp_path / "run", metrics=example_metrics())
    text_file(folder / "profiles", example.stats_text("us", reports=("nvtx_sum",)), "nsys_stats_more.txt")
    text_file(folder / "profiles", example.stats_csv(), "nsys_all.csv")
    once = summarize(folder)
    assert [row["count"] for row in once["nccl"]["instances"]] == [18, 18]
    assert once["nvtx_top5"][0]["raw"].startswith("  ")  # of the text, not of the CSV
    text_file(folder / "profiles", example.stats_text("us", trace="nsys_17_node1"), "nsys_stats_node1.txt")
    both = summarize(folder)
    assert [row["count"] for row in both["nccl"]["instances"]] == [36, 36]
    assert [item["name"] for item in both["nvtx_top5"]] == [item["name"] for item in once["nvtx_top5"]]
    row = both["tables"]["nvtx_sum"]["rows"][0]
    assert (row["total_ns"], row["avg_ns"], row["med_ns"]) == (1200 * UNIT, 100.0 * UNIT, None)


def test_warnings_name_what_proves_nothing(tmp_path):
    metrics = v20_metrics(deepspeed_config={"selected": {"wall_clock_breakdown": True}})
    folder = run_folder(tmp_path, metrics=metrics)
    (folder / "launcher_metadata.json").write_text(json.dumps({"nccl_env": {"NCCL_DEBUG": "INFO"}}))
    said = " ".join(summarize(folder, 3, 2)["warnings"])
    for part in ("poll first", "idle helpers", "Made under a profiler", "must not be added", "wall_clock_breakdown",
                 "NCCL_DEBUG was on", "2 of 4 ranks"):  # fmt: skip
        assert part in said


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


def test_parse_nsys_stats_writes_or_leaves_everything_as_it_was(tmp_path):
    folder = run_folder(tmp_path / "run", metrics=example_metrics())
    done = run_here(PARSE, "--run_dir", folder)
    path = folder / "profiles" / "profile_summary.json"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Wrote {path}\n")
    assert ":train/backward" in done.stdout and "per rank and step" in done.stdout
    content = path.read_text(encoding="utf-8")
    text_file(folder / "profiles", example.stats_text("indian").replace("28,80,00,864", "28,80,0?,864"))
    failed = run_here(PARSE, "--run_dir", folder)
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
        done = run_here(*command)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr and "Traceback" not in done.stderr


# --- two profiles against each other: published counts, and what differs per step


def instances(summary: dict, name: str) -> float:
    return next(row[PER_STEP] for row in summary["nccl"]["instances"] if row["name"] == name)


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
    for folder in (before, after):
        write_summary(folder)
    said, changes = " ".join(run_here(DIFF, before, after).stdout.split()), diff(summarize(before), summarize(after))
    for text in (
        "Unequal length: 3,561 and 40 optimizer steps; everything is per step.",
        "NOT THE SAME: grad accum steps 1 and 2.",
        "no difference is significant",
        "NCCL's share of the sum of kernel times: 85.6 % and 87.9 %.",
        "3.00 3.25 +0.25",
    ):
        assert text in said, text
    ranges = {row["name"]: row for row in changes["tables"]["nvtx_sum"]}
    backward = ranges[":DeepSpeedEngine.backward"]
    assert backward["ns"] == pytest.approx([2_765_967_562_725 / 14_244, 62_133_803_775 / 160])
    assert ranges[":train/backward"]["ns"][0] is None  # a range that is new is not a time that is new
    assert ranges["NCCL:ncclAllReduce"]["count"] == pytest.approx([3.0, 3.25], abs=0.005)
    assert not any("hosts" in note or "sha256" in note for note in changes["notes"])
    a, b = summarize(before), summarize(after) | {"hosts": ["c", "d"], "deepspeed_config_sha256": "0" * 64}
    notes = diff(a, b)["notes"]
    assert "NOT THE SAME: hosts a, b and c, d." in notes
    assert f"NOT THE SAME: deepspeed config sha256 {a['deepspeed_config_sha256'][:8]} and 00000000." in notes


def test_files_of_one_trace_that_differ_are_refused(tmp_path):
    folder = run_folder(tmp_path, metrics=example_metrics())
    other = example.stats_text("us", reports=("cuda_api_sum",)).replace("cuda_api_sum", "osrt_sum")
    text_file(folder / "profiles", other, "nsys_stats_other.txt")
    with pytest.raises(ValueError, match="made from one trace, but their osrt_sum differs"):
        summarize(folder)


def test_a_summary_that_lacks_what_is_compared_is_one_sentence(tmp_path, before):
    path = tmp_path / "profile_summary.json"
    for nccl, said in ((3, "nccl is 3"), ({"instances": []}, "lacks 'percent_of_kernel_time'; write it again")):
        path.write_text(json.dumps(summarize(before) | {"nccl": nccl}))
        with pytest.raises(ValueError, match=said):
            read_summary(path)


def test_names_that_text_cuts_are_those_of_csv(tmp_path, before):
    kept = {}
    for name, text in (("text", example.stats_text("us")), ("csv", example.stats_csv())):
        folder = tmp_path / name / "profiles"
        text_file(folder, text, "nsys_stats.txt" if name == "text" else "nsys.csv")
        kept[name] = summarize(folder.parent, 3, 2)
    rows = diff(kept["text"], kept["csv"])["tables"]["cuda_gpu_kern_sum"]
    assert len(rows) == 3 and all(row["count"][0] == row["count"][1] for row in rows)


def test_traces_of_two_machines_cover_the_ranks_of_both(tmp_path, before):
    """Eight ranks on two machines: a trace is of four."""
    text = (before / "profiles" / "nsys_stats_node0.txt").read_text()
    assert summarize(before)["ranks_in_profile"] == 4
    text_file(before / "profiles", text.replace("[/data/profiles/before", "[/data/profiles/other"), "nsys_stats_b.txt")
    assert summarize(before)["ranks_in_profile"] == 8


def test_summaries_without_a_common_table_do_not_compare(tmp_path, before):
    chrome_trace(tmp_path / "torch")
    trace = summarize(tmp_path / "torch")
    trace["tables"].pop("cuda_gpu_kern_sum")
    with pytest.raises(ValueError, match="no table in common"):
        diff(summarize(before), trace)
