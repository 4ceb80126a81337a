"""What is made of the files that training wrote: runs, charts, tables. Never imports torch, never parses a log."""
