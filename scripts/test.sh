#!/usr/bin/env bash
# Run what judges a change: ruff, mypy, and the tests that take seconds each. With --all as its first argument: every
# test. Other arguments go to pytest.
#
# `--torch VERSION` before all others runs the tests with that PyTorch, in an environment .venv-torch-VERSION. ruff and
# mypy are left out. pip decides which build it takes: the one for CUDA is a download of 2 to 3 GB with its libraries,
# the one for CPUs 0.2 GB.
. "$(dirname "${BASH_SOURCE[0]}")/maintain/environment.sh"
if [ "${1:-}" = --torch ]; then
    version=${2:-}
    oldest=$(sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
    if ! [[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || ! printf '%s\n' "$oldest" "$version" | sort -VC; then
        echo "--torch '$version' is not a version of three numbers from $oldest on; give one such as $oldest.0" >&2
        exit 2
    fi
    shift 2
    activate_environment ".venv-torch-$version"
    # without the pins that would contradict it: torch itself, and setuptools, of which an older torch needs an older one
    use_environment "torch==$version" -r <(grep -vE '^(torch|setuptools)==|^-e' requirements.txt) -e '.[test]'
else
    use_environment -r requirements.txt -e '.[test]'
    ruff check .
    ruff format --check .
    mypy
fi

NO_TESTS=5 # pytest's exit code where the arguments select none of them
run_tests() {
    local code=0
    python -m pytest "$@" || code=$?
    [ "$code" -eq 0 ] || [ "$code" -eq "$NO_TESTS" ] || exit "$code"
    return "$code"
}
# A file stays in one process, because its tests share launches. tests/conftest.py says which come first. Two cores run
# three files at once: tests wait for ranks that start, and for timeouts, about a third of the time.
processes=$(python -c 'import os; print((os.cpu_count() or 1) * 3 // 2)')
in_parallel() { run_tests -n "$processes" --maxprocesses 8 --dist loadfile --no-loadscope-reorder "$@"; }

found=no
if [ "${1:-}" = --all ]; then
    shift
    in_parallel --hypothesis-profile all -m "not alone" "$@" && found=yes
    # What measures time runs afterwards, with nothing at the same time.
    run_tests --hypothesis-profile all -m alone "$@" && found=yes
else
    in_parallel -m "not slow and not alone" "$@" && found=yes
    echo "Left out: the tests marked slow or alone, and four of five examples of a fuzz."
    echo "Run them with \`bash scripts/test.sh --all\`, or those of one file with \`bash scripts/test.sh --all FILE\`."
fi
if [ "$found" = no ]; then
    echo "no test was selected" >&2
    exit "$NO_TESTS"
fi
