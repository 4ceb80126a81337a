#!/usr/bin/env bash
# Everything that must hold: environment, ruff, the whole test suite. Arguments go to pytest.
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
use_environment -r requirements.txt -e '.[test]'
ruff check .
ruff format --check .

NO_TESTS=5 # pytest's exit code where the arguments select none of them
run_tests() {
    local code=0
    python -m pytest "$@" || code=$?
    [ "$code" -eq 0 ] || [ "$code" -eq "$NO_TESTS" ] || exit "$code"
    return "$code"
}
# A file stays in one process, because its tests share launches. What measures time runs afterwards, with nothing beside it.
run_tests -n auto --maxprocesses 8 --dist loadfile -m "not alone" "$@" && found=yes || found=no
run_tests -m alone "$@" && found=yes
if [ "$found" = no ]; then
    echo "no test was selected" >&2
    exit "$NO_TESTS"
fi
