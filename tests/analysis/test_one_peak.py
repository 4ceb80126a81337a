"""MFU of runs shown together follows from their rates: one peak for a machine and precision."""

from pathlib import Path

import pytest
from support.metrics_examples import save
from support.report_cases import repeats

from testbed.analysis.charts.training import comparison_table
from testbed.analysis.runs.entries import subject_of
from testbed.analysis.runs.load import Run, load_run, on_one_peak


def measured(metrics: dict, peak: float, source: str = "measured: best of 4 products") -> dict:
    """Give a file's run this measured peak per device, and the MFU that it would record."""
    flops = metrics["flops"]
    flops |= {"peak_flops_per_s_per_device": peak, "peak_source": source}
    flops["mfu"] = flops["model_flops_per_s"] / peak / metrics["hardware"]["world_size"]
    return metrics


def loaded(folder: Path, *files: dict) -> list[Run]:
    for number, metrics in enumerate(files):
        save(folder / str(number), metrics)
    return [load_run(folder / str(number) / "training_metrics.json") for number in range(len(files))]


@pytest.fixture
def two(tmp_path):
    """The faster run measured the higher peak, so its own MFU is the lower one."""
    (slow,), (fast,) = repeats("baseline", 0.30, 1), repeats("ddp", 0.29, 1)
    return loaded(tmp_path, measured(slow, 1.0e11), measured(fast, 1.2e11))


def test_the_faster_of_equal_work_has_the_higher_mfu(two):
    assert two[0].mfu > two[1].mfu
    (slow, fast), notes = on_one_peak(two)
    assert fast.mfu / slow.mfu == pytest.approx(fast.tokens_per_s / slow.tokens_per_s)
    assert fast is two[1] and slow.section("flops")["peak_flops_per_s_per_device"] == 1.2e11
    (note,) = notes
    assert "2 runs measured peaks of" in note and "the largest counts for all" in note
    assert "the largest counts for all" in " ".join(comparison_table(two).split())
    by_rate = sorted((entry.example for entry in subject_of(two).entries), key=lambda run: run.tokens_per_s)
    assert by_rate[1].mfu > by_rate[0].mfu


def test_a_data_sheet_and_peaks_that_agree_are_left_alone(tmp_path):
    (a,), (b,), (c,) = repeats("baseline", 0.30, 1), repeats("ddp", 0.29, 1), repeats("fsdp", 0.31, 1)
    runs = loaded(tmp_path, measured(a, 1e11), measured(b, 1.04e11), measured(c, 9e11, "data sheet"))
    found, notes = on_one_peak(runs)
    assert found[2] is runs[2] and not notes
