"""The certificate of a machine: what pairs of equal runs say, what a report quotes, and what a sweep plans with it."""

import json
import re

import numpy as np
import pytest
from support.certificate_cases import COMMAND, write_certificate, write_pairs
from support.metrics_examples import example_metrics
from support.report_cases import load, markdown, repeats, save

from testbed.analysis import certificate as certificates
from testbed.analysis import statistics
from testbed.analysis.certificate import (
    certificate_here,
    certificate_of,
    found_in,
    known_noise,
    largest,
    machine_of,
    power_lines,
    read_certificate,
)
from testbed.analysis.report.build import report_of
from testbed.errors import Failure, InputError


def certificate(tmp_path, **of_pairs) -> dict:
    return read_certificate(write_certificate(tmp_path / "sweep", **of_pairs))


@pytest.mark.parametrize("noise", [0.003, 0.03])
def test_a_certificate_finds_the_noise_and_no_difference_where_there_is_none(tmp_path, noise):
    content = certificate(tmp_path, noise=noise)
    (found,) = content["found"]
    assert found["noise"] == pytest.approx(noise, rel=0.25)
    assert found["noise"] < found["noise_below"] < 1.3 * found["noise"]
    assert found["a_against_b"]["verdict"] == "no detectable difference"
    assert found["a_against_b"]["low"] < 1 < found["a_against_b"]["high"]
    assert (found["sessions"], found["claims"]) == (4, 0)
    assert found["detectable"]["5"] > found["detectable"]["10"] > found["detectable"]["20"] > noise
    assert content["machine"] == {"hostname": "node0", "device_type": "cpu", "device": "Example CPU", "cores": 2}
    (configuration,) = content["configurations"]
    assert configuration["name"] == "baseline on 1 rank"
    assert configuration["work"] == "nano, 8 sequences of 64 tokens, 6 steps, fp32"
    assert [pair["first"] for pair in configuration["pairs"][:4]] == ["a", "b", "a", "b"]
    assert [pair["number"] for pair in configuration["pairs"]] == list(range(1, 21))


def test_a_difference_that_is_not_noise_is_claimed_in_the_certificate(tmp_path):
    """As where side a is slower for a reason."""
    folder = write_pairs(tmp_path / "pairs", noise=0.004)
    for path in folder.rglob("baseline_1rank_batch8_a/*/training_metrics.json"):
        metrics = json.loads(path.read_text())
        metrics["summary"]["mean_tokens_per_sec_global"] *= 0.95
        path.write_text(json.dumps(metrics))
    (configuration,) = certificate_of(folder, COMMAND)["configurations"]
    found = found_in(configuration["pairs"])
    assert found["a_against_b"]["verdict"] == "slower" and found["claims"] > 0
    assert found["a_against_b"]["ratio"] == pytest.approx(0.95, abs=0.01)


def rates(generator, number: int, noise: float, outliers: float) -> np.ndarray:
    """Rates of runs, of which a share is slower by 30 %."""
    return np.exp(generator.normal(0, noise, number)) * np.where(generator.random(number) < outliers, 0.7, 1)


def twenty_pairs(generator, noise: float, outliers: float) -> list[dict]:
    sides = (rates(generator, 20, noise, outliers) for _ in "ab")
    return [{"first": "a", "a": a, "b": b} for a, b in zip(*sides, strict=True)]


@pytest.mark.parametrize("outliers", [0, 1, 2, 4])
def test_few_runs_far_from_the_others_are_left_out_of_the_plans(outliers):
    pairs = twenty_pairs(np.random.default_rng(3), 0.01, 0)
    quiet = found_in(pairs)
    for pair in pairs[:outliers]:
        pair["a"] *= 0.7
    found = found_in(pairs)
    assert quiet["outliers"] == 0 and quiet["planning_noise"] == quiet["noise_below"]
    if outliers > 2:  # more than one in twenty are how the machine runs
        assert found["outliers"] == 0 and found["planning_noise"] == found["noise_below"] > 0.05
        return
    assert found["outliers"] == outliers
    assert found["planning_noise"] == pytest.approx(quiet["planning_noise"], rel=0.1)
    assert found["repeats"]["0.01"] == pytest.approx(quiet["repeats"]["0.01"], rel=0.2)
    assert outliers == 0 or found["noise_below"] > 4 * found["planning_noise"]


