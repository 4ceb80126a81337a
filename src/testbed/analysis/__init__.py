"""Make comparisons, charts and tables of the files that training wrote. Never imports torch, never parses a log."""
