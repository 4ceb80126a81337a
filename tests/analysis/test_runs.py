"""Files of every version as runs: what a label says, what stays unknown, and which runs may be compared."""

import subprocess
import sys

import numpy as np
import pytest
from support.metrics_examples import SHA_OTHER, example_metrics, save, v1_metrics, v20_metrics
from support.report_cases import repeats

from testbed.analysis.charts.training import comparison_table
from testbed.analysis.comparison.files import arms_from
from testbed.analysis.runs.comparability import differing_validation, differing_work, speed_ups, warnings
from testbed.analysis.runs.entries import subject_of
from testbed.analysis.runs.load import WORK_FIELDS, find_runs, load_run, load_runs, on_one_peak
from testbed.analysis.runs.verify import verify
from testbed.audit.readers import read_reported
from testbed.checkpoint.changed_settings import in_words
from testbed.config.flag import Kind
from testbed.config.table import FLAGS
from testbed.errors import value_text

# Written out a second time: a field that leaves the program's list must be missed here.
EQUAL_WORK = (
    *("num_layers", "num_heads", "embedding_size", "vocab_size", "max_position_embeddings", "dropout", "init_from"),
    "gelu",
    "label_smoothing",
    *("seq_len", "global_batch_size", "precision", "optimizer", "lr", "min_lr", "warmup_steps", "lr_decay_steps"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "max_grad_norm", "total_steps", "seed"),
    *("train_data_sha256", "optimizer_steps", "tokens", "math_changes", "lr_schedule"),
)
OPTIMIZED = {"run_type": "optimized", "deepspeed_enabled": True, "zero_stage": 2}


@pytest.fixture
def load(tmp_path):
    """load({...}, {...}) writes each into a folder of its own, run0, run1, ..., and loads them together."""

    def loader(*files: dict) -> list:
        return load_runs([save(tmp_path / f"run{index}", metrics) for index, metrics in enumerate(files)])

    return loader


def test_a_run_carries_the_numbers_of_its_rows(load):
    metrics = example_metrics(num_steps=20, warmup_steps=5, world_size=2)
    (run,) = load(metrics)
    measured = sorted(row["step_time_s"] for row in metrics["steps"][5:])
    assert run.label == "baseline, 2 x CPU (1 thread), fp32"
    assert run.training_time_s == pytest.approx(sum(row["step_time_s"] for row in metrics["steps"]))
    assert run.step_time_median_s == measured[7]  # the middle of 15
    assert measured[-2] <= run.step_time_p95_s <= measured[-1]
    assert (len(run.step_times_s), run.num_warmup_steps) == (15, 5)
    assert run.work["tokens"] == 20 * 8 * 64
    assert run.train_times_s[-1] == pytest.approx(run.training_time_s)
    assert run.final_validation_loss == metrics["evaluations"][-1]["val_loss"]
    assert run.memory_bytes_per_rank == (700 * 2**20, 701 * 2**20)
    assert "RSS" in run.memory_meaning


def test_a_cuda_run_is_named_by_its_device_and_counts_allocated_memory(load):
    (run,) = load(
        example_metrics(
            world_size=1,
            training_config={**OPTIMIZED, "precision": "bf16"},
            hardware={"device_type": "cuda", "gpu_name": "NVIDIA H200", "backend": "nccl"},
            memory={
                "per_rank": [{"rank": 0, "peak_rss_bytes": 1, "peak_allocated_bytes": 5, "peak_reserved_bytes": 9}]
            },
        )
    )
    assert run.label == "optimized ZeRO-2, 1 x NVIDIA H200, bf16"
    assert run.memory_bytes_per_rank == (5,)
    assert "allocated" in run.memory_meaning


def test_v1_stays_per_rank_because_its_world_size_is_not_known(load):
    """Seed 000: 11,213.5 tokens/s per rank on 4 T4. Times four would be right, and would be a guess."""
    one, four = load(v1_metrics(1), v1_metrics(4))
    assert (one.tokens_per_s, four.tokens_per_s) == (12914.9, 11213.5)
    assert "PER RANK" in four.tokens_per_s_meaning
    assert (four.world_size, four.instrumented, four.step_time_median_s) == (None, None, None)
    assert (four.training_time_s, four.final_validation_loss) == (650.37, 6.181)
    assert [difference.field for difference in differing_work([one, four])] == list(WORK_FIELDS)
    assert all(set(difference.values) == {"unknown"} for difference in differing_work([one, four]))
    assert speed_ups([one, four])[1] == "n/a (work not known)"


