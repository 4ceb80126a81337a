"""Which rank and which cause hold a run back: from rows that are made up, and a few real runs on two ranks."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.diagnosis_study import is_right, overhead, read, table
from support.metrics_examples import example_metrics
from support.programs import REPOSITORY, TINY_RUN, data_flags, run_here

from testbed.analysis.diagnosis.diagnose import NOT_COMPARED, PHASES, Diagnosis, Finding, diagnose
from testbed.analysis.diagnosis.shifts import Shift, against_others, shift_of
from testbed.analysis.diagnosis.words import NOTHING, SHOWN, text_of, verdict, way_out
from testbed.analysis.document import markdown
from testbed.analysis.report.build import report_of
from testbed.analysis.runs.load import load_run
from testbed.metrics.file import check_metrics, read_metrics, write_metrics

STEP_S = 0.2
LEVEL_S = {"data_wait": 0.0005, "forward": 0.05, "backward": 0.1, "synchronise": 0.002, "optimizer": 0.02}


def watched_run(seed: int, ranks: int = 2, windows: int = 64, noise: float = 0.1, mesh: dict | None = None) -> dict:
    """A run whose ranks are alike: each phase takes its level, times noise of a long tail that both its steps and its
    neighbours in time have in common."""
    random = np.random.default_rng(seed)

    def noisy(level: float) -> np.ndarray:
        slow = np.repeat(random.exponential(noise, (windows // 4 + 1, ranks)), 4, axis=0)[:windows]
        return level * (1 + slow + random.exponential(noise, (windows, ranks)))

    own = {phase: noisy(level) for phase, level in LEVEL_S.items()}
    rows = []
    for index in range(windows):
        rows.append({
            "step": 6 + index, "num_steps": 1,
            **{f"per_rank_own_{phase}_s": own[phase][index].tolist() for phase in PHASES},
            "per_rank_own_between_s": [0.002] + [0.001] * (ranks - 1),
            "per_rank_own_elsewhere_s": [0.001] * ranks,
            **{f"per_rank_cpu_{phase}_s": [LEVEL_S[phase]] * ranks for phase in PHASES},
            **{f"per_rank_queued_{phase}_s": [0.0] * ranks for phase in (*PHASES, "between", "elsewhere")},
            "per_rank_calls_s": [0.001] * ranks, "per_rank_blocked_s": [0.01] * ranks, "per_rank_gc_s": [0.0] * ranks,
        })  # fmt: skip
    call = {
        "name": "allreduce",
        "axes": "copies",
        "phase": "backward",
        "num": 70,
        "bytes": 70 * 4_000_000,
        "call_s": 0.01,
    }
    small = {
        "name": "allgather",
        "axes": "copies",
        "phase": "between",
        "num": 70,
        "bytes": 7000,
        "call_s": 0.01,
        "blocked_s": 0.02,
    }
    per_rank = [
        {"rank": rank, "own_start_up_s": 5.0, "num_steps": 70, "collectives": [small, {**call, "blocked_s": 0.7}]}
        for rank in range(ranks)
    ]
    metrics = example_metrics(num_steps=windows + 5, world_size=ranks, step_time_s=STEP_S)
    metrics |= {"watched_steps": rows, "watched": {"per_rank": per_rank}}
    if mesh:
        metrics["training_config"]["mesh"] = {"data": 1, "pipeline": 1, "tensor": 1, "shard": 1, "context": 1} | mesh
    check_metrics(metrics)
    return metrics


def add(metrics: dict, rank: int, seconds: float, *names: str) -> dict:
    for row in metrics["watched_steps"]:
        for name in names:
            row[f"per_rank_{name}_s"][rank] += seconds
    return metrics


def found(metrics: dict) -> list[tuple[str, int | None]]:
    return [(one.cause, one.rank) for one in diagnose(metrics).findings]


def on_a_busy_machine(seed: int) -> dict:
    """A run whose cores change their speed in all phases alike, and on which other work comes and goes."""
    metrics, random = watched_run(seed), np.random.default_rng(1000 + seed)
    core, queue = (np.repeat(random.exponential(1.0, (17, 2)), 4, axis=0) for _ in range(2))
    for number, row in enumerate(metrics["watched_steps"]):
        for phase in PHASES:
            computed = LEVEL_S[phase] * (1 + 0.1 * core[number]) * (1 + random.exponential(0.03, 2))
            queued = 0.1 * LEVEL_S[phase] * queue[number] * random.exponential(1.0, 2)
            pauses = np.array(row[f"per_rank_own_{phase}_s"]) - LEVEL_S[phase]
            row[f"per_rank_cpu_{phase}_s"], row[f"per_rank_queued_{phase}_s"] = computed.tolist(), queued.tolist()
            row[f"per_rank_own_{phase}_s"] = (pauses + computed + queued).tolist()
        row["per_rank_calls_s"] = (0.01 * (1 + 0.1 * core[number]) * (1 + random.exponential(0.1, 2))).tolist()
        row["per_rank_gc_s"] = random.exponential(0.001, 2).tolist()
    check_metrics(metrics)
    return metrics


@pytest.mark.parametrize("run", [watched_run, pytest.param(on_a_busy_machine, marks=pytest.mark.slow)])
def test_ranks_that_are_alike_are_seldom_told_apart(run):
    """200 runs, 39 comparisons each, together at most 5 % false. The noise lasts for four windows, a batch for six."""
    false = sum(bool(found(run(seed))) for seed in range(200))
    assert false <= 10
    assert verdict(diagnose(run(0))) == NOTHING


def test_intervals_hold_as_often_as_they_say():
    """One comparison at 95 %, of noise that is independent from batch to batch and of noise that lasts."""
    random = np.random.default_rng(0)
    for lasting in (0.0, 0.3):
        missed = 0
        for _ in range(400):
            noise = random.normal(0.0, 1.0, 30)
            for place in range(1, 30):
                noise[place] += lasting * noise[place - 1]
            shift = shift_of(1.0 + noise[20:], comparisons=1)
            missed += not shift.low <= 1.0 <= shift.high
        assert missed <= 0.08 * 400


@pytest.mark.parametrize(
    ("phase", "cause"),
    [("data_wait", "data"), ("forward", "forward"), ("backward", "backward"), ("optimizer", "optimizer"),
     ("synchronise", "collective"), ("elsewhere", "collective"), ("between", "writing")],
)  # fmt: skip
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_is_slow_in_one_phase_is_named_with_it(phase, cause, ranks):
    for seed in range(5):
        metrics = add(watched_run(seed, ranks), ranks - 1, 0.1 * STEP_S, f"own_{phase}")
        assert found(metrics)[0] == (cause, ranks - 1)
        (first, *_) = diagnose(metrics).findings
        assert first.shift.low < first.shift.seconds < first.shift.high or phase == "between"
        assert first.share == pytest.approx(0.1, abs=0.05)


def test_a_core_that_others_use_or_that_is_slower_is_told_from_a_slow_phase():
    for waits in (True, False):
        metrics = watched_run(1)
        for phase in ("forward", "backward", "optimizer"):
            seconds = 0.2 * LEVEL_S[phase]
            add(metrics, 1, seconds, f"own_{phase}", f"{'queued' if waits else 'cpu'}_{phase}")
        (first,) = diagnose(metrics).findings
        assert (first.cause, first.rank, first.details["is_waiting"]) == ("core", 1, waits)
        assert first.shift.seconds == pytest.approx(0.034, rel=0.02)
        assert ("which something else uses" in text_of(diagnose(metrics))) is waits


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "data_wait", "synchronise"])
def test_a_longer_computation_shows_beside_cores_that_change_their_speed(phase):
    """By a third in waves of 20 windows, in all phases alike: far more than the 5 ms more in one of them."""
    metrics = watched_run(8)
    for number, row in enumerate(metrics["watched_steps"]):
        for rank, wave in enumerate((np.sin(number / 3), np.cos(number / 2))):
            for each in PHASES:
                more = row[f"per_rank_cpu_{each}_s"][rank] * 0.15 * (1 + wave)
                row[f"per_rank_cpu_{each}_s"][rank] += more
                row[f"per_rank_own_{each}_s"][rank] += more
    assert found(metrics) == []
    add(metrics, 1, 0.025 * STEP_S, f"own_{phase}", f"cpu_{phase}")
    assert [rank for _, rank in found(metrics)] == [1]


def test_a_call_that_takes_a_rank_longer_is_the_collectives():
    metrics = add(watched_run(1), 1, 0.03, "own_backward")
    rank = metrics["watched"]["per_rank"][1]
    rank["collectives"] = [rank["collectives"][0], {**rank["collectives"][1], "call_s": 70 * 0.03}]
    assert found(metrics) == [("collective", 1)]
    assert "in allreduce along copies of backward" in text_of(diagnose(metrics))


def test_a_pause_shows_in_idle_times_where_speed_varies_more():
    """A sleep of 1.5 % of a step: cores whose speed varies by far more hide it in all times but idle ones."""
    random = np.random.default_rng(3)
    metrics = watched_run(3, noise=0.02)
    for row in metrics["watched_steps"]:
        for rank in range(2):
            slower = random.exponential(0.3) * LEVEL_S["backward"]
            for kind in ("own", "cpu"):
                row[f"per_rank_{kind}_backward_s"][rank] += slower
    assert found(metrics) == []
    assert found(add(metrics, 1, 0.015 * STEP_S, "own_backward")) == [("backward", 1)]


def with_calls(metrics: dict, *seconds: float, num: int = 70) -> dict:
    """Give each rank calls in backward and after it, of so many seconds a step together in each."""
    for rank, one in zip(metrics["watched"]["per_rank"], seconds, strict=True):
        small, call = rank["collectives"]
        calls = [{**call, "phase": phase, "num": num, "call_s": 70 * one} for phase in ("backward", "synchronise")]
        rank["collectives"] = [small, *calls]
    return metrics


def test_slow_calls_are_one_finding_however_many_phases_they_are_in():
    metrics = add(watched_run(1), 1, 0.01, "own_backward", "cpu_backward", "calls")
    metrics = with_calls(add(metrics, 1, 0.01, "own_synchronise", "calls"), 0.0, 0.01)
    (first,) = diagnose(metrics).findings
    assert (first.cause, first.rank, first.shift.seconds) == ("collective", 1, pytest.approx(0.02))
    assert "most in allreduce along copies in backward, 10 ms by the mean" in text_of(diagnose(metrics))
    del metrics["watched"]
    assert len({cause for cause, _ in found(metrics)} & {"collective"}) <= 1, "of a killed run no time is said twice"


def test_a_stage_that_makes_twice_the_calls_is_not_slow_in_them():
    metrics = add(watched_run(1, mesh={"pipeline": 2}), 1, 0.002, "own_elsewhere", "cpu_forward", "calls")
    metrics = with_calls(add(metrics, 0, 0.001, "calls"), 0.001, 0.001)
    metrics["watched"]["per_rank"][1]["collectives"] *= 2
    assert ("collective", 1) not in [
        (one.cause, one.rank) for one in diagnose(metrics).findings if one.details.get("is_all")
    ]


def test_a_stage_between_two_others_exchanges_twice_as_much():
    """As measured on three ranks: what it takes to send and receive is in no phase."""
    metrics = add(watched_run(1, ranks=3, mesh={"pipeline": 3}), 1, 0.001, "own_elsewhere")
    metrics["watched"]["per_rank"][1]["collectives"] = [
        {**one, "num": 2 * one["num"]} for one in metrics["watched"]["per_rank"][1]["collectives"]
    ]
    assert found(metrics) == []
    assert found(add(metrics, 1, 0.01, "own_elsewhere")) == [("collective", 1)]


@pytest.mark.parametrize(("share", "is_said"), [(0.004, False), (0.007, True)])
def test_half_a_percent_of_a_step_is_said(share, is_said):
    metrics = add(watched_run(1, noise=0.0), 1, share * STEP_S, "own_backward")
    assert found(metrics) == [("backward", 1)] * is_said


@pytest.mark.parametrize(("share", "is_said"), [(0.02, False), (0.04, True)])
def test_of_a_core_three_percent_are_said(share, is_said):
    metrics = add(watched_run(1, noise=0.0), 1, share * STEP_S, "own_backward", "queued_backward")
    assert found(metrics) == [("core", 1)] * is_said


def test_a_slow_call_outside_the_phases_is_named():
    metrics = add(watched_run(1), 1, 0.03, "own_elsewhere")
    send = {"name": "send", "axes": "stages", "phase": "schedule", "num": 70, "bytes": 70, "blocked_s": 0.0}
    for rank, call_s in enumerate((0.001, 70 * 0.03)):
        metrics["watched"]["per_rank"][rank]["collectives"].append({**send, "call_s": call_s})
    assert found(metrics) == [("collective", 1)]
    assert "is slow in send along stages outside the step's phases" in text_of(diagnose(metrics))


def test_garbage_collection_counts_even_if_it_comes_in_some_steps_only():
    metrics = watched_run(2)
    for row in metrics["watched_steps"][::2]:
        row["per_rank_gc_s"][0] = 0.02
    assert found(metrics) == [("garbage collection", 0)]


def test_what_all_ranks_have_is_of_no_rank():
    metrics = watched_run(3)
    for rank in (0, 1):
        add(metrics, rank, 0.02, "own_data_wait")
    (first,) = diagnose(metrics).findings
    assert (first.cause, first.rank) == ("data", None)
    assert text_of(diagnose(metrics)).startswith("all ranks: wait for data: 20") and "--num_workers" in text_of(
        diagnose(metrics)
    )


def test_a_slow_link_is_one_that_moves_few_bytes_while_every_rank_waits():
    def with_link(waited_s: float, small_s: float = 0.02 / 70) -> dict:
        metrics = watched_run(4)
        for rank in metrics["watched"]["per_rank"]:
            rank["collectives"] = [dict(one) for one in rank["collectives"]]
            rank["collectives"][0]["blocked_s"] = 70 * small_s
            rank["collectives"][1]["blocked_s"] = 70 * waited_s
        for row in metrics["watched_steps"]:
            row["per_rank_blocked_s"] = [waited_s, 1.5 * waited_s]
        return metrics

    (first,) = diagnose(with_link(0.32)).findings  # 4 MB in 0.32 s
    assert (first.cause, first.rank, first.details["collective"]) == ("link", None, "allreduce along copies")
    assert first.shift.seconds == pytest.approx(0.319, rel=0.01)
    assert "all collectives of a step (4 MB" in text_of(diagnose(with_link(0.32)))
    assert found(with_link(0.04)) == [], "100 MB/s"
    assert found(with_link(0.08, small_s=0.05)) == [], "the smallest collectives take as long: the machine is busy"


def test_a_stage_of_its_own_is_compared_by_what_it_idles():
    """Stages compute different things by design: 30 ms more in forward is no cause, 30 ms more of waiting is."""
    stages = {"pipeline": 2}
    by_design = add(watched_run(5, mesh=stages), 1, 0.03, "own_forward", "cpu_forward")
    assert found(by_design) == []
    assert found(add(by_design, 1, 0.03, "own_forward")) == [("forward", 1)]
    exchange = add(watched_run(5, mesh=stages), 0, 0.03, "own_synchronise", "queued_synchronise")
    assert found(exchange) == [], "stages exchange and wait unequally by design"
    crowded = watched_run(5, mesh=stages)  # who computes longer waits longer for a core that all others use too
    for rank in (0, 1):
        add(crowded, rank, 0.02 * (1 + rank), "own_forward", "queued_forward")
    add(crowded, 1, sum(LEVEL_S.values()), "own_backward", "cpu_backward")
    assert found(crowded) == []
    assert found(add(crowded, 0, 0.03, "own_forward", "queued_forward")) == [("core", 0)]
    assert any("stages of a pipeline" in note for note in diagnose(by_design).notes)


def test_ranks_of_one_stage_are_compared_with_each_other():
    metrics = watched_run(6, ranks=4, mesh={"pipeline": 2, "data": 2})
    for rank in (2, 3):
        add(metrics, rank, 0.05, "own_backward", "cpu_backward")
    assert found(metrics) == []
    assert found(add(metrics, 3, 0.05, "own_backward")) == [("backward", 3)]


def test_ranks_along_the_context_do_equal_work():
    metrics = add(watched_run(6, mesh={"context": 2}), 1, 0.02, "own_forward", "cpu_forward")
    assert found(metrics) == [("forward", 1)]


def test_what_was_not_looked_at_is_said():
    killed = watched_run(7)
    del killed["watched"]
    assert found(killed) == [] and "a slow link, the start-up" in text_of(diagnose(killed))
    assert "no ranks were compared" in text_of(diagnose(watched_run(9, ranks=1)))
    assert diagnose(watched_run(7)).notes == ()


@pytest.mark.parametrize(
    ("cause", "settings", "named", "not_named"),
    [
        ("link", {"run_type": "ddp", "gradient_compression": "none"}, "--gradient_compression bf16; more", "()"),
        ("link", {"run_type": "ddp", "gradient_compression": "bf16"}, "--grad_accum_steps", "--gradient_compression"),
        ("link", {"run_type": "fsdp"}, "a faster network", "--"),
        ("optimizer", {"run_type": "ddp"}, "--run_type fsdp", "()"),
        ("optimizer", {"run_type": "fsdp"}, "--profile", "--run_type"),
        ("data", {"num_workers": 2}, "slow disk", "--num_workers"),
        ("core", {"bind_cores": True}, "--threads_per_rank", "--bind_cores"),
        ("checkpoints", {"run_type": "optimized"}, "--save_every", "--async_mode"),
        ("checkpoints", {"run_type": "ddp", "async_mode": "async"}, "--save_every", "--async_mode"),
    ],
)
def test_advice_is_what_the_run_can_take(cause, settings, named, not_named):
    words = way_out(Finding(cause, None, Shift(0.1, 0.1, 0.1, 9.0), 0.1, settings=settings))
    assert named in words and not_named not in words


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 64])
def test_each_rank_is_compared_with_the_median_of_all_others(ranks):
    values = np.random.default_rng(ranks).integers(0, 9, (10, ranks)).astype(float)  # with ties
    for rank in range(ranks):
        others = np.delete(values, rank, axis=1)
        np.testing.assert_array_equal(against_others(values)[:, rank], values[:, rank] - np.median(others, axis=1))


def test_the_name_of_a_phase_forges_no_line():
    details = {"phase": "backward\nrank 9 is slow", "collective": "allreduce", "call_s": 1.0}
    one = Finding("collective", 0, Shift(0.1, 0.1, 0.1, 9.0), 0.1, details)
    assert len(text_of(Diagnosis((one,))).splitlines()) == 3


def test_what_is_outside_the_steps():
    metrics = watched_run(7)
    metrics["watched"]["per_rank"][1]["own_start_up_s"] = 11.0
    metrics["checkpoints"] = [
        {"step": step, "bytes": 1, "blocking_s": 1.0, "total_s": 1.0, "is_asynchronous": False} for step in (20, 40)
    ]
    metrics["evaluations"] = []
    assert found(metrics) == [("writing", None), ("start-up", 1)]
    assert "--async_mode async" in text_of(diagnose(metrics)) and "6.0 s once" in text_of(diagnose(metrics))


def test_files_that_cannot_say_it_say_why():
    few = watched_run(8)
    few["watched_steps"] = few["watched_steps"][:5]
    other = watched_run(8)
    other["hardware"]["world_size"] = 3
    cuda, off = example_metrics(), example_metrics()
    cuda["hardware"]["device_type"] = "cuda"
    off["settings"]["watch_collectives"] = "off"
    untimed, huge = watched_run(8), watched_run(8)
    untimed["timing"]["step_time_p50_sec"] = None
    huge["evaluations"] = [{"step": 20, "wall_time_s": 1e308}, {"step": 21, "wall_time_s": 1e308}]
    for metrics, words in ((few, "watched 5 steps"), (other, "not of all"), (cuda, "on CUDA"), (off, "off"),
                           (untimed, "no median step time"), (huge, "too large"),
                           (example_metrics(), "an earlier version")):  # fmt: skip
        assert words in verdict(diagnose(metrics))


def test_a_single_process_has_no_other_rank():
    metrics = watched_run(9, ranks=1)
    assert found(metrics) == []
    assert found(add(metrics, 0, 0.05, "own_data_wait")) == [("data", None)]


def test_the_report_has_the_sentence_of_every_run_that_has_the_figures(tmp_path):
    without, quiet, slow = example_metrics(), watched_run(0), add(watched_run(1), 1, 0.05, "own_backward")
    runs = []
    for name, metrics in (("without", without), ("quiet", quiet), ("slow", slow)):
        (tmp_path / name).mkdir()
        write_metrics(tmp_path / name / "training_metrics.json", metrics | {"run_id": name})
        runs.append(load_run(tmp_path / name / "training_metrics.json"))
    (section,) = [one for one in report_of(runs, tmp_path).sections if one.anchor == "held_back"]
    assert [row[2] for row in section.blocks[0].rows] == [verdict(diagnose(quiet)), verdict(diagnose(slow))]
    assert NOTHING in markdown.text(report_of(runs, tmp_path), "pictures")
    assert "what holds a run back" in str(report_of(runs[:1], tmp_path).notes)


def test_the_program(tmp_path):
    write_metrics(tmp_path / "training_metrics.json", add(watched_run(10), 1, 0.05, "own_backward"))
    done = run_here("scripts/diagnose.py", tmp_path, "--json", tmp_path / "out.json")
    assert done.returncode == 0 and done.stdout.startswith("rank 1 is slow in backward: ")
    (one,) = json.loads((tmp_path / "out.json").read_text())["findings"]
    assert one["low"] < 0.05 < one["high"] and one["sentence"] in done.stdout
    write_metrics(tmp_path / "training_metrics.json", example_metrics())
    done = run_here("scripts/diagnose.py", tmp_path)
    assert done.returncode == 1 and done.stdout.startswith("not known: ")
    done = run_here("scripts/diagnose.py", tmp_path / "nowhere")
    assert done.returncode == 2 and "does not exist" in done.stderr


@pytest.mark.launches
@pytest.mark.parametrize(
    ("run_type", "cause", "rank", "style"),
    [("ddp", "backward", 1, "sleep"), ("allreduce", "collective", 0, "sleep"), ("pipeline", "forward", 1, "sleep")],
)
def test_a_planted_cause_is_named_on_two_ranks(ranks, token_files, tmp_path, run_type, cause, rank, style):
    """A sample of diagnosis_study.py, with pauses that are long beside the noise of any machine."""
    words = ["--run_type", run_type, *TINY_RUN, *data_flags(token_files), "--global_batch_size", "4"]
    words += ["--max_train_steps", "27", "--timing_warmup_steps", "3", "--watch_collectives", "every_step"]
    words += ["--max_val_steps", "0", "--sample_tokens", "0", "--save_at_end", "off"]
    done = ranks.run_program(
        [*words, "--checkpoint_path", str(tmp_path / "out")], tmp_path, 2, plant=[cause, 0.08, rank, style, "timed"]
    )
    assert done.returncode == 0, done.stderr[-2000:]
    metrics = read_metrics(tmp_path / "out" / "training_metrics.json")
    (first, *_) = diagnose(metrics).findings
    assert (first.cause, first.rank) == (cause, rank)
    assert first.shift.seconds > 0.05
    timed = diagnose({**metrics, "watched_steps": []})  # as on GPUs, by made-up times of the real collectives
    if run_type == "pipeline":
        assert timed.unknown == NOT_COMPARED
    else:
        assert [(one.cause, one.rank) for one in timed.findings] == [("late", 1)]
        assert timed.findings[0].shift.seconds == pytest.approx(0.03) and timed.findings[0].shift.low >= 0.0299


def test_the_page_of_the_study_has_the_counts_of_its_cases():
    folder = REPOSITORY / "docs" / "results" / "diagnosis"
    cases = read(folder / "cases.jsonl")
    page = (folder / "README.md").read_text()
    assert table(cases) in page
    assert overhead([json.loads(line) for line in (folder / "overhead.jsonl").read_text().splitlines()]) in page
    planted, clean = [one for one in cases if one["cause"]], [one for one in cases if not one["cause"]]
    right, blamed = (
        sum(is_right(one) == (True, True) for one in planted),
        sum(bool(one["findings"]) for one in clean),
    )
    counts = f"of {len(planted)} planted slow-downs on two ranks it named {right} rightly, and of {len(clean)} "
    counts += f"undisturbed runs it blamed {blamed or 'none'}"
    assert counts in " ".join((REPOSITORY / "docs" / "diagnosis.md").read_text().split()) and counts in SHOWN
    assert is_right({"findings": [{"cause": "data", "rank": 1}], "cause": "data", "rank": 0}) == (False, True)
