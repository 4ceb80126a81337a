"""scripts/network_study.py: what it plans, what follows from runs whose answer is known, and a short study for real."""

from __future__ import annotations

import copy
import inspect
import json
import subprocess
import sys

import pytest
from support.programs import REPOSITORY, run_here

from testbed.analysis.blocks import block_of, filled
from testbed.analysis.statistics import FASTER, NO_DIFFERENCE, NOT_ENOUGH, SLOWER
from testbed.experiments.network_lab.bounds import bound_of, share_ready_last
from testbed.experiments.network_lab.charts import plot_study
from testbed.experiments.network_lab.links import why_impossible
from testbed.experiments.network_lab.results import BEST_OF, LinkComparison, results
from testbed.experiments.network_lab.study import (
    LEVERS,
    LINKS,
    PARTS,
    STRATEGIES_STUDIED,
    Asked,
    StudyArm,
    arms_of,
    cells_of,
    links_as_records,
)
from testbed.experiments.network_lab.study_file import STUDY_FILE
from testbed.experiments.network_lab.tables import _ratio, blocks, tables
from testbed.model.gpt2 import GPT2
from testbed.model.shape import ModelShape
from testbed.profiling.attribution import measured_bus_bandwidth

PAGE = REPOSITORY / "docs" / "results" / "network" / "README.md"


def asked(**changes) -> Asked:
    whole = {
        "parts": PARTS, "strategies": tuple(STRATEGIES_STUDIED), "hosts": (2, 4), "links": tuple(LINKS), "repeats": 5,
        "profile_runs": 1, "steps": 10, "warmup_steps": 3, "folder": "out", "data": "out/data",
        "program": "src/gpt2.py", "network": "scripts/lab/network.py",
    }  # fmt: skip
    return Asked(**{**whole, **changes})


def test_each_round_holds_every_arm_once_and_profiled_runs_are_their_own():
    cells = cells_of(asked())
    arms = [arm.name for arm in arms_of(asked())]
    assert len(arms) == len(set(arms)) == 7 * 5 + 3 * 2 + 6 + 4
    rounds = [cells[: len(arms)], cells[len(arms) : 2 * len(arms)], cells[2 * len(arms) : 3 * len(arms)]]
    assert all(sorted(cell.name for cell in round_) == sorted(arms) for round_ in rounds)
    assert [round_[0].profiled for round_ in rounds] == [False, True, False], "the profiled ones end the first round"
    assert [cell.name for cell in rounds[0]] != [cell.name for cell in rounds[2]], "no arm always runs first"
    assert len(cells) == 6 * len(arms) and len({cell.folder for cell in cells}) == len(cells)
    assert all(("--profile" in cell.command) == cell.profiled for cell in cells)


def test_a_command_is_what_a_person_would_type():
    of_name = {cell.name: cell.command for cell in cells_of(asked(repeats=1, profile_runs=0))}
    command = of_name["zero2_2hosts_100mbit"]
    assert command[2:11] == [
        *("python", "scripts/lab/network.py", "run", "--hosts", "2", "--rate", "100mbit", "--seconds", "600")
    ]
    place = command.index("--")
    assert command[place + 1 : place + 5] == ["python", "src/gpt2.py", "--run_type", "optimized"]
    assert command[command.index("--zero_stage") + 1] == "2"
    assert command[command.index("--checkpoint_path") + 1] == "out/zero2_2hosts_100mbit/run_1"
    delayed = of_name["ddp_2hosts_switch5ms"]
    assert "--rate" not in delayed and delayed[delayed.index("--delay_ms") + 1] == "5"
    assert "--rate" not in of_name["ddp_2hosts_unlimited"] and "--delay_ms" not in of_name["ddp_2hosts_unlimited"]
    assert {name for name in of_name if "_4hosts_" in name} == {
        f"{strategy}_4hosts_{link}" for strategy in ("ddp", "fsdp", "zero1") for link in ("unlimited", "100mbit")
    }


