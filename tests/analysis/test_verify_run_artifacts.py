"""The files of runs and sweeps: a whole sweep passes at any depth, and each fault is found and named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.metrics_examples import example_metrics, save, v1_metrics, v20_metrics
from support.programs import REPOSITORY, run_here
from support.sweep_cases import write_sweep_json

from testbed.analysis.runs.verify import as_tsv, verify
from testbed.run_folder import COMPLETE, FAILED, LAUNCHER
from testbed.run_folder.marks import mark_complete

PROGRAM = "scripts/more/verify_run_artifacts.py"


def write_run(folder: Path, ranks: int = 2, **overrides) -> Path:
    """A run's folder as a finished run of a sweep leaves it."""
    metrics = example_metrics(world_size=ranks, **{"run_id": str(folder), **overrides})
    save(folder, metrics)
    mark_complete(folder, ranks, metrics["summary"]["mean_tokens_per_sec_global"], 12.5)
    (folder / LAUNCHER).write_text(json.dumps({"world_size": ranks}))
    (folder / "train.log").write_text("step 1\n")
    return folder


def write_sweep(root: Path) -> list[dict]:
    """Two cells of two repeats, one that does not apply."""
    cells = []
    for variant, ranks in (("baseline", 1), ("ddp", 2)):
        for repeat in (1, 2):
            cell = {"name": f"{variant}_{ranks}", "variant": variant, "run_type": variant, "ranks": ranks, "seed": 1337}
            cell |= {"folder": f"{variant}_{ranks}/run_{repeat}", "batch_size": 8}
            work = ["--run_type", variant, "--seed", "1337"]
            command = ["env", "python", "src/gpt2.py", *work, "--checkpoint_path", cell["folder"], "--overwrite"]
            cells.append(cell | {"command": command})
            line = " ".join(["python", "../src/gpt2.py", *work, "--checkpoint_path", "elsewhere"])
            write_run(root / cell["folder"], ranks, training_config={"run_type": variant}, command_line=line)
    cells.append(
        cells[0]
        | {"name": "baseline_2", "ranks": 2, "folder": "baseline_2/run_1"}
        | {"status": "not applicable", "reason": "baseline is one process"}
    )
    write_sweep_json(root, cells)
    return cells


def verdict_of(root: Path, folder: str = "ddp_2/run_2", **options):
    found = {str(each.run_dir.relative_to(root)): each for each in verify(root, **options)}
    others = {name: each.status for name, each in found.items() if each.is_failure and name != folder}
    assert not others, others
    return found[folder]


def test_a_whole_sweep_passes_at_any_depth_and_lists_what_does_not_apply(tmp_path):
    write_sweep(tmp_path / "some" / "where")
    verdicts = verify(tmp_path)
    assert [each.status for each in verdicts] == ["ok", "ok", "not_applicable", "ok", "ok"]
    assert not any(each.is_failure for each in verdicts)
    lines = as_tsv(verdicts).splitlines()
    assert lines[0] == "run_dir\tstatus\tworld_size\texpected\treason"
    assert lines[-1] == f"{tmp_path}/some/where/ddp_2/run_2\tok\t2\t2\t-"
    assert lines[3].endswith("-\t2\tthe sweep says not applicable: baseline is one process")


def change(folder: Path, edit) -> None:
    path = folder / "training_metrics.json"
    metrics = json.loads(path.read_text())
    edit(metrics)
    path.write_text(json.dumps(metrics))


def claim_more(metrics):
    metrics["summary"]["mean_tokens_per_sec_global"] *= 1.001


def hide_the_slowest_rank(metrics):
    metrics["steps"][8]["step_time_s"] = metrics["steps"][8]["per_rank_step_time_s"][1]


DIED = {"status": "failed", "failure": {"reason": "loss is nan", "step": 7}, "completion": None}
CONTENT_FAULTS = [
    (lambda m: m["steps"].pop(9), "missing_steps", "without a gap"),
    (lambda m: m["steps"][2].update(is_warmup=False), "missing_warmup", "warm-up"),
    (lambda m: m.update(steps=m["steps"][:-3]), "wrong_number_of_steps", "17 steps, the settings say 20"),
    (claim_more, "inconsistent_throughput", "summary.mean_tokens_per_sec_global"),
    (hide_the_slowest_rank, "inconsistent_step_time", "slowest rank"),
    (lambda m: m.update(status="running"), "incomplete", "running"),
    (lambda m: m.update(DIED), "failed", "loss is nan"),
    (lambda m: m["steps"][4].update(loss=float("inf")), "invalid_schema", "steps[4].loss is inf"),
    (lambda m: m["summary"].update(mean_tokens_per_sec_global=None), "inconsistent_throughput", "None"),
    (lambda m: m["epochs"][0].update(optimizer_steps=19), "wrong_number_of_steps", "add up"),
    (lambda m: m["timing"].update(num_measured_steps=3), "inconsistent_throughput", "15 measured rows"),
    (lambda m: m["training_config"].update(run_type="fsdp"), "not_as_planned", "run_type is fsdp, the plan has ddp"),
    (lambda m: m.update(instrumented=True), "instrumented", "profiler"),
]


@pytest.mark.parametrize(("edit", "status", "words"), CONTENT_FAULTS)
def test_a_fault_in_the_metrics_is_found_and_named(tmp_path, edit, status, words):
    write_sweep(tmp_path)
    change(tmp_path / "ddp_2/run_2", edit)
    verdict = verdict_of(tmp_path)
    assert verdict.is_failure and words in "; ".join(verdict.reasons)
    assert verdict.status == status


