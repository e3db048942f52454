"""The profile: the one form that every cost model takes, as a value and as readable JSON.

A profile speaks of one layer, and of what the first and the last stage do besides. Everything in
it is linear: seconds in a chunk's tokens and in its query-key pairs, bytes in its tokens. Its
figures are of one device where a layer is spread over ``tp * cp`` devices; other degrees scale.
Analytic profiles come from :mod:`megatron_epp.cost.analytic`, measured ones from
:mod:`megatron_epp.cost.fit`.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_epp.cost.named import read_json
from megatron_epp.ir import COMPUTE, FULL, KEEP, SELECTIVE, Kind

VERSION = 1
_DEGREE = re.compile(r"[1-9][0-9]{0,6}")
LETTERS = (KEEP, FULL, *SELECTIVE)


def _check_numbers(value: Any) -> None:
    for field in dataclasses.fields(value):
        number = getattr(value, field.name)
        if (
            not isinstance(number, int | float)
            or isinstance(number, bool)
            or not math.isfinite(number)
            or number < 0
        ):
            raise ValueError(f"{field.name} {number!r}: expected a number of at least 0")


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of some work: per_token * tokens + per_pair * query-key pairs + per_chunk."""

    per_token: float = 0.0
    per_pair: float = 0.0
    per_chunk: float = 0.0

    def __post_init__(self):
        _check_numbers(self)

    def __call__(self, tokens: float, pairs: float) -> float:
        return self.per_token * tokens + self.per_pair * pairs + self.per_chunk


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of some tensors: ``per_token``, ``per_cut_token`` of a slice whose K and V are kept.

    They differ because the K and V that later slices attend to lie in the document's own buffer.
    """

    per_token: float = 0.0
    per_cut_token: float = 0.0

    def __post_init__(self):
        _check_numbers(self)

    def __call__(self, tokens: float, cut_tokens: float) -> float:
        """Of a chunk of ``tokens``, ``cut_tokens`` of which have their K and V kept."""
        return self.per_token * (tokens - cut_tokens) + self.per_cut_token * cut_tokens


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of weights, gradients and optimizer per parameter.

    zero1_resident   on every device of the stage under ZeRO 1: weights and gradients
    zero1_sharded    spread over cp * dp under ZeRO 1: the optimizer's
    zero3_sharded    everything, spread over cp * dp under ZeRO 3
    zero3_gathered   of one gathered layer under ZeRO 3
    zero3_layers     how many layers are gathered at once under ZeRO 3
    """

    zero1_resident: float
    zero1_sharded: float
    zero3_sharded: float
    zero3_gathered: float
    zero3_layers: float

    def __post_init__(self):
        _check_numbers(self)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a profile comes from.

    model    its name, or the shape that was measured
    device   its name
    dtype    of the activations
    date     YYYY-MM-DD
    source   "analytic: ..." or "measured: ...", with what it rests on
    """

    model: str
    device: str
    dtype: str
    date: str
    source: str

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if not isinstance(getattr(self, field.name), str):
                raise ValueError(f"{field.name}: expected a text")


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds and bytes of a layer, and of the pipeline's ends.

    tp, cp                        degrees over which a layer was spread for these figures
    layer_seconds[kind]           of one layer: F; B without recompute; I and W, its halves
    first_seconds[kind]           besides, on the first stage: the embedding
    last_seconds[kind]            besides, on the last stage: output layer and loss
    recompute_seconds[letter]     added to B or I, of one layer with that recompute choice
    gather_seconds[kind]          of one layer and chunk under ZeRO 3: parameter gathers
    saved_bytes[letter]           one layer holds from F to B, K and V of cut documents apart
    first_bytes, last_bytes       besides, on the first and last stage, from F to B (logits)
    kv_bytes_per_token            K and V of one layer, of a cut document's context
    keeps_last                    whether the context's buffer has room for the last slice's K and
                                  V, too, which are then not saved with their chunk
    kv_gradient_bytes_per_token   their gradients, which add up in float32
    weight_input_bytes            one layer holds from I to W
    last_weight_input_bytes       besides, on the last stage: the output layer
    workspace_bytes[kind]         while an op runs, on any stage, whatever its layers
    last_workspace_bytes[kind]    besides, on the last stage
    last_workspace_tokens         of so many of the chunk's tokens at most; 0: of all of them
    recompute_workspace_bytes     while a B or I runs that recomputes: letter -> of the one layer
                                  that lives again
    all_to_all_bytes_per_token    one layer's forward hands over inside a CP group, all devices
                                  together; backward as much
    all_to_all_bytes_per_second   by CP degree
    tensor_bytes_per_token        one layer's forward moves inside a TP group; backward as much
    tensor_bytes_per_second       by TP degree
    link_seconds_per_token        a message occupies the link between two stages
    link_latency_seconds          of every message
    layer_parameters, first_parameters, last_parameters
    states                        bytes per parameter
    host_bytes_per_second         between one device and its host's memory, one direction; 0: not
                                  known, nothing can be offloaded
    """

    provenance: Provenance
    tp: int
    cp: int
    layer_seconds: Mapping[Kind, Seconds]
    first_seconds: Mapping[Kind, Seconds]
    last_seconds: Mapping[Kind, Seconds]
    recompute_seconds: Mapping[str, Seconds]
    gather_seconds: Mapping[Kind, float]
    saved_bytes: Mapping[str, Bytes]
    first_bytes: Bytes
    last_bytes: Bytes
    kv_bytes_per_token: float
    keeps_last: bool
    kv_gradient_bytes_per_token: float
    weight_input_bytes: Bytes
    last_weight_input_bytes: Bytes
    workspace_bytes: Mapping[Kind, Bytes]
    last_workspace_bytes: Mapping[Kind, Bytes]
    last_workspace_tokens: float
    recompute_workspace_bytes: Mapping[str, Bytes]
    all_to_all_bytes_per_token: float
    all_to_all_bytes_per_second: Mapping[int, float]
    tensor_bytes_per_token: float
    tensor_bytes_per_second: Mapping[int, float]
    link_seconds_per_token: float
    link_latency_seconds: float
    layer_parameters: float
    first_parameters: float
    last_parameters: float
    states: States
    host_bytes_per_second: float = 0.0

    def to_json(self) -> str:
        """Readable text; ``from_json(to_json()) == self``."""
        return json.dumps({"profile": VERSION, **_plain(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "the text") -> "Profile":
        """The profile that ``text`` describes; a ValueError in one line says what is wrong."""
        try:
            return _profile(json.loads(text), where)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"profile file {where}: no JSON ({error})") from error

    @classmethod
    def load(cls, path: str) -> "Profile":
        return _profile(read_json("profile", path), path)

    def save(self, path: str) -> None:
        Path(path).write_text(self.to_json(), encoding="utf-8")


def _plain(value: Any) -> Any:
    """``value`` as JSON knows it: dataclasses as objects, kinds as their letters."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {
            key.value if isinstance(key, Kind) else str(key): _plain(item)
            for key, item in value.items()
        }
    return value


def _number(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
        if math.isfinite(number) and number >= 0:
            return number
    raise ValueError(f"{value!r}: expected a number of at least 0")


def _degree(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{value!r}: expected a whole number of at least 1")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r}: expected true or false")
    return value


def _flat[T](kind: type[T]) -> Callable[[Any], T]:
    """Reads a flat dataclass from an object with exactly its fields."""

    def read(value: Any) -> T:
        names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        if not isinstance(value, dict) or set(value) != names:
            raise ValueError(f"expected an object with {', '.join(sorted(names))}")
        return kind(**value)

    return read


def _by(keys: tuple, names: tuple[str, ...], read: Callable[[Any], Any]) -> Callable[[Any], dict]:
    """Reads an object that has every one of ``names`` as a mapping from ``keys``."""

    def read_all(value: Any) -> dict:
        if not isinstance(value, dict) or set(value) != set(names):
            raise ValueError(f"expected an object with {', '.join(names)}")
        return {key: read(value[name]) for key, name in zip(keys, names, strict=True)}

    return read_all


def _by_degree(value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or not all(_DEGREE.fullmatch(key) for key in value):
        raise ValueError("expected an object from degree to bytes per second")
    rates = {int(key): _number(item) for key, item in value.items()}
    if min(rates.values(), default=1.0) < 1:
        raise ValueError("expected rates of at least 1")
    return rates


def _by_kind(read: Callable[[Any], Any]) -> Callable[[Any], dict]:
    return _by(COMPUTE, tuple(kind.value for kind in COMPUTE), read)


def _by_letter(read: Callable[[Any], Any]) -> Callable[[Any], dict]:
    return _by(LETTERS, LETTERS, read)


_SECONDS, _BYTES = _flat(Seconds), _flat(Bytes)
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "provenance": _flat(Provenance),
    "tp": _degree,
    "cp": _degree,
    "layer_seconds": _by_kind(_SECONDS),
    "first_seconds": _by_kind(_SECONDS),
    "last_seconds": _by_kind(_SECONDS),
    "recompute_seconds": _by_letter(_SECONDS),
    "gather_seconds": _by_kind(_number),
    "saved_bytes": _by_letter(_BYTES),
    "first_bytes": _BYTES,
    "last_bytes": _BYTES,
    "keeps_last": _flag,
    "weight_input_bytes": _BYTES,
    "last_weight_input_bytes": _BYTES,
    "workspace_bytes": _by_kind(_BYTES),
    "last_workspace_bytes": _by_kind(_BYTES),
    "recompute_workspace_bytes": _by_letter(_BYTES),
    "all_to_all_bytes_per_second": _by_degree,
    "tensor_bytes_per_second": _by_degree,
    "states": _flat(States),
}


def _profile(value: Any, where: str) -> Profile:
    if not isinstance(value, dict) or "profile" not in value:
        raise ValueError(f"profile file {where}: expected an object with 'profile': {VERSION}")
    if value["profile"] != VERSION:
        raise ValueError(
            f"profile file {where}: version {value['profile']!r}; this program reads {VERSION}: "
            "measure again with `python -m megatron_epp profile`"
        )
    names = {field.name: field.default for field in dataclasses.fields(Profile)}
    # Fields with a default are younger than the first files.
    optional = {name for name, at in names.items() if at is not dataclasses.MISSING}
    if wrong := sorted((names.keys() ^ (value.keys() - {"profile"})) - (optional - value.keys())):
        what = "unknown" if wrong[0] in value else "lacks"
        raise ValueError(f"profile file {where}: {what} {wrong[0]}")
    fields = {}
    for name in [name for name in names if name in value]:
        try:
            fields[name] = _READERS.get(name, _number)(value[name])
            _require_sense(name, fields[name])
        except (ValueError, TypeError) as error:
            raise ValueError(f"profile file {where}: {name}: {error}") from error
    return Profile(**fields)


# The most of any figure, by the end of its name: far above what a machine does, and so far below
# what a float holds that sums over a batch stay finite. Rates, parameters and all others: _MOST.
_MOST_SECONDS, _MOST_BYTES_OF_A_TOKEN, _MOST = 1e3, 1e12, 1e24


def _require_sense(name: str, value: Any) -> None:
    """Refuse figures that no measurement gives: no time at all, or more than sums can hold."""
    most = _MOST
    if "seconds" in name and "per_second" not in name:
        most = _MOST_SECONDS
    elif "bytes" in name and "per_second" not in name:
        most = _MOST_BYTES_OF_A_TOKEN
    for number in _numbers(value):
        if number > most:
            raise ValueError(f"{number!r}: expected at most {most:g}")
    if name == "layer_seconds":
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            if not (value[kind].per_token or value[kind].per_pair):
                raise ValueError(
                    f"{kind.value}: a token takes no time; expected per_token or per_pair above 0"
                )


def _numbers(value: Any) -> Iterator[float]:
    """Every figure within ``value``."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _numbers(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _numbers(item)
    elif isinstance(value, int | float):
        yield value
