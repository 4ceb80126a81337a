"""The audit names each error of a measurement, gives the figure that the files allow, and leaves sound files alone."""

from __future__ import annotations

import json

import pytest
from support import foreign_examples as foreign
from support.audit_cases import CASES, ONLY_NOTES, edited, ours, v20, wandb_pair
from support.metrics_examples import example_metrics, save, v1_metrics
from support.programs import REPOSITORY, run_here

from testbed.audit.claims import FAILS, NOTE, Finding, audit
from testbed.audit.finding import Rule

PROGRAM = "scripts/audit_runs.py"


@pytest.mark.parametrize(("rule", "words", "corrected", "broken", "sound"), CASES.values(), ids=CASES)
def test_an_error_is_named_and_its_sound_twin_is_left_alone(tmp_path, rule, words, corrected, broken, sound, request):
    found = [f for f in audit(broken(tmp_path / "broken")) if f.rule == rule and words in f.message]
    assert found, "\n".join(map(str, audit(broken(tmp_path / "broken"))))
    if corrected:
        assert corrected in found[0].corrected
    assert found[0].severity == (NOTE if request.node.callspec.id in ONLY_NOTES else FAILS)
    left = audit(sound(tmp_path / "sound"))
    assert [f for f in left if f.severity == FAILS] == []
    assert [f for f in left if f.rule == rule and words[:12] in f.message] == []
    if sound is ours:
        assert left == []


@pytest.mark.parametrize("protocol", ["weak", "time_to_loss"])
def test_our_own_sweep_is_silent(tmp_path, protocol):
    """1 and 2 ranks, two batch sizes, five repeats: under weak scaling the batch grows with the ranks."""
    assert audit([foreign.sweep(tmp_path, protocol, foreign.FEW)]) == []


def test_a_weak_sweep_out_of_proportion_is_accused(tmp_path):
    folder = foreign.sweep(tmp_path, "weak", foreign.FEW)
    edited(sorted((folder / "ddp_2r_b8").iterdir()), lambda m: m["training_config"].update(
        global_batch_size=24, micro_batch_size_per_gpu=12))  # fmt: skip
    found = [f for f in audit([folder]) if f.rule == "equal work"]
    assert len(found) == 1
    assert "global batch size 8 against 24 (3 times)" in found[0].message


def test_the_devices_of_dp_are_its_ranks(tmp_path):
    """One process drives two: a weak sweep of it is in proportion."""
    folder = foreign.sweep(tmp_path, "weak", foreign.FEW)
    of_dp = foreign._cell_metrics("dp", 2, 16) | {"world_size": 1, "hardware": {"num_devices": 2}}
    foreign.arm(folder / "ddp_2r_b8", **of_dp)
    assert audit([folder]) == []


def on_device(paths, kind: str, threads: int):
    return edited(paths, lambda m: m["hardware"].update(device_type=kind, cpu_threads_per_rank=threads))


def test_beside_gpus_a_rank_has_its_share_of_the_cores(tmp_path):
    """More ranks, fewer threads each: no other device. On CPUs the threads are the device."""
    for kind, expected in (("cuda", []), ("cpu", ["equal devices"])):
        runs = ours(tmp_path / kind)
        on_device(runs[:5], kind, 8)
        on_device(runs[5:], kind, 4)
        assert [f.rule for f in audit(runs)] == expected


def test_the_same_cores_shared_by_more_ranks_are_equal_devices(tmp_path):
    """One process with 8 threads against two ranks with 4 each: all the cores, spread in another way."""
    one = {"world_size": 1, "num_devices": 1, "device_type": "cpu", "cpu_threads_per_rank": 8}
    runs = foreign.arm(tmp_path / "one", world_size=1, hardware=one) + foreign.arm(
        tmp_path / "two", training_config={"run_type": "ddp"}
    )
    for threads, expected in ((4, []), (3, [FAILS])):
        on_device(runs[5:], "cpu", threads)
        assert [f.severity for f in audit(runs) if f.rule == "equal devices"] == expected


def test_more_than_linear_compares_cores_where_they_are_known(tmp_path):
    """One process with 2 threads against two ranks with 1 each: twice the ranks, no more cores."""
    one = {"world_size": 1, "num_devices": 1, "device_type": "cpu", "cpu_threads_per_rank": 2}
    runs = foreign.arm(tmp_path / "one", world_size=1, hardware=one, step_time_s=0.9)
    runs += foreign.arm(tmp_path / "two", training_config={"run_type": "ddp"})
    for threads, expected in ((1, "on 2 times the ranks but 2 and 2 cores: no more cores"), (2, "2 times the cores")):
        on_device(runs[5:], "cpu", threads)
        said = [f.message for f in audit(runs) if f.rule == "step clock" and "times the" in f.message]
        assert len(said) == 1 and expected in said[0], said


