#!/usr/bin/env bash
# with_python.sh PYTHON ARGUMENTS...: PYTHON ARGUMENTS, or in words which node has no PYTHON.
command -v "$1" >/dev/null || {
    echo "${SLURMD_NODENAME:-$(hostname)}: there is no $1: install it there, or set PYTHON to one on a file system that the nodes share" >&2
    exit 2
}
exec "$@"
