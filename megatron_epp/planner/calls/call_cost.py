"""Seconds and bytes of a call's chunks on every stage.

Seconds are estimated at first and then measured, because the training loop may have layers of kinds
that the cost model does not know. Ops of complete stages are timed while the loop runs
(stage_seconds). If the user sets a memory budget in bytes, the cost model of a GPT model with the
same sizes predicts the bytes. Otherwise, memory is counted in tokens.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate, pairwise
from operator import add
from typing import Any

import numpy as np

from megatron_epp.cost.analytic import profile, without_states
from megatron_epp.cost.catalogue.devices import GIB, device
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.columns import CHUNKS, TOKENS
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.kinds.base import BF16
from megatron_epp.cost.layer_kinds import Counts
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.loads import Loads, loads_of_plan
from megatron_epp.cost.profile import Profile
from megatron_epp.ir import (
    BACKWARDS,
    FULL,
    KEEP,
    KIND_CODE,
    OF_LAYERS,
    Item,
    Kind,
    Payload,
    Plan,
    PlanError,
    Prefixes,
    Span,
    Table,
)
from megatron_epp.planner.block_table import BlockLoads, TreeBlockLoads, tables_of
from megatron_epp.planner.chunks.block import BlockChunking, block_of
from megatron_epp.planner.chunks.chunking import Chunking, starts_of
from megatron_epp.planner.chunks.slicing import Rates, Spans
from megatron_epp.planner.chunks.tree_cutting import Parents
from megatron_epp.planner.order.problem import loads_of

Groups = Sequence[Sequence[Sequence[tuple[int, int, int]]]]

SPLIT_COST = 1.04  # time of I and W together relative to B, until they are measured
# Bytes held from I to W, relative to bytes held from F to B: inputs and output gradients of
# linears.
WEIGHT_INPUT_FRACTION = 0.6
OP_TOKENS = 32  # constant cost of an op in tokens, until it is measured


@dataclass(frozen=True, slots=True, eq=False)
class ActivationBudget:
    """Bytes that a stage's chunks may hold between forward and backward.

    Attributes:
        budget_bytes: bytes per device.
        profile: cost coefficients of the model.
        tp: number of tensor-parallel ranks of a stage.
    """

    budget_bytes: float
    profile: Profile
    tp: int = 1

    @classmethod
    def of(cls, config: Any, vocabulary: int, budget_bytes: float) -> "ActivationBudget":
        """Return the budget of a GPTModel with Megatron's ``config``, assuming fused kernels."""
        of_model = _profile(config, vocabulary, dtype=str(config.params_dtype))
        return cls(budget_bytes, of_model, config.tensor_model_parallel_size)

    def cost(self, layers: Sequence[int]) -> Cost:
        """Return the cost model of stages with ``layers[s]`` layers on stage s."""
        budgets = (self.budget_bytes,) * len(layers)
        return Cost(StageLayout(self.profile, tuple(layers), tp=self.tp), budgets)

    def too_little(self, of: str, tokens: int) -> PlanError:
        """Return the error to raise if no order of ops fits the budget.

        The message names the kind of chunks, ``of``, and the longest micro-batch's ``tokens``.
        """
        return PlanError(
            f"attach(memory_gib={self.budget_bytes / GIB:.6g}): no order of {of} holds so little, "
            f"not even with all layers recomputed; expected more, for a micro-batch of {tokens} "
            "tokens"
        )


