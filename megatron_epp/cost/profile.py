"""The profile: the one form that every cost model takes, as a value and as readable JSON.

A profile speaks of one layer of every kind that the model has, and of what the first and the last
stage do besides. Everything in it is linear: seconds in a chunk's tokens and in its query-key pairs
(as many of them as the kind's window leaves), bytes in its tokens, those of a running op also in
the tokens before it. Its coefficients are of one device where a layer is spread over ``tp * cp``
devices; other degrees scale. Analytic profiles come from :mod:`megatron_epp.cost.analytic`,
measured ones from :mod:`megatron_epp.cost.fitting.fit`.

As JSON, version 5, every field is written: the coefficients of the first kind beside those of the
ends, those of each further kind in an object of ``other_kinds``.
"""

import dataclasses
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from megatron_epp.cost.catalogue.devices import device_like
from megatron_epp.cost.catalogue.json_values import Limits, json_value, read_value
from megatron_epp.cost.catalogue.named import read_json
from megatron_epp.cost.columns import CONTEXT, Column, DiagonalPairs, WindowPairs
from megatron_epp.cost.kinds import layer
from megatron_epp.cost.loads import pairs_within
from megatron_epp.ir import FULL, KEEP, OF_HEAD, OF_LAYERS, SELECTIVE, Kind, Span
from megatron_epp.ir.errors import quoted, require_line
from megatron_epp.safe_files import replace_file

logger = logging.getLogger(__name__)

VERSION = 5
BEFORE = 4  # without what the host takes, reads of weights, latencies: read all the same
ALLTOALL, FLEX = DISPATCHERS = ("alltoall", "flex")  # as Megatron calls them
ColumnSeconds = Mapping[Column, Mapping[Kind, float]]
_DEGREE = re.compile(r"[1-9][0-9]{0,6}")
MODES = (KEEP, FULL, *SELECTIVE)


@dataclass(frozen=True, slots=True)
class _Coefficients:
    """Fields that are numbers of at least 0."""

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
        return self.per_token * tokens + self.per_pair * pairs + self.per_chunk

    def __mul__(self, factor: float) -> "Seconds":
        return Seconds(self.per_token * factor, self.per_pair * factor, self.per_chunk * factor)


@dataclass(frozen=True, slots=True)
class Bytes(_Coefficients):
    """Bytes of some tensors: ``per_token``, ``per_cut_token`` of a slice whose K and V are kept.

    They differ because the K and V that later slices attend to lie in the document's own buffer.
    """

    per_token: float = 0.0
    per_cut_token: float = 0.0

    def __call__(self, tokens: float, cut_tokens: float) -> float:
        """Bytes of a chunk of ``tokens``, ``cut_tokens`` of which have their K and V kept."""
        return self.per_token * (tokens - cut_tokens) + self.per_cut_token * cut_tokens


@dataclass(frozen=True, slots=True)
class Workspace(Bytes):
    """Bytes that live while one op runs, beyond what its chunk holds.

    per_context_token   of the slice's document before the slice: K's and V's gradients are made
                        for all keys of a call at once
    per_op              whatever the chunk's size: a weight's gradient before it is added up, the
                        least that a kernel asks for. Only one op runs at a time, so a stage's
                        budget is charged with it once
    """

    per_context_token: float = 0.0
    per_op: float = 0.0


@dataclass(frozen=True, slots=True)
class States(_Coefficients):
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