def test_v2_0_gives_what_it_records_and_no_step_times(load):
    (run,) = load(v20_metrics())
    assert run.label == "optimized, 4 x Tesla V100-SXM2-16GB, fp16_deepspeed (v2.0)"
    assert (run.work["num_layers"], run.work["optimizer_steps"], run.work["seed"]) == (12, 3561, None)
    assert run.step_time_median_s is None  # its samples can miss the communication
    assert run.validation_losses[0].step == 3561
    assert "rank 0" in run.memory_meaning


def test_v2_0_zero_loss_of_a_run_without_validation_is_not_a_loss(load):
    metrics = v20_metrics()
    metrics["epochs"][0]["val_loss_avg_global"] = 0.0
    assert load(metrics)[0].final_validation_loss is None


def test_v2_0_with_profile_mode_is_instrumented(load):
    quiet, loud = load(
        v20_metrics(command_line="src/gpt2.py --run_type optimized --checkpoint_path a--profile_mode"),
        v20_metrics(command_line="src/gpt2.py --run_type optimized --profile_mode --max_train_steps 300"),
    )
    assert (quiet.instrumented, loud.instrumented) == (None, True)
    assert speed_ups([quiet, loud])[1] == "n/a (instrumented)"


def test_equal_work_is_found_equal_whatever_spreads_it(load):
    """World size, micro batch, run type and threads are how, not what."""
    runs = load(
        example_metrics(world_size=1, step_time_s=0.3),
        example_metrics(
            world_size=2,
            step_time_s=0.2,
            training_config={**OPTIMIZED, "micro_batch_size_per_gpu": 2, "grad_accum_steps": 2, "max_grad_norm": 1},
            hardware={"cpu_threads_per_rank": 2},
        ),
    )
    assert differing_work(runs) == []
    assert warnings(runs) == []
    assert speed_ups(runs) == [1.0, pytest.approx(1.5)]


OTHER_VALUES = {
    "seq_len": 32,
    "init_from": "gpt2",
    "gelu": "exact",
    "precision": "bf16",
    "optimizer": "SGD",
    "lr_schedule": "constant",
}  # of text, and a length that the positions allow; any other number is doubled


@pytest.mark.parametrize("field", [field for field in EQUAL_WORK if field not in ("optimizer_steps", "tokens")])
def test_no_part_of_the_work_is_overlooked(load, field):
    """One field of docs/measuring.md, rule 1, changed in the file: found, and no other but what follows from it."""
    first, second = example_metrics(), example_metrics()
    config = second["training_config"]
    if field == "train_data_sha256":
        config["dataset_sha256"]["train"] = SHA_OTHER
    elif field == "math_changes":
        config[field] = ["gradients are averaged in bf16"]
    else:
        config[field] = OTHER_VALUES.get(field) or config[field] * 2 or 1
    runs = load(first, second)
    found = [difference.field for difference in differing_work(runs)]
    assert found == [field, *(["tokens"] if field in ("seq_len", "global_batch_size") else [])]
    assert speed_ups(runs)[1] == "n/a (work differs)"
    assert warnings(runs)[0].startswith(f"Not equal work: {field.replace('_', ' ')}")


def test_the_fields_of_equal_work_are_these():
    of_one_strategy = [name for name, flag in FLAGS.items() if flag.is_option and flag.kind is Kind.WORK]
    assert sorted(WORK_FIELDS) == sorted([*EQUAL_WORK, *of_one_strategy])


def test_another_optimizer_or_schedule_is_other_work(load):
    """Files from before these fields did what the defaults do."""
    muon = {"optimizer": "Muon", "muon_learning_rate": 0.01, "muon_momentum": 0.95}
    older, adamw, first, second, wsd = load(
        example_metrics(),
        example_metrics(training_config={"lr_schedule": "cosine", "muon_learning_rate": None, "decay_share": None}),
        example_metrics(training_config=muon),
        example_metrics(training_config={**muon, "muon_learning_rate": 0.02}),
        example_metrics(training_config={"lr_schedule": "wsd", "decay_share": 0.2}),
    )
    (log,) = load(example_metrics(training_config={"lr_schedule": "cosine", "warmup_shape": "log"}))
    assert warnings([adamw, log])[0] == "Not equal work: lr schedule cosine / cosine, log warm-up."
    assert differing_work([older, adamw]) == []
    assert warnings([adamw, first])[0] == "Not equal work: optimizer AdamW / Muon (learning rate 0.01, momentum 0.95)."
    assert [each.field for each in differing_work([first, second])] == ["optimizer"]
    assert warnings([adamw, wsd])[0] == "Not equal work: lr schedule cosine / wsd, decay share 0.2."
    assert speed_ups([adamw, first])[1] == "n/a (work differs)"
    assert "Muon" in first.label and "AdamW" not in adamw.label


