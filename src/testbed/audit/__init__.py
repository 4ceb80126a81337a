"""Findings on which comparison the files of runs allow, and which they contradict, each under the rule that it breaks.

To add a rule, write one function and list it in the table at the end of its file, with the forms of files it reads:

- run_rules.py, METRICS_RULES: a training_metrics.json against itself.
- foreign_rules.py, FOREIGN_RULES: the files of another program, or of any, against themselves.
- tables/rules.py, TABLE_RULES: a table of published figures against itself.
- comparison_rules.py: CONDITION_RULES, whether one arm and the baseline did equal work, on one code and equal devices;
  ARITHMETIC_RULES, what the figures of both contradict together.

A rule takes what was read (`Reported`), a table (`Grid`) or the two sides of a claim (`Claim`). It yields
`item.fails(Rule.X, ...)` where a claim does not stand and `item.notes(Rule.X, ...)` where something is pointed out,
with the corrected figure if the files give one. `item.cannot_tell(Rule.X, message, names...)` is about what no file
records: page.py puts all such names into one paragraph. A rule says nothing about what is None.
The names of the rules stand in finding.py, what each finds in docs/audit.md (add its row). tests/support/audit_cases.py
has a fault of each kind and its sound twin.

conditions.py reads every condition of two sides (FACTS), measures.py their ratios, answer.py gives the verdict on a
claim. To add a condition, add its row to FACTS: rules, the page of a claim and the rows of tables then have it.

readers.py says what reads which file: earlier.py the files of the five earlier projects, logs.py the logs of other
programs by one table of patterns, curves.py curves, tables/ tables. To add a format, give what is there.
"""
