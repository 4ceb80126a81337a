"""What ranks are said to hold alike is compared before one rank's values are saved."""

from __future__ import annotations

import pytest


@pytest.mark.launches
def test_ranks_that_hold_other_values_of_one_name_save_nothing(ranks, tmp_path):
    """One bit, the order of two elements. What one rank alone has is not compared."""
    equal, one_bit, swapped, stages, kept, while_saving = ranks.run("support.state_worker", tmp_path, [], 2)
    assert equal == stages == [None, None]
    for refused, name in ((one_bit, "model.a"), (swapped, "model.b")):
        assert refused[0] == refused[1], "every rank is told the same"
        assert f"ranks 0 and 1 hold different values of {name}," in refused[0]
        assert "Resume from the last checkpoint" in refused[0]
    assert kept == [True, True], "a state of each rank comes back on that rank"
    assert while_saving == [None, None], "compared while a checkpoint is written in the background"
