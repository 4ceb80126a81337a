"""The GPT-2 training testbed: what `src/gpt2.py` and the analysis programs are made of."""
