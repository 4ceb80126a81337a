"""Types of fields, with the rules for their values."""

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar


@dataclass(frozen=True)
class Rule:
    """A rule of JSON Schema for the values of a field."""

    name: str
    value: Any


Item = TypeVar("Item")
Count = Annotated[int, Rule("minimum", 0)]
Positive = Annotated[int, Rule("minimum", 1)]
ZeroStage = Annotated[int, Rule("minimum", 0), Rule("maximum", 3)]
Amount = Annotated[float, Rule("minimum", 0)]
AboveZero = Annotated[float, Rule("exclusiveMinimum", 0)]
Fraction = Annotated[float, Rule("minimum", 0), Rule("maximum", 1)]
Name = Annotated[str, Rule("minLength", 1)]
Sha256 = Annotated[str, Rule("pattern", "^[0-9a-f]{64}$")]
OneOrMore = Annotated[list[Item], Rule("minItems", 1)]
