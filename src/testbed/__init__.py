"""The GPT-2 training testbed: what `src/gpt2.py` and the analysis programs are made of."""

from testbed.program import name_missing_packages

name_missing_packages()  # here, because programs import third-party packages before they call anything
