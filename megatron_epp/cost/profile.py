"""Profile: the coefficients of a cost model, as a value and as readable JSON.

A profile describes one layer of every kind of the model, and the additional work of the first and
last stage. Seconds are linear in a chunk's tokens and query-key pairs (within the kind's window).
Bytes are linear in a chunk's tokens; the workspace of an op is also linear in the context tokens
before the chunk. Unless an attribute says otherwise, coefficients are for one device with a layer
sharded over ``tp * cp`` devices; other parallel sizes scale them. Analytic profiles come from
:mod:`megatron_epp.cost.analytic`, measured profiles from :mod:`megatron_epp.cost.fitting.fit`.

The JSON form (version 5) contains every field. The top-level object contains the coefficients of
the first kind, of the embedding and of the LM head; ``other_kinds`` contains the other kinds.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args

from megatron_epp.cost.catalogue.named import read_json
from megatron_epp.cost.columns import CONTEXT, DIAGONALS, Column, WindowPairs
from megatron_epp.cost.kinds import layer
from megatron_epp.cost.loads import pairs_within
from megatron_epp.ir import FULL, KEEP, OF_HEAD, OF_LAYERS, SELECTIVE, Kind, Span
from megatron_epp.ir.errors import quoted, require_line
from megatron_epp.safe_files import replace_file

VERSION = 5
ALLTOALL, FLEX = DISPATCHERS = ("alltoall", "flex")  # as Megatron calls them
ColumnSeconds = Mapping[Column, Mapping[Kind, float]]
_DEGREE = re.compile(r"[1-9][0-9]{0,6}")
MODES = (KEEP, FULL, *SELECTIVE)


@dataclass(frozen=True, slots=True)
class _Coefficients:
    """Base of classes whose fields are all numbers of at least 0."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            number = getattr(self, field.name)
            known = isinstance(number, int | float) and not isinstance(number, bool)
            if not (known and math.isfinite(number) and number >= 0):
                raise ValueError(f"{field.name} {quoted(number)}: expected a number of at least 0")


@dataclass(frozen=True, slots=True)
class Seconds(_Coefficients):
    """Seconds of some work: per_token * tokens + per_pair * query-key pairs + per_chunk."""

    per_token: float = 0.0
    per_pair: float = 0.0
    per_chunk: float = 0.0

    def __call__(self, tokens: float, pairs: float) -> float:
        """Return the seconds of a chunk of ``tokens`` and query-key ``pairs``."""
        return self.per_token * tokens + self.per_pair * pairs + self.per_chunk

    def __mul__(self, factor: float) -> "Seconds":
        return Seconds(self.per_token * factor, self.per_pair * factor, self.per_chunk * factor)


@dataclass(frozen=True, slots=True)
class Bytes(_Coefficients):
    """Bytes of some tensors: per token, and per token whose K and V are cached (cut token).

    These two differ because the K and V that later slices attend to are in a buffer of the
    document, not in these tensors.
    """

    per_token: float = 0.0
    per_cut_token: float = 0.0

    def __call__(self, tokens: float, cut_tokens: float) -> float:
        """Return the bytes of a chunk; ``cut_tokens`` of its ``tokens`` have cached K and V."""
        return self.per_token * (tokens - cut_tokens) + self.per_cut_token * cut_tokens


@dataclass(frozen=True, slots=True)
class Workspace(Bytes):
    """Bytes that exist while one op runs, in addition to the bytes that its chunk holds.

    Attributes:
        per_context_token: bytes per token of the document before the slice, for example because a
            kernel call computes gradients of K and V for all keys at once.
        per_op: bytes independent of the chunk, such as a weight's gradient before it is
            accumulated, or a kernel's minimum workspace. One op runs at a time, so a stage's budget
            includes them once.
    """

    per_context_token: float = 0.0
    per_op: float = 0.0


@dataclass(frozen=True, slots=True)
class States(_Coefficients):
    """Bytes of weights, gradients and optimizer states per parameter.

    Attributes:
        zero1_resident: with ZeRO 1, weights and gradients, which every device of the stage holds.
        zero1_sharded: with ZeRO 1, optimizer states, sharded over all devices with equal weights.
        zero3_sharded: with ZeRO 3, all model states, sharded in the same way.
        zero3_gathered: with ZeRO 3, weights of a gathered layer.
        zero3_layers: with ZeRO 3, number of layers that are gathered at a time.
    """

    zero1_resident: float
    zero1_sharded: float
    zero3_sharded: float
    zero3_gathered: float
    zero3_layers: float