MEASURED, ANALYTIC = "measured", "analytic"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a profile comes from.

    model    its name, or the shape that was measured
    device   its name
    dtype    of the activations
    date     YYYY-MM-DD
    source   what it rests on, for a person
    kind     how the coefficients came about: measured, on that model and device and valid for no
             other; or analytic, from arithmetic
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

    layer_seconds[kind]           F; B without recompute; I and W, its halves. Pairs are those of
                                  the window
    recompute_seconds[letter]     added to B or I with that recompute choice
    gather_seconds[kind]          per chunk under ZeRO 3: parameter gathers
    saved_bytes[letter]           held from F to B, excluding K and V of cut documents
    kv_bytes_per_token            what later slices need of a cut document: K and V, or latents
    kv_gradient_bytes_per_token   their gradients, which add up in float32
    border_bytes                  what later slices need of each border behind which one follows,
                                  whatever the tokens: a state, rows in front of a convolution
    border_gradient_bytes         their gradients
    weight_input_bytes            from I to W
    workspace_bytes[kind]         while an op runs, whatever the number of layers
    forward_workspace_bytes       in the place of workspace_bytes[F] where a layer of the chunk has
                                  that recompute choice, by letter; of others nothing is known
    recompute_workspace_bytes     while a B or I runs that recomputes: letter -> of the one layer
                                  that lives again
    all_to_all_bytes_per_token    a forward hands over inside a CP group, all devices together;
                                  backward as much
    tensor_bytes_per_token        a forward moves inside a TP group; backward as much
    layer_parameters              spread over TP
    window                        keys that a query sees at most, itself among them; 0: all of its
                                  document before it. Only so many tokens before a border between
                                  slices are kept for later slices
    column_seconds[column][kind]  per unit of a further column, beside those of tokens and pairs:
                                  pairs of a query and a key that it has chosen, tokens of a slice's
                                  context of which K and V are made again; kinds that lack take none
    kv_replicated                 whether every device of the stage keeps all of what later slices
                                  need, as of latents, which have no heads
    expert_bytes_per_token        a forward hands over to experts and back inside an EP group, all
                                  devices together; backward as much
    expert_parameters             spread over EP
    exchange_seconds[kind]        of layer_seconds, what was measured per token of exchanging rows
                                  for heads over the CP ranks: rows of documents that one rank
                                  computes alone do without. Of what is not measured, the bytes of
                                  all_to_all_bytes_per_token tell
    weight_seconds[kind]          per chunk, of one layer: weights are read once, and a weight's
                                  gradient written; sharded over TP
    expert_weight_seconds[kind]   those of all experts; sharded over EP
    host_seconds[kind]            that the host takes to issue one layer's op, which takes at least
                                  as long, whatever the chunk
    tensor_gathers                gathers and scatters of a forward inside a TP group; backward as
                                  many
    expert_copies                 of a token that go to experts: those it is routed to
    heads                         how often more the output layer runs for a layer that predicts a
                                  further token: 1, of all others 0. From the first such layer on
                                  all lie on the last stage
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


