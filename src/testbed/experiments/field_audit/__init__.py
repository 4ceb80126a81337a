"""Audit public tables and logs: what the audit finds on files that its authors did not write, and how often it errs.

- material.py lists the files by repository, commit and sha256, and gets each once.
- examine.py audits each file alone. review.py reads the verdicts of a review by hand, and draws what to review next.
- planting.py changes single figures of real files and counts those that are found. mutation.py breaks files.
- page.py writes the blocks of docs/audits.
"""
