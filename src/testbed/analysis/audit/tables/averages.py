"""Tell where a mean of rates stands next to a mean time: the rates' mean is above the rate of the mean time."""

from __future__ import annotations

import math
import re

from testbed.analysis.audit.tables.agreement import Outlier
from testbed.analysis.audit.tables.columns import RATES

MEAN_OF_RATES = math.log(1.05)  # by the variance of the times: here they vary by a fifth
AVERAGE = re.compile(r"(?i)\b(avg|average|mean)\b")


def is_mean_of_rates(one: Outlier) -> bool:
    """Return whether both headings say that they are means, and the row misses in the direction of a mean of rates."""
    headings = {term.column.quantity: term.column.heading for term in one.terms}
    measured = [headings[name] for name in ("step_s", *RATES) if name in headings]
    is_of_means = len(measured) == 2 and "step_s" in headings and all(map(AVERAGE.search, measured))
    return is_of_means and one.agreed[0] < one.high and one.low < one.agreed[1] + MEAN_OF_RATES
