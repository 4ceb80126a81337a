"""Readers of the files of other training programs: one file per family of formats.

To add a reader, write a function that takes what foreign.py gives it and returns `Reported` of each run in the file,
and list it: a kind of file in foreign.py's READERS, a text log in TEXT_LOGS of text_logs.py. A format comes from the
code of the program that writes it. Give what is there, and name in `Reported.unread` what was looked for and not found.
Add a real excerpt with its source and licence to tests/support/real_logs, and a row to the table of docs/audit.md.

A reader of a log that prints a line per step fills `lines`, `relations` and `products` (log_lines.py), and the rules
of log_rules.py check each line against the others.
"""
