"""Draw charts of runs from their training_metrics.json files, print a table that compares them, write a report; draw
what scripts/evaluate.py measured of a checkpoint."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))  # this checkout's code, installed or not

from testbed.config.flag_parser import FlagParser
from testbed.config.flag_types import percentage
from testbed.errors import InputError, say
from testbed.io import cannot_become_a_folder
from testbed.program import program

COLUMNS = 8  # runs that fit beside each other on a screen; more are told by configuration


def make_parser() -> FlagParser:
    parser = FlagParser(
        description=__doc__,
        epilog="Without runs: every training_metrics.json under checkpoint/. Reads the versions 1 and 2.0 to 2.2. "
        "Exit code 2: something that was typed is wrong; 1: writing failed.",
    )
    which = parser.add_argument_group("which runs (a training_metrics.json, or the directory that holds one)")
    which.add_argument("--baseline-json", type=Path, metavar="FILE", help="first run; speed-ups are against it")
    which.add_argument("--optimized-json", type=Path, metavar="FILE", help="second run")
    which.add_argument("--runs", type=Path, nargs="+", metavar="DIR",
                       help="any number of runs instead of these two; a directory that holds no run itself stands for "
                       "all runs below it, so the --out_dir of a sweep is enough")  # fmt: skip
    which.add_argument("--inference", type=Path, nargs="+", metavar="PATH",
                       help="an inference_metrics.json or the directory that holds one: quality against bytes, decode "
                       "rate, latency against load, and tables; several get a folder each. Alone it draws no "
                       "runs")  # fmt: skip
    written = parser.add_argument_group("what is written")
    written.add_argument("--output-dir", type=Path, metavar="DIR",
                         help="PNG files go here (default: docs/charts; with --report or --markdown only if given or "
                         "--inference is)")  # fmt: skip
    written.add_argument("--report", type=Path, metavar="FILE.html",
                         help="one HTML page that needs nothing else: verdicts, then strategies against each other, "
                         "then all sources")  # fmt: skip
    written.add_argument("--markdown", type=Path, metavar="FILE.md",
                         help="the same as GitHub markdown, its pictures in a folder next to it")  # fmt: skip
    written.add_argument("--target_val_loss", type=float, metavar="NATS",
                         help="validation loss that the report's time to loss is measured to (default: the sweep's, "
                         "else the lowest that every run reached)")  # fmt: skip
    written.add_argument("--equivalent", type=percentage, metavar="PERCENT",
                         help="difference that does not matter: the report says what is shown to be equal within it "
                         "(default: 2%%)")  # fmt: skip
    return parser


def parse_arguments() -> argparse.Namespace:
    parser = make_parser()
    arguments = parser.parse_args()
    pair = {"--baseline-json": arguments.baseline_json, "--optimized-json": arguments.optimized_json}
    has_report, target = bool(arguments.report or arguments.markdown), arguments.target_val_loss
    if arguments.runs and any(pair.values()):
        parser.error("--runs names all runs; leave out --baseline-json and --optimized-json")
    if any(pair.values()) and not all(pair.values()):
        given, missing = sorted(pair, key=lambda flag: pair[flag] is None)
        parser.error(f"{given} needs {missing} too; for one run alone use --runs DIR")
    if target is not None and not has_report:
        parser.error("--target_val_loss is for the report: give --report FILE.html or --markdown FILE.md too")
    if target is not None and not 0 < target < float("inf"):
        parser.error(f"--target_val_loss {target:g} is not a loss: it is a positive number of nats per token")
    if arguments.equivalent is not None and not has_report:
        parser.error("--equivalent is for the report: give --report FILE.html or --markdown FILE.md too")
    if arguments.equivalent == 0:
        parser.error("--equivalent 0 shows nothing: no runs are equal within nothing; give a percentage such as 2%")
    arguments.equivalent = 0.02 if arguments.equivalent is None else arguments.equivalent
    if arguments.inference and has_report and not (arguments.runs or any(pair.values())):
        parser.error("--report and --markdown are about runs: name them with --runs DIR next to --inference")
    if arguments.output_dir is None and (arguments.inference or not has_report):
        arguments.output_dir = Path("docs/charts")
    return arguments


def runs_under(directory: Path, or_else: str) -> list:
    """Return every run below `directory` that can be read; name one that cannot on stderr."""
    from testbed.analysis.runs import load as run_files

    runs = []
    for path in run_files.find_runs(directory):
        try:
            runs.append(run_files.load_run(path))
        except ValueError as error:
            say(f"Warning: left out: {error}", file=sys.stderr)
    if not runs:
        raise InputError(f"no run found under {directory}/: {or_else}")
    return runs


def named_runs(paths: list[Path]) -> list:
    """Return the runs in these files and directories, each once, in the order given."""
    from testbed.analysis.runs import load as run_files

    found: dict[Path, run_files.Run] = {}
    for path in paths:
        if path.is_dir() and not (path / run_files.METRICS_FILE).exists():
            runs = runs_under(path, "name a run's directory, or one with runs below it")
        else:
            runs = [run_files.load_run(path)]
        found |= {run.path.resolve(): run for run in runs if run.path.resolve() not in found}
    return list(found.values())


def has_repeats(runs: list) -> bool:
    from testbed.analysis.runs.arms import group_into_arms

    return any(len(arm.runs) > 1 for arm in group_into_arms(runs))


def named_inference(paths: list[Path], output_dir: Path) -> dict[Path, tuple[Path, dict]]:
    """Return folder -> (file, content): what is drawn, in a folder of its own where there are several paths.

    InputError, one sentence, where a file cannot be read or two would share a folder.
    """
    from testbed.inference.report import read_inference

    found = {}
    for path in paths:
        content = read_inference(path)
        checkpoint = (path if path.is_dir() else path.parent).resolve()
        folder = output_dir if len(paths) == 1 else output_dir / checkpoint.name
        if folder in found:
            raise InputError(f"--inference {path} would be drawn into {folder} too; draw it in a call of its own")
        found[folder] = path, content
    return found


def write_inference(found: dict[Path, tuple[Path, dict]]) -> None:
    """Print the tables, write them and the pictures, and say where they are. OSError when that fails."""
    from testbed.inference.charts import write_inference_charts
    from testbed.inference.report import report
    from testbed.io import holding_together

    for folder, (path, content) in found.items():
        with holding_together(path):
            say(report(content) + "\n")
            for name, written in write_inference_charts(content, folder).items():
                say(f"Saved {name}{'' if name == 'tables' else ' chart'} to {written}")


def write(arguments: argparse.Namespace, runs: list) -> None:
    """Write what was asked for, and say where it is. OSError when that fails."""
    if arguments.output_dir:
        from testbed.analysis.charts.training import write_charts
        from testbed.analysis.runs.load import with_distinct_labels

        single = runs if has_repeats(runs) else with_distinct_labels(runs)
        for name, path in write_charts(single, arguments.output_dir).items():
            say(f"Saved {name} chart to {path}")
    if arguments.report:
        from testbed.analysis.report.build import write_html

        write_html(runs, arguments.report, arguments.target_val_loss, arguments.equivalent)
        say(f"Saved the report to {arguments.report}")
    if arguments.markdown:
        from testbed.analysis.report.build import write_markdown

        write_markdown(runs, arguments.markdown, arguments.target_val_loss, arguments.equivalent)
        say(f"Saved the report to {arguments.markdown}")


@program
def main() -> None:
    arguments = parse_arguments()
    from testbed.analysis.charts.training import comparison_table
    from testbed.analysis.runs import comparability  # numpy and matplotlib: 1 s that --help does not owe
    from testbed.analysis.runs import load as run_files
    from testbed.audit.notes import notes_on_single_runs

    named = arguments.runs or [path for path in (arguments.baseline_json, arguments.optimized_json) if path]
    draws_runs = bool(named or not arguments.inference)
    try:
        runs = named_runs(named)
        if draws_runs and not named:
            runs = runs_under(Path("checkpoint"), "train one with src/gpt2.py, or name runs with --runs DIR")
        inference = named_inference(arguments.inference or [], arguments.output_dir)
        check_outputs(arguments)
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise InputError(f"{error.filename} cannot be read: {error.strerror}") from None
    write_inference(inference)
    if not draws_runs:
        return
    if len(runs) <= COLUMNS:
        labelled = run_files.with_distinct_labels(runs)
        say(comparison_table(labelled, notes_on_single_runs(labelled)) + "\n")
        for warning in comparability.warnings(labelled):
            say(f"Warning: {warning}", file=sys.stderr)
    if has_repeats(runs) or len(runs) > COLUMNS:
        from testbed.analysis.report.build import summary

        say(summary(runs) + "\n")
    write(arguments, runs)


def check_outputs(arguments: argparse.Namespace) -> None:
    """Make the folders to write to. InputError, one sentence, where a flag names what cannot be written."""
    folders = {"--output-dir": arguments.output_dir} if arguments.output_dir else {}
    for flag, path in (("--report", arguments.report), ("--markdown", arguments.markdown)):
        if path and path.is_dir():
            raise InputError(f"{flag} {path} is a directory; name a file in it")
        folders |= {flag: path.parent} if path else {}
    for flag, folder in folders.items():
        if fault := cannot_become_a_folder(folder):
            raise InputError(f"{flag} {folder} {fault}; name another")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fault = f"cannot be a folder to write to ({error.strerror})"
            raise InputError(f"{flag} {folder} {fault}; name another") from None


if __name__ == "__main__":
    sys.exit(main())
