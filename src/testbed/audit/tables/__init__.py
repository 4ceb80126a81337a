"""Audit tables of published figures: what does not follow from the rest, and what differs behind a ratio.

grid.py reads the tables of a file, columns.py names their columns, told.py says which rows a text is about,
words.py what it says of them, rows.py takes a row as one side of a claim, rules.py checks them.
"""
