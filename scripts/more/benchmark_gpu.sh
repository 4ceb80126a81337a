#!/usr/bin/env bash
# Measure a GPU machine without a network: scripts/more/benchmark_gpu.py with an interpreter that has PyTorch, which is
# python, else python3, or what PYTHON= names. --help lists the flags.
has_torch() { "$1" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)" 2>/dev/null; }
python=${PYTHON:-python}
[ -n "${PYTHON:-}" ] || has_torch python || python=python3
exec "$python" "$(dirname "${BASH_SOURCE[0]}")/benchmark_gpu.py" "$@"