def test_with_many_runs_a_difference_says_which_run_has_what(load):
    seeds = [{"training_config": {"seed": seed}} for seed in (1, 2, 3, 2)]
    runs = load(*[example_metrics(**overrides) for overrides in seeds])
    assert warnings(runs)[0] == "Not equal work: seed 1 [1] / 2 [2, 4] / 3 [3]."
    assert warnings(runs[:3])[0] == "Not equal work: seed 1 / 2 / 3."
    with_v1 = load(
        *[example_metrics(**overrides) for overrides in seeds[:2]], v1_metrics(1), example_metrics(**seeds[3])
    )
    assert "seed 1 [1] / 2 [2, 4] / unknown [3]" in warnings(with_v1)[0]


def test_unequal_validation_is_said_but_keeps_the_speed_up(load):
    other = example_metrics(training_config={"dataset_sha256": {"val": SHA_OTHER}})
    none, *runs = load(example_metrics(evaluations=[]), example_metrics(), other)
    assert differing_work(runs) == []
    assert [difference.values for difference in differing_validation(runs)] == [("bbbbbbbb", "cccccccc")]
    found = warnings([none, *runs])
    assert "Validation losses do not compare: val data sha256 bbbbbbbb [2] / cccccccc [3]." in found


@pytest.mark.parametrize(
    ("overrides", "label", "reason"),
    [
        ({"instrumented": True}, "[INSTRUMENTED]", "n/a (instrumented)"),
        ({"status": "running", "completion": None}, "[RUNNING]", "n/a (not complete)"),
    ],
)
def test_an_unfit_run_is_labelled_and_gives_no_speed_up(load, overrides, label, reason):
    runs = load(example_metrics(), example_metrics(**overrides))
    assert runs[1].full_label.endswith(label)
    assert speed_ups(runs)[1] == reason
    assert warnings(runs)


def test_a_faster_run_that_learns_worse_is_called_out(load):
    worse = example_metrics(step_time_s=0.1)
    worse["evaluations"][-1]["val_loss"] += 0.01
    said = warnings(load(example_metrics(), worse))
    assert any(
        "losses differ by 0.0100 at equal work" in warning and "only repeats tell" in warning for warning in said
    )


def test_equal_labels_are_told_apart_by_their_folders(load, tmp_path):
    runs = load(example_metrics(), example_metrics())
    assert [run.label[-7:] for run in runs] == [" (run0)", " (run1)"]
    twice = load_runs([tmp_path / "run0", tmp_path / "run0"])
    assert len({run.label for run in twice}) == 2


def test_a_run_that_has_not_begun_can_be_loaded(load):
    metrics = example_metrics(status="running", steps=[], evaluations=[], epochs=[])
    metrics["summary"]["mean_tokens_per_sec_global"] = None
    (run,) = load(metrics)
    assert (run.training_time_s, run.tokens_per_s, run.final_train_loss) == (None, None, None)
    assert isinstance(run.step_times_s, np.ndarray)


def test_a_folder_and_a_tree_of_runs_are_found(tmp_path):
    save(tmp_path / "b", example_metrics())
    save(tmp_path / "a" / "deep", example_metrics())
    save(tmp_path / "a", example_metrics(), name="other.json")
    assert [path.parent.name for path in find_runs(tmp_path)] == ["deep", "b"]
    assert load_run(tmp_path / "b").path == tmp_path / "b" / "training_metrics.json"
    with pytest.raises(ValueError, match="does not exist"):
        load_run(tmp_path / "a")


