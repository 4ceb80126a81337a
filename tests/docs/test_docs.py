"""Check README and docs: links, commands, generated blocks, named tests, run types, rooms and pictures."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest
from support.programs import REPOSITORY

from testbed.config.flags import parse_command_line
from testbed.config.run_types import STRATEGIES

README = REPOSITORY / "README.md"
DOCS = REPOSITORY / "docs"
RESULTS = DOCS / "results"
PAGES = [
    README,
    REPOSITORY / "CONTRIBUTING.md",
    REPOSITORY / "CHANGELOG.md",
    *sorted(DOCS.rglob("*.md")),
    REPOSITORY / "checkpoint" / "README.md",
]


def relative(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def headings(page: Path) -> set[str]:
    found = re.findall(r"^#+ (.+)$", read(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", read(page)):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target
            if anchor:
                assert anchor in headings(page.parent / target if target else page), f"{target}#{anchor}"


def test_every_guide_is_in_the_index():
    linked = set(re.findall(r"\]\(([\w.]+\.md)", read(DOCS / "index.md")))
    assert {page.name for page in DOCS.glob("*.md")} - {"index.md"} <= linked


def commands_of(page: Path) -> list[str]:
    """Return the commands in the page's bash blocks, without comments, lines that go on joined."""
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", read(page), re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(r"(^|\s)# .*", "", line).strip() for line in lines]


def known_flags() -> str:
    """Return all sources in which a flag of this project can be defined."""
    folders = [REPOSITORY / "src", REPOSITORY / "scripts"]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".sh")]
    return "\n".join(read(path) for path in [*REPOSITORY.glob("*.py"), REPOSITORY / "tests" / "conftest.py", *files])


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=relative)
def test_commands_name_programs_and_flags_that_exist(page):
    sources, arrays = known_flags(), {}
    for command in commands_of(page):
        if array := re.fullmatch(r"(\w+)=\((.*)\)", command):
            arrays[array[1]] = array[2]
        command = re.sub(r'"\$\{(\w+)\[@\]\}"', lambda name: arrays.get(name[1], name[0]), command)
        for program in re.findall(r"\b((?:src|scripts)/[\w/]+\.(?:py|sh|sbatch|slurm|yaml))\b", command):
            assert (REPOSITORY / program).is_file(), command
        if "src/gpt2.py" in command and not re.search(r"\.\.\.|<|\$|srun|network\.py", command):
            words = shlex.split(command.partition("src/gpt2.py")[2])
            parse_command_line(words[: words.index(";")] if ";" in words else words)
        elif "scripts/" in command and command.startswith(("python ", "bash ")):
            for flag in re.findall(r"(?<=\s)--([a-z][\w-]+)", command.partition("scripts/")[2]):
                spellings = (flag, flag.replace("-", "_"), flag.replace("_", "-"))
                assert any(f"--{spelling}" in sources or f'"{spelling}"' in sources for spelling in spellings), command


GUIDES = [README, REPOSITORY / "CONTRIBUTING.md", *(page for page in DOCS.glob("*.md") if page.name != "log.md")]
OF_OTHERS = {"train.py", "training.py"}  # nanoGPT's, and a name behind its link


@pytest.mark.parametrize("page", GUIDES, ids=relative)
def test_files_of_ours_that_a_guide_names_exist(page):
    places = [REPOSITORY, REPOSITORY / "src" / "testbed", REPOSITORY / "scripts", REPOSITORY / "tests"]
    for name in set(re.findall(r"`([\w/.]+\.(?:py|sh))`", read(page))) - OF_OTHERS:
        found = any((place / name).is_file() for place in places)
        assert found or ("/" not in name and any(any(place.rglob(name)) for place in places[1:])), name


def test_the_commands_of_the_readme_train_a_small_model_on_a_cpu():
    """Without these flags a CPU would train 124M parameters."""
    (work,) = [command for command in commands_of(README) if command.startswith("work=(")]
    assert work.startswith("work=(--model nano --seq_length 128 --max_train_steps ")
    trainings = [command for command in commands_of(README) if "src/gpt2.py" in command and "work[@]" in command]
    assert len(trainings) == 2


def test_the_readme_names_the_tests_beside_the_quickstart():
    commands = commands_of(README)
    first = commands.index("bash scripts/quickstart.sh")
    assert commands[first + 2 : first + 4] == ["bash scripts/test.sh", "bash scripts/test.sh --all"]


