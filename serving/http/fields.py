"""Kinds of request fields: each checks one value and describes itself in OpenAPI, from the same numbers."""

import math
from dataclasses import dataclass
from typing import Any

from serving.http.errors import describe, invalid_value

MAX_INT = 2**63 - 1


@dataclass(frozen=True, slots=True)
class IntegerField:
    """A whole number in low..high. JSON's true, 3.0 and "3" are not whole numbers."""

    about: str
    low: int
    high: int = MAX_INT
    default: int | None = None

    def check(self, name: str, value: object) -> int:
        """Returns the value, or raises the ApiError that names the field."""
        if not isinstance(value, int) or isinstance(value, bool):
            raise invalid_value(name, f"{name} must be an integer, got {describe(value)}")
        if not self.low <= value <= self.high:
            is_open = self.high == MAX_INT and value < self.low
            span = f"at least {self.low}" if is_open else f"in {self.low}..{self.high}"
            raise invalid_value(name, f"{name} must be {span}, got {describe(value)}")
        return value

    def schema(self) -> dict[str, Any]:
        """Returns the OpenAPI schema."""
        # JSON Schema's numbers may be floats, which 2^63 - 1 is not one of: the format says the same exactly.
        high = {"format": "int64"} if self.high == MAX_INT else {"maximum": self.high}
        return {"type": "integer", "description": self.about, "minimum": self.low, **high, **_default(self.default)}


@dataclass(frozen=True, slots=True)
class NumberField:
    """A finite number between low and high; `is_low_open` leaves low itself out."""

    about: str
    low: float
    high: float
    default: float
    is_low_open: bool = False

    def check(self, name: str, value: object) -> float:
        """Returns the value as a float, or raises the ApiError that names the field."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise invalid_value(name, f"{name} must be a number, got {describe(value)}")
        is_above_low = value > self.low if self.is_low_open else value >= self.low
        # A whole number too large for a float fails the comparison with `high` before it is converted.
        if not (is_above_low and value <= self.high and math.isfinite(value)):
            span = f"{'(' if self.is_low_open else '['}{self.low:g}, {self.high:g}]"
            raise invalid_value(name, f"{name} must be in {span}, got {describe(value)}")
        return float(value)

    def schema(self) -> dict[str, Any]:
        """Returns the OpenAPI schema."""
        low = "exclusiveMinimum" if self.is_low_open else "minimum"
        limits = {low: self.low, "maximum": self.high}
        return {"type": "number", "description": self.about, **limits, **_default(self.default)}


@dataclass(frozen=True, slots=True)
class FlagField:
    """true or false, by default false."""

    about: str
    default: bool = False

    def check(self, name: str, value: object) -> bool:
        """Returns the value, or raises the ApiError that names the field."""
        if not isinstance(value, bool):
            raise invalid_value(name, f"{name} must be true or false, got {describe(value)}")
        return value

    def schema(self) -> dict[str, Any]:
        """Returns the OpenAPI schema."""
        return {"type": "boolean", "description": self.about, "default": self.default}


@dataclass(frozen=True, slots=True)
class ChoiceField:
    """One of a few words, by default the first."""

    about: str
    choices: tuple[str, ...]

    @property
    def default(self) -> str:
        return self.choices[0]

    def check(self, name: str, value: object) -> str:
        """Returns the value, or raises the ApiError that names the field."""
        if not isinstance(value, str) or value not in self.choices:
            expected = " or ".join(f'"{choice}"' for choice in self.choices)
            raise invalid_value(name, f"{name} must be {expected}, got {describe(value)}")
        return value

    def schema(self) -> dict[str, Any]:
        """Returns the OpenAPI schema."""
        words = list(self.choices)
        return {"type": "string", "enum": words, "description": self.about, "default": self.default}


Field = IntegerField | NumberField | FlagField | ChoiceField


def _default(value: float | None) -> dict[str, Any]:
    return {} if value is None else {"default": value}