def test_more_threads_alone_are_what_is_compared(tmp_path):
    one, other = (foreign.arm(tmp_path / name) for name in "ab")
    on_device(other, "cpu", 8)
    assert [(f.severity, f.rule) for f in audit([*one, *other])] == [(NOTE, "equal devices")]
    edited(other, lambda m: m["settings"].update(compile="blocks"))
    assert (FAILS, "equal devices") in [(f.severity, f.rule) for f in audit([*one, *other])]


TYPED_TWICE = ("ours learns worse", "a faster run learns worse", "more than linear in 2.0", "more than linear",
               "v1: a rate of one rank")  # fmt: skip


@pytest.mark.parametrize("name", TYPED_TWICE)
def test_the_order_in_which_two_are_typed_hides_nothing(tmp_path, name):
    rule, words, corrected, broken, _ = CASES[name]
    paths = broken(tmp_path)
    half = len(paths) // 2
    found = [f for f in audit([*paths[half:], *paths[:half]]) if f.rule == rule and words in f.message]
    assert found and found[0].severity == FAILS and (corrected or "") in (found[0].corrected or "")


def test_a_time_to_loss_compares_other_recipes_for_one_task(tmp_path):
    """docs/scaling.md: batch, optimizer, schedule and precision may differ; model, data, length, validation may not."""
    recipe = {"precision": "bf16", "lr": 1e-3, "warmup_steps": 3, "optimizer": "Lion", "weight_decay": 0.0}
    folder = foreign.sweep(tmp_path, "time_to_loss", foreign.FEW)
    runs = sorted((folder / "ddp_2r_b8").iterdir())
    edited(runs, lambda m: m["training_config"].update(recipe))
    assert audit([folder]) == []
    edited(runs, lambda m: m["training_config"].update(num_layers=3))
    assert ["vocabulary 8192 against 3 layers" in f.message for f in audit([folder])] == [True]
    edited(runs, lambda m: (m["training_config"].update(num_layers=2),
                            [row.update(num_target_tokens=64) for row in m["evaluations"]]))  # fmt: skip
    assert ["val tokens 6400 against 64" in f.message for f in audit([folder])] == [True]


def test_the_plan_is_what_excuses_a_weak_sweep(tmp_path):
    folder = foreign.sweep(tmp_path, "weak", foreign.FEW, repeats=1)
    (folder / "sweep.json").unlink()
    (folder / "scaling_report.json").unlink()
    runs = [folder / name / "run_0" for name in ("baseline_1r_b8", "ddp_2r_b8")]
    assert "global batch size 8 against 16" in next(f.message for f in audit(runs) if f.severity == FAILS)


def test_a_marked_profiling_run_beside_a_sweep_is_left_out_and_not_held_against_it(tmp_path):
    runs = ours(tmp_path) + foreign.arm(tmp_path / "profiled", 1, instrumented=True)
    found = audit(runs)
    assert [(f.rule, f.severity) for f in found] == [("instrumented runs", NOTE)]


def test_a_sweep_with_profiled_runs_and_one_without_synchronisation_is_silent(tmp_path):
    """They are part of its plan: none is compared, none is the baseline, and one arm alone is left at batch 8."""
    folder = foreign.sweep(tmp_path, run_types=foreign.FEW)
    for cell in ("baseline_1r_b16", "ddp_1r_b8"):
        edited(sorted((folder / cell).iterdir()), lambda m: m.update(instrumented=True))
    edited(sorted((folder / "ddp_2r_b8").iterdir()), lambda m: m["settings"].update(skip_gradient_sync=True))
    assert audit([folder]) == []


@pytest.mark.parametrize("folder", ["run_types", "quickstart"])
def test_our_published_single_runs_give_notes_and_no_failure(folder):
    found = audit([REPOSITORY / "docs" / "results" / folder])
    assert {f.severity for f in found} == {NOTE}
    assert any("have n = 1" in f.message for f in found)


def test_a_folder_without_a_first_run_is_compared_with_its_baseline(tmp_path):
    foreign.arm(tmp_path / "allreduce", training_config={"run_type": "allreduce"})
    foreign.arm(tmp_path / "baseline", world_size=1)
    foreign.arm(tmp_path / "optimized", training_config={"run_type": "optimized", "precision": "bf16"})
    found = [f for f in audit([tmp_path]) if f.severity == FAILS]
    assert [f.runs[0].partition(",")[0] for f in found] == ["baseline"]