LAYER_KIND = "layer"  # where a model has one kind, and nobody named it


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(LayerCoefficients):
    """Seconds and bytes of a layer of every kind, and of the pipeline's ends.

    The fields of :class:`LayerCoefficients` are those of the kind ``layer_kind``.

    tp, cp                        degrees over which a layer was spread for these coefficients
    first_seconds[kind]           besides, on the first stage: the embedding
    last_seconds[kind]            besides, on the last stage: output layer and loss
    first_bytes, last_bytes       besides, on the first and last stage, from F to B (logits)
    stores_last_slice             whether the context's buffer has room for the last slice's K and
                                  V, too, which are then not saved with their chunk
    last_weight_input_bytes       besides, on the last stage, from I to W: the output layer
    last_workspace_bytes[kind]    besides, on the last stage, while an op runs
    last_workspace_tokens         its bytes per token are of so many of the chunk's tokens at most;
                                  0: of all of them
    head_seconds[kind]            of H and G for the whole vocabulary on one stage; per chunk, as of
                                  one of many. Missing kinds are derived from last_seconds
    head_workspace_bytes[kind]    while H or G runs where one stage had all words; likewise
    all_to_all_bytes_per_second   by CP degree, and by EP degree
    tensor_bytes_per_second       by TP degree
    link_seconds_per_token        a message occupies the link between two stages
    link_latency_seconds          of every message
    first_parameters, last_parameters
    states                        bytes per parameter
    host_bytes_per_second         between one device and its host's memory, one direction; 0: not
                                  known, nothing can be offloaded
    routing                       tokens that the experts of the fullest device get, over an even
                                  share: what training learnt of it, by which memory that routing
                                  decides is multiplied
    token_dispatcher              alltoall: every copy of a token is sent; flex: one for each node
                                  and device that wants any
    layer_kind                    the name of the first kind
    other_kinds                   the coefficients of further kinds, by name
    rank_slowness                 of every pipeline rank, where devices were measured that differ:
                                  what an op takes there over these seconds, those of the fastest;
                                  none: all are alike
    replica_slowness              the same of every pipeline rank of every replica, the first one's
                                  first, where replicas differ; ``rank_slowness`` is then that of
                                  the slowest replica, rank by rank
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
    replica_slowness: tuple[float, ...] = ()

    @property
    def kinds(self) -> dict[str, LayerCoefficients]:
        """The coefficients of every kind by its name, the first one's first."""
        return {self.layer_kind: self, **self.other_kinds}

    def of_kind(self, kind: str) -> "Profile":
        """The profile of a model whose layers are all of ``kind``."""
        return self.with_kinds({kind: self.kinds[kind]})

    def with_kinds(self, coefficients: Mapping[str, LayerCoefficients]) -> "Profile":
        """The ends of this profile, and layers of these kinds, the first one first."""
        (first, its), *others = coefficients.items()
        named = {name: getattr(its, name) for name in _LAYER_FIELDS}
        return dataclasses.replace(
            self,
            **named,
            layer_kind=first,
            other_kinds={kind: layer_coefficients(each) for kind, each in others},
        )

    def each_kind(self, **fields: Any) -> "Profile":
        """With ``fields`` of LayerCoefficients in the place of every kind's own."""
        return dataclasses.replace(
            self,
            **fields,
            other_kinds={
                kind: dataclasses.replace(each, **fields) for kind, each in self.other_kinds.items()
            },
        )

    def times(self, factors: Mapping[str, float]) -> "Profile":
        """The profile with fields of every kind's coefficients, by name, times ``factors``."""
        return self.with_kinds(
            {
                kind: dataclasses.replace(layer_coefficients(each), **_times(each, factors))
                for kind, each in self.kinds.items()
            }
        )

    def slowed(self, factor: float) -> "Profile":
        """The profile of one device on which every op takes ``factor`` times as long."""
        layers = self.times(dict.fromkeys(_LAYER_SECONDS, factor))
        ends = _times(self, dict.fromkeys(_END_SECONDS, factor))
        return dataclasses.replace(layers, **ends, rank_slowness=(), replica_slowness=())

    def with_slowness(self, slowness: Sequence[float], ranks: int) -> "Profile":
        """The profile on devices of this ``slowness``: of each of the ``ranks`` of a pipeline, for
        every replica or for all; of the fastest device it becomes 1."""
        rows = [tuple(slowness[at : at + ranks]) for at in range(0, len(slowness), ranks)]
        least = min(slowness, default=1.0)
        rows = [tuple(round(factor / least, 3) for factor in row) for row in rows]
        worst = tuple(map(max, zip(*rows, strict=True)))
        unlike = len(set(rows)) > 1
        return dataclasses.replace(
            self,
            rank_slowness=worst if unlike or set(worst) - {1.0} else (),
            replica_slowness=sum(rows, ()) if unlike else (),
        )

    def to_json(self) -> str:
        """Readable text; ``from_json(to_json()) == self``."""
        first = {name: json_value(getattr(self, name)) for name in ("provenance", "tp", "cp")}
        others = {kind: _layer_json(each) for kind, each in self.other_kinds.items()}
        value = {"profile": VERSION, **first, **_layer_json(self), "other_kinds": others}
        return json.dumps(value, indent=1) + "\n"

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
        replace_file(path, self.to_json())


_LAYER_FIELDS = tuple(field.name for field in dataclasses.fields(LayerCoefficients))


def layer_coefficients(of: LayerCoefficients) -> LayerCoefficients:
    """The coefficients of a layer in ``of``, perhaps a profile, and nothing else."""
    return LayerCoefficients(**{name: getattr(of, name) for name in _LAYER_FIELDS})


