#!/usr/bin/env python3
"""Write what README.md and docs/ take from the code and from docs/results.

    python scripts/maintain/update_docs.py            # after a flag, a strategy, a field or a result changed
    python scripts/maintain/update_docs.py --check    # write nothing; exit code 1 where a file is out of date

docs/flags.md follows from the table of flags, the tables of docs/metrics_file.md from testbed/metrics/fields/. A block
between
`<!-- made by: scripts/maintain/update_docs.py NAME -->` and `<!-- end of NAME -->` follows from files in docs/results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))  # this checkout's code, installed or not

from testbed.analysis.blocks import filled, names_of_blocks
from testbed.config.flag_parser import FlagParser
from testbed.errors import InputError, say
from testbed.io import write_text
from testbed.program import program

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "docs" / "results"
QUICKSTART_RUNS = ("baseline", "baseline_all_cores", "optimized")  # as scripts/quickstart.sh draws them


def quickstart() -> str:
    from testbed.analysis.charts.training import comparison_table
    from testbed.analysis.runs.load import load_runs
    from testbed.audit.notes import notes_on_single_runs

    runs = load_runs([RESULTS / "quickstart" / name for name in QUICKSTART_RUNS])
    return f"```\n{comparison_table(runs, notes_on_single_runs(runs))}\n```"


def list_of_run_types() -> str:
    from testbed.config.run_types import STRATEGIES

    ranks = {"stages": "stages x data", "parts": "tensor x data", "axes": "any product"}
    lines = ["| `--run_type` | what it is | ranks |", "|---|---|---|"]
    for name, entry in STRATEGIES.items():
        lines.append(f"| `{name}` | {entry.summary} | {ranks.get(entry.keeps, 'any') if entry.is_distributed else 1} |")
    return "\n".join(lines)


def sweep(folder: Path = RESULTS / "sweep") -> str:
    from testbed.analysis.scaling.report import report_on_directory
    from testbed.analysis.scaling.tables import scaling_table

    return scaling_table(report_on_directory(folder)).strip()


def certificate() -> str:
    from testbed.analysis.certificate import CERTIFICATE_FILE, read_certificate
    from testbed.analysis.document import markdown
    from testbed.analysis.document.model import Document, Section
    from testbed.analysis.report.certified import blocks

    content = read_certificate(RESULTS / "certificate")
    return markdown.text(Document(sections=[Section(blocks=blocks(content, CERTIFICATE_FILE))]))


def metrics_fields() -> str:
    from testbed.metrics import fields_page

    return fields_page.sections()


def planner_score() -> str:
    from testbed.planner.score import page_of
    from testbed.planner.step_time import SCORE_FILE

    return page_of(json.loads(SCORE_FILE.read_text(encoding="utf-8")))


def mesh_agreement() -> str:
    path = RESULTS / "meshes" / "agreement.jsonl"
    made, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    head = (
        f"`AGREEMENT_FILE={path.relative_to(REPOSITORY)} {made['command']}`, commit `{made['commit']}`, "
        f"{made['cores']} cores ({made['cpu']}), PyTorch {made['torch']}.\n"
    )
    table = [
        head,
        "| mesh | ranks | loss | norm | validation loss | weights (relative) |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for variant in dict.fromkeys(line["variant"] for line in lines):
        of_variant = [line for line in lines if line["variant"] == variant]
        names = ("losses", "grad_norms", "val_loss", "weights")
        largest = [f"{max(line[name] for line in of_variant):.1e}" for name in names]
        sizes = of_variant[0]["mesh"].removeprefix("mesh ")
        table.append(f"| {variant}: {sizes} | {of_variant[0]['ranks']} | {' | '.join(largest)} |")
    return "\n".join(table)


def conformance() -> str:
    from testbed.experiments.conformance import results

    return results.tables(results.read(RESULTS / "conformance" / results.FILE))


def refused_together() -> str:
    from testbed.config.compatibility import refusals

    return "\n".join(f"- {flags}: {why}" if why else f"- {flags}" for flags, why in refusals())


def deepspeed_keys() -> str:
    from testbed.config.deepspeed_keys import table

    return table()


BLOCKS: dict[str, Callable[[], str]] = {
    "quickstart": quickstart,
    "list of run types": list_of_run_types,
    "sweep": sweep,
    "certificate": certificate,
    "metrics fields": metrics_fields,
    "deepspeed keys": deepspeed_keys,
    "refused together": refused_together,
    "mesh agreement": mesh_agreement,
    "mesh sweep": lambda: sweep(RESULTS / "meshes" / "sweep"),
    "conformance": conformance,
    "planner score": planner_score,
}


def flags_page() -> str:
    from testbed.config.flags_page import page

    return page()


WHOLE_FILES: dict[Path, Callable[[], str]] = {REPOSITORY / "docs" / "flags.md": flags_page}


def made_files() -> Iterator[tuple[Path, str]]:
    """Yield each file that is made, or holds a block, with the text that it should have."""
    for path, make in WHOLE_FILES.items():
        yield path, make()
    for path in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        names = names_of_blocks(text)
        if unknown := [name for name in names if name not in BLOCKS]:
            raise InputError(f"{path}: no block is called {unknown[0]!r}; known: {', '.join(BLOCKS)}")
        if names:
            yield path, filled(text, {name: BLOCKS[name]() for name in names})


@program
def main(words: list[str] | None = None) -> int:
    parser = FlagParser(prog="update_docs.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a file is out of date")
    check = parser.parse_args(words).check
    out_of_date = []
    for path, made in made_files():
        if not path.exists() or path.read_text(encoding="utf-8") != made:
            out_of_date.append(str(path.relative_to(REPOSITORY)))
            if not check:
                write_text(path, made)
    if not out_of_date:
        say("every file is up to date")
    elif check:
        say(f"out of date: {', '.join(out_of_date)}; run: python scripts/maintain/update_docs.py", file=sys.stderr)
    else:
        say(f"written: {', '.join(out_of_date)}")
    return 1 if check and out_of_date else 0


if __name__ == "__main__":
    sys.exit(main())
