# Sourced by the other scripts: a virtual environment with this project in it. Uses the active one, else .venv.
# Called with pip's arguments for what to install.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

needs_python_3_11() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "$1 is $("$1" --version 2>&1); Python 3.11 or newer is needed, name one with PYTHON=..." >&2
        exit 2
    }
}

activate_environment() {
    if [ ! -f "$1/bin/activate" ]; then # written last: without it an earlier try was interrupted
        local python=${PYTHON:-python3}
        needs_python_3_11 "$python"
        echo "making a virtual environment in $1"
        "$python" -m venv "$1"
    fi
    . "$1/bin/activate"
}

use_environment() {
    if [ -z "${VIRTUAL_ENV:-}" ]; then
        activate_environment .venv
    fi
    needs_python_3_11 python
    echo "installing into $VIRTUAL_ENV (the first time takes minutes: PyTorch is large)"
    python -m pip install --quiet --disable-pip-version-check "$@"
    # a build of a DeepSpeed extension that was killed leaves a lock; in a folder of its own it blocks nobody else
    export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$VIRTUAL_ENV/torch_extensions}
}