MEASURED, ANALYTIC = "measured", "analytic"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Origin of a profile.

    Attributes:
        model: name of the model, or the shape that was measured.
        device: name of the device.
        dtype: data type of the activations.
        date: YYYY-MM-DD.
        source: basis of the coefficients, as text for readers.
        kind: "measured": valid for that model and device only; "analytic": computed.

    Raises:
        ValueError: a text is not one printable line, or ``kind`` has another value.
    """

    model: str
    device: str
    dtype: str
    date: str
    source: str
    kind: str

    def __post_init__(self):
        for field in dataclasses.fields(self):
            require_line(field.name, getattr(self, field.name))
        if self.kind not in (MEASURED, ANALYTIC):
            raise ValueError(f"kind {quoted(self.kind)}: expected {MEASURED} or {ANALYTIC}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCoefficients:
    """Seconds and bytes of one layer of some kind.

    Attributes:
        layer_seconds: by kind of op, seconds of a layer. B and I exclude recompute. Only pairs
            within the window count.
        recompute_seconds: by recompute mode, seconds added to B or I.
        gather_seconds: by kind of op, seconds per chunk of ZeRO 3's parameter gathers.
        saved_bytes: by recompute mode, bytes held from F to B, without K and V of cut documents.
        kv_bytes_per_token: bytes of the K and V, or latents, cached for later slices.
        kv_gradient_bytes_per_token: bytes of the accumulated gradients of these tensors.
        border_bytes: bytes of state at each boundary of slices, such as an SSM state and the last
            rows before a convolution. They do not depend on the slice's length.
        border_gradient_bytes: bytes of the gradients of this state.
        weight_input_bytes: bytes held from I to W.
        workspace_bytes: by kind of op, bytes during the op, independent of the number of layers.
        forward_workspace_bytes: by recompute mode, used instead of workspace_bytes[F] if a layer of
            the chunk has that mode. Only measured modes are present.
        recompute_workspace_bytes: by recompute mode, additional bytes while B or I recomputes one
            layer.
        all_to_all_bytes_per_token: bytes that a forward exchanges within a CP group, summed over
            its devices; backward exchanges as much.
        tensor_bytes_per_token: bytes that a forward gathers and scatters within a TP group;
            backward moves as much.
        layer_parameters: number of parameters that TP shards, before sharding.
        window: maximum keys of a query, its own included; 0: whole context. With a window, only the
            last ``window - 1`` tokens before a boundary between slices are cached.
        column_seconds: by column and kind of op, seconds per unit of an additional column. Examples
            are pairs of a query and its top-k keys. A missing kind of op takes no time.
        kv_replicated: whether every device of the stage holds all state that later slices need, as
            with latents, which cannot be sharded by heads.
        expert_bytes_per_token: bytes that a forward sends to experts and back within an EP group,
            summed over its devices; backward exchanges as much.
        expert_parameters: number of parameters that EP shards, before sharding.
        exchange_seconds: by kind of op, measured seconds per token of all-to-alls over CP ranks,
            which layer_seconds include. Single-rank documents do not need these all-to-alls. For
            all-to-alls that were not measured, see all_to_all_bytes_per_token.
        weight_seconds: by kind of op, seconds per chunk to read weights once and write their
            gradients; divided by TP.
        expert_weight_seconds: like weight_seconds, for the weights of all experts; divided by EP.
        host_seconds: by kind of op, seconds of the host to issue one layer's op, a lower bound of
            the op's seconds.
        expert_host_seconds: by kind of op, seconds of the host to issue the products of all experts
            of a layer, in addition to host_seconds; divided by EP.
        expert_seconds: by kind of op, seconds per token of the products of routed experts, a part
            of layer_seconds. Exchanges with experts may overlap with them (cost/halves.py).
        tensor_gathers: number of gathers and scatters in a forward within a TP group; backward has
            as many.
        expert_copies: number of experts that a token is routed to.
        heads: additional runs of the LM head: 1 for the first layer of an MTP layer, otherwise 0.
            From the first such layer on, all layers are on the last stage.
    """

    layer_seconds: Mapping[Kind, Seconds]
    recompute_seconds: Mapping[str, Seconds]
    gather_seconds: Mapping[Kind, float]
    saved_bytes: Mapping[str, Bytes]
    kv_bytes_per_token: float
    kv_gradient_bytes_per_token: float
    weight_input_bytes: Bytes
    workspace_bytes: Mapping[Kind, Workspace]
    recompute_workspace_bytes: Mapping[str, Bytes]
    all_to_all_bytes_per_token: float
    tensor_bytes_per_token: float
    layer_parameters: float
    forward_workspace_bytes: Mapping[str, Workspace] = dataclasses.field(default_factory=dict)
    window: int = 0
    column_seconds: ColumnSeconds = dataclasses.field(default_factory=dict)
    kv_replicated: bool = False
    border_bytes: float = 0.0
    border_gradient_bytes: float = 0.0
    expert_bytes_per_token: float = 0.0
    expert_parameters: float = 0.0
    exchange_seconds: Mapping[Kind, float] = dataclasses.field(default_factory=dict)
    heads: float = 0.0
    weight_seconds: Mapping[Kind, float] = dataclasses.field(default_factory=dict)
    expert_weight_seconds: Mapping[Kind, float] = dataclasses.field(default_factory=dict)
    host_seconds: Mapping[Kind, float] = dataclasses.field(default_factory=dict)
    expert_host_seconds: Mapping[Kind, float] = dataclasses.field(default_factory=dict)
    expert_seconds: Mapping[Kind, float] = dataclasses.field(default_factory=dict)
    tensor_gathers: float = 0.0
    expert_copies: float = 0.0

    def op_seconds(self, kind: Kind, spans: Sequence[Span]) -> float:
        """Return the seconds of one layer's op on a chunk of these ``spans``, without recompute."""
        tokens = sum(span.tokens for span in spans)
        of_columns = (
            seconds.get(kind, 0.0) * column.of(spans)
            for column, seconds in self.column_seconds.items()
        )
        return self.layer_seconds[kind](tokens, pairs_within(spans, self.window)) + sum(of_columns)


