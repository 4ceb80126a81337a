"""What the documents say is so: links lead somewhere, tables come from files, the file map is complete."""

from __future__ import annotations

import re

import pytest
from conftest import REPOSITORY

from testbed.analysis.charts import comparison_table
from testbed.analysis.runs import load_runs
from testbed.metrics_file import read_metrics

README = REPOSITORY / "README.md"
QUICKSTART = REPOSITORY / "docs" / "results" / "quickstart"
PAGES = [README, *sorted((REPOSITORY / "docs").rglob("*.md")), REPOSITORY / "checkpoint" / "README.md"]


def test_the_quickstart_table_is_what_the_files_say():
    block = re.search(r"<!-- quickstart table.*?-->\n```\n(.*?)```", README.read_text(), re.DOTALL).group(1)
    runs = load_runs([QUICKSTART / "baseline", QUICKSTART / "optimized"])
    assert block.strip() == comparison_table(runs).strip()


def test_the_quickstart_page_names_what_was_measured():
    page = (QUICKSTART / "README.md").read_text()
    for run in ("baseline", "optimized"):
        metrics = read_metrics(QUICKSTART / run / "training_metrics.json")
        assert metrics["status"] == "complete" and metrics["git_dirty"] is False
        for fact in (metrics["git_commit"], metrics["hardware"]["cpu_name"], metrics["env"]["torch_version"]):
            assert fact in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target


def test_the_file_map_names_every_module():
    text = README.read_text()
    for path in (REPOSITORY / "src" / "testbed").rglob("*.py"):
        name = str(path.relative_to(REPOSITORY / "src" / "testbed"))
        if path.name != "__init__.py" or name == "strategies/__init__.py":
            assert f"`{name}`" in text, name


def test_every_picture_of_the_readme_is_tracked_beside_its_data():
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", README.read_text()):
        assert (REPOSITORY / picture).stat().st_size > 10_000
        assert picture.startswith("docs/images/")
