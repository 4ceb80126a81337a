"""List the audit's rules for tables of published figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from testbed.audit.finding import Finding
from testbed.audit.reported import Reported
from testbed.audit.tables.column_ratios import ratios_follow_from_two_columns
from testbed.audit.tables.formula_rules import figures_follow_from_one_another
from testbed.audit.tables.limit_rules import (
    a_measurement_is_not_two_rows,
    averages_are_between_their_ends,
    batches_are_of_whole_micro_batches,
    flops_are_at_most_the_peak,
    memory_holds_the_weights,
    shares_are_at_most_one,
)
from testbed.audit.tables.ratio_rules import scaled_rows_do_the_same_work
from testbed.audit.tables.read import FORM
from testbed.audit.tables.shape_rules import rates_follow_from_the_size
from testbed.audit.tables.swapped import headings_are_not_swapped

# rule -> the forms of files that it reads
TABLE_RULES: dict[Callable[[Reported], Iterator[Finding]], tuple[str, ...]] = {
    figures_follow_from_one_another: (FORM,),
    ratios_follow_from_two_columns: (FORM,),
    headings_are_not_swapped: (FORM,),
    scaled_rows_do_the_same_work: (FORM,),
    batches_are_of_whole_micro_batches: (FORM,),
    averages_are_between_their_ends: (FORM,),
    shares_are_at_most_one: (FORM,),
    flops_are_at_most_the_peak: (FORM,),
    rates_follow_from_the_size: (FORM,),
    memory_holds_the_weights: (FORM,),
    a_measurement_is_not_two_rows: (FORM,),
}