LAYER_KIND = "layer"  # name of the kind if a model has one kind without a name


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(LayerCoefficients):
    """Seconds and bytes of one layer of every kind, and of embedding and LM head.

    The fields of :class:`LayerCoefficients` are those of the kind ``layer_kind``.

    Attributes:
        provenance: origin of the coefficients.
        tp: tensor-parallel size of the coefficients.
        cp: context-parallel size of the coefficients.
        first_seconds: by kind of op, additional seconds of the first stage: the embedding.
        last_seconds: by kind of op, additional seconds of the last stage: LM head and loss.
        first_bytes: additional bytes of the first stage from F to B.
        last_bytes: additional bytes of the last stage from F to B (logits).
        stores_last_slice: whether the K and V of a document's last slice are also in its buffer;
            they are then not saved with their chunk.
        last_weight_input_bytes: additional bytes of the last stage from I to W: the LM head.
        last_workspace_bytes: by kind of op, additional bytes of the last stage while an op runs.
        last_workspace_tokens: maximum number of a chunk's tokens to which the bytes per token of
            last_workspace_bytes apply; 0: all.
        head_seconds: seconds of H and G if one stage has the whole vocabulary. Sharding does not
            reduce the constant per chunk of a stage. Missing ops are derived from last_seconds.
        head_workspace_bytes: bytes while H or G runs if one stage has the whole vocabulary. Missing
            ops are derived from last_bytes and last_workspace_bytes.
        all_to_all_bytes_per_second: rate of an all-to-all by size of the CP or EP group.
        tensor_bytes_per_second: rate of gathers and scatters by TP size.
        link_seconds_per_token: seconds per token that a message occupies the link of two stages.
        link_latency_seconds: latency of every message.
        first_parameters: parameters of the embedding.
        last_parameters: parameters of the LM head.
        states: bytes of model states per parameter.
        host_bytes_per_second: rate between a device and host memory in one direction; 0: unknown,
            so that no layer can be offloaded.
        routing: ratio of the tokens on the most loaded device's experts to an even share, as
            observed in training. It multiplies the memory that depends on routing.
        token_dispatcher: "alltoall": every copy of a token is sent; "flex": one copy for each node
            or device that needs it.
        layer_kind: name of the first kind.
        other_kinds: coefficients of the other kinds, by name.
        rank_slowness: for each pipeline rank, seconds of an op relative to those of this profile,
            which describes the fastest device; empty: all ranks are equal.
    """

    provenance: Provenance
    tp: int
    cp: int
    first_seconds: Mapping[Kind, Seconds]
    last_seconds: Mapping[Kind, Seconds]
    first_bytes: Bytes
    last_bytes: Bytes
    stores_last_slice: bool
    last_weight_input_bytes: Bytes
    last_workspace_bytes: Mapping[Kind, Workspace]
    last_workspace_tokens: float
    all_to_all_bytes_per_second: Mapping[int, float]
    tensor_bytes_per_second: Mapping[int, float]
    link_seconds_per_token: float
    link_latency_seconds: float
    first_parameters: float
    last_parameters: float
    states: States
    host_bytes_per_second: float = 0.0
    routing: float = 1.0
    token_dispatcher: str = ALLTOALL
    layer_kind: str = LAYER_KIND
    head_seconds: Mapping[Kind, Seconds] = dataclasses.field(default_factory=dict)
    head_workspace_bytes: Mapping[Kind, Workspace] = dataclasses.field(default_factory=dict)
    other_kinds: Mapping[str, LayerCoefficients] = dataclasses.field(default_factory=dict)
    rank_slowness: tuple[float, ...] = ()

    @property
    def kinds(self) -> dict[str, LayerCoefficients]:
        """Coefficients of every layer kind by name, starting with the first kind."""
        return {self.layer_kind: self, **self.other_kinds}

    def of_kind(self, kind: str) -> "Profile":
        """Return the profile of a model whose layers are all of ``kind``."""
        return self.with_kinds({kind: self.kinds[kind]})

    def with_kinds(self, coefficients: Mapping[str, LayerCoefficients]) -> "Profile":
        """Return the profile with layers of these kinds; the first becomes ``layer_kind``."""
        (first, its), *others = coefficients.items()
        named = {name: getattr(its, name) for name in _LAYER_FIELDS}
        return dataclasses.replace(
            self,
            **named,
            layer_kind=first,
            other_kinds={kind: layer_coefficients(each) for kind, each in others},
        )

    def each_kind(self, **fields: Any) -> "Profile":
        """Return the profile with ``fields`` of LayerCoefficients replaced in every kind."""
        return dataclasses.replace(
            self,
            **fields,
            other_kinds={
                kind: dataclasses.replace(each, **fields) for kind, each in self.other_kinds.items()
            },
        )

    def times(self, factors: Mapping[str, float]) -> "Profile":
        """Return the profile with fields of every kind's coefficients multiplied by ``factors``."""
        return self.with_kinds(
            {
                kind: dataclasses.replace(layer_coefficients(each), **_times(each, factors))
                for kind, each in self.kinds.items()
            }
        )

    @property
    def without_slowness(self) -> "Profile":
        """The profile with all ranks as fast as the fastest."""
        return dataclasses.replace(self, rank_slowness=())

    def to_json(self) -> str:
        """Return readable text; ``from_json(to_json()) == self``."""
        first = {name: json_value(getattr(self, name)) for name in ("provenance", "tp", "cp")}
        others = {kind: _layer_json(each) for kind, each in self.other_kinds.items()}
        value = {"profile": VERSION, **first, **_layer_json(self), "other_kinds": others}
        return json.dumps(value, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "the text") -> "Profile":
        """Return the profile that ``text`` describes.

        Raises:
            ValueError: the text is not a valid profile; ``where`` names the text in the message.
        """
        try:
            return _profile(json.loads(text), where)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"profile file {where}: no JSON ({error})") from error

    @classmethod
    def load(cls, path: str) -> "Profile":
        """Return the profile in the file at ``path``.

        Raises:
            ValueError: the file cannot be read, or is not a valid profile.
        """
        return _profile(read_json("profile", path), path)

    def save(self, path: str) -> None:
        """Write the profile to ``path``."""
        replace_file(path, self.to_json())


