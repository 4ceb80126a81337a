"""Types of fields, with the rules for their values."""

import sys
from typing import Annotated, TypeVar

from msgspec import Meta

from testbed.typed_json import LARGEST_COUNT

LARGEST = sys.float_info.max  # neither NaN nor infinity passes a comparison with it

Item = TypeVar("Item")
Whole = Annotated[int, Meta(ge=-LARGEST_COUNT, le=LARGEST_COUNT)]
Count = Annotated[int, Meta(ge=0, le=LARGEST_COUNT)]
Positive = Annotated[int, Meta(ge=1, le=LARGEST_COUNT)]
ZeroStage = Annotated[int, Meta(ge=0, le=3)]
Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
Amount = Annotated[float, Meta(ge=0, le=LARGEST)]
AboveZero = Annotated[float, Meta(gt=0, le=LARGEST)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(min_length=1)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
OneOrMore = Annotated[list[Item], Meta(min_length=1)]