def test_the_readmes_example_learns_without_a_spike_and_both_of_its_runs_agree():
    """As measured with the flags that README has."""
    from testbed.analysis.runs.load import load_runs

    runs = load_runs([RESULTS / "rounding" / "rate_2e-3_warmup_40" / name for name in ("baseline", "optimized")])
    (work,) = [command for command in commands_of(README) if command.startswith("work=(")]
    typed = parse_command_line(shlex.split(work.removeprefix("work=(").removesuffix(")")))
    for name in typed.typed:
        assert runs[0].record["settings"][name] == typed.values[name], name
    losses = runs[0].train_losses
    assert max(losses) == losses[0] and max(losses[1:] - losses[:-1]) < 0.5, "a loss that falls"
    loss, norm = (abs(getattr(runs[1], name) - getattr(runs[0], name)) for name in ("train_losses", "grad_norms"))
    assert len(loss) == 100 and loss.max() < 5e-6 and norm[:30].max() < 5e-6  # float32 sums in another order


def test_norms_have_the_precision_that_the_field_says():
    """ZeRO 1 and 2 round to float32, others do not."""
    from testbed.analysis.runs.load import load_runs

    assert "(ZeRO 1 and 2 round each rank's sum to float32)" in read(DOCS / "metrics_file.md")
    for run in load_runs([RESULTS / "run_types" / name for name in ("baseline", "ddp", "fsdp", "tensor", "optimized")]):
        is_rounded = (run.grad_norms == run.grad_norms.astype("float32")).all()
        assert is_rounded == (run.run_type == "optimized"), run.label


def test_the_generated_blocks_are_up_to_date(capsys):
    main = runpy.run_path(str(REPOSITORY / "scripts" / "maintain" / "update_docs.py"))["main"]
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_the_pages_of_complete_results_name_the_commits_that_made_them():
    from testbed.metrics.file import read_metrics

    for folder in ("quickstart", "run_types", "sweep", "rounding"):
        page, paths = read(RESULTS / folder / "README.md"), [*(RESULTS / folder).rglob("training_metrics.json")]
        assert len(paths) >= 3
        for path in paths:
            metrics = read_metrics(path)
            assert (metrics["status"], metrics["git_dirty"]) == ("complete", False), path
            assert metrics["git_commit"] in page, path


def test_results_that_are_a_table_name_their_raw_files_by_hash():
    sums = list(RESULTS.glob("*/SHA256SUMS"))
    assert len(sums) >= 9
    for path in sums:
        assert all(re.fullmatch(r"[0-9a-f]{64}  \S+", line) for line in read(path).splitlines()), path
        page = read(path.parent / "README.md")
        assert "|" in page or "```" in page, "the table stays"
        assert re.search(r"python (scripts|tests)/|src/gpt2\.py|commands of", page), "so does the command"


def test_results_name_commits_in_full():
    for page in RESULTS.glob("*/README.md"):
        assert re.findall(r"`(?=\w*\d)[0-9a-f]{6,39}`|checkout [0-9a-f]{6,39} ", read(page)) == [], page


@pytest.mark.parametrize("file", sorted(RESULTS.rglob("*.json")), ids=lambda file: file.name)
def test_no_result_names_a_folder_of_the_machine_that_made_it(file):
    assert not re.findall(r"(?<![\w.])/(?:tmp|home|root|work|Users)/[^\s\"]*", read(file))


def test_the_guide_has_a_section_for_every_run_type():
    found = re.findall(r"^### (.+)$", read(DOCS / "strategies.md"), re.MULTILINE)
    assert {name for heading in found for name in heading.split(", ")} == STRATEGIES.keys()


def test_every_picture_of_the_readme_is_tracked():
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", read(README))
    assert pictures
    for picture in pictures:
        assert picture.startswith("docs/images/") and (REPOSITORY / picture).stat().st_size > 10_000


def test_the_readme_holds_no_time_typed_by_hand():
    typed = re.sub(r"<!-- made by.*?<!-- end of [^>]*-->", "", read(README), flags=re.DOTALL)
    assert re.findall(r"\b\d[\d.]* ?(?:s|ms|min|minutes?|seconds?|hours?)\b|\b\d+\.\d+x", typed) == []


def test_every_interval_of_the_log_stands_in_a_page_of_results():
    pages = "\n".join(read(page) for page in RESULTS.glob("*/README.md"))
    intervals = re.findall(r"[\d.]+x? [\[(][\d.]+(?:,| to) [\d.]+[\])]", " ".join(read(DOCS / "log.md").split()))
    assert len(intervals) >= 9
    assert [each for each in intervals if each not in pages] == []
