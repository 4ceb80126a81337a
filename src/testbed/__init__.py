"""The GPT-2 training testbed: what `src/gpt2.py` and the analysis programs are made of."""

from testbed.program import name_missing_packages

name_missing_packages()  # here, because programs import third-party packages before they call anything


def __getattr__(name: str) -> object:
    """Return `load_run`, for `import testbed; testbed.load_run("checkpoint/baseline").steps` in a notebook."""
    if name == "load_run":
        from testbed.analysis.runs.load import load_run

        return load_run
    raise AttributeError(f"module 'testbed' has no attribute {name!r}")