def test_copies_of_a_runs_files_in_its_checkpoints_are_not_runs(tmp_path):
    """Whole, half written, damaged; one beside a log. A folder of runs may be called checkpoints, or like a step."""
    for number in (1, 2):
        metrics = example_metrics(run_id=f"run {number}", step_time_s=0.2 + number / 1000)
        save(tmp_path / f"run_{number}", metrics)
        for step in ("step_000002", ".step_000004.tmp", "step_000003.damaged"):
            inside = tmp_path / f"run_{number}" / "checkpoints" / step
            save(inside, metrics | {"status": "running"})
            (inside / "RUN_PREEMPTED.txt").write_text("")
            (inside / "rank0_results_epoch1.json").write_text("{}")
    expected = [tmp_path / f"run_{number}" for number in (1, 2)]
    assert [path.parent for path in find_runs(tmp_path)] == expected
    assert [verdict.run_dir for verdict in verify(tmp_path, metrics_only=True)] == expected
    assert [each.path.parent for each in read_reported([tmp_path])] == expected
    a, b, unreadable = arms_from(expected[:1], expected[1:])
    assert (len(a.runs), len(b.runs), unreadable) == (1, 1, [])
    save(tmp_path / "others" / "checkpoints" / "baseline", example_metrics())
    save(tmp_path / "others" / "step_000001", example_metrics())
    assert [path.parent.name for path in find_runs(tmp_path / "others")] == ["baseline", "step_000001"]


@pytest.mark.launches
def test_analysis_never_imports_torch():
    """In a process of its own, because other tests of this one import torch."""
    code = (
        "import sys, testbed.analysis.runs.load, testbed.analysis.charts.training\n"
        "print(*[name for name in ('torch', 'deepspeed', 'transformers', 'matplotlib.pyplot') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == ""


def test_a_tenth_of_a_learning_rate_reads_as_a_person_writes_it(load):
    """3e-3 / 10 by way of 0.1 is 0.00030000000000000003: neither shown so, nor other work than a typed 3e-4."""
    work = [{"lr": 0.003, "min_lr": 0.003 * 0.1}, {"lr": 0.004, "min_lr": 0.0004}, {"lr": 0.003, "min_lr": 0.0003}]
    runs = load(*(example_metrics(training_config=each) for each in work))
    said = " ".join(warnings(runs[:2]))
    assert "min lr 0.0003 / 0.0004" in said and "000000" not in said
    assert differing_work([runs[0], runs[2]]) == []
    changes = [{"name": "min_learning_rate", "before": 0.003 * 0.1, "now": 1e-4}]
    assert in_words(changes) == "--min_learning_rate is 0.0001, was 0.0003"
    assert [*map(value_text, (1.0, 3, True, 0.1 + 0.2, 1e-8, "x"))] == ["1", "3", "True", "0.3", "1e-08", "x"]


def measured(metrics: dict, peak: float, source: str = "measured: best of 4 products") -> dict:
    """Give a file's run this measured peak per device, and the MFU that it would record."""
    flops = metrics["flops"]
    flops |= {"peak_flops_per_s_per_device": peak, "peak_source": source}
    flops["mfu"] = flops["model_flops_per_s"] / peak / metrics["hardware"]["world_size"]
    return metrics


def test_the_faster_of_equal_work_has_the_higher_mfu(load):
    """MFU of runs shown together is against one peak. The faster run measured the higher one, so its own is lower."""
    (slow,), (fast,) = repeats("baseline", 0.30, 1), repeats("ddp", 0.29, 1)
    two = load(measured(slow, 1.0e11), measured(fast, 1.2e11))
    assert two[0].mfu > two[1].mfu
    (slow, fast), notes = on_one_peak(two)
    assert fast.mfu / slow.mfu == pytest.approx(fast.tokens_per_s / slow.tokens_per_s)
    assert fast is two[1] and slow.section("flops")["peak_flops_per_s_per_device"] == 1.2e11
    (note,) = notes
    assert "2 runs measured peaks of" in note and "the largest counts for all" in note
    assert "the largest counts for all" in " ".join(comparison_table(two).split())
    by_rate = sorted((entry.example for entry in subject_of(two).entries), key=lambda run: run.tokens_per_s)
    assert by_rate[1].mfu > by_rate[0].mfu


def test_a_data_sheet_and_peaks_that_agree_are_left_alone(load):
    (a,), (b,), (c,) = repeats("baseline", 0.30, 1), repeats("ddp", 0.29, 1), repeats("fsdp", 0.31, 1)
    runs = load(measured(a, 1e11), measured(b, 1.04e11), measured(c, 9e11, "data sheet"))
    found, notes = on_one_peak(runs)
    assert found[2] is runs[2] and not notes
