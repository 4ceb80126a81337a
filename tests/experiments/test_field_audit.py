"""The audit of public files: what is got, what is said of a finding, what is planted, and what the pages show."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import runpy

import pytest
from support.programs import REPOSITORY

from testbed.errors import Failure, InputError
from testbed.experiments.field_audit import material as getting
from testbed.experiments.field_audit import mutation, page, planting
from testbed.experiments.field_audit.examine import examine
from testbed.experiments.field_audit.material import Material, get_all, read_material
from testbed.experiments.field_audit.review import counts, in_random_order, read_reviews, wilson

RESULTS = REPOSITORY / "docs" / "results" / "audits"
ROWS = [(1, 100.0), (2, 190.0), (4, 360.0), (8, 700.0), (16, 1380.0), (32, 2740.0)]
SOUND = "# Runs\n\n| GPUs | tokens/s | tokens/s/GPU | note |\n|---|---|---|---|\n" + "".join(
    f"| {devices} | {rate} | {rate / devices} | a*b |\n" for devices, rate in ROWS
)
BROKEN = SOUND.replace("| 90.0 |", "| 60.0 |")
LOG = "".join(
    f"step {step:5d} | loss: {9 - step / 50:.6f} | lr 6.0e-04 | norm: 1.0 | dt: {dt:.2f}ms | "
    f"tok/sec: {524288e3 / dt:.2f}\n"
    for step, dt in ((step, 300 + step % 7 * 1.37) for step in range(40))
)


def listed(folder, files, **more):
    """Put files below `folder` and return their material."""
    found = []
    for path, text in files.items():
        content = text.encode()
        kind = "table" if path.endswith(".md") else "build_nanogpt"
        one = Material("owner/name", path, "0" * 40, kind, "MIT", hashlib.sha256(content).hexdigest(), True, **more)
        one.place(folder).parent.mkdir(parents=True, exist_ok=True)
        one.place(folder).write_bytes(content)
        found.append(one)
    return found


def test_a_file_is_got_once_and_must_be_the_one_that_is_listed(tmp_path, monkeypatch):
    (one,) = listed(tmp_path, {"docs/a.md": SOUND})
    asked = []
    monkeypatch.setattr(getting, "_download", lambda address, folder: asked.append(address) or SOUND.encode())
    get_all([one], tmp_path, offline=False)
    assert asked == []
    one.place(tmp_path).unlink()
    with pytest.raises(InputError, match=r"--offline: .* is missing"):
        get_all([one], tmp_path, offline=True)
    get_all([one], tmp_path, offline=False)
    assert asked == [f"https://raw.githubusercontent.com/owner/name/{'0' * 40}/docs/a.md"]
    assert one.place(tmp_path).read_text() == SOUND
    one.place(tmp_path).write_text(BROKEN)
    with pytest.raises(InputError, match="another sha256"):
        get_all([one], tmp_path, offline=True)
    monkeypatch.setattr(getting, "_download", lambda address, folder: b"another")
    with pytest.raises(Failure, match="gave another file"):
        get_all([one], tmp_path, offline=False)


def test_a_download_that_fails_is_one_sentence(tmp_path, monkeypatch):
    import requests

    def refuse(*_, **__):
        raise requests.ConnectionError("no route")

    monkeypatch.setattr(requests, "get", refuse)
    (one,) = listed(tmp_path, {"a.md": SOUND})
    one.place(tmp_path).unlink()
    with pytest.raises(Failure, match=r"a\.md cannot be downloaded \(ConnectionError\).*run the same command again"):
        get_all([one], tmp_path, offline=False)


def test_a_finding_has_its_line_what_stands_there_and_a_name_that_stays(tmp_path):
    content = examine(listed(tmp_path, {"a.md": BROKEN, "b.md": SOUND, "c.md": "no table"}), tmp_path)
    (finding,) = content["findings"]
    line = BROKEN.splitlines().index("| 4 | 360.0 | 60.0 | a*b |") + 1
    assert (finding["path"], finding["lines"], finding["quoted"]) == ("a.md", [line], ["| 4 | 360.0 | 60.0 | a*b |"])
    assert "does not follow" in finding["message"] and str(tmp_path) not in json.dumps(content)
    assert [(file["read"], file.get("rows")) for file in content["files"]] == [(True, 6), (True, 6), (False, None)]
    moved = BROKEN.replace("| 60.0 |", "| 50.0 |")
    assert examine(listed(tmp_path, {"a.md": moved}), tmp_path)["findings"][0]["id"] == finding["id"]


def test_a_finding_in_a_log_names_the_line_that_prints_the_step(tmp_path):
    lines = LOG.splitlines()
    lines[20] = lines[20].replace("tok/sec: ", "tok/sec: 3")
    (finding,) = examine(listed(tmp_path, {"log.txt": "\n".join(lines)}), tmp_path)["findings"]
    assert finding["lines"] == [21] and finding["quoted"] == [" ".join(lines[20].split())]


def test_no_figure_of_a_project_that_scores_the_planner_is_kept(tmp_path):
    content = examine(listed(tmp_path, {"a.md": BROKEN}, figures_withheld=True), tmp_path)
    (finding,) = content["findings"]
    assert finding["quoted"] == [] and not re.search(r"\d", finding["message"] + str(finding["corrected"]))


def test_determined_figures_are_changed_beyond_rounding_and_found(tmp_path):
    materials = listed(tmp_path, {"a.md": SOUND, "log.txt": LOG})
    planted = planting.plant(materials, tmp_path, 20, seed=1)
    assert len(planted) == 20 and {one.material.path for one in planted} == {"a.md", "log.txt"}
    assert sum(one.is_found for one in planted) >= 18
    assert planting.plant(materials, tmp_path, 20, seed=1) == planted


def test_a_sound_table_whose_rows_determine_nothing_is_left_alone(tmp_path):
    text = "| GPUs | tokens/s |\n|---|---|\n| 1 | 100.0 |\n| 2 | 170.0 |\n| 4 | 390.0 |\n"
    assert planting.plant(listed(tmp_path, {"a.md": text}), tmp_path, 5, seed=0) == []


@pytest.mark.parametrize("text", ["12.34", "1,234", "7", "0.051", "98304"])
def test_a_changed_figure_is_printed_alike_and_differs_beyond_rounding(text):
    rng = random.Random(0)
    made = [planting.changed(text, math.log(1.1), rng) for _ in range(200)]
    values = [float(after.replace(",", "")) / float(text.replace(",", "")) for after in made if after]
    assert len(values) > 50 and all(abs(math.log(value)) > math.log(1.1) for value in values)
    assert max(values) > 3 and min(values) < 0.4
    assert {len(after.partition(".")[2]) for after in made if after} == {len(text.partition(".")[2])}


def test_clean_rows_with_a_finding_are_counted(tmp_path):
    materials = listed(tmp_path, {"a.md": SOUND, "b.md": BROKEN}, clean=True)
    rows = planting.clean_rows(materials, tmp_path, 100, seed=0)
    assert len(rows) == 12 and [one.path for one, _, is_accused in rows if is_accused] == ["b.md"]


def test_broken_files_are_survived_and_what_is_not_is_counted(tmp_path, monkeypatch):
    materials = listed(tmp_path, {"a.md": SOUND, "log.txt": LOG})
    counted = mutation.mutate(materials, tmp_path, 60, seed=0)
    assert counted["read"] + counted["refused"] == counted["files"] == 60 and counted["read"] > 10
    assert counted["tracebacks"] == counted["slow"] == []

    def fail(paths):
        raise KeyError("lost")

    monkeypatch.setattr(mutation, "audit", fail)
    assert len(mutation.mutate(materials, tmp_path, 7, seed=0)["tracebacks"]) == 7


def test_every_mutation_changes_something():
    for mutate in mutation.MUTATIONS:
        rng = random.Random(0)
        assert any(mutate(SOUND.encode(), rng) != SOUND.encode() for _ in range(20))
        mutate(b"", rng)


def test_wilsons_interval():
    """Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for share, expected in [((81, 263), (0.2553, 0.3662)), ((15, 148), (0.0624, 0.1605)),
                            ((0, 20), (0.0, 0.1611)), ((1, 29), (0.0061, 0.1718))]:  # fmt: skip
        assert wilson(*share) == pytest.approx(expected, abs=5e-5)


