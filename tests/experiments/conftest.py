"""Share fixtures among the tests of this room."""

from __future__ import annotations

import pytest
from support.lab_links_cases import (
    network_of_this_machine,
)

from testbed.experiments.network_lab import links
from testbed.experiments.network_lab.lab import STATE, known_labs


@pytest.fixture
def nothing_left():
    """What a test of labs must leave as it was."""
    before = known_labs(), sorted(links.NETNS.glob("*")), network_of_this_machine()
    yield
    assert (known_labs(), sorted(links.NETNS.glob("*")), network_of_this_machine()) == before
    assert not [path for path in STATE.glob("*") if path.stem not in before[0]]
