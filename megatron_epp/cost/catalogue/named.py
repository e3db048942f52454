"""Lookup of models, devices and other values by name or in a JSON file."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from megatron_epp.flag_fields import did_you_mean
from megatron_epp.ir.errors import quoted
from megatron_epp.safe_files import read_bounded

_MOST_BYTES = 16 << 20  # a profile takes 5 KB
_CURE = {
    "model": "give a name that --help lists, or a file that describes the model's shape",
    "device": "give a name that --help lists, or a file that describes the device",
    "topology": "give a name that --help lists, or a file that describes how devices are joined",
    "profile": "`python -m megatron_epp profile` measures one and writes it",
}


def pick[T](what: str, name: str, known: Mapping[str, T], kind: type[T]) -> T:
    """Return the value of ``name`` in ``known``, or the value in the JSON file at ``name``.

    A name that ends in .json or contains a slash is a file.

    Args:
        what: kind of value ("model", "device"), named in error messages.
        name: name or path.
        known: values by name.
        kind: dataclass of the value in a file.

    Raises:
        ValueError: the name is unknown (the message suggests similar names), or the file is
            invalid.
    """
    if name in known:
        return known[name]
    if name.endswith(".json") or "/" in name:
        return from_json(f"{what} file {name}", read_json(what, name), kind)
    hint = did_you_mean(name, known, f"known: {', '.join(known)}.", most=3, cutoff=0.4)
    raise ValueError(f"unknown {what} {quoted(name)}; {hint} A JSON file's path is taken too.")


def unknown_name(what: str, name: str, known: Iterable[str], *others: str) -> str:
    """Return an error line with names similar to ``name``, then all valid names.

    Args:
        what: kind of value that was looked up, named in the line.
        name: name that is unknown.
        known: valid names; similar ones are suggested.
        *others: other valid names, which are never suggested.
    """
    names = list(known)
    near = did_you_mean(name, names, most=2)
    hint = f"; {near}" if near else "."
    return f"unknown {what} {quoted(name)}{hint} Known: {', '.join((*names, *others))}"


def read_json(what: str, path: str) -> Any:
    """Return the value in the JSON file at ``path``; ``what`` names its kind in errors.

    Raises:
        ValueError: the file cannot be read or is not JSON; the message is one line.
    """
    try:
        data = read_bounded(path, _MOST_BYTES, "a description in JSON")
        return json.loads(data.decode(), parse_constant=_no_constant, parse_int=_int)
    except FileNotFoundError as error:
        raise ValueError(f"{what} file {path}: No such file; {_CURE[what]}") from error
    except OSError as error:
        raise ValueError(f"{what} file {path}: {error.strerror or error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{what} file {path}: no JSON ({error})") from error
    except ValueError as error:
        raise ValueError(f"{what} file {path}: {error}") from error


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number")


def _int(digits: str) -> int:
    """Parse an integer of at most 30 digits; products of larger integers may not fit a float."""
    if len(digits) > 30:
        raise ValueError(f"a whole number of {len(digits)} digits: expected at most 30")
    return int(digits)


def from_json[T](where: str, value: Any, kind: type[T]) -> T:
    """Return an instance of the dataclass ``kind`` from a JSON object with its fields.

    Fields with a default may be missing.

    Raises:
        ValueError: the object does not fit; the message starts with ``where``.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in value:
        if key not in fields:
            hint = did_you_mean(key, fields, f"known: {', '.join(fields)}")
            raise ValueError(f"{where}: unknown field {quoted(key)}; {hint}")
    lacking = [
        name
        for name, field in fields.items()
        if name not in value
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if lacking:
        raise ValueError(f"{where}: lacks {', '.join(lacking)}")
    try:
        return kind(**value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error
