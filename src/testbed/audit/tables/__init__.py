"""Audit tables of published figures, in Markdown, HTML or CSV: what of a row does not follow from the rest of it.

grid.py reads the tables of a file, columns.py names their columns and reads their figures, rules.py checks them.
"""
