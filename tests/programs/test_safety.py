"""What a stranger's file, folder or name must not do, and what of the environment must not land in a file."""

from __future__ import annotations

import base64
import json
import pickle
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.browser import BROWSER, Page
from support.corpus_cases import Documents, download
from support.evil import EVIL, complete_again, evil_metrics
from support.fuzz import content_of
from support.metrics_examples import example_metrics, save
from support.programs import REPOSITORY
from support.report_cases import load, run_metrics
from support.sweep_cases import write_sweep_json

from testbed import run_folder
from testbed.analysis.charts.training import write_charts
from testbed.analysis.report.build import write_html, write_markdown
from testbed.analysis.runs.verify import verify
from testbed.data.sources import find_source
from testbed.data.token_file import open_token_file, sidecar_path
from testbed.run_folder import reuse, run_lock
from testbed.sweep.request import folder_name

# rules of ruff that refuse what runs or unpacks what it reads: pickles, eval, shells, unpack_archive
RULES = "S102 S301 S302 S306 S307 S506 S602 S604 S605 TID251".split()
PLANTED_FLAGS = [
    "torch.load('x')",
    "torch.load('x', weights_only=False)",
    "np.load('x', allow_pickle=True)",
    "datasets.load_dataset('x', trust_remote_code=True)",
]
FLAGS = re.compile(
    r"torch\.load\((?![^\n]*weights_only=True)|from torch import load|(allow_pickle|trust_remote_code)=(?!False)"
)


def test_the_sources_are_checked_for_what_runs_or_unpacks_what_it_reads():
    selected = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["select"]
    assert set(RULES) <= set(selected)


def test_no_source_reads_pickles_or_remote_code():
    assert all(FLAGS.search(source) for source in PLANTED_FLAGS)
    sources = [*(REPOSITORY / "src").rglob("*.py"), *(REPOSITORY / "scripts").rglob("*.py"), *REPOSITORY.glob("*.py")]
    assert len(sources) > 100
    assert [path.name for path in sources if FLAGS.search(path.read_text(encoding="utf-8"))] == []


class Marker:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pickle_in_a_folder_of_weights_is_not_opened(tmp_path, name):
    from testbed.checkpoint.weights import read_initial_weights
    from testbed.model.shape import ModelShape

    mark = tmp_path / "it_ran"
    planted = pickle.dumps(Marker(mark))
    (tmp_path / name).write_bytes(planted)
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be used"):
        read_initial_weights(str(tmp_path), ModelShape(1, 1, 8))
    assert not mark.exists()
    pickle.loads(planted)
    assert mark.exists(), "the pickle is not the trap that it should be"


@pytest.mark.launches
def test_a_report_of_evil_runs_does_nothing(tmp_path):
    """Names, flags, reasons, tokenizers, devices and folders are text in the page and in its pictures."""
    for number in (1, 2):
        folder = f'a"><script>{number}'
        save(tmp_path / "runs" / folder, evil_metrics(number))
        save(tmp_path / "runs" / f"{folder}_whole", evil_metrics(number) | complete_again())
    cells = [
        {"name": EVIL, "run_type": EVIL, "ranks": 2, "folder": "nowhere/run_1", "command": [EVIL], "status": status,
         "reason": EVIL}
        for status in ("failed", "not applicable")
    ]  # fmt: skip
    write_sweep_json(tmp_path / "runs", cells)
    path = tmp_path / "report.html"
    write_html(load(tmp_path / "runs"), path)
    found = Page(path)
    assert "script" not in found.tags and EVIL in found.text
    assert [address for address in found.addresses if not address.startswith("data:")] == []
    assert all(link.startswith(("#", "./", "runs/")) for link in found.links)
    pictures = [base64.b64decode(each.partition(",")[2]) for each in found.addresses if "svg+xml;base64," in each]
    assert pictures and not any(b"<script" in picture or b"<img" in picture for picture in pictures)
    if BROWSER:
        done = subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", "--dump-dom",
             f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
        assert "<script" not in done.stdout and "<title>it ran" not in done.stdout and "evil.example" in done.stdout


