"""Load-balancing losses of MoE routers per sample, independent of the plan.

A sample is a document of the batch: a document of the plan with the prefixes that it continues. The
auxiliary loss of sample d in one layer equals Megatron's loss of a micro-batch with d alone:

    coeff * E / (k * T_d^2) * sum_i count_i(d) * sum_t score_ti        times T_d in the sum over d

A slice contains a part of a sample's tokens; a pack contains several samples; a prefix is computed
once for all samples that share it, and counts once for each. The gradient depends on other tokens
through the counts only: d/d score_ti = sum over the samples d that contain token t of
coeff * E / (k * T_d) * count_i(d). All forwards of a sample precede the backward of any of its
rows: the backward of a prefix follows the backwards of all documents that continue it. The forward
counts tokens, and the backward of an identity on the logits adds the gradient.

    F   slice 0: count     F   slice 1: count     B   slice 1: all-reduce, add     B   slice 0: add

Shape suffixes: t rows of a rank, E experts, k experts of a token, T_d tokens of sample d, L layers,
S spans of the plan's chunks, P pools, n pairs of a pool and one of its spans
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.ir import Span
from megatron_epp.layers.attention.varlen import on_device
from megatron_epp.layers.chunk_state import ChunkState


@dataclass(frozen=True, slots=True)
class Balancing:
    """Settings of the load balancing of a model's experts.

    Attributes:
        experts: E, the number of experts.
        topk: k, the number of experts per token.
        auxiliary: (name in the log, coefficient) of auxiliary losses.
        z_coefficient: coefficient of the squared log-sum-exp of a token's logits; 0 for none.
        place: index of this rank among the ranks that shard a chunk's rows, in row order.
        places: number of ranks that shard a chunk's rows.
        splits: number of consecutive (sequence-parallel) ranks that shard the rows of one CP rank.
        group: group of all ``places`` ranks; None for a single rank.
    """

    experts: int
    topk: int
    auxiliary: tuple[tuple[str, float], ...] = ()
    z_coefficient: float = 0.0
    place: int = 0
    places: int = 1
    splits: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def coefficient(self) -> float:
        """Sum of the auxiliary losses' coefficients; for one document, these losses are equal."""
        return sum(coefficient for _, coefficient in self.auxiliary)


@dataclass(frozen=True, slots=True)
class Pools:
    """Sets of samples (pools) over which the load of experts is balanced together.

    For example, a pool is a micro-batch of an external training loop. All forwards of a pool
    precede its first backward.

    Attributes:
        paths: for each sample, the spans of the plan's documents of which it consists.
        of: index of the pool of every sample.
        shares: for each pool, factor on its auxiliary losses, which are also multiplied by its
            token count.
        token_fractions: for each pool, factor on the z-losses of its tokens.
    """

    paths: Sequence[Sequence[Span]]
    of: Sequence[int]
    shares: Sequence[float]
    token_fractions: Sequence[float]

    @classmethod
    def each_alone(cls, paths: Sequence[Sequence[Span]]) -> "Pools":
        """Build one pool per sample, in which every factor is 1."""
        ones = (1.0,) * len(paths)
        return cls(paths, range(len(paths)), ones, ones)