# What a device computes; gathers and messages are the links'.
_LAYER_SECONDS = (
    "layer_seconds",
    "recompute_seconds",
    "column_seconds",
    "exchange_seconds",
    "weight_seconds",
    "expert_weight_seconds",
)
_END_SECONDS = ("first_seconds", "last_seconds", "head_seconds")


def _times(of: LayerCoefficients, factors: Mapping[str, float]) -> dict[str, Any]:
    """Fields of ``of`` that are Seconds, numbers or mappings of these, times their ``factors``."""

    def times(value: Any, factor: float) -> Any:
        if isinstance(value, Mapping):
            return {key: times(each, factor) for key, each in value.items()}
        return value * factor

    return {name: times(getattr(of, name), factor) for name, factor in factors.items()}


# ------------------------------------------------------------------ JSON


_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


def kind_name(value: Any) -> str:
    """``value`` where it can name a kind of layer; a ValueError where not."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(f"{quoted(value)}: expected a word of letters, digits, '_', '-' and '.'")
    return value


def _kinds(value: Any) -> dict[str, LayerCoefficients]:
    if not isinstance(value, dict):
        raise ValueError("expected an object from a kind's name to its coefficients")
    return {kind_name(kind): LayerCoefficients(**_read(LayerCoefficients, item, f"{kind}: "))
            for kind, item in value.items()}  # fmt: skip


def _layer_json(of: LayerCoefficients) -> dict[str, Any]:
    """The fields of ``of`` as version 4 has them: of the columns, keys that queries choose and
    context have fields of their own, the others ``column_seconds``, which is left out where empty.
    """
    columns = dict(of.column_seconds)
    chosen = next((each for each in columns if isinstance(each, WindowPairs)), WindowPairs())
    value: dict[str, Any] = {}
    for field in dataclasses.fields(of):
        if field.name != "column_seconds":
            value[field.name] = json_value(getattr(of, field.name))
        if field.name == "window":  # where version 4 has them
            value["chosen"] = chosen.size
            value["chosen_seconds"] = json_value(columns.pop(chosen, {}))
            value["context_seconds"] = json_value(columns.pop(CONTEXT, {}))
    return {**value, "column_seconds": json_value(columns)} if columns else value


def _layer_columns(fields: dict[str, Any]) -> ColumnSeconds:
    """Take the columns out of ``fields``, as they are read from JSON."""
    chosen, of_chosen, context = (fields.pop(name) for name in _COLUMN_FIELDS)
    columns: dict[Column, Mapping[Kind, float]] = {WindowPairs(chosen): of_chosen} if chosen else {}
    if context:
        columns[CONTEXT] = context
    return {**columns, **fields["column_seconds"]}


def _column(text: str) -> Column:
    """The column of a kind of layers that goes by ``text`` in a file."""
    columns: list[type[Column]] = [DiagonalPairs]
    columns += [column for part in layer.PARTS for column in part.COLUMNS]
    known = {column.NAME: column for column in columns}
    name, _, size = text.partition(" ")
    if name not in known or (size and not _DEGREE.fullmatch(size)):
        raise ValueError(f"{quoted(text)}: no kind of layers has such a column; known: {[*known]}")
    return known[name](int(size or 0))


_COLUMN_FIELDS: Mapping[str, Any] = {
    "chosen": int,
    "chosen_seconds": Mapping[Kind, float],
    "context_seconds": Mapping[Kind, float],
}
_OP_NAMES = {kind.value: kind for kind in OF_LAYERS}
_HEAD_NAMES = {kind.value: kind for kind in OF_HEAD}
_MODE_NAMES = {mode: mode for mode in MODES}
_SLOWNESS = ("rank_slowness", "replica_slowness")
_AT_LEAST_1 = ("tp", "cp", "routing", *_SLOWNESS)
# Fields that files of before there were such layers lack.
_LATER: Mapping[str, Any] = {
    "heads": 0.0,
    "rank_slowness": [],
    "replica_slowness": [],
    "chosen": 0,
    "chosen_seconds": {},
    "column_seconds": {},
    "weight_seconds": {},
    "expert_weight_seconds": {},
    "host_seconds": {},
    "tensor_gathers": 0.0,
    "expert_copies": 0.0,
    "token_dispatcher": ALLTOALL,
}
_SOME_KEYS = re.compile(
    "(context|exchange|head|forward|chosen|weight|expert_weight|host)_.*"
)  # of a mapping, not all
# The most of any coefficient, by the end of its name: far above what a machine does, and so far
# below what a float holds that sums over a batch stay finite. Rates, parameters, others: _MOST.
_MOST_SECONDS, _MOST_BYTES_OF_A_TOKEN, _MOST_KEYS, _MOST = 1e3, 1e12, 1e9, 1e24


def _limits(name: str, kind: Any) -> Limits:
    """The limits of the field ``name``, of that type."""
    keys = _MODE_NAMES if get_args(kind)[:1] == (str,) else _OP_NAMES
    if name.startswith("head_"):
        keys = _HEAD_NAMES
    most = _MOST
    if name in _SLOWNESS or ("seconds" in name and "per_second" not in name):
        most = _MOST_SECONDS
    elif "bytes" in name and "per_second" not in name:
        most = _MOST_BYTES_OF_A_TOKEN
    elif name in ("window", "chosen"):
        most = _MOST_KEYS
    return Limits(int(name in _AT_LEAST_1), most, keys, bool(_SOME_KEYS.fullmatch(name)))


def _field(name: str, kind: Any, value: Any) -> Any:
    """The field ``name`` of that type; a ValueError where its coefficients make no sense, too: no
    time at all, or more than sums can hold."""
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
    """The fields of ``what`` from a JSON object; a ValueError names the field behind ``where``."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}expected an object of coefficients")
    fields = {field.name: field.type for field in dataclasses.fields(what)}
    fields.update(_COLUMN_FIELDS)
    value = {**{name: item for name, item in _LATER.items() if name in fields}, **value}
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