def guessed_rates(config: Any, layers: int, vocabulary: int, active: int = 1) -> np.ndarray:
    """Return the estimated seconds of a stage per token, per query-key pair and per op.

    The shape is [4, 3]; rows are F, B, I and W. All estimates may be wrong by the same factor.

    Args:
        config: configuration of Megatron's model.
        layers: number of layers of the stage.
        vocabulary: vocabulary size of the stage's LM head; 0 if the stage has no LM head.
        active: number of feed-forward modules per layer that process a token.
    """
    cost = Cost(StageLayout(_profile(config, vocabulary, active), (max(1, layers),)), (math.inf,))
    forward, backward = (cost.seconds.per(kind)[0] for kind in (Kind.FORWARD, Kind.BACKWARD))
    forward[CHUNKS] = OP_TOKENS * forward[TOKENS]
    backward[CHUNKS] = 2 * forward[CHUNKS]
    half = SPLIT_COST / 2 * backward
    return np.stack([forward, backward, half, half])  # in the order of ir.KIND_CODE


def guessed_token_bytes(
    config: Any, sizes: Sequence[tuple[int, int]], active: int = 1
) -> tuple[float, ...]:
    """Return the estimated bytes per token that each stage holds from forward to backward.

    The bytes include logits. All estimates may be wrong by the same factor. ``sizes`` contains
    (layers, vocabulary size) of each stage. Other arguments: see :func:`guessed_rates`.
    """
    one = CallChunks.of([[[(0, 0, 1)]]], (1,))
    held = []
    for layers, vocabulary in sizes:
        count = max(1, layers)
        cost = Cost(StageLayout(_profile(config, vocabulary, active), (count,)), (math.inf,))
        table = cost.table_of(one.loads, {(0, KEEP): np.full((1, 1), count)})
        held.append(float(np.asarray(table.held_bytes[Item.ACTIVATIONS])[0, 0]))
    return tuple(held)


def _profile(config: Any, vocabulary: int, active: int = 1, dtype: str = BF16) -> Profile:
    """Return the cost coefficients of the model that Megatron's ``config`` describes.

    The ``active`` feed-forward modules that process a token count as one dense MLP.
    """
    model = Model(
        name="loop",
        layers=config.num_layers,
        hidden=config.hidden_size,
        ffn_hidden=active * config.ffn_hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_query_groups,
        head_size=config.kv_channels,
        vocabulary=max(1, vocabulary),
        gated=config.gated_linear_unit,
    )
    head = vocabulary > 0
    return without_states(
        profile(model, device("cpu"), head_seconds=head, link_seconds=False, dtype=dtype)
    )


def features(
    tokens: Sequence[float] | np.ndarray, pairs: Sequence[float] | np.ndarray
) -> np.ndarray:
    """Return the rows tokens, query-key pairs and ones [3, chunks]; seconds are linear in them."""
    return np.stack([np.asarray(tokens, float), np.asarray(pairs, float), np.ones(len(tokens))])


@dataclass(frozen=True, slots=True)
class CallDocuments:
    """Documents of the micro-batches of a replica's call.

    Attributes:
        lengths: lengths[m] contains the number of tokens of every document of micro-batch m.
        parents: parents[m][d] is the document that document d of micro-batch m continues, or -1;
            () if no document continues another.
    """

    lengths: Sequence[Sequence[int]]
    parents: Sequence[Parents] = ()


