"""Check that blocks of a page are found, read and replaced, and that nothing else of the page changes."""

import pytest

from testbed.analysis.blocks import filled, names_of_blocks

PAGE = """# Page
before
<!-- made by: scripts/maintain/update_docs.py run types -->
| old |
<!-- end of run types -->
between
<!-- made by: scripts/maintain/update_docs.py sweep -->

<!-- end of sweep -->
after
"""


def test_a_block_is_replaced_and_nothing_else():
    assert names_of_blocks(PAGE) == ["run types", "sweep"]
    page = filled(PAGE, {"run types": r"| \\1 new |", "sweep": "a\nb"})
    assert page == PAGE.replace("| old |", r"| \\1 new |").replace("sweep -->\n\n", "sweep -->\na\nb\n")
    assert filled(page, {"sweep": "a\nb"}) == page, "filling in twice changes nothing"


def test_a_block_without_exactly_one_place_is_refused():
    for page, count in (("# nothing here", 0), (PAGE + PAGE, 2)):
        with pytest.raises(ValueError, match=f"{count} places for 'sweep'"):
            filled(page, {"sweep": "x"})