def test_levers_alone_bring_what_they_are_compared_to():
    arms = arms_of(asked(parts=("levers",)))
    buckets = [name for name in LEVERS if "buckets" in name]
    assert [arm.lever for arm in arms] == [None, None, *LEVERS, None, None, *buckets]
    assert [arm.link for arm in arms] == ["100mbit"] * 8 + ["1gbit"] * 6
    assert [arm.lever for arm in arms if arm.changes_work] == ["gradients in bf16", "4 micro batches per step"]
    by_name = {arm.name: arm for arm in arms}
    published = by_name["zero1_buckets_of_5e8_elements_2hosts_100mbit"]
    assert published.flags[-4:] == ("--reduce_bucket_size", "500000000", "--allgather_bucket_size", "500000000")
    assert all(f"{arm.strategy}_{arm.hosts}hosts_{arm.link}" in by_name for arm in arms), (
        "each has its strategy as it is"
    )
    of_ddp = arms_of(asked(parts=("levers",), strategies=("allreduce", "ddp"), links=("1gbit",)))
    assert [arm.lever for arm in of_ddp] == [None, "buckets of 200 MiB", "buckets of 1 MiB"], "only what was asked for"
    assert arms_of(asked(parts=("levers",), hosts=(4,))) == []
    assert len(arms_of(asked(is_whole=True, parts=("strategies",)))) == 7 * 2 * 5


def test_the_plan_is_printed_and_what_is_typed_wrong_is_one_sentence(tmp_path):
    said = run_here("scripts/network_study.py", "--dry_run", "--out_dir", tmp_path / "none")
    assert said.returncode == 0 and said.stdout.count("gpt2.py") == 6 * 51 and "51 arms" in said.stdout
    assert not (tmp_path / "none").exists()
    for words, telling in (
        (["--links", "10mbit"], "'10mbit' is not one of unlimited"),
        (["--strategies", "ddp,dp"], "'dp'"),
        (["--hosts", "1"], "from 2 to"),
        (["--steps", "3"], "--steps 3"),
        (["--repeats", "0"], "--repeats: '0' is not a positive whole number"),
        (["--tables", tmp_path], "does not exist"),
    ):
        said = run_here("scripts/network_study.py", *words)
        assert said.returncode == 2 and telling in said.stderr and "Traceback" not in said.stderr, said.stderr


# what the made-up study says: seconds of a step by arm; 1,000 tokens each, 2 MB of gradients
STEPS_S = {
    "ddp_2hosts_unlimited": 0.10, "allreduce_2hosts_unlimited": 0.12, "ddp_2hosts_100mbit": 0.30,
    "allreduce_2hosts_100mbit": 0.36, "ddp_2hosts_switch0ms": 0.11, "ddp_2hosts_switch5ms": 0.22,
    "ddp_buckets_of_200_MiB_2hosts_100mbit": 0.30, "ddp_buckets_of_1_MiB_2hosts_100mbit": 0.25,
}  # fmt: skip


def made_up(repeats: int = 5) -> dict:
    levers = ("buckets of 200 MiB", "buckets of 1 MiB")
    arms = [
        StudyArm("strategies", *name.split("_")[:1], 2, name.split("_")[-1])
        for name in STEPS_S
        if "buckets" not in name
    ]
    arms += [StudyArm("levers", "ddp", 2, "100mbit", lever) for lever in levers]
    assert {arm.name for arm in arms} == STEPS_S.keys()
    runs = []
    for arm in arms:
        for repeat in range(1, repeats + 1):
            step_s = STEPS_S[arm.name] * (1 + 0.002 * repeat)
            row = {"arm": arm.name, "kind": "timed", "repeat": repeat, "started_utc": None, "seconds": 9.0}
            row |= {"run_id": f"{arm.name}-{repeat}", "git_commit": "0" * 40, "tokens_per_step": 1000}
            row |= {"step_times_s": [9.0, step_s, step_s, step_s], "last_loss": 8.5, "traced": None}
            runs.append(row)
        traced = {
            "exposed_s": [0.05, 0.04, 0.06],
            "communication_s": [0.1] * 3,
            "idle_s": [0.0] * 3,
            "num_collectives": [2.0] * 3,
        }
        traced |= {"bus_bytes_per_step": 4e6, "bus_bandwidth_bytes_per_s": 1e7, "source": "a test"}
        runs.append({**row, "kind": "profiled", "repeat": 1, "step_times_s": [50.0] * 4, "traced": traced})
    work = {"num_parameters": 500_000, "model_name": "nano", "model_size": "n_layer=4", "vocab_size": 300}
    work |= {"seq_len": 128, "precision": "fp32", "gradient_bytes": 2_000_000, "steps": 4, "warmup_steps": 1}
    return {
        "schema_version": "1.0", "status": "complete", "timestamp_utc": "2026-01-01T00:00:00Z",
        "command_line": "a test", "repeats": repeats, "arms": [arm.as_record() for arm in arms],
        "links": links_as_records(["unlimited", "100mbit", "switch0ms", "switch5ms"]), "git_commits": ["0" * 40],
        "git_dirty": False, "env": {"torch_version": "2.13.0"},
        "hardware": {"cpu_name": "a CPU", "cpu_cores_visible": 2, "backend": "gloo"}, "work": work, "runs": runs,
        "not_measured": {},
    }  # fmt: skip


