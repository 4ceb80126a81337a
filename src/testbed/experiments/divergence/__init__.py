"""Find the first place where two runs part: fingerprints of each side's steps, and their comparison."""