def test_names_in_a_file_do_not_choose_where_pictures_go(tmp_path):
    for number, name in enumerate(("../../evil", "/tmp/evil")):
        metrics = run_metrics("ddp", 2, number)
        metrics["training_config"] |= {"run_type": name, "model_name": name, "dataset_name": name}
        metrics["settings"]["run_type"] = name
        save(tmp_path / "runs" / str(number), metrics)
    out = tmp_path / "a" / "b" / "out"
    out.mkdir(parents=True)
    before = content_of(tmp_path)
    runs = load(tmp_path / "runs")
    write_html(runs, out / "report.html")
    write_markdown(runs, out / "report.md")
    write_charts(runs, out / "charts")
    made = content_of(tmp_path).keys() - before.keys()
    assert len(made) > 3 and all(name.startswith("a/b/out/") for name in made)


def test_a_plan_that_points_outside_is_only_looked_at(tmp_path):
    """sweep.json names folders; none of them is written to, wherever it lies."""
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    save(tmp_path / "elsewhere", example_metrics(num_steps=3, warmup_steps=1))
    write_sweep_json(folder, [{"ranks": 2, "folder": "../../elsewhere"}])
    before = content_of(tmp_path)
    verify(folder)
    assert content_of(tmp_path) == before


@settings(max_examples=300, derandomize=True, database=None, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=20), st.sampled_from(["..", ".", "/", "../x", "a/b", "\\", "C:\\x", "\0"])),
                min_size=3, max_size=3))  # fmt: skip
def test_a_name_of_a_dataset_is_one_folder(words):
    """What a dataset, its configuration and its split are called becomes one folder's name, below --output_dir."""
    dataset, config, split = words
    try:
        name = find_source(f"owner/{dataset}".replace("\0", ""), config or None, split or None).name
    except ValueError:
        return
    assert name not in ("", ".", "..") and Path(name).name == name
    assert Path(folder_name(f"ddp:{config}")).name == folder_name(f"ddp:{config}") != ".."


def test_a_folder_of_files_is_one_folder_too(tmp_path):
    for name in ("..x", "a b", "-", "..."):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one.txt").write_text("text")
        found = find_source(str(tmp_path / name)).name
        assert found not in ("", ".", "..") and Path(found).name == found


@pytest.mark.parametrize("name", ["../bpe.json", "/etc/passwd", "..", ".", "a/b.json", "a\x00b"])
def test_a_sidecar_names_a_tokenizer_in_its_own_folder(tmp_path, token_files, name):
    path = tmp_path / "train.bin"
    path.write_bytes(token_files[0].read_bytes())
    sidecar = json.loads(sidecar_path(token_files[0]).read_text())
    sidecar_path(path).write_text(json.dumps({**sidecar, "tokenizer_file": name}))
    with pytest.raises(ValueError, match="a file name without folders"):
        open_token_file(path)


@pytest.mark.parametrize("name", ["documents.jsonl", "manifest.json"])
def test_a_link_in_the_folder_of_a_corpus_is_not_written_through(tmp_path, name):
    """Whoever gave away the folder could have put a link there."""
    victim = tmp_path / "victim"
    victim.write_text("precious\n" * 100)
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / name).symlink_to(victim)
    download(Documents(), folder)
    assert victim.read_text() == "precious\n" * 100
    assert not any(path.is_symlink() for path in folder.iterdir())


def test_overwriting_a_run_takes_links_away_and_not_what_they_lead_to(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    run = tmp_path / "run"
    run.mkdir()
    (run / run_folder.CHECKPOINTS).symlink_to(outside)
    (run / run_folder.METRICS).symlink_to(outside / "precious")
    reuse.claim(run, overwrite=True)
    assert (outside / "precious").read_text() == "x"
    assert list(run.iterdir()) == []


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / run_lock.LOCK).symlink_to(victim)
    with pytest.raises(ValueError, match="cannot be written"):
        run_lock.acquire(tmp_path / "run")
    assert victim.read_text() == "precious"