@dataclass(frozen=True)  # no slots, because loads is a cached property
class CallChunks:
    """The chunks of one call of an external training loop.

    A *group* is one micro-batch: one chunk, or several if its documents are sliced. The chunks of a
    group run forward in order and backward in reverse. The loss follows the group's last forward,
    so all backwards of the group run after that forward.

    If replicas run in lockstep, these are the chunks of all of them, and group n is micro-batch n
    of each replica. The last chunks of a group run at the same time on all replicas, so that their
    losses follow the same forward:

        replica 0   a0 a1 a2 | b0        a, b, c: chunks of micro-batches
        replica 1   .  .  c0 | .         .: an empty chunk

    Attributes:
        chunking: groups in the order of their forwards.
        documents: number of tokens of each document; the documents of replica 0 are first.
        prefixes: for each document, the span that it continues, or None; () if no document
            continues another.
        firsts: index of the first document of each replica.
    """

    chunking: Chunking
    documents: tuple[int, ...]
    prefixes: Prefixes = ()
    firsts: tuple[int, ...] = (0,)

    @classmethod
    def of(cls, groups: Groups, documents: Sequence[int], prefixes: Prefixes = ()) -> "CallChunks":
        """Build the chunks; groups[g][c] lists chunk c's spans (document, start, stop)."""
        chunks = [chunk for group in groups for chunk in group]
        rows = [(number, *span) for number, chunk in enumerate(chunks) for span in chunk]
        chunk, document, start, stop = np.array(rows, np.int64).T
        starts = np.cumsum([0, *map(len, groups)])
        cut = stop - start < np.array(documents)[document]
        spans = Spans(document, start, stop)
        result = cls(Chunking.of_spans(spans, chunk, starts, cut), tuple(documents), prefixes)
        if not any(prefixes):
            return result
        pairs = result.loads.pairs.astype(np.int64)
        return dataclasses.replace(
            result, chunking=dataclasses.replace(result.chunking, pairs=pairs)
        )

    @classmethod
    def in_lockstep(cls, members: Sequence["CallChunks"], rates: Rates) -> "CallChunks":
        """Return the chunks of replicas that run in lockstep, from the chunks of each replica.

        Replicas with fewer chunks or micro-batches than others get empty chunks.
        """
        if len(members) == 1:
            return members[0]
        sizes = np.zeros((len(members), max(len(one.sizes) for one in members)), np.int64)
        for number, one in enumerate(members):
            sizes[number, : len(one.sizes)] = one.sizes
        starts = starts_of(sizes.max(axis=0))
        firsts = tuple(accumulate((len(one.documents) for one in members[:-1]), initial=0))
        spans, position, prefixes = [], [], []
        for first, one in zip(firsts, members, strict=True):
            own = one.chunking
            late = starts[1 : own.groups + 1] - own.starts[1:]
            position.append(own.chunk + late[own.group[own.chunk]])
            spans.append(Spans(own.spans.document + first, own.spans.start, own.spans.stop))
            prefixes += [renumbered(prefix, first) for prefix in one.prefixes]
        replica = np.repeat(np.arange(len(members)), [*map(len, spans)])
        positions, every = np.concatenate(position), reduce(add, spans)
        chunks = block_of(every, replica, positions, starts, len(members), rates)
        documents = tuple(length for one in members for length in one.documents)
        return cls(chunks, documents, tuple(prefixes), firsts)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Number of chunks of every group."""
        return self.chunking.sizes

    @cached_property
    def loads(self) -> Loads:
        """Tokens and query-key pairs of every chunk, in lockstep the most; computed once."""
        loads = loads_of(self.chunking, np.array(self.documents))
        if not any(self.prefixes):
            return loads
        members = tuple(loads_of_plan(plan, 1) for plan in self.plans((1,)))
        blocks = isinstance(loads, BlockLoads)
        return TreeBlockLoads.of(members, loads.earlier) if blocks else members[0]

    def plans(self, layers: Sequence[int]) -> tuple[Plan, ...]:
        """Return a plan of the chunks of each replica, without orders of ops.

        Stage s has ``layers[s]`` layers.
        """
        chunks = self.chunking
        members = chunks.members if isinstance(chunks, BlockChunking) else (chunks,)
        ends = pairwise((*self.firsts, len(self.documents)))
        return tuple(
            Plan(
                documents=self.documents[first:end],
                layers=tuple(layers),
                chunks=member.ir_chunks(range(-first, end - first)),
                recompute=tuple((KEEP * count,) * member.count for count in layers),
                orders=((),) * len(layers),
                replica=replica,
                replicas=len(members),
                prefixes=tuple(renumbered(p, -first) for p in self.prefixes[first:end]),
            )
            for replica, (member, (first, end)) in enumerate(zip(members, ends, strict=True))
        )

    @property
    def losses(self) -> np.ndarray:
        """Whether each chunk is the last of its group, so the loss follows its forward [chunks]."""
        return np.arange(self.chunking.count) == self.chunking.last_of_group

    def arranged(self, order: Sequence[int]) -> "CallChunks":
        """Return the same chunks with the groups (micro-batches) in ``order``."""
        return dataclasses.replace(self, chunking=self.chunking.arranged(order))


def renumbered(prefix: Span | None, first: int) -> Span | None:
    """Return ``prefix`` with the index of its document increased by ``first``."""
    return prefix and dataclasses.replace(prefix, document=prefix.document + first)


def chunks_in(order: Sequence[int], sizes: np.ndarray) -> np.ndarray:
    """Return the chunk indices in running order; group g has ``sizes[g]`` chunks."""
    ends = np.cumsum(sizes)
    return np.concatenate([np.arange(ends[g] - sizes[g], ends[g]) for g in order])


def token_table(
    call: CallChunks, rates_SK3: np.ndarray, token_bytes: Sequence[float] = ()
) -> Table:
    """Return the seconds and bytes of a call's ops for measured rates [stages, op kinds, 3].

    On stage s, a token holds ``token_bytes[s]`` bytes, by default 1.
    """
    stages, loads = len(rates_SK3), call.loads
    tokens = np.outer(token_bytes or (1.0,) * stages, loads.tokens)
    nothing, of_documents = np.zeros_like(tokens), np.zeros((stages, len(loads.lengths)))
    return Table(
        seconds=_seconds(call, rates_SK3),
        recompute_seconds=nothing,
        comm_seconds=dict.fromkeys(OF_LAYERS, nothing),
        link_seconds=dict.fromkeys((Payload.ACTIVATION, Payload.GRADIENT), nothing[1:]),
        link_latency_seconds=0.0,
        held_bytes={
            Item.ACTIVATIONS: tokens,
            Item.WEIGHT_INPUTS: WEIGHT_INPUT_FRACTION * tokens,
            Item.KV: of_documents,
            Item.KV_GRADIENTS: of_documents,
        },
        workspace_bytes=dict.fromkeys(OF_LAYERS, nothing),
        resident_bytes=(0.0,) * stages,
    )


def byte_table(call: CallChunks, rates_SK3: np.ndarray, cost: Cost, again: np.ndarray) -> Table:
    """Return the seconds and bytes of a call's ops, with bytes predicted by a cost model.

    The last chunk of a micro-batch holds its logits from forward to backward, because the loss
    follows its forward. Earlier slices recompute their logits during their backwards.

    Args:
        call: the chunks.
        rates_SK3: [stages, op kinds, 3] measured seconds per token, query-key pair and op.
        cost: cost model that predicts the bytes.
        again: [stages, chunks] number of layers to recompute.
    """
    layers = np.array(cost.layout.layers)[:, None]
    counts: Counts = {(0, FULL): again, (0, KEEP): layers - again}
    table, seconds = tables_of(cost, call.loads).of_counts(counts), _seconds(call, rates_SK3)
    logits = np.where(call.losses, 0.0, cost.ends.freed_bytes(call.loads))
    held, workspace = dict(table.held_bytes), dict(table.workspace_bytes)
    held[Item.ACTIVATIONS] = held[Item.ACTIVATIONS] - logits
    workspace |= {kind: workspace[kind] + logits for kind in BACKWARDS}
    return dataclasses.replace(
        table,
        seconds=seconds,
        recompute_seconds=seconds[Kind.FORWARD] * again / np.maximum(layers, 1),
        held_bytes=held,
        workspace_bytes=workspace,
    )


def _seconds(call: CallChunks, rates_SK3: np.ndarray) -> dict[Kind, np.ndarray]:
    features_3C = features(call.loads.tokens, call.loads.pairs)
    return {kind: rates_SK3[:, KIND_CODE[kind]] @ features_3C for kind in OF_LAYERS}