def compared(content: dict) -> dict:
    return {(row["question"], row["faster"], row["slower"]): row for row in results(content)["comparisons"]}


def test_what_follows_from_the_runs_is_what_was_put_in():
    found = results(made_up())
    summary = next(row for row in found["summaries"] if row["arm"] == "ddp_2hosts_100mbit")
    assert summary["median_step_s"] == pytest.approx(0.3 * 1.006), "warm-up and profiled runs are no times"
    assert summary["median_tokens_per_s"] == pytest.approx(1000 / 0.3 / 1.006)
    assert (summary["num_runs"], summary["num_profiled"], summary["exposed_s"]) == (5, 1, 0.05)
    assert summary["bound_s"] == pytest.approx(2e6 / 12.5e6), "2 (N - 1) / N is 1 for two hosts"
    assert summary["traffic"] == pytest.approx(2.0)
    by_link = {row["link"]: row for row in found["all_reduces"]}
    assert by_link["100mbit"]["seconds"] == pytest.approx(0.2) and by_link["100mbit"]["num_runs"] == 2
    assert by_link["100mbit"]["over_bound"] == pytest.approx(1.25) and by_link["unlimited"]["over_bound"] is None
    assert found["largest_loss_difference"] == 0


def test_arms_are_compared_to_what_differs_in_one_thing():
    rows = compared(made_up())
    ratios = {key: round(row["ratio"], 3) for key, row in rows.items()}
    assert ratios == {
        ("link", "ddp_2hosts_unlimited", "ddp_2hosts_100mbit"): 3.0,
        ("link", "allreduce_2hosts_unlimited", "allreduce_2hosts_100mbit"): 3.0,
        ("link", "ddp_2hosts_switch0ms", "ddp_2hosts_switch5ms"): 2.0,  # never with the bridge
        ("ddp", "ddp_2hosts_unlimited", "allreduce_2hosts_unlimited"): 1.2,
        ("ddp", "ddp_2hosts_100mbit", "allreduce_2hosts_100mbit"): 1.2,
        ("coalescing", "ddp_buckets_of_200_MiB_2hosts_100mbit", "allreduce_2hosts_100mbit"): 1.2,
        ("both", "ddp_buckets_of_1_MiB_2hosts_100mbit", "allreduce_2hosts_100mbit"): 1.44,
        (
            "overlap",
            "ddp_buckets_of_1_MiB_2hosts_100mbit",
            "ddp_buckets_of_200_MiB_2hosts_100mbit",
        ): 1.2,
        ("lever", "ddp_buckets_of_200_MiB_2hosts_100mbit", "ddp_2hosts_100mbit"): 1.0,
        ("lever", "ddp_buckets_of_1_MiB_2hosts_100mbit", "ddp_2hosts_100mbit"): 1.2,
    }
    assert all(row["low"] < row["ratio"] < row["high"] for row in rows.values())
    assert sorted(row["verdict"] for row in rows.values()) == [FASTER] * 9 + [NO_DIFFERENCE]