_LAYER_FIELDS = tuple(field.name for field in dataclasses.fields(LayerCoefficients))


def layer_coefficients(of: LayerCoefficients) -> LayerCoefficients:
    """Return the layer coefficients of ``of``, which may be a profile."""
    return LayerCoefficients(**{name: getattr(of, name) for name in _LAYER_FIELDS})


# Computation of a device; gathers and messages depend on the links.
def _times(of: LayerCoefficients, factors: Mapping[str, float]) -> dict[str, Any]:
    """Return fields of ``of`` (Seconds, numbers or mappings of these) times their ``factors``."""

    def times(value: Any, factor: float) -> Any:
        if isinstance(value, Mapping):
            return {key: times(each, factor) for key, each in value.items()}
        return value * factor

    return {name: times(getattr(of, name), factor) for name, factor in factors.items()}


# ------------------------------------------------------------------ JSON


_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


def kind_name(value: Any) -> str:
    """Return ``value`` if it is a valid name of a layer kind; otherwise raise a ValueError."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(f"{quoted(value)}: expected a word of letters, digits, '_', '-' and '.'")
    return value


def _kinds(value: Any) -> dict[str, LayerCoefficients]:
    if not isinstance(value, dict):
        raise ValueError("expected an object from a kind's name to its coefficients")
    return {kind_name(kind): LayerCoefficients(**_read(LayerCoefficients, item, f"{kind}: "))
            for kind, item in value.items()}  # fmt: skip


def _layer_json(of: LayerCoefficients) -> dict[str, Any]:
    """Return the fields of ``of`` in the JSON form of profiles.

    Top-k pairs and context tokens have separate fields. Other columns are in ``column_seconds``,
    which is omitted if empty.
    """
    columns = dict(of.column_seconds)
    chosen = next((each for each in columns if isinstance(each, WindowPairs)), WindowPairs())
    value: dict[str, Any] = {}
    for field in dataclasses.fields(of):
        if field.name != "column_seconds":
            value[field.name] = json_value(getattr(of, field.name))
        if field.name == "window":
            value["chosen"] = chosen.size
            value["chosen_seconds"] = json_value(columns.pop(chosen, {}))
            value["context_seconds"] = json_value(columns.pop(CONTEXT, {}))
    return {**value, "column_seconds": json_value(columns)} if columns else value


def _layer_columns(fields: dict[str, Any]) -> ColumnSeconds:
    """Remove the columns from ``fields``, which were read from JSON, and return them."""
    chosen, of_chosen, context = (fields.pop(name) for name in _COLUMN_FIELDS)
    columns: dict[Column, Mapping[Kind, float]] = {WindowPairs(chosen): of_chosen} if chosen else {}
    if context:
        columns[CONTEXT] = context
    return {**columns, **fields["column_seconds"]}


def _column(text: str) -> Column:
    """Return the column that a profile file calls ``text``."""
    columns: list[type[Column]] = [type(column) for column in DIAGONALS]
    columns += [column for part in layer.PARTS for column in part.COLUMNS]
    known = {column.NAME: column for column in columns}
    name, _, size = text.partition(" ")
    if name not in known or (size and not _DEGREE.fullmatch(size)):
        raise ValueError(f"{quoted(text)}: no kind of layers has such a column; known: {[*known]}")
    return known[name](int(size or 0))


# ------------------------------------------------------------------ values in JSON


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
        kind: type: a dataclass, Mapping, tuple of any length, int, float, bool or str.
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


# ------------------------------------------------------------------ fields

_COLUMN_FIELDS: Mapping[str, Any] = {
    "chosen": int,
    "chosen_seconds": Mapping[Kind, float],
    "context_seconds": Mapping[Kind, float],
}
_OP_NAMES = {kind.value: kind for kind in OF_LAYERS}
_HEAD_NAMES = {kind.value: kind for kind in OF_HEAD}
_MODE_NAMES = {mode: mode for mode in MODES}
_AT_LEAST_1 = ("tp", "cp", "routing", "rank_slowness")
_SOME_KEYS = re.compile(
    "(context|exchange|head|forward|chosen|weight|expert|expert_weight|host|expert_host)_.*"
)  # mappings that need not have all keys
# Largest value of a coefficient by the end of its name. It is far above any machine, and small
# enough for sums over a batch to stay finite. _MOST applies to rates, parameters and others.
_MOST_SECONDS, _MOST_BYTES_OF_A_TOKEN, _MOST_KEYS, _MOST = 1e3, 1e12, 1e9, 1e24


def _limits(name: str, kind: Any) -> Limits:
    """Return the limits for values of the field ``name``, whose type is ``kind``."""
    keys = _MODE_NAMES if get_args(kind)[:1] == (str,) else _OP_NAMES
    if name.startswith("head_"):
        keys = _HEAD_NAMES
    most = _MOST
    if name == "rank_slowness" or ("seconds" in name and "per_second" not in name):
        most = _MOST_SECONDS
    elif "bytes" in name and "per_second" not in name:
        most = _MOST_BYTES_OF_A_TOKEN
    elif name in ("window", "chosen"):
        most = _MOST_KEYS
    return Limits(int(name in _AT_LEAST_1), most, keys, bool(_SOME_KEYS.fullmatch(name)))


def _field(name: str, kind: Any, value: Any) -> Any:
    """Return ``value`` of the field ``name``, parsed as the type ``kind``.

    Raises:
        ValueError: the value is invalid or exceeds a limit, or F or B would take no time.
    """
    if kind == Mapping[int, float]:
        if not isinstance(value, dict) or not all(_DEGREE.fullmatch(key) for key in value):
            raise ValueError("expected an object from degree to bytes per second")
        return {int(key): read_value(float, value[key], Limits(1, _MOST)) for key in value}
    if kind == Mapping[str, LayerCoefficients]:
        return _kinds(value)
    if kind == ColumnSeconds:
        if not isinstance(value, dict):
            raise ValueError("expected an object from a column's name to its seconds")
        limits = _limits("context_seconds", Mapping[Kind, float])
        return {_column(n): read_value(Mapping[Kind, float], v, limits) for n, v in value.items()}
    parsed = read_value(kind, value, _limits(name, kind))
    if name == "layer_seconds":
        for op in (Kind.FORWARD, Kind.BACKWARD):
            if not (parsed[op].per_token or parsed[op].per_pair):
                raise ValueError(
                    f"{op.value}: a token takes no time; expected per_token or per_pair above 0"
                )
    return parsed


def _read(what: type, value: Any, where: str) -> dict[str, Any]:
    """Return the fields of the class ``what`` from a JSON object.

    Raises:
        ValueError: a field is invalid; the message is ``where``, the field's name and the reason.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where}expected an object of coefficients")
    fields = {field.name: field.type for field in dataclasses.fields(what)}
    fields.update(_COLUMN_FIELDS)
    value = {"column_seconds": {}, "expert_seconds": {}, **value}  # profiles may lack both
    if unknown := sorted(value.keys() - fields.keys()):
        raise ValueError(f"{where}unknown {quoted(unknown[0])}")
    if lacking := sorted(fields.keys() - value.keys()):
        raise ValueError(f"{where}lacks {lacking[0]}")
    values = {}
    for name, kind in fields.items():
        try:
            values[name] = _field(name, kind, value[name])
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}{name}: {error}") from error
    values["column_seconds"] = _layer_columns(values)
    return values


def _profile(value: Any, where: str) -> Profile:
    if not isinstance(value, dict) or "profile" not in value:
        raise ValueError(f"profile file {where}: expected an object with 'profile': {VERSION}")
    if value["profile"] != VERSION:
        raise ValueError(
            f"profile file {where}: version {quoted(value['profile'])}; this program reads "
            f"{VERSION}: measure again with `python -m megatron_epp profile`"
        )
    # Jobs before 2026-11-29 also saved the slowness by replica.
    coefficients = {
        name: item for name, item in value.items() if name not in ("profile", "replica_slowness")
    }
    try:
        profile = Profile(**_read(Profile, coefficients, ""))
        kind_name(profile.layer_kind)
        if profile.token_dispatcher not in DISPATCHERS:
            raise ValueError(
                f"token_dispatcher {profile.token_dispatcher!r}: expected one of "
                f"{', '.join(DISPATCHERS)}"
            )
        if profile.layer_kind in profile.other_kinds:
            raise ValueError(f"other_kinds: {profile.layer_kind} is the name of the first kind")
    except ValueError as error:
        raise ValueError(f"profile file {where}: {error}") from error
    return profile
