"""What the documents say is so: links lead somewhere, tables come from files, the file map is complete."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import statistics
from collections import defaultdict
from statistics import median

import pytest
from support.programs import REPOSITORY

from testbed.analysis.charts.agreement import agreement_table
from testbed.analysis.charts.training import comparison_table
from testbed.analysis.comparison.files import arms_from
from testbed.analysis.comparison.two_arms import compare_arms
from testbed.analysis.profiles.exposed import exposed_communication, exposed_table
from testbed.analysis.runs.load import find_runs, load_run, load_runs
from testbed.analysis.statistics import FASTER, NO_DIFFERENCE, SLOWER
from testbed.config.flags import parse_command_line
from testbed.config.run_types import STRATEGIES
from testbed.experiments.evidence_overhead import (
    OVERHEAD_FILE,
    loss_difference,
    overhead,
    overhead_table,
    read_overhead,
)
from testbed.experiments.fault_drill.drill_file import DRILL_FILE, read_drill, summary, table
from testbed.experiments.network_lab.study import STRATEGIES_STUDIED
from testbed.experiments.network_lab.study_file import read_study, steps_of
from testbed.experiments.network_lab.study_file import results as results_of_study
from testbed.experiments.network_lab.tables import blocks, filled
from testbed.experiments.peers.results_file import peers_table, read_peers, results, unmeasured
from testbed.inference.report import INFERENCE_FILE, measured_schemes, read_inference, report
from testbed.metrics.file import read_metrics
from testbed.model.shape import LEARNING_RATES, MUON_LEARNING_RATES

README = REPOSITORY / "README.md"
QUICKSTART = REPOSITORY / "docs" / "results" / "quickstart"
QUICKSTART_RUNS = ("baseline", "baseline_all_cores", "optimized")  # as scripts/quickstart.sh draws them
RUN_TYPES = REPOSITORY / "docs" / "results" / "run_types"
CORES = REPOSITORY / "docs" / "results" / "cores"
SWEEP = REPOSITORY / "docs" / "results" / "sweep"
PERFORMANCE = REPOSITORY / "docs" / "results" / "performance"
EXPOSED = REPOSITORY / "docs" / "results" / "exposed"
INFERENCE = REPOSITORY / "docs" / "results" / "inference"
NETWORK = REPOSITORY / "docs" / "results" / "network"
FAULT_DRILL = REPOSITORY / "docs" / "results" / "fault_drill"
STRATEGIES_PAGE = REPOSITORY / "docs" / "strategies.md"
PAGES = [README, *sorted((REPOSITORY / "docs").rglob("*.md")), REPOSITORY / "checkpoint" / "README.md"]


def test_the_quickstart_table_is_what_the_files_say():
    block = re.search(r"<!-- quickstart table.*?-->\n```\n(.*?)```", README.read_text(), re.DOTALL).group(1)
    runs = load_runs([QUICKSTART / name for name in QUICKSTART_RUNS])
    assert block.strip() == comparison_table(runs).strip()


def test_the_quickstart_page_names_what_was_measured():
    page = (QUICKSTART / "README.md").read_text()
    for run in QUICKSTART_RUNS:
        metrics = read_metrics(QUICKSTART / run / "training_metrics.json")
        assert metrics["status"] == "complete" and metrics["git_dirty"] is False
        for fact in (metrics["git_commit"], metrics["hardware"]["cpu_name"], metrics["env"]["torch_version"]):
            assert fact in page


def test_what_the_second_rank_gains_beyond_the_core_is_what_the_files_say():
    words = {"baseline_1rank_batch32": "1 thread, so one core"}
    words |= {"baseline-threads_per_rank=2_1rank_batch32": "2 threads, so the same cores"}
    for folder, cores in words.items():
        ddp, one_process, unreadable = arms_from([CORES / "ddp_2ranks_batch32"], [CORES / folder])
        found = compare_arms(ddp, one_process).quantities[0].ratio
        row = f"| with {cores} | {found.ratio:.2f}x [{found.low:.2f}, {found.high:.2f}] |"
        assert not unreadable and found.n_a == found.n_b == 5 and row in STRATEGIES_PAGE.read_text()
    commits = {metrics["git_commit"] for metrics in map(read_metrics, find_runs(CORES)) if not metrics["git_dirty"]}
    assert len(commits) == 1 and commits.pop() in (CORES / "README.md").read_text()


def test_the_steps_of_waiting_threads_are_what_the_files_say():
    page = (REPOSITORY / "docs" / "measuring.md").read_text()
    for file in ("quiet.txt", "two_busy_loops.txt"):
        text = (REPOSITORY / "docs" / "results" / "openmp" / file).read_text()
        steps = defaultdict(list)
        for count, step_ms in re.findall(r"GOMP_SPINCOUNT=(\d+): median step ([\d.]+) ms", text):
            steps[count].append(float(step_ms))
        assert len(steps) >= 3
        for values in steps.values():
            assert f"| {statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f}) |" in page


def test_what_the_second_core_gains_is_what_the_sweep_says():
    """Of every strategy on two ranks, and of nothing that makes them look better: the reference is one thread."""
    from testbed.analysis.scaling.report import report_on_directory

    rows = {}
    for arm in report_on_directory(SWEEP)["arms"]:
        if arm["ranks"] == 2:
            gain = arm["speedup"]
            name = f"{arm['strategy_name']} on 2 ranks"
            rows[gain["ratio"]] = f"| {name} | {gain['ratio']:.2f}x [{gain['low']:.2f}, {gain['high']:.2f}] |"
    table = "\n".join(rows[ratio] for ratio in sorted(rows, reverse=True))
    assert len(rows) == 4 and f"|---|---|\n{table}\n\n" in STRATEGIES_PAGE.read_text()
    assert {metrics["hardware"]["cpu_threads_per_rank"] for metrics in map(read_metrics, find_runs(SWEEP))} == {1}


def test_the_table_of_run_types_is_what_the_files_say():
    """And every run type is in it, but dp, which needs two CUDA devices."""
    files = {path: read_metrics(path) for path in RUN_TYPES.glob("*/training_metrics.json")}
    run_types = {path: metrics["training_config"]["run_type"] for path, metrics in files.items()}
    order = list(STRATEGIES)
    paths = sorted(files, key=lambda path: (order.index(run_types[path]), path.parent.name))
    assert agreement_table(load_runs(paths)) in STRATEGIES_PAGE.read_text()
    assert set(run_types.values()) == STRATEGIES.keys() - {"dp"}
    page = (RUN_TYPES / "README.md").read_text()
    for metrics in files.values():
        assert metrics["status"] == "complete" and metrics["git_dirty"] is False
        assert metrics["git_commit"] in page


def test_the_table_of_model_states_is_what_the_file_says():
    """Within 2 % on every rank, as the guide claims."""
    counter = runpy.run_path(str(REPOSITORY / "scripts" / "measure_model_states.py"))
    counted = json.loads((REPOSITORY / "docs" / "results" / "model_states" / "counts.json").read_text())
    assert "\n".join(counter["table"](counted)) in STRATEGIES_PAGE.read_text()
    rows = [row for result in counted for of_rank in result["per_rank"] for row in of_rank["rows"]]
    assert {result["ranks"] for result in counted} == {2, 4}
    assert max(abs(counter["difference"](row)) for row in rows) < 0.02


def test_the_scaling_table_is_what_the_sweep_says():
    """The whole sweep is sound, unselected, and the page names each commit of it."""
    from testbed.analysis.audit.claims import audit
    from testbed.analysis.scaling.report import report_on_directory
    from testbed.analysis.scaling.tables import scaling_table

    assert scaling_table(report_on_directory(SWEEP)).strip() in (REPOSITORY / "docs" / "scaling.md").read_text()
    assert audit([SWEEP]) == []
    page = (SWEEP / "README.md").read_text()
    files = [read_metrics(path) for path in SWEEP.rglob("training_metrics.json")]
    cells = [cell for cell in json.loads((SWEEP / "sweep.json").read_text())["cells"] if cell["status"] == "complete"]
    assert len(files) == len(cells) == 54
    for metrics in files:
        assert metrics["status"] == "complete" and metrics["git_dirty"] is False
        assert metrics["git_commit"] in page


def test_the_table_of_other_trainers_is_what_the_file_says():
    """Whole, of a clean commit, and ours is not shown to be slower than any of them."""
    content = read_peers(PERFORMANCE / "peers.json")
    assert peers_table(content).partition("\n\n- ")[0] in (REPOSITORY / "docs" / "performance.md").read_text()
    assert unmeasured(content) == [] and content["git_dirty"] is False
    assert content["git_commit"] in (PERFORMANCE / "README.md").read_text()
    others = [result for result in results(content) if result.peer != "ours"]
    assert {result.peer for result in others} == {"nanogpt", "nanogpt-bf16", "transformers"}
    assert all(result.ratio_high > 1 for result in others)
    assert all(result.median_share_of_ceiling > 0.6 for result in results(content) if result.peer == "ours")


def test_the_losses_of_two_precisions_are_what_the_files_say():
    """The same work but for the precision; bf16 moves the loss after 20 steps by less than 0.02."""
    files = [read_metrics(PERFORMANCE / "precisions" / name / "training_metrics.json") for name in ("fp32", "bf16")]
    page = (PERFORMANCE / "README.md").read_text()
    for metrics in files:
        assert (metrics["status"], metrics["git_dirty"], len(metrics["steps"])) == ("complete", False, 20)
        assert metrics["git_commit"] in page
    fp32, bf16 = (metrics["training_config"] for metrics in files)
    assert fp32["precision"] == "fp32" and {**fp32, "precision": "bf16"} == bf16
    losses = [metrics["steps"][-1]["loss"] for metrics in files]
    said = f"After 20 steps on the same batches the loss is {losses[0]:.4f} in fp32 and {losses[1]:.4f} in bf16"
    assert said in (REPOSITORY / "docs" / "performance.md").read_text()
    assert abs(losses[0] - losses[1]) < 0.02


def test_the_table_of_learning_rates_is_what_the_files_say():
    """One seed of each rate; the defaults of nano are the best of them."""
    rows = []
    folder = REPOSITORY / "docs" / "results" / "learning_rates"
    for metrics in map(read_metrics, folder.glob("*/*/run_1/training_metrics.json")):
        config, last = metrics["training_config"], metrics["evaluations"][-1]
        assert (metrics["status"], metrics["git_dirty"], config["seed"], last["step"]) == ("complete", False, 42, 300)
        rows.append((config["optimizer"], config["lr"], config["muon_learning_rate"], last["val_loss"]))
    lines = [
        "| optimizer | `--learning_rate` | `--muon_learning_rate` | validation loss after 300 steps |",
        "|---|---|---|---|",
    ]
    rows.sort(key=lambda row: (row[0], row[1], row[2] or 0))
    lines += [
        f"| {name} | {rate:g} | {'' if muon is None else f'{muon:g}'} | {loss:.4f} |" for name, rate, muon, loss in rows
    ]
    assert len(rows) == 13 and "\n".join(lines) in (REPOSITORY / "docs" / "optimizers.md").read_text()
    best = {name: min((row for row in rows if row[0] == name), key=lambda row: row[3]) for name in ("AdamW", "Muon")}
    assert best["AdamW"][1] == LEARNING_RATES["nano"]
    assert best["Muon"][1:3] == (MUON_LEARNING_RATES["nano"],) * 2


def test_what_saving_in_the_background_hides_is_what_the_files_say():
    """Three pairs of runs; at least four fifths are hidden in the middle one."""
    lines = [
        "| pair | stood still without | with | hidden of it | hidden of its own time | median step without | with |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    hidden = []
    for pair in range(1, 4):
        folder = REPOSITORY / "docs" / "results" / "saving"
        plain, behind = (
            read_metrics(folder / f"{mode}_{pair}/training_metrics.json") for mode in ("disabled", "async")
        )
        assert not plain["git_dirty"] and plain["git_commit"] == behind["git_commit"]
        assert [row["is_asynchronous"] for row in plain["checkpoints"] + behind["checkpoints"]] == [False] * 20 + [
            True
        ] * 20
        stood_s, still_s = (sum(row["blocking_s"] for row in run["checkpoints"]) for run in (plain, behind))
        in_all_s = sum(row["total_s"] for row in behind["checkpoints"])
        steps_s = [f"{run['timing']['step_time_p50_sec']:.3f} s" for run in (plain, behind)]
        hidden.append(1 - still_s / stood_s)
        shares = f"{hidden[-1]:.0%} | {1 - still_s / in_all_s:.0%}"
        lines.append(f"| {pair} | {stood_s:.2f} s | {still_s:.2f} s | {shares} | {steps_s[0]} | {steps_s[1]} |")
    assert "\n".join(lines) in (REPOSITORY / "docs" / "checkpoints.md").read_text(), "\n".join(lines)
    assert median(hidden) >= 0.8


def test_start_up_and_data_wait_are_what_the_sweep_says():
    files = [read_metrics(path) for path in SWEEP.glob("*/run_*/training_metrics.json")]
    start_up = {name: [] for name in ("PyTorch", "DeepSpeed")}
    for metrics in files:
        engine = "DeepSpeed" if metrics["training_config"]["run_type"] == "optimized" else "PyTorch"
        start_up[engine].append(metrics["timing"]["startup_time_s"])
    waits = [metrics["timing"]["data_wait_fraction"] for metrics in files]
    page = " ".join((REPOSITORY / "docs" / "performance.md").read_text().split())
    assert len(files) == 45
    assert (
        f"longest start-up was {max(start_up['PyTorch']):.1f} s, with DeepSpeed {max(start_up['DeepSpeed']):.1f} s"
        in page
    )
    assert f"at most {max(waits):.2%} of the steps' time" in page
    assert max(waits) < 0.01 and max(map(max, start_up.values())) < 10


def test_the_table_of_exposed_communication_is_what_the_files_say():
    """And allreduce exposes more than ddp, beyond their intervals."""
    found, left_out = exposed_communication([load_run(path) for path in find_runs(EXPOSED)])
    assert left_out == []
    assert exposed_table(found) in (REPOSITORY / "docs" / "measuring.md").read_text()
    allreduce, ddp = found
    assert (allreduce.run_type, ddp.run_type) == ("allreduce", "ddp")
    assert allreduce.traced.low > ddp.traced.high
    assert allreduce.verdict == ddp.verdict == "agree"
    page = (EXPOSED / "README.md").read_text()
    assert all(read_metrics(path)["git_commit"] in page for path in EXPOSED.rglob("training_metrics.json"))


def test_the_cost_of_evidence_is_what_the_file_says():
    """Of a clean commit, with the same losses. Where nothing was measured yet, the page says so and has no table."""
    text = (REPOSITORY / "docs" / "evidence.md").read_text()
    block = re.search(
        r"<!-- evidence overhead:.*?-->\n(.*?)\n<!-- end of evidence overhead -->", text, re.DOTALL
    ).group(1)
    path = REPOSITORY / "docs" / "results" / "evidence" / OVERHEAD_FILE
    if not path.exists():
        assert block == "Not measured yet."
        return
    content = read_overhead(path)
    assert block == overhead_table(content)
    assert content["git_dirty"] is False and overhead(content).low is not None
    assert loss_difference(content) == 0
    assert all(bool(run["instruments"]) == (run["arm"] == "evidence") for run in content["runs"])


def test_the_tables_of_inference_are_what_the_file_says():
    """Whole, of a clean commit; each scheme's bytes are within 5 % of what its bits say, and each has its intervals.
    Where nothing was measured yet, the page says so and has no table."""
    text = (REPOSITORY / "docs" / "inference.md").read_text()
    block = re.search(r"<!-- inference tables:.*?-->\n(.*?)\n<!-- end of inference tables -->", text, re.DOTALL).group(
        1
    )
    if not (INFERENCE / INFERENCE_FILE).exists():
        assert block.startswith("Not measured yet") and "|" not in block
        return
    content = read_inference(INFERENCE)
    assert block == report(content)
    assert content["status"] == "complete" and content["git_dirty"] is False
    assert content["git_commit"] in (INFERENCE / "README.md").read_text()
    schemes = measured_schemes(content)
    assert {"none", "bf16", "int8_dynamic", "int8_weight_only", "int4_weight_only"} <= schemes.keys()
    for name, scheme in schemes.items():
        assert scheme["bytes_in_memory"] == pytest.approx(scheme["bytes_expected"], rel=0.05), name
        if name != "none":
            assert None not in (*scheme["perplexity_ratio"].values(), *scheme["speed_ratio"].values()), name
    assert len(content["load"]["closed"]) > 2 and len(content["load"]["open"]) > 2 and content["wrapped"] is not None


def test_the_table_of_generation_beside_others_is_what_the_files_say():
    """The cache is five times as fast at 512 tokens, and a batch of eight 1.2 times as fast as transformers': of nano
    with the whole interval, of GPT-2 124M in the median."""
    rows, page = [], (INFERENCE / "README.md").read_text()
    for model in ("nano", "gpt2"):
        content = json.loads((INFERENCE / f"generation_{model}.json").read_text())
        assert content["git_dirty"] is False and content["git_commit"] in page
        cached, batched = content["comparisons"]["recomputing"], content["comparisons"]["transformers"]
        assert cached["low"] > 5 and batched["low" if model == "nano" else "ratio"] > 1.2
        for entry in (cached, batched):
            assert entry["tokens_are_equal"]
            (_, ours), (name, theirs) = entry["tokens_per_s"].items()
            interval = f"{entry['ratio']:.2f}x [{entry['low']:.2f}, {entry['high']:.2f}]"
            rates = f"{median(ours):,.1f} | {median(theirs):,.1f}"
            rows.append(
                f"| {model} | {entry['work']} | {name} | {rates} | {interval} | {len(ours)} | {entry['verdict']} |"
            )
    assert "\n".join(rows) in (REPOSITORY / "docs" / "inference.md").read_text()


def test_the_table_of_the_fault_drill_is_what_its_file_says():
    """All 200 faults, none left out, none that lost anything; the page names every commit of them."""
    drill = read_drill(FAULT_DRILL / DRILL_FILE)
    assert drill["status"] == "complete"
    assert [row["number"] for row in drill["faults"]] == list(range(1, 201))
    assert [row["problems"] for row in drill["faults"]] == [[]] * 200
    assert f"```\n{table(summary(drill['faults']))}\n```" in (REPOSITORY / "docs" / "fault_drill.md").read_text()
    by_signal = [row["asked"] for row in summary(drill["faults"]) if row["kind"] in ("sigterm", "sigusr1")]
    counted = [sum(row[name] for row in by_signal) for name in ("in_order", "completed", "in_start_up")]
    guide = " ".join((REPOSITORY / "docs" / "fault_drill.md").read_text().split())
    assert (
        "Of the {} faults by signal, {} ended the run in order, {} came so late".format(sum(counted), *counted[:2])
        in guide
    )
    assert f"and {counted[2]} came while it started up" in guide
    page = (FAULT_DRILL / "README.md").read_text()
    assert len(drill["code"]) == 1
    for code in drill["code"]:
        assert code["git_dirty"] is False
        for fact in (code["git_commit"], code["cpu_name"], code["torch_version"], code["deepspeed_version"]):
            assert fact in page


def test_the_tables_of_the_network_study_are_what_the_file_says():
    """Whole, of a clean commit, every verdict with its interval; at 100 Mbit/s the gradients' all-reduce is within 25 %
    of its bound."""
    page = (REPOSITORY / "docs" / "network.md").read_text()
    content = read_study(NETWORK)
    assert filled(page, blocks(content)) == page
    assert (content["status"], content["git_dirty"], content["not_measured"]) == ("complete", False, {})
    assert all(commit in (NETWORK / "README.md").read_text() for commit in content["git_commits"])
    assert content["results"] == json.loads(json.dumps(results_of_study(content)))
    assert all(row["low"] is not None for row in content["results"]["comparisons"])
    slow = [row["over_bound"] for row in content["results"]["all_reduces"] if row["link"] == "100mbit"]
    assert len(slow) == 2 and all(0.95 < each < 1.25 for each in slow)


def test_what_a_longer_warm_up_would_have_made_of_the_peers_is_what_the_steps_say():
    content = read_peers(PERFORMANCE / "peers.json")

    def ratio_after(warmup: int) -> float:
        rates = {}
        for peer in ("ours", "transformers"):
            runs = [run["step_times_s"] for run in content["runs"] if (run["peer"], run["precision"]) == (peer, "fp32")]
            rates[peer] = median(len(steps[warmup:]) / sum(steps[warmup:]) for steps in runs)
        return rates["ours"] / rates["transformers"]

    said = f"over the last three steps of each run its {ratio_after(1):.2f}x is {ratio_after(2):.2f}x"
    assert said in " ".join((REPOSITORY / "docs" / "performance.md").read_text().split())


@pytest.fixture(scope="module")
def study() -> dict:
    """Of the network study: comparisons by question and arms, summaries by arm, steps of the runs of each arm."""
    content = read_study(NETWORK)
    found = content["results"]
    return {
        "content": content,
        "page": " ".join((REPOSITORY / "docs" / "network.md").read_text().split()),
        "told": {(row["question"], row["faster"], row["slower"]): row for row in found["comparisons"]},
        "arms": {row["arm"]: row for row in found["summaries"]},
    }


def test_what_came_out_of_the_network_study_for_strategies(study):
    page, told, arms = study["page"], study["told"], study["arms"]
    assert "Alone it takes at most a few per cent more than its bound, on two hosts and on four." in page
    over = [row for row in study["content"]["results"]["all_reduces"] if row["over_bound"] is not None]
    assert {row["hosts"] for row in over} == {2, 4} and all(row["over_bound"] < 1.06 for row in over)
    assert "FSDP and every stage of ZeRO are slower than `ddp`, which moves fewer" in page
    assert "ZeRO takes longer than its bytes explain" in page
    usual = arms["ddp_2hosts_100mbit"]
    for strategy in ("fsdp", "zero1", "zero2", "zero3"):
        name = f"{strategy}_2hosts_100mbit"
        assert told["strategy", name, "ddp_2hosts_100mbit"]["verdict"] == SLOWER and arms[name]["traffic"] > 1.4
        if strategy != "fsdp":
            assert arms[name]["communication_s"] / usual["communication_s"] > arms[name]["traffic"] + 0.05
    assert "The pipeline, which keeps its gradients but one at home, is the only strategy that is faster" in page
    for link in ("unlimited", "1gbit", "100mbit", "switch0ms", "switch5ms"):
        is_faster = told["strategy", f"pipeline_2hosts_{link}", f"ddp_2hosts_{link}"]["verdict"] == FASTER
        assert is_faster == (link == "100mbit")
    assert "gradients in bf16, or four micro batches per step. Both change the training." in page
    for lever in ("gradients_in_bf16", "4_micro_batches_per_step"):
        assert told["lever", f"ddp_{lever}_2hosts_100mbit", "ddp_2hosts_100mbit"]["low"] > 1.5
    assert all(arm["changes_work"] == ("bf16" in arm["name"] or "4_micro" in arm["name"]) for arm in _levers(study))
    assert "whole runs of an arm differ by up to two thirds" in page
    spread = [max(times) / min(times) for name in arms if (times := steps_of(study["content"], name))]
    assert 1.6 < max(spread) < 1.7


def _levers(study: dict) -> list[dict]:
    return [arm for arm in study["content"]["arms"] if arm["lever"] is not None]


def test_what_came_out_of_the_network_study_for_buckets(study):
    page, told, arms = study["page"], study["told"], study["arms"]
    assert "Over 100 Mbit/s `ddp` gains two or three per cent by small ones" in page
    small, one = "ddp_buckets_of_1_MiB_2hosts_{}", "ddp_buckets_of_200_MiB_2hosts_{}"
    slow = [told["lever", small.format("100mbit"), "ddp_2hosts_100mbit"]]
    slow += [told["overlap", small.format("100mbit"), one.format("100mbit")]]
    assert all(row["verdict"] == FASTER and 1.015 < row["ratio"] < 1.035 for row in slow)
    assert "at 1 Gbit/s they scatter too much to tell" in page
    fast = told["overlap", small.format("1gbit"), one.format("1gbit")]
    assert fast["verdict"] == NO_DIFFERENCE and fast["high"] - fast["low"] > 0.3
    assert "there is no detectable difference over either link, and a gain of that size is excluded" in page
    for link in ("100mbit", "1gbit"):
        row = told["lever", f"zero1_buckets_of_5e8_elements_2hosts_{link}", f"zero1_2hosts_{link}"]
        assert row["verdict"] == NO_DIFFERENCE and row["low"] > 1 / 1.195
        buckets = f"zero1_buckets_of_2e5_elements_2hosts_{link}"
        assert told["lever", buckets, f"zero1_2hosts_{link}"]["verdict"] == NO_DIFFERENCE
        assert arms[buckets]["num_collectives"] > arms[f"zero1_2hosts_{link}"]["num_collectives"]
    assert "All of `nano`'s gradients fit into its bucket, so nothing overlaps." in page
    assert "small buckets, whose communication is partly covered, are not found faster than one" in page
    for link in ("100mbit", "1gbit"):
        assert arms[f"ddp_2hosts_{link}"]["num_collectives"] == 1 and arms[f"ddp_2hosts_{link}"]["covered_s"] < 1e-3
        assert arms[small.format(link)]["covered_s"] > 0.01
    assert "at 100 Mbit/s neither `ddp` nor `allreduce` is found faster" in page
    assert told["ddp", "ddp_2hosts_100mbit", "allreduce_2hosts_100mbit"]["verdict"] == NO_DIFFERENCE
    assert told["ddp", "ddp_2hosts_1gbit", "allreduce_2hosts_1gbit"]["verdict"] == FASTER


def test_what_came_out_of_the_network_study_for_a_delay(study):
    page, arms = study["page"], study["arms"]
    delayed = {
        name: study["told"]["link", f"{name}_2hosts_switch0ms", f"{name}_2hosts_switch5ms"]
        for name in STRATEGIES_STUDIED
    }

    def lost_s(name: str) -> float:
        return arms[f"{name}_2hosts_switch5ms"]["median_step_s"] - arms[f"{name}_2hosts_switch0ms"]["median_step_s"]

    assert "`allreduce`, which waits for one per tensor, takes several times as long" in page
    assert delayed["allreduce"]["low"] > 5
    assert "ZeRO 3 has about as many collectives and loses a third as much" in page
    counts = [arms[f"{name}_2hosts_switch5ms"]["num_collectives"] for name in ("zero3", "allreduce")]
    assert counts[0] == pytest.approx(counts[1], rel=0.1)
    assert lost_s("zero3") / lost_s("allreduce") == pytest.approx(1 / 3, rel=0.1)
    assert "`ddp`, with one, and the pipeline lose least, and these runs do not part the two" in page
    assert arms["ddp_2hosts_switch5ms"]["num_collectives"] == 1
    cheap = [delayed.pop(name) for name in ("ddp", "pipeline")]
    assert max(row["ratio"] for row in cheap) < min(row["ratio"] for row in delayed.values())
    assert cheap[0]["high"] > cheap[1]["low"]


@pytest.mark.parametrize("file", sorted((REPOSITORY / "docs" / "results").rglob("*.json")), ids=lambda file: file.name)
def test_no_result_names_a_folder_of_the_machine_that_made_it(file):
    assert not re.findall(r"(?<![\w.])/(?:tmp|home|root|work|Users)/[^\s\"]*", file.read_text())


def test_the_guide_tells_of_every_run_type():
    headings = re.findall(r"^### (.+)$", STRATEGIES_PAGE.read_text(), re.MULTILINE)
    assert {name for heading in headings for name in heading.split(", ")} == STRATEGIES.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            headings = re.findall(r"^#+ (.+)$", (page.parent / target if target else page).read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{target}#{anchor}"


def test_the_file_map_names_every_room():
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    package = REPOSITORY / "src" / "testbed"
    rooms = [path.name for path in package.iterdir() if path.suffix == ".py" and path.stem != "__init__"]
    rooms += [f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").is_file()]
    assert [room for room in rooms if f"`{room}`" not in readme] == []


def test_every_picture_of_the_readme_is_tracked_beside_its_data():
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", README.read_text()):
        assert (REPOSITORY / picture).stat().st_size > 10_000
        assert picture.startswith("docs/images/")


def test_the_commands_for_a_cpu_can_be_copied_as_they_are():
    """Flags without which a CPU would train 124M parameters stand in the block, and how long each command takes."""
    block = re.search(r"On a CPU, to copy as it is.*?```bash\n(.*?)```", README.read_text(), re.DOTALL)[1]
    work, *commands = block.splitlines()
    assert work.startswith("work=(--model nano --seq_length 128 ")
    flags = shlex.split(work.removeprefix("work=(").removesuffix(")"))
    assert len(commands) == 6 and all(re.search(r"  # \d+ (s|minutes): ", line) for line in commands)
    trainings = [line.partition("  #")[0] for line in commands if "src/gpt2.py" in line]
    assert [line.count('"${work[@]}"') for line in trainings] == [1, 1, 1]
    for line in trainings:
        words = shlex.split(line.replace('"${work[@]}"', shlex.join(flags)))
        assert parse_command_line(words[words.index("src/gpt2.py") + 1 :]).values["model"] == "nano"


@pytest.mark.parametrize("page", ["faults.md", "first_day.md"])
def test_the_tests_that_a_table_names_are_there(page):
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)", (REPOSITORY / "docs" / page).read_text(encoding="utf-8"))
    assert len(named) > 30
    for file, test in named:
        text = next((REPOSITORY / "tests").rglob(file)).read_text(encoding="utf-8")
        assert re.search(rf"^def {test}\(", text, re.M), (file, test)
