"""Audit tables of published figures, in Markdown or CSV: what of a row does not follow from the rest of it.

- grid.py and html.py read the tables of a file, turned.py turns one whose metrics stand in rows. figures.py reads a
  cell, with the interval that its digits leave open.
- columns.py names the quantity of a column by its heading, or by `--columns`; counts.py reads devices from labels.
  read.py puts them together.
- relations.py lists the formulas. agreement.py says which rows contradict one (fits.py, intervals.py), explanations.py
  what the table says that explains them, formula_rules.py makes the findings.
- column_ratios.py checks columns that compare two others, shape_rules.py rates against a model's size (peaks.py).
- limit_rules.py holds what no row can exceed. ratio_rules.py compares the rows of a ratio, swapped.py their headings.

To add a quantity, list its heading in columns.py. To add a formula, list it in relations.py with every convention that
is in use: a row is only reported where all of them fail.
"""