def _with_host(profile: Profile, where: str) -> Profile:
    """A profile of version 4 with the host time of its device in the catalogue; what reads of
    weights and latencies take is in its constants."""
    device = device_like(profile.provenance.device)
    if device is None or not device.host_seconds:
        return profile
    logger.warning(
        "profile file %s: version %d has no host time of a layer; the catalogue's of %s are taken, "
        "%.3g ms forward and %.3g ms backward",
        *(where, BEFORE, device.name),
        *(1e3 * device.host_seconds[kind] for kind in (Kind.FORWARD, Kind.BACKWARD)),
    )
    return profile.each_kind(host_seconds=device.host_seconds)


def _profile(value: Any, where: str) -> Profile:
    if not isinstance(value, dict) or "profile" not in value:
        raise ValueError(f"profile file {where}: expected an object with 'profile': {VERSION}")
    if value["profile"] not in (BEFORE, VERSION) or isinstance(value["profile"], bool):
        raise ValueError(
            f"profile file {where}: version {quoted(value['profile'])}; this program reads "
            f"{VERSION}: measure again with `python -m megatron_epp profile`"
        )
    coefficients = {name: item for name, item in value.items() if name != "profile"}
    try:
        profile = Profile(**_read(Profile, coefficients, ""))
        kind_name(profile.layer_kind)
        if profile.token_dispatcher not in DISPATCHERS:
            raise ValueError(
                f"token_dispatcher {profile.token_dispatcher!r}: expected one of "
                f"{', '.join(DISPATCHERS)}"
            )
        if value["profile"] == BEFORE:
            profile = _with_host(profile, where)
        if profile.layer_kind in profile.other_kinds:
            raise ValueError(f"other_kinds: {profile.layer_kind} is the name of the first kind")
    except ValueError as error:
        raise ValueError(f"profile file {where}: {error}") from error
    return profile
