"""Draw charts of runs from their training_metrics.json files and print a table that compares them."""

import argparse
import sys
from pathlib import Path


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Without runs: every training_metrics.json under checkpoint/. Reads the versions 1, 2.0 and 2.1. "
        "Exit code 2: something that was typed is wrong; 1: writing failed.",
    )
    which = parser.add_argument_group("which runs (a training_metrics.json, or the directory that holds one)")
    which.add_argument("--baseline-json", type=Path, metavar="FILE", help="first run; speed-ups are against it")
    which.add_argument("--optimized-json", type=Path, metavar="FILE", help="second run")
    which.add_argument("--runs", type=Path, nargs="+", metavar="DIR", help="any number of runs instead of these two")
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("docs/charts"),
        metavar="DIR",
        help="PNG files go here (default: %(default)s)",
    )
    arguments = parser.parse_args()
    if arguments.runs and (arguments.baseline_json or arguments.optimized_json):
        parser.error("--runs names all runs; leave out --baseline-json and --optimized-json")
    if bool(arguments.baseline_json) != bool(arguments.optimized_json):
        given, missing = "--baseline-json", "--optimized-json"
        if not arguments.baseline_json:
            given, missing = missing, given
        parser.error(f"{given} needs {missing} beside it; for one run alone use --runs DIR")
    return arguments


def runs_under(directory: Path) -> list:
    """Every run below `directory` that can be read; one that cannot is named on stderr, so that it blocks no other."""
    from testbed.analysis import runs as run_files

    runs = []
    for path in run_files.find_runs(directory):
        try:
            runs.append(run_files.load_run(path))
        except ValueError as error:
            print(f"Warning: left out: {error}", file=sys.stderr)
    if not runs:
        raise ValueError(f"no run found under {directory}/: train one with src/gpt2.py, or name runs with --runs DIR")
    return run_files.with_distinct_labels(runs)


def main() -> int:
    arguments = parse_arguments()
    from testbed.analysis import runs as run_files  # numpy and matplotlib: 1 s that --help does not owe

    named = arguments.runs or [path for path in (arguments.baseline_json, arguments.optimized_json) if path]
    try:
        runs = run_files.load_runs(named) if named else runs_under(Path("checkpoint"))
    except ValueError as error:
        print(f"generate_charts.py: error: {error}", file=sys.stderr)
        return 2

    from testbed.analysis.charts import comparison_table, write_charts

    print(comparison_table(runs))
    print()
    for warning in run_files.warnings(runs):
        print(f"Warning: {warning}", file=sys.stderr)
    try:
        arguments.output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(
            f"generate_charts.py: error: --output-dir {arguments.output_dir} cannot be a folder to write to "
            f"({error.strerror}); name another",
            file=sys.stderr,
        )
        return 2
    try:
        saved = write_charts(runs, arguments.output_dir)
    except OSError as error:
        print(
            f"generate_charts.py: error: charts could not be written to {arguments.output_dir}: {error}",
            file=sys.stderr,
        )
        return 1
    for name, path in saved.items():
        print(f"Saved {name} chart to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
