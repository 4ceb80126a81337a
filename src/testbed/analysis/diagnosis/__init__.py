"""Say from a run's own file which rank holds it back, and why."""