def test_the_order_of_reviews_is_random_and_a_new_finding_moves_no_other():
    findings = [{"id": f"{number:08x}"} for number in range(50)]
    order = in_random_order(findings, 0)
    assert order != findings and order != in_random_order(findings, 1)
    assert [one for one in in_random_order([*findings, {"id": "new"}], 0) if one["id"] != "new"] == order


def test_a_review_needs_a_verdict_and_a_reason(tmp_path):
    path = tmp_path / "reviews.json"
    path.write_text(json.dumps({"a": {"verdict": "perhaps", "sure": "certain", "why": "x"}}))
    with pytest.raises(InputError, match="a needs a verdict"):
        read_reviews(path)
    good = {
        "a": {"verdict": "holds", "sure": "certain", "why": "x"},
        "gone": {"verdict": "wrong", "sure": "likely", "why": "y"},
    }
    path.write_text(json.dumps(good))
    assert counts([{"id": "a"}, {"id": "b"}], read_reviews(path)) == {"holds": 1, "explained": 0, "wrong": 0}


def test_the_pages_link_each_finding_to_its_line_and_escape_what_it_quotes(tmp_path):
    materials = listed(tmp_path, {"docs/a b.md": BROKEN})
    finding = examine(materials, tmp_path)["findings"][0]
    review = {"verdict": "holds", "sure": "certain", "why": "360 / 4 is 90."}
    text = "\n".join(page._item(finding, review, materials[0]))
    assert f"https://github.com/owner/name/blob/{'0' * 40}/docs/a%20b.md?plain=1#L7" in text
    assert "`| 4 | 360.0 | 60.0 | a*b |`" in text and "Review: holds (certain): 360 / 4 is 90." in text


def test_what_is_committed_has_the_size_that_it_should():
    files = json.loads((RESULTS / "findings.json").read_text())["files"]
    read = [file for file in files if file["read"]]
    assert sum(file["rows"] for file in read) >= 300 and sum(not file["rows"] for file in read) >= 40
    assert len({file["repository"] for file in read}) >= 8
    materials = {(one.repository, one.path) for one in read_material(RESULTS / "material.json")}
    assert {(file["repository"], file["path"]) for file in files} <= materials


def test_the_program_says_what_to_do_without_the_files(tmp_path, capsys):
    main = runpy.run_path(str(REPOSITORY / "scripts" / "audit_field.py"))["main"]
    assert main(["--offline", "--folder", str(tmp_path / "none")]) == 2
    assert "run once without --offline" in capsys.readouterr().err