class RouterStats:
    """Counts and scores of a stage's routers in one iteration.

    Tokens are counted in a layer's first run of a chunk, not in recompute.

    Args:
        balancing: settings of the load balancing.
        spans: the spans of all chunks.
        layers: number of layers of the stage.
        pools: samples that are balanced together.
        scale: factor on the loss before backward (loss scaling).
    """

    def __init__(
        self,
        balancing: Balancing,
        spans: Iterable[Span],
        layers: int,
        pools: Pools,
        scale: Tensor | float = 1.0,
    ):
        self.balancing, self.layers, self.pools, self.scale = balancing, layers, pools, scale
        spans = [*spans]
        self.spans = {(span.document, span.start): number for number, span in enumerate(spans)}
        of_document: dict[int, list[tuple[int, int]]] = {}
        for (document, start), number in self.spans.items():
            of_document.setdefault(document, []).append((start, number))
        # For each pool, how many of its samples contain each span.
        self._times: list[Counter[int]] = [Counter() for _ in pools.shares]
        for path, pool in zip(pools.paths, pools.of, strict=True):
            for part in path:
                within = of_document[part.document]
                self._times[pool].update(number for start, number in within if start < part.stop)
        self._pools_of: list[list[int]] = [[] for _ in spans]
        for pool, times in enumerate(self._times):
            for number in times:
                self._pools_of[number].append(pool)
        tokens = (sum(spans[s].tokens * n for s, n in times.items()) for times in self._times)
        self._inverse = [1 / number for number in tokens]  # of the tokens of every pool
        self._passed: set[tuple[int, int]] = set()
        self._summed: set[int] = set()
        # Counts and scores of this rank's rows, and gradients of scores from the pools in _summed;
        # the last of S + 1 rows is for padding.
        self._sums_3SLE: Tensor | None = None
        self._of_spans: dict[str, Tensor] = {}
        self._auxiliary_L: Tensor | None = None
        self._z_L: Tensor | None = None

    def first_time(self, layer: int, chunk: int) -> bool:
        """Return whether ``layer`` runs ``chunk`` for the first time, and record this run."""
        first = (layer, chunk) not in self._passed
        self._passed.add((layer, chunk))
        return first

    # -------------------------------------------------------------- rows

    def owners(self, state: ChunkState, device: torch.device) -> Tensor:
        """Return the index of the span of each of this rank's rows: int64 [t].

        The index of padding rows is the number of spans.
        """
        return state.once("owners", lambda: on_device(self._owners(state), device))

    def _owners(self, state: ChunkState) -> Tensor:
        rules = self.balancing
        part, split = divmod(rules.place, rules.splits)
        sharded_owners = self._owners_of(state).reshape(rules.places // rules.splits, -1)[part]
        local = () if state.local is None else (self._owners_of(state.local),)
        owners = numpy.concatenate((sharded_owners, *local)).reshape(rules.splits, -1)[split]
        return torch.from_numpy(owners.copy())

    def _owners_of(self, state: ChunkState) -> numpy.ndarray:
        """Return the index of the span of each row of ``state``."""
        owners = numpy.full(state.tokens, len(self.spans), dtype=numpy.int64)
        for rows in state.rows:
            owners[rows.start : rows.stop] = self.spans[rows.span.document, rows.span.start]
        return owners

    def times(self, state: ChunkState, like: Tensor) -> Tensor:
        """Return the number of samples that contain each of this rank's rows: [t], 0 for padding.

        The result has the device of ``like``, and at least the precision of float32.
        """
        times_S = self._per_span("samples", [1.0] * len(self._times), like)
        return times_S.index_select(0, self.owners(state, like.device))

    # -------------------------------------------------------------- auxiliary losses

    def balanced(
        self,
        logits_tE: Tensor,
        scored: Callable[[Tensor], tuple[Tensor, Tensor]],
        layer: int,
        state: ChunkState,
        first: bool,
        fraction: float = 1.0,
    ) -> Tensor:
        """Return ``logits_tE``, whose backward adds the gradients of auxiliary losses.

        The first run of a chunk adds the chosen experts and the scores to the statistics. The first
        backward that needs the counts of a pool all-reduces them.

        Args:
            logits_tE: [local rows, experts] logits.
            scored: function from logits to the mask of the chosen experts [t, E] and the scores
                [t, E].
            layer: number of the layer in the stage.
            state: state of the chunk.
            first: whether this is the layer's first run of the chunk.
            fraction: additional factor on the gradients.
        """
        if not self.balancing.coefficient:
            return logits_tE
        owners_t = self.owners(state, logits_tE.device)
        chosen_tE, scores_tE = scored(logits_tE)
        if first:
            counts_SLE, scores_SLE, _ = self._sums(scores_tE)
            counts_SLE[:, layer].index_add_(0, owners_t, chosen_tE.to(counts_SLE.dtype))
            scores_SLE[:, layer].index_add_(0, owners_t, scores_tE.detach().to(scores_SLE.dtype))
        if not torch.is_grad_enabled():
            return logits_tE

        def gradient() -> Tensor:
            slopes_SLE = self._sum_over_ranks(state, scores_tE)
            rules = self.balancing
            factor = fraction * rules.coefficient * rules.experts / rules.topk * self.scale
            return (slopes_SLE[:, layer] * factor).index_select(0, owners_t).to(scores_tE.dtype)

        return _Attached.apply(logits_tE, scores_tE, gradient)

    def _sums(self, like: Tensor) -> Tensor:
        if self._sums_3SLE is None:
            dtype = torch.promote_types(like.dtype, torch.float32)
            shape = (3, len(self.spans) + 1, self.layers, self.balancing.experts)
            self._sums_3SLE = torch.zeros(shape, dtype=dtype, device=like.device)
            self._auxiliary_L = torch.zeros(self.layers, dtype=dtype, device=like.device)
        return self._sums_3SLE

    def _sum_over_ranks(self, state: ChunkState, like: Tensor) -> Tensor:
        """All-reduce the token counts of the chunk's pools; return gradients of scores [S, L, E].

        One all-reduce covers all layers and all pools of the chunk that are not yet reduced. It
        runs in the first backward of a pool's rows, in the first layer that needs the counts. The
        losses are added to the log: this rank's parts, reduced counts times scores of its rows.
        """
        counts_SLE, scores_SLE, slopes_SLE = self._sums(like)
        spans = [(rows.span.document, rows.span.start) for rows in state.rows]
        spans += [(document, 0) for document in state.local_documents]
        pools = dict.fromkeys(pool for span in spans for pool in self._pools_of[self.spans[span]])
        new = [pool for pool in pools if pool not in self._summed]
        if not new:
            return slopes_SLE
        self._summed.update(new)
        device, dtype = counts_SLE.device, counts_SLE.dtype
        pairs = [(p, s, n) for p, pool in enumerate(new) for s, n in self._times[pool].items()]
        pool_n, span_n, times_n = on_device(torch.tensor(pairs), device).T.contiguous()
        times_n11 = times_n.to(dtype)[:, None, None]

        def of_pools(sums_SLE: Tensor) -> Tensor:
            sums_PLE = sums_SLE.new_zeros(len(new), *sums_SLE.shape[1:])
            return sums_PLE.index_add_(0, pool_n, sums_SLE.index_select(0, span_n) * times_n11)

        counts_PLE, rules = of_pools(counts_SLE), self.balancing
        if rules.group is not None:
            dist.all_reduce(counts_PLE, group=rules.group)
        factors = [(self._inverse[p] ** 2, self.pools.shares[p] * self._inverse[p]) for p in new]
        squares_P, weights_P = on_device(torch.tensor(factors, dtype=dtype), device).T
        losses_PL = (counts_PLE * of_pools(scores_SLE)).sum(-1) * squares_P[:, None]
        assert self._auxiliary_L is not None
        self._auxiliary_L += losses_PL.sum(0) * (rules.experts / rules.topk)
        slopes_PLE = counts_PLE * weights_P[:, None, None]
        return slopes_SLE.index_add_(0, span_n, slopes_PLE.index_select(0, pool_n) * times_n11)

    def _per_span(self, name: str, of_pools: Sequence[float], like: Tensor) -> Tensor:
        """Return, for each span, the sum of ``of_pools`` over its samples: [S + 1] as ``like``.

        The last number is 0, for padding. The result is cached under ``name``.
        """
        if name not in self._of_spans:
            sums = [
                sum(of_pools[pool] * self._times[pool][number] for pool in pools)
                for number, pools in enumerate(self._pools_of)
            ]
            dtype = torch.promote_types(like.dtype, torch.float32)
            self._of_spans[name] = on_device(torch.tensor([*sums, 0.0], dtype=dtype), like.device)
        return self._of_spans[name]

    # -------------------------------------------------------------- z-loss

    def restrained(self, logits_tE: Tensor, layer: int, state: ChunkState, first: bool) -> Tensor:
        """Return ``logits_tE``, whose backward adds the gradient of the z-loss.

        The z-loss is a loss per token, so it does not depend on the chunks. Padding has no loss. In
        the first run of a chunk, the z-loss is added to the log.

        Args:
            logits_tE: [local rows, experts] logits.
            layer: number of the layer in the stage.
            state: state of the chunk.
            first: whether this is the layer's first run of the chunk.
        """
        coefficient = self.balancing.z_coefficient
        if not coefficient:
            return logits_tE
        owners_t = self.owners(state, logits_tE.device)
        squares_t = torch.logsumexp(logits_tE, dim=-1).square()
        if first:
            if self._z_L is None:
                dtype = torch.promote_types(squares_t.dtype, torch.float32)
                self._z_L = torch.zeros(self.layers, dtype=dtype, device=squares_t.device)
            weights_S = self._per_span("inverse", self._inverse, squares_t)
            weights_t = weights_S.index_select(0, owners_t)
            self._z_L[layer] += (squares_t.detach() * weights_t).sum()
        if not torch.is_grad_enabled():
            return logits_tE

        def gradient() -> Tensor:
            fractions_S = self._per_span("token shares", self.pools.token_fractions, squares_t)
            return fractions_S.index_select(0, owners_t).to(squares_t.dtype) * (
                coefficient * self.scale
            )

        return _Attached.apply(logits_tE, squares_t, gradient)

    # -------------------------------------------------------------- for the log

    def losses(self) -> dict[str, Tensor]:
        """Return this rank's part of every router loss: name in the log -> tensor [layers].

        The losses are sums over this replica's pools, not multiplied by their coefficients. They
        are complete after all backwards.
        """
        losses: dict[str, Tensor] = {}
        if self._auxiliary_L is not None:
            losses |= {name: self._auxiliary_L for name, _ in self.balancing.auxiliary}
        if self._z_L is not None:
            losses["z_loss"] = self._z_L
        return losses


class _Attached(torch.autograd.Function):
    """Identity on ``output``, whose backward also returns ``gradient()`` for ``other``."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, other: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
        ctx.gradient = gradient
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor):
        gradient, ctx.gradient = ctx.gradient, None
        return grad_output, gradient(), None
