"""Write the blocks of docs/audits: the projects, how often the audit errs, and every finding with its source."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed.analysis.document.words import counted
from testbed.audit.finding import FAILS, NOTE, label_of
from testbed.experiments.field_audit.material import GROUPS, TABLE, Material, read_material
from testbed.experiments.field_audit.review import counts, read_reviews, with_interval
from testbed.io import read_json

MATERIAL, FINDINGS, REVIEWS, TRIALS = "material.json", "findings.json", "reviews.json", "trials.json"
SECOND = "second_reviews.json"  # of findings drawn at random, by a reader who had not seen the first verdicts
FIRST_CONTACT = "first_contact.json"  # findings in what was collected afterwards, by the rules of then


def blocks(folder: Path) -> dict[str, str]:
    """Return the blocks of the pages by their names, from the files of docs/results/audits."""
    content, reviews = read_json(folder / FINDINGS), read_reviews(folder / REVIEWS)
    materials = {(each.repository, each.path, each.commit): each for each in read_material(folder / MATERIAL)}
    findings = content["findings"]
    return {
        "field material": _projects(content["files"], findings),
        "field precision": _precision(findings, read_json(folder / FIRST_CONTACT), reviews, materials)
        + _second(read_json(folder / SECOND)["reviews"]),
        "field trials": _trials(read_json(folder / TRIALS)),
        "field findings": "\n".join(_listed(findings, reviews, materials)).strip(),
    }


def _projects(files: Sequence[Mapping[str, Any]], findings: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| project | tables: files, rows | logs and trackers | claims that do not stand | notes |",
        "|---|--:|--:|--:|--:|",
    ]
    read = [file for file in files if file["read"]]
    rows = []
    for project in sorted({file["repository"] for file in read}, key=str.lower):
        rows.append(_row(project, [file for file in read if file["repository"] == project],
                         [finding for finding in findings if finding["repository"] == project]))  # fmt: skip
    rows.append(_row(f"all {len(rows)}", read, findings))
    lines += [f"| {' | '.join(row)} |" for row in rows]
    if unread := Counter(file["kind"] for file in files if not file["read"]):
        named = ", ".join(f"{count} {kind}" for kind, count in sorted(unread.items()))
        lines += ["", f"{sum(unread.values())} more files are of no format that the audit reads ({named})."]
    return "\n".join(lines)


def _row(name: str, files: Sequence[Mapping[str, Any]], findings: Sequence[Mapping[str, Any]]) -> list[str]:
    tables = [file for file in files if file["rows"]]
    severities = Counter(finding["severity"] for finding in findings)
    shown = f"{len(tables):,}, {sum(file['rows'] for file in tables):,}" if tables else "-"
    return [name, shown, f"{len(files) - len(tables):,}", f"{severities[FAILS]:,}", f"{severities[NOTE]:,}"]


def _precision(
    findings: Sequence[Mapping[str, Any]],
    first: Mapping[str, Any],
    reviews: Mapping[str, Mapping[str, str]],
    materials: Mapping[tuple[str, str, str], Material],
) -> str:
    lines = ["| material | findings | reviewed | explained by the file or a convention | wrong | hold |",
             "|---|--:|--:|--:|--:|--:|"]  # fmt: skip
    first_words = f"{GROUPS[False]}, before the rules were changed for it (commit `{first['git_commit']}`)"
    last = [finding for finding in findings if materials[_source(finding)].last]
    later = [finding for finding in findings if not finding["tuned"] and finding not in last]
    groups = [
        (f"{GROUPS[True]}, now", [finding for finding in findings if finding["tuned"]]),
        (first_words, first["findings"]),
        (f"{GROUPS[False]}, now", later),
        ("collected last, audited by rules that were not changed for it", last),
        ("all, now", findings),
    ]
    for words, own in groups:
        given = counts(own, reviews)
        total = sum(given.values())
        cells = (words, f"{len(own):,}", f"{total:,}", f"{given['explained']:,}", f"{given['wrong']:,}",
                 with_interval(given["holds"], total))  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _second(reviews: Mapping[str, Mapping[str, str]]) -> str:
    """Return the row of the second reader."""
    given = Counter(review["verdict"] for review in reviews.values())
    cells = ("all, drawn at random, by a second reader", f"{len(reviews)}", f"{len(reviews)}", f"{given['explained']}",
             f"{given['wrong']}", with_interval(given["holds"], len(reviews)))  # fmt: skip
    return f"\n| {' | '.join(cells)} |"


def _source(finding: Mapping[str, Any]) -> tuple[str, str, str]:
    return finding["repository"], finding["path"], finding["commit"]


def _trials(trials: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| trial | material | result (95 % interval) | command |", "|---|---|---|---|"]
    for trial in trials.values():
        for result in trial["results"]:
            cells = (trial["what"], result["material"], result["said"], f"`{trial['command']}`")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _listed(
    findings: Sequence[Mapping[str, Any]],
    reviews: Mapping[str, Mapping[str, str]],
    materials: Mapping[tuple[str, str, str], Material],
) -> Iterator[str]:
    by_project: dict[str, list[Mapping[str, Any]]] = {}
    for finding in findings:
        by_project.setdefault(finding["repository"], []).append(finding)
    for project in sorted(by_project, key=str.lower):
        found = by_project[project]
        yield f"\n## {project}\n\n{counted(len(found), 'finding')}.\n"
        for finding in found:
            material = materials[_source(finding)]
            yield from _item(finding, reviews.get(finding["id"]), material)


def _item(finding: Mapping[str, Any], review: Mapping[str, str] | None, material: Material) -> Iterator[str]:
    line = finding["lines"][0] if finding["lines"] else None
    where = finding["path"] + "".join(f":{number}" for number in finding["lines"][:1])
    more = f" and line {', '.join(map(str, finding['lines'][1:4]))}" if len(finding["lines"]) > 1 else ""
    link = f"[{_plain(where)}]({material.page(line if material.kind == TABLE or line else None)})"
    note = ", a note" if finding["severity"] == NOTE else ""
    yield f"- {link}{more}, {finding['id']}: *{finding['rule']}*{note}. {_plain(finding['message'])}."
    yield from (f"  `{_as_code(quoted)}`" for quoted in finding["quoted"] if quoted)
    if material.in_pull_request:
        yield "  From a pull request, not by the project."
    if finding["corrected"]:
        yield f"  Instead: {_plain(finding['corrected'])}."
    yield f"  Review: {review['verdict']} ({review['sure']}): {review['why']}" if review else "  Not reviewed by hand."


def _as_code(quoted: str) -> str:
    """Return a line of a source without what ends a code span, and without the targets of its links."""
    return re.sub(r"\]\([^()]*\)", "]", quoted.replace("`", "'"))


def _plain(text: str) -> str:
    """Return text with what Markdown would read as markup escaped."""
    return re.sub(r"([\\*_<>\[\]`|#~])", r"\\\1", text)


def in_words(finding: Mapping[str, Any], review: Mapping[str, str] | None) -> list[str]:
    """Return a finding as a person reviews it on a terminal."""
    lines = [f"{finding['id']}  {finding['repository']}/{finding['path']}:{finding['lines']}"]
    lines += [f"  {finding['severity']}: {finding['rule']}", f"  {finding['message']}"]
    lines += [f"  > {quoted}" for quoted in finding["quoted"]]
    corrected = finding["corrected"]
    lines += [f"  {label_of(corrected)}: {corrected}"] if corrected else []
    return [*lines, f"  {review['verdict']}, {review['sure']}: {review['why']}" if review else "  no review yet", ""]