def test_plans_without_outliers_find_what_they_promise_although_outliers_come(monkeypatch):
    monkeypatch.setattr(statistics, "NUM_RESAMPLES", 499)
    generator = np.random.default_rng(5)
    verdicts = []
    for _ in range(40):
        repeats = found_in(twenty_pairs(generator, 0.02, 0.025))["repeats"]["0.03"]
        for _ in range(5):
            a, b = (rates(generator, repeats, 0.02, 0.025) for _ in "ab")
            verdicts.append(statistics.compare(1.03 * a, b).verdict)
    assert np.mean([verdict == "faster" for verdict in verdicts]) >= 0.8


def test_only_whole_pairs_count_and_five_are_the_least(tmp_path):
    folder = write_pairs(tmp_path / "pairs", pairs=6)
    (folder / "baseline_1rank_batch8_a" / "run_3" / "training_metrics.json").unlink()
    (configuration,) = certificate_of(folder, COMMAND)["configurations"]
    assert [pair["number"] for pair in configuration["pairs"]] == [1, 2, 4, 5, 6]
    (folder / "baseline_1rank_batch8_b" / "run_1" / "training_metrics.json").unlink()
    with pytest.raises(Failure, match="has 4 whole pairs of runs, and a certificate takes 5"):
        certificate_of(folder, COMMAND)
    with pytest.raises(Failure, match="no pair of runs ended well"):
        certificate_of(tmp_path / "empty", COMMAND)


@pytest.mark.parametrize(
    ("changes", "said"), [({"git_commit": "1" * 40}, "commit"), ({"settings": {"bucket_cap_mb": 5}}, "settings")]
)
def test_runs_that_differ_in_more_than_chance_give_no_certificate(tmp_path, changes, said):
    folder = write_pairs(tmp_path / "pairs", pairs=6)
    path = folder / "baseline_1rank_batch8_a" / "run_1" / "training_metrics.json"
    save(path.parent, example_metrics(num_steps=6, warmup_steps=1, world_size=1, run_id="other", **changes))
    with pytest.raises(InputError, match=f"differ in more than chance \\({said}"):
        certificate_of(folder, COMMAND)


def test_a_certificate_is_of_one_machine(tmp_path):
    folder = write_pairs(tmp_path / "pairs", pairs=5)
    write_pairs(folder, pairs=5, name="other", host={"hostname": "node1"})
    with pytest.raises(InputError, match="runs of several machines"):
        certificate_of(folder, COMMAND)


def test_a_report_quotes_the_certificate_above_its_runs(tmp_path):
    for number, metrics in enumerate(repeats("ddp", 0.2)):
        save(tmp_path / "sweep" / "ddp" / f"run_{number}", metrics)
    runs = load(tmp_path / "sweep")
    assert "How noisy" not in markdown(runs)
    assert "noise of the machine: scripts/more/certify_machine.py" in markdown(runs)
    (found,) = certificate(tmp_path, noise=0.01)["found"]
    said = markdown(runs)
    section = said.partition("## How noisy the machine is")[2].partition("\n## ")[0]
    assert "machine_certificate.json, " in section and "node0, Example CPU, 2 cores, commit 000000000000" in section
    assert f"{found['noise']:.2%} (below {found['noise_below']:.2%})" in section
    assert f"{found['detectable']['5']:.1%}" in section and f"| {found['repeats']['0.01']:,} |" in section
    assert "0 of 4" in section
    assert not [each for each in report_of(runs, tmp_path).cautions if "certif" in each.text]


