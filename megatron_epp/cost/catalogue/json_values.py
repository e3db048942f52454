"""Conversion of values to JSON and back: dataclasses and mappings become objects."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args

from megatron_epp.ir.errors import quoted


def json_value(value: Any) -> Any:
    """Return ``value`` as a JSON value; mapping keys that are Enum members become their values."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: json_value(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {
            key.value if isinstance(key, Enum) else str(key): json_value(item)
            for key, item in value.items()
        }
    return value


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a value in addition to its type.

    Attributes:
        least: lower bound of every number in the value.
        most: upper bound of every number in the value.
        keys: valid keys of a mapping, by the text that stands for each of them in JSON.
        some: whether a mapping may lack some of these keys.
    """

    least: float = 0
    most: float = math.inf
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    some: bool = False


def read_value(kind: Any, value: Any, limits: Limits) -> Any:
    """Return a JSON ``value`` as the type ``kind``.

    Args:
        kind: a dataclass, Mapping, tuple of any length, number, bool or str.
        value: JSON value.
        limits: limits of numbers and keys in the value.

    Raises:
        ValueError: the value does not fit; the message names what was expected.
    """
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        fields = {field.name: field.type for field in dataclasses.fields(kind)}
        if not isinstance(value, dict) or set(value) != set(fields):
            raise ValueError(f"expected an object with {', '.join(sorted(fields))}")
        return kind(**{name: read_value(fields[name], value[name], limits) for name in fields})
    if get_args(kind)[1:] == (...,):
        if not isinstance(value, list):
            raise ValueError(f"{quoted(value)}: expected a list")
        return tuple(read_value(get_args(kind)[0], each, limits) for each in value)
    if get_args(kind):
        there = set(value) if isinstance(value, dict) else {None}
        if not (there <= set(limits.keys) if limits.some else there == set(limits.keys)):
            some = "some of " if limits.some else ""
            raise ValueError(f"expected an object with {some}{', '.join(limits.keys)}")
        _, of = get_args(kind)
        return {limits.keys[name]: read_value(of, item, limits) for name, item in value.items()}
    if kind is bool or kind is str:
        if not isinstance(value, kind):
            what = "true or false" if kind is bool else "a text"
            raise ValueError(f"{quoted(value)}: expected {what}")
        return value
    wanted = int if kind is int else int | float
    if (
        not isinstance(value, wanted)
        or isinstance(value, bool)
        or not limits.least <= value < 1e308
    ):
        what = "whole number" if kind is int else "number"
        raise ValueError(f"{quoted(value)}: expected a {what} of at least {limits.least:g}")
    if value > limits.most:
        raise ValueError(f"{quoted(value)}: expected at most {limits.most:g}")
    return kind(value)
