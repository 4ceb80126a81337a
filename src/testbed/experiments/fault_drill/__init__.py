"""Inject faults into runs, resume them, and compare them with a reference run."""
