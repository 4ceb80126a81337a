"""The report's sentences: who is faster, who learns worse, and what is not a claim."""

import re
import statistics
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.metrics_examples import save, v20_metrics
from support.report_cases import arms, load, repeats, table

from testbed.analysis.document.model import Table
from testbed.analysis.report.build import report_of
from testbed.analysis.report.cautions import cautions
from testbed.analysis.report.headlines import headlines
from testbed.analysis.report.verdicts import NO_CLAIM, NOT_COMPARED, WORSE, compared, verdicts
from testbed.analysis.runs.comparability import LOSS_NOISE
from testbed.analysis.runs.entries import Subject, Workload, subject_of


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


def test_no_detectable_difference_says_what_is_shown_to_be_equal(tmp_path):
    scattered = [repeats("tensor", time, 1)[0] for time in (0.28, 0.29, 0.301, 0.31, 0.32)]
    for number, metrics in enumerate(scattered):
        metrics["run_id"] = f"tensor-{number}"
    subject = arms(tmp_path, a=repeats("baseline", 0.3), c=repeats("fsdp", 0.3003), d=scattered)

    def said(margin: float) -> str:
        (text,) = [verdict.sentence for verdict in verdicts(subject, margin) if "each of" in verdict.claim]
        return text.rpartition("; ")[2] if "equal within 2" not in text else text.partition("unnoticed; ")[2]

    assert said(0.02) == "equal within 2 %: fsdp on 2 ranks; not shown for tensor on 2 ranks)."
    assert said(0.001) == "not shown to be equal within 0.1 %)."
    assert said(0.5) == "each is equal within 50 %)."
    cells = {row[0]: row[table_header(subject, tmp_path).index("equal within 2 %")] for row in
             table(subject, tmp_path, "Equal work")}  # fmt: skip
    assert cells == {"baseline on 2 ranks": "", "fsdp on 2 ranks": "equal", "tensor on 2 ranks": "not shown"}
    alone = arms(tmp_path / "alone", a=repeats("baseline", 0.3), c=repeats("fsdp", 0.3003))
    assert "would go unnoticed; equal within 2 %)." in verdicts(alone)[0].sentence


def table_header(subject: Subject, folder: Path) -> list[str]:
    blocks = [block for section in report_of(subject.runs, folder).sections for block in section.blocks]
    return list(next(block.columns for block in blocks if isinstance(block, Table)))


def test_slower_is_said_as_such(tmp_path):
    subject = arms(tmp_path, a=repeats("baseline", 0.2), b=repeats("tensor", 0.3))
    assert "tensor on 2 ranks is slower: 0.67x as fast as baseline on 2 ranks" in verdicts(subject)[0].sentence


def test_four_repeats_make_no_claim(tmp_path):
    subject = arms(tmp_path, a=repeats("baseline", 0.3), b=repeats("ddp", 0.2, count=4))
    assert kinds(subject) == [NO_CLAIM]
    assert "n = 4 and 5; a claim takes 5 each" in verdicts(subject)[0].sentence
    assert [warning.title for warning in cautions(subject)] == ["n < 5"]


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
    assert "global batch size 8 / 16" in next(w.text for w in cautions(subject) if w.title == "Unequal work")


def test_groups_whose_recorded_work_is_equal_are_not_called_unequal(tmp_path):
    """2.0 records neither seed nor data: such a pair of groups is apart because nothing shows it to be equal."""
    unrecorded = [v20_metrics(), v20_metrics(command_line="src/gpt2.py --run_type baseline")]
    del unrecorded[1]["training_config"]["seq_len"]
    for number, metrics in enumerate(unrecorded):
        save(tmp_path / f"run_{number}", metrics)
    subject = subject_of(load(tmp_path))
    (said,) = [verdict.sentence for verdict in verdicts(subject) if verdict.kind == NOT_COMPARED]
    assert said.startswith("2 groups of configurations did work that their files do not show to be equal and are")
    save(tmp_path / "run_2", v20_metrics(training_config={"seq_len": 1024}))
    (said,) = [each.sentence for each in verdicts(subject_of(load(tmp_path))) if each.kind == NOT_COMPARED]
    assert "3 groups of configurations did unequal work, or work that their files do not show to be equal, and" in said


def test_one_configuration_has_nothing_to_compare(tmp_path):
    assert verdicts(arms(tmp_path, a=repeats("baseline", 0.2))) == []
    with pytest.raises(ValueError, match="at least one run"):
        subject_of([])


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
    assert row[3:5] == ["n/a", NOT_COMPARED]
    assert "no claim" in headlines(subject)[0].sentence


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
    low, high = pair.ratio.interval_among(10)
    middle, plain = np.log(pair.ratio.ratio), np.log(pair.ratio.high)
    assert np.log(high) - middle == pytest.approx((plain - middle) * 5.598 / 2.776, rel=1e-3)
    assert middle - np.log(low) == pytest.approx(np.log(high) - middle)
    assert pair.ratio.interval_among(1) == pytest.approx((pair.ratio.low, pair.ratio.high))
    close = arms(
        tmp_path / "more",
        **{kind: repeats(kind, 0.2 * step) for kind, step in (("baseline", 1.5), ("ddp", 1), ("fsdp", 1.009))},
    )
    by_name = {entry.strategy: entry for entry in close.entries}
    pair = compared(by_name["ddp"], by_name["fsdp"])
    assert pair.kind == "faster" and pair.ratio.interval_among(3)[0] < 1
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
    assert learning.startswith(
        "Learning: both configurations learn alike; the largest difference of final validation losses is "
    )
    assert f"0.0010, limit {LOSS_NOISE:.4f} (what seeds explain" in learning
    rates = [statistics.median(run.tokens_per_s for run in load(tmp_path / name)) for name in files]
    rates = [3_800_000 * rate / 2e11 for rate in rates]  # the example's FLOPs per token, and two peaks
    assert mfu.startswith(
        f"MFU: {rates[0]:.1%} to {rates[1]:.1%}, medians of 2 of 2 configurations; source of the peak"
    )
    assert mfu.endswith("measured: 2048^3 matrix product.")
    files["c"] = repeats("fsdp", 0.25, loss=0.003, flops={"peak_source": "data sheet"})
    _, learning, mfu = (line.sentence for line in headlines(arms(tmp_path / "three", **files)))
    assert "all configurations learn alike; the largest difference of final validation losses is 0.0030" in learning
    assert mfu.endswith("source of the peak: data sheet and measured, in 2 ways (table of MFU).")
    files["b"] = repeats("ddp", 0.2, loss=0.05)
    del files["c"]
    best, learning, _ = (line.sentence for line in headlines(arms(tmp_path / "worse", **files)))
    assert best == "Best: none is shown to beat baseline on 2 ranks."
    assert "not alike; ddp on 2 ranks learns worst, its final validation loss is 0.0500 above" in learning


def test_unknown_ranks_are_not_few():
    """Speed-ups against a run of four ranks whose file does not say so would be four times too small."""
    entries = [SimpleNamespace(ranks=ranks, tokens_per_s=[1.0], example=SimpleNamespace(run_type="ddp"))
               for ranks in (None, 4, 2)]  # fmt: skip
    assert Workload("", tuple(entries)).reference is entries[2]
    assert Workload("", tuple(entries[:1])).reference is entries[0]