FOLDER_FAULTS = {
    "missing_metrics": shutil.rmtree,
    "missing_log": lambda folder: (folder / "train.log").write_text(""),
    "missing_mark": lambda folder: (folder / COMPLETE).unlink(),
    "contradicting_marks": lambda folder: (folder / FAILED).write_text("reason=x"),
    "missing_launcher_metadata": lambda folder: (folder / LAUNCHER).unlink(),
    "invalid_launcher_metadata": lambda folder: (folder / LAUNCHER).write_text("{"),
    "world_size_mismatch": lambda folder: (folder / LAUNCHER).write_text('{"world_size": 4}'),
    "inconsistent_throughput": lambda folder: mark_complete(folder, 2, 1.0, 1.0) and None,
}


@pytest.mark.parametrize("status", FOLDER_FAULTS)
def test_a_fault_in_the_folder_is_found_and_named(tmp_path, status):
    write_sweep(tmp_path)
    FOLDER_FAULTS[status](tmp_path / "ddp_2/run_2")
    verdict = verdict_of(tmp_path)
    assert verdict.status == status and verdict.reasons and verdict.is_failure


def test_another_number_of_ranks_than_planned(tmp_path):
    write_sweep(tmp_path)
    write_run(tmp_path / "ddp_2/run_2", 1, training_config={"run_type": "ddp"})
    verdict = verdict_of(tmp_path)
    assert (verdict.status, verdict.world_size, verdict.expected) == ("world_size_mismatch", 1, 2)


def test_data_parallel_in_one_process_counts_its_devices(tmp_path):
    words = " ".join(write_sweep(tmp_path)[3]["command"])
    hardware = {"num_devices": 2}
    write_run(tmp_path / "ddp_2/run_2", 1, training_config={"run_type": "ddp"}, hardware=hardware, command_line=words)
    assert not verdict_of(tmp_path).is_failure


@pytest.mark.parametrize(
    ("status", "expected"), [("failed", "failed"), ("pending", "missing_run"), ("running", "missing_run")]
)
def test_a_cell_that_is_not_complete_is_a_failure(tmp_path, status, expected):
    cells = write_sweep(tmp_path)
    cells[3] |= {"status": status, "reason": "exit code 1"}
    write_sweep_json(tmp_path, cells)
    verdict = verdict_of(tmp_path)
    assert verdict.status == expected and "exit code 1" in verdict.reasons[0] and verdict.is_failure


def test_in_weak_scaling_the_planned_batch_is_that_of_a_rank(tmp_path):
    cells = [cell | {"batch_size": 4} for cell in write_sweep(tmp_path) if cell["variant"] == "ddp"]
    write_sweep_json(tmp_path, cells, protocol="weak")
    assert not verdict_of(tmp_path).is_failure  # 2 ranks of 4 are the global batch of 8
    write_sweep_json(tmp_path, cells)
    assert {each.status for each in verify(tmp_path) if each.world_size == 2} == {"not_as_planned"}


def test_variants_of_one_run_type_in_each_others_folders_are_found(tmp_path):
    """Nothing but the command tells `ddp` from `ddp:bucket_cap_mb=5`."""
    cells = write_sweep(tmp_path)
    cells[3]["command"][-3:-3] = ["--bucket_cap_mb", "5"]
    write_sweep_json(tmp_path, cells)
    verdict = verdict_of(tmp_path)
    assert verdict.status == "not_as_planned" and "--bucket_cap_mb 5" in verdict.reasons[0]
    change(tmp_path / "ddp_2/run_2", lambda m: m.update(command_line='python "'))
    assert verdict_of(tmp_path).status == "not_as_planned"
    words = " ".join(word for word in cells[3]["command"][1:])
    change(tmp_path / "ddp_2/run_2", lambda m: m.update(command_line=words))
    assert not verdict_of(tmp_path).is_failure


def test_one_run_in_two_folders_is_found(tmp_path):
    write_sweep(tmp_path)
    for path in (tmp_path / "ddp_2/run_1").iterdir():
        (tmp_path / "ddp_2/run_2" / path.name).write_bytes(path.read_bytes())
    verdict = verdict_of(tmp_path)
    assert verdict.status == "duplicate_run" and str(tmp_path / "ddp_2/run_1") in verdict.reasons[0]


def test_older_versions_are_checked_as_far_as_they_go(tmp_path):
    save(tmp_path / "v1", v1_metrics())
    save(tmp_path / "v20", v20_metrics())
    assert [each.status for each in verify(tmp_path, metrics_only=True)] == ["ok", "ok"]


def test_the_exit_code_says_whether_all_runs_passed(tmp_path):
    write_sweep(tmp_path)
    assert run_here(PROGRAM, "--dir", tmp_path).returncode == 0
    (tmp_path / "ddp_2/run_1/RUN_COMPLETE.txt").unlink()
    done = run_here(PROGRAM, "--dir", tmp_path)
    assert done.returncode == 1 and "missing_mark" in done.stdout and "1 of 5" in done.stderr
    nothing = run_here(PROGRAM, "--dir", REPOSITORY / "docs/images")
    assert nothing.returncode == 2 and len(nothing.stderr.splitlines()) == 1 and not nothing.stdout


def test_the_published_results_pass_with_metrics_only():
    verdicts = verify(REPOSITORY / "docs" / "results", metrics_only=True)
    assert len(verdicts) >= 12 and not any(each.is_failure for each in verdicts), as_tsv(verdicts)
    assert any(each.is_failure for each in verify(REPOSITORY / "docs" / "results"))