def rows_of(table: str) -> list[dict[str, str]]:
    """The lines of a Markdown table by the names of its columns."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def with_arms(*added: tuple[str, str, int, str, float]) -> dict:
    """The made-up study with more arms, each (part, strategy, hosts, link, seconds of a step)."""
    content = made_up()
    of_ddp = [run for run in content["runs"] if run["arm"] == "ddp_2hosts_100mbit"]
    for part, strategy, hosts, link, step_s in added:
        arm = StudyArm(part, strategy, hosts, link)
        content["arms"].append(arm.as_record())
        for run in copy.deepcopy(of_ddp):
            times = [9.0, *[step_s * (1 + 0.002 * run["repeat"])] * 3]
            content["runs"].append({**run, "arm": arm.name, "step_times_s": times})
    return content


def test_what_is_exposed_covered_and_idle_is_told_of_every_strategy():
    content = with_arms(("strategies", "pipeline", 2, "100mbit", 0.2))
    for run in content["runs"]:
        if run["traced"] and run["arm"] in ("pipeline_2hosts_100mbit", "allreduce_2hosts_100mbit"):
            run["traced"].update(exposed_s=[0.03] * 3, communication_s=[0.05, 0.02, 0.07], idle_s=[0.011] * 3)
    told = {(row["strategy"], row["link"]): row for row in rows_of(tables(content)["strategies"].split("Against")[0])}
    columns = ("profiled runs (their step over the timed)", "exposed communication (ms)", "covered (ms)", "idle (ms)")
    assert [told["allreduce", "100 Mbit/s"][name] for name in columns] == ["1 (138.06)", "30.0", "20.0", "11.0"]
    assert [told["pipeline", "100 Mbit/s"][name] for name in columns] == ["1 (1.00)", "30.0", "", "11.0"], (
        "transfers are idle"
    )
    assert [told["ddp", "100 Mbit/s"][name] for name in columns] == ["1 (165.67)", "50.0", "50.0", "0.0"]
    assert told["ddp", "100 Mbit/s"]["collectives"] == "2"
    row = told["ddp", "100 Mbit/s"]
    assert row["tokens/s over the reference link, over these"].startswith("3.00x [")
    assert row["reference"] == f"the reference is {FASTER} (unlimited)"


def test_bounds_and_the_ceiling_of_overlap_follow_from_the_shapes():
    """A pipeline: 384 rows of the embedding (300 padded) and 1,000 tokens, 128 numbers each, at 12.5 MB/s."""
    content = with_arms(("strategies", "pipeline", 2, "100mbit", 0.2), ("strategies", "fsdp", 4, "100mbit", 0.5))
    of_name = {arm["name"]: bound_of(content, arm) for arm in content["arms"]}
    assert of_name["pipeline_2hosts_100mbit"] == pytest.approx((384 + 1000) * 128 * 4 / 12.5e6)
    assert of_name["fsdp_4hosts_100mbit"] == pytest.approx(1.5 * 2e6 / 12.5e6)
    assert of_name["ddp_2hosts_unlimited"] is None
    in_bf16 = {**content["arms"][0], "link": "100mbit", "lever": "gradients in bf16"}
    assert bound_of(content, in_bf16) == pytest.approx(1e6 / 12.5e6), "half the bytes"
    model = GPT2(ModelShape(4, 4, 128, vocab_size=300, max_position_embeddings=128))
    last = sum(each.numel() for each in (model.wte.weight[:300], model.wpe.weight))
    whole = sum(each.numel() for each in model.parameters()) - model.wte.weight[300:].numel()
    assert share_ready_last(content["work"]) == pytest.approx(last / whole)
    assert f"at most {1 - last / whole:.0%} can overlap" in tables(content)["overlap"]


def test_strategies_stand_against_ddp_and_what_was_left_out_is_said():
    content = with_arms(("strategies", "fsdp", 2, "100mbit", 0.6), ("strategies", "ddp", 4, "100mbit", 0.6))
    (row,) = rows_of(tables(content)["strategies"].split("Against ddp over the same link:")[1])
    assert (row["hosts"], row["link"], row["strategy"]) == ("2", "100 Mbit/s", "fsdp")
    assert row["tokens/s over those of ddp"].startswith("0.50x [") and row["verdict: the strategy is"] == SLOWER
    said = tables(content)["what was measured"]
    # 3 strategies over 4 links: on 2 hosts 7 of 12 cells are there, on 4 hosts one
    assert "are 16 cells" in said and "on 4 hosts there are only ddp over 100 Mbit/s." in said
    assert f"hold {len(results(content)['comparisons'])} verdicts" in said and "None is corrected" in said


def test_levers_show_both_losses_and_warn_of_batches_of_other_sizes():
    content = made_up()
    assert "not comparable" not in tables(content)["levers"]
    for run in content["runs"]:
        if run["arm"].startswith("ddp_buckets_of_1_MiB"):
            run.update(tokens_per_step=4000, last_loss=8.25)
    row = next(row for row in rows_of(tables(content)["levers"]) if row["with"] == "buckets of 1 MiB")
    assert (row["strategy"], row["last loss"], row["last loss without"]) == ("ddp", "8.25000", "8.50000")
    assert "not comparable where a step takes another number of tokens (buckets of 1 MiB)" in tables(content)["levers"]


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (0.98, 1.0026, "1.02x [0.98, 1.00]"),  # nothing was found, so nothing looks odd
        (1.0026, 1.0359, "1.019x [1.003, 1.036]"),
        (1.0003, 1.0359, "1.0191x [1.0003, 1.0359]"),
        (0.9, 0.9996, "1.0191x [0.9000, 0.9996]"),
        (1.00001, 1.1, "1.0191x [1.0000, 1.1000]"),
        (1.05, 1.1, "1.02x [1.05, 1.10]"),
        (None, None, "1.02x"),
    ],
)
def test_an_interval_that_leaves_1_out_is_seen_to(low, high, shown):
    each = LinkComparison("lever", "a", "b", 1.01914, low, high, FASTER, 5, 5)
    assert _ratio(each) == shown


def test_the_best_of_as_many_all_reduces_as_the_table_says():
    assert inspect.signature(measured_bus_bandwidth).parameters["repeats"].default == BEST_OF
    assert f"best of {BEST_OF} (ms)" in tables(made_up())["all-reduce"]


def test_few_repeats_make_no_claim():
    assert {row["verdict"] for row in compared(made_up(repeats=2)).values()} == {NOT_ENOUGH}
    assert "corrected" not in tables(made_up(repeats=2))["what was measured"]


def test_the_file_is_checked_and_names_what_is_wrong(tmp_path):
    STUDY_FILE.write(tmp_path / STUDY_FILE.name, made_up())
    assert STUDY_FILE.read(tmp_path)["results"]["summaries"]
    good = STUDY_FILE.read(tmp_path)
    for change, telling in (
        (lambda content: content.pop("work"), "work"),
        (lambda content: content["runs"][0].update(arm="unknown_arm"), "unknown_arm"),
        (lambda content: content["runs"][0].update(step_times_s=[1.0]), "no step after warm-up"),
        (lambda content: content["runs"][0].update(step_times_s=[0.0, 1.0]), "step_times_s"),
    ):
        content = copy.deepcopy(good)
        change(content)
        with pytest.raises(ValueError, match=telling):
            STUDY_FILE.check(content)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json"):
        STUDY_FILE.read(tmp_path / "other.json")


def test_the_page_takes_the_tables_and_a_study_draws_its_pictures(tmp_path):
    STUDY_FILE.write(tmp_path / STUDY_FILE.name, made_up())
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    said = run_here("scripts/network_study.py", "--tables", tmp_path, "--into", page)
    assert said.returncode == 0, said.stderr
    for name, text in blocks(STUDY_FILE.read(tmp_path)).items():
        assert block_of(page.read_text(), name) == text
    assert filled(page.read_text(), blocks(made_up())) == page.read_text(), "filling in twice changes nothing"
    assert all((tmp_path / f"network_{name}.png").stat().st_size > 10_000 for name in ("strategies", "delay", "levers"))
    assert "| 2 | 100 Mbit/s | ddp | 5 | 302 [" in page.read_text()
    with pytest.raises(ValueError, match="0 places for 'levers'"):
        filled("# nothing here", {"levers": "x"})
    assert len(plot_study({**made_up(), "arms": made_up()["arms"][:1]}, tmp_path)) == 1, "without levers one picture"


@pytest.mark.launches
@pytest.mark.alone  # labs are seen by the whole machine
@pytest.mark.skipif(why_impossible() is not None, reason=f"no lab here: {why_impossible()}")
def test_a_short_study_measures_for_real_and_goes_on_where_it_was(tmp_path):
    words = ["--strategies", "ddp", "--hosts", "2", "--links", "100mbit", "--parts", "strategies", "--steps", "5"]
    words += ["--out_dir", tmp_path, "--repeats", "1"]
    command = [sys.executable, REPOSITORY / "scripts" / "network_study.py", *words]
    said = subprocess.run(command, capture_output=True, text=True, timeout=170, cwd=REPOSITORY)
    assert said.returncode == 0, said.stdout + said.stderr
    content = STUDY_FILE.read(tmp_path)
    assert (content["status"], content["not_measured"]) == ("complete", {})
    assert [(run["arm"], run["kind"]) for run in content["runs"]] == [
        ("ddp_2hosts_100mbit", "timed"), ("ddp_2hosts_100mbit", "profiled"),
    ]  # fmt: skip
    assert all(len(run["step_times_s"]) == 5 for run in content["runs"])
    summary = content["results"]["summaries"][0]
    assert summary["median_step_s"] > summary["bound_s"], "a step holds the all-reduce of its gradients"
    assert summary["exposed_s"] > 0 and summary["traffic"] == pytest.approx(1, abs=0.05)
    before = [run["run_id"] for run in content["runs"]]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert said.returncode == 0 and "2 of them finished" in said.stdout
    assert [run["run_id"] for run in STUDY_FILE.read(tmp_path)["runs"]] == before
    assert json.loads((tmp_path / "sweep.json").read_text())["protocol"] == "network"
