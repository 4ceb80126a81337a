"""Share cases among the tests of inference charts."""

from __future__ import annotations

NOTHING_MEASURED = {"schemes": {}, "load": None, "wrapped": None, "data": None}
