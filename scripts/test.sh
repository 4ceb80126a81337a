#!/usr/bin/env bash
# Everything that must hold: environment, ruff, the whole test suite. Arguments go to pytest.
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
use_environment -r requirements.txt -e '.[test]'
ruff check .
ruff format --check .
python -m pytest "$@"