@pytest.mark.parametrize(
    ("of_pairs", "named"),
    [({"noise": 0.0005}, "Noisier than certified"), ({"host": {"hostname": "node9"}}, "Other machine"), ({}, "")],
)
def test_a_certificate_of_another_machine_or_a_quieter_one_is_named(tmp_path, of_pairs, named):
    for number, metrics in enumerate(repeats("ddp", 0.2)):
        save(tmp_path / "sweep" / "ddp" / f"run_{number}", metrics)
    certificate(tmp_path, **of_pairs)
    report = report_of(load(tmp_path / "sweep"), tmp_path)
    said = {each.title: each.text for each in report.cautions if "certif" in each.text}
    assert list(said) == [named] * bool(named)
    assert ("noise" in [section.anchor for section in report.sections]) == (named != "Other machine")
    assert named != "Other machine" or "the certificate of node9, Example CPU, 2 cores" in said[named]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content["configurations"][0]["pairs"].pop(),
        lambda content: content["configurations"][0]["pairs"][0].update(a="fast"),
        lambda content: content.update(schema_version="0.9"),
    ],
)
def test_a_damaged_certificate_is_one_sentence_and_what_was_found_follows_from_the_pairs(tmp_path, damage):
    path = write_certificate(tmp_path / "sweep", pairs=5)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"found": []}))
    assert read_certificate(path) == content
    damage(content)
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"machine_certificate\.json: "):
        read_certificate(path)


def test_power_is_planned_from_the_certificate_until_runs_of_the_sweep_say_more(tmp_path):
    content = certificate(tmp_path, noise=0.01)
    here = (tmp_path / "c.json", content)
    known = known_noise({"a": [1.0, 1.01], "b": [1.0]}, here)
    assert known == (largest(content, "planning_noise"), str(here[0]))
    assert known_noise({}, None) is None
    own = known_noise({"a": [1.0, 1.1, 0.9], "b": [1.0, 1.2, 0.9]}, here)
    assert own[0] > 0.1 and own[1] == "6 finished runs of this sweep"


def test_the_lines_say_what_repeats_show_and_what_a_difference_takes():
    shown, differences, equal = power_lines((0.012, "c.json"), 5, 60.0)
    assert re.match(
        r"5 repeats find a difference of 3\.\d% in 80 % of cases; noise of a run below 1\.2%, from c", shown
    )
    assert "3%: 6 repeats (6 min)" in differences and "10%: 5 repeats (5 min)" in differences
    assert re.match(r"to show that two are equal within 2%: \d+ repeats \(\d+ min\)", equal)
    assert "make no claim; it takes 5" in power_lines((0.012, "c.json"), 4, 60.0)[0]
    assert "1%: more than 1,000 repeats;" in power_lines((0.3, "c.json"), 5, 60.0)[1]
    (unknown,) = power_lines(None, 5, 60.0)
    assert "certify_machine.py" in unknown


def test_a_certificate_counts_on_its_own_machine_only(tmp_path, monkeypatch):
    path = write_certificate(tmp_path / "sweep", pairs=5)
    content = read_certificate(path)
    own, other = content["machine"], content["machine"] | {"cores": 64}
    assert certificate_here(path, own) == (path, content)
    with pytest.raises(
        InputError, match=r"is of another machine .node0, Example CPU, 2 cores; this one is node0, .* 64"
    ):
        certificate_here(path, other)
    monkeypatch.setattr(certificates, "DEFAULT_CERTIFICATE", path)
    assert certificate_here(None, own) == (path, content)
    assert certificate_here(None, other) is None
    monkeypatch.setattr(certificates, "DEFAULT_CERTIFICATE", tmp_path / "none.json")
    assert certificate_here(None, own) is None
    with pytest.raises(InputError, match="does not exist"):
        certificate_here(tmp_path / "none.json", own)


def test_the_machine_of_a_run_is_what_its_file_names(tmp_path):
    save(tmp_path, example_metrics(hardware={"gpu_name": "Example GPU", "device_type": "cuda"}))
    assert machine_of(load(tmp_path)[0])["device"] == "Example GPU"
