"""Two profiles against each other: published counts, and what differs per step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import nsys_examples as example
from support.metrics_examples import example_metrics, v20_metrics
from support.nsight_cases import DIFF, chrome_trace, run_folder, text_file
from support.programs import run_here

from testbed.analysis.profiles.diff import diff, diff_text, read_summary
from testbed.analysis.profiles.summary import PER_STEP, summarize, write_summary


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
    changes = diff(*(read_summary(write_summary(folder)[0]) for folder in (before, after)))
    assert "Unequal length: 3,561 and 40 optimizer steps; everything is per step." in changes["notes"]
    assert "NOT THE SAME: grad accum steps 1 and 2." in changes["notes"]
    assert "NOT THE SAME: global batch size 16 and 32." in changes["notes"]
    assert "no difference is significant" in changes["notes"][0]
    assert not any("hosts" in note or "sha256" in note for note in changes["notes"])
    ranges = {row["name"]: row for row in changes["tables"]["nvtx_sum"]}
    backward = ranges[":DeepSpeedEngine.backward"]
    assert backward["ns"] == pytest.approx([2_765_967_562_725 / 14_244, 62_133_803_775 / 160])
    assert ranges[":train/backward"]["ns"][0] is None  # a range that is new is not a time that is new
    a, b = summarize(before), summarize(after) | {"hosts": ["c", "d"], "deepspeed_config_sha256": "0" * 64}
    notes = diff(a, b)["notes"]
    assert "NOT THE SAME: hosts a, b and c, d." in notes
    assert f"NOT THE SAME: deepspeed config sha256 {a['deepspeed_config_sha256'][:8]} and 00000000." in notes
    said = " ".join(diff_text(changes).split())
    assert "85.6 % and 87.9 %" in said


def test_files_of_one_trace_that_differ_are_refused(tmp_path):
    folder = run_folder(tmp_path, metrics=example_metrics())
    other = example.stats_text("us", reports=("cuda_api_sum",)).replace("cuda_api_sum", "osrt_sum")
    text_file(folder / "profiles", other, "nsys_stats_other.txt")
    with pytest.raises(ValueError, match="made from one trace, but their osrt_sum differs"):
        summarize(folder)


def test_diff_profiles_prints_and_writes_json(before, after, tmp_path):
    for folder in (before, after):
        write_summary(folder)
    done = run_here(DIFF, before, after, "--json", tmp_path / "changes.json")
    assert done.returncode == 0 and " 3.00 3.25 +0.25" in " ".join(done.stdout.split())
    rows = {row["name"]: row for row in json.loads((tmp_path / "changes.json").read_text())["tables"]["nvtx_sum"]}
    assert rows["NCCL:ncclAllReduce"]["count"] == pytest.approx([3.0, 3.25], abs=0.005)
    done = run_here(DIFF, before, after, "--json", tmp_path)
    assert done.returncode == 1 and "cannot be written" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_summary_that_lacks_what_is_compared_is_one_sentence(tmp_path, before):
    path = tmp_path / "profile_summary.json"
    for nccl, said in ((3, "nccl is 3"), ({"instances": []}, "lacks 'percent_of_kernel_time'; write it again")):
        path.write_text(json.dumps(summarize(before) | {"nccl": nccl}))
        with pytest.raises(ValueError, match=said):
            read_summary(path)


def test_summaries_without_a_common_table_do_not_compare(tmp_path, before):
    chrome_trace(tmp_path / "torch")
    trace = summarize(tmp_path / "torch")
    trace["tables"].pop("cuda_gpu_kern_sum")
    with pytest.raises(ValueError, match="no table in common"):
        diff(summarize(before), trace)