def test_baseline_is_what_the_others_are_compared_with(tmp_path):
    paths = [v20(tmp_path / "a", wall_s=2258.76), v20(tmp_path / "b", world=4, batch=64, wall_s=650.37)]
    other = [f for f in audit(paths[:1], baseline=paths[1]) if f.severity == FAILS]
    assert "global batch size 64 against 16 (0.25 times)" in other[0].message
    assert other[0].runs == (str(paths[1] / "training_metrics.json"), str(paths[0] / "training_metrics.json"))


def test_one_log_with_a_heading_per_run_is_a_table_per_batch(tmp_path):
    """Seed 001's results file: each batch has its own single process, and 64 is not compared with 128."""
    text = "".join(
        f"### {path.name}\n\n{path.read_text()}\n"
        for batch, one_s, two_s in ((64, 2233.5, (1384.64, 806.75)), (128, 2082.29, (1188.86, 693.97)))
        for path in [foreign.timing_log(tmp_path / "parts", batch, times, (0.0,) * len(times), 1.5)
                     for times in ((one_s,), two_s)]
    )  # fmt: skip
    (tmp_path / "results.md").write_text(text, encoding="utf-8")
    found = [f for f in audit([tmp_path / "results.md"]) if f.severity == FAILS]
    ratios = [f.corrected.split(" =")[0] for f in found if "linear" in f.message]
    assert ratios == ["1.61x", "1.75x"]
    assert not any("global batch" in f.message for f in found)


def test_a_shorter_iteration_on_an_unknown_batch_is_no_speed_up(tmp_path):
    """Two ranks can be quick because each has less to do."""
    second = {"iteration_s": 0.3, "tflops_per_s": 8.0, "losses": [2.31, 2.33], "val_loss": 2.25, "seconds_at": (15, 20)}
    found = audit(wandb_pair(tmp_path, 2, second))
    assert [f.message for f in found if "more than linear" in f.message] == []


def test_what_a_file_does_not_hold_is_said(tmp_path):
    found = audit([foreign.pipeline_files(tmp_path)])
    assert [f.severity for f in found] == [NOTE]
    assert {"time of a step", "global batch size"} <= {*found[0].unknown}


def test_a_run_that_is_not_complete_is_left_out(tmp_path):
    runs = ours(tmp_path)
    runs += [save(tmp_path / "c", example_metrics(status="running", completion=None, git_commit="1" * 40)).parent]
    found = audit(runs)
    assert [f.message for f in found if "left out" in f.message] == ["left out of every comparison: the run is running"]
    assert not any("commit" in f.message for f in found)


def test_the_script_prints_rule_runs_and_figure_and_exits_1(tmp_path):
    paths = [save(tmp_path / "runs/a", v1_metrics(1)), save(tmp_path / "runs/b", v1_metrics(4))]
    short = run_here(PROGRAM, tmp_path / "runs")
    done = run_here(PROGRAM, tmp_path / "runs", "--json", tmp_path / "findings.json", "--details")
    assert short.returncode == done.returncode == 1 and "CLAIM DOES NOT STAND" not in short.stdout
    assert done.stdout.startswith(short.stdout) and "CLAIM DOES NOT STAND: throughput is global" in done.stdout
    assert "Claims that do not stand\n" in done.stdout and ". throughput is global\n" in done.stdout
    assert "corrected: 4 x 11,213.5 = 44,854 tokens/s" in done.stdout
    written = json.loads((tmp_path / "findings.json").read_text())["findings"][0]
    assert Finding(**written | {name: tuple(written[name]) for name in ("runs", "unknown")}) in audit(paths)
    done = run_here(PROGRAM, paths[0], "--json", tmp_path)
    assert done.returncode == 1 and "cannot be written" in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_script_is_short_where_nothing_is_wrong(tmp_path):
    """A strong-scaling sweep of ours: five strategies x 1 and 2 ranks x two batch sizes x five repeats."""
    done = run_here(PROGRAM, foreign.sweep(tmp_path))
    first, second = done.stdout.splitlines()
    assert (done.returncode, first) == (0, "nothing found in 90 runs")
    assert second.endswith(" figures could be checked") and "skipped" not in done.stdout


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("nothing.json", None, "does not exist"),
        ("broken.json", "{", "is not JSON"),
        ("list.json", "[]", "not a training_metrics.json"),
        ("notes.txt", "a text", "is not a known log"),
        ("page.rst", "a page", "make Markdown of it: pandoc"),
        ("numbers.csv", "a,b\n1,2\n", "is not CSV that is known"),
        ("rank0_results_epoch0.json", "{}", "is not a result of a rank"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_sentence(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=words) as caught:
        audit([tmp_path / name])
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_rule_of_the_audit_is_explained_in_its_page():
    page = (REPOSITORY / "docs" / "audit.md").read_text(encoding="utf-8")
    for rule in Rule:
        assert f"| {rule} |" in page, rule
