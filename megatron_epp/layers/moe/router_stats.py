"""Load-balancing losses of MoE routers per document, independent of the plan.

The auxiliary loss of document d in one layer equals Megatron's loss of a micro-batch with d alone:

    coeff * E / (k * T_d^2) * sum_i count_i(d) * sum_t score_ti        times T_d in the sum over d

A slice contains a part of a document's tokens; a pack contains several documents. The gradient
depends on other tokens through the counts only: d/d score_ti = coeff * E / (k * T_d) * count_i(d).
The counts are complete after the forward of the document's last slice, before any of its slices
runs backward. So the forward counts tokens, and the backward of an identity on the logits adds the
gradient.

    F   slice 0: count     F   slice 1: count     B   slice 1: all-reduce, add     B   slice 0: add

t rows of a rank, E experts, k experts of a token, T_d tokens of document d
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

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
    """Pools of documents balanced together, such as micro-batches of an external training loop.

    All forwards of a pool precede its first backward.

    Attributes:
        of: index of the pool of every document.
        shares: for each pool, factor on its auxiliary losses; another factor is its token count.
        token_fractions: for each pool, factor on the z-losses of its tokens.
    """

    of: Sequence[int]
    shares: Sequence[float]
    token_fractions: Sequence[float]

    @classmethod
    def each_alone(cls, documents: int) -> "Pools":
        """Build one pool per document, in which every factor is 1."""
        return cls(range(documents), (1.0,) * documents, (1.0,) * documents)


class RouterStats:
    """Counts and scores of a stage's routers in one iteration.

    Tokens are counted in a layer's first run of a chunk, not in recompute. In the tensors' shapes,
    D is the number of pools.

    Args:
        balancing: settings of the load balancing.
        documents: number of tokens T_d of every document.
        layers: number of layers of the stage.
        scale: factor on the loss before backward.
        pools: documents that are balanced together; None balances each document individually.
    """

    def __init__(
        self,
        balancing: Balancing,
        documents: Sequence[int],
        layers: int,
        scale: Tensor | float = 1.0,
        pools: Pools | None = None,
    ):
        self.balancing, self.layers = balancing, layers
        self.pools = Pools.each_alone(len(documents)) if pools is None else pools
        self.tokens = [0] * len(self.pools.shares)  # of every pool
        for tokens, pool in zip(documents, self.pools.of, strict=True):
            self.tokens[pool] += tokens
        self.scale = scale
        self._passed: set[tuple[int, int]] = set()
        self._summed: set[int] = set()
        self._counts_DLE: Tensor | None = None  # the last row is for padding
        self._scores_DLE: Tensor | None = None  # of this rank's rows
        self._of_pools: dict[str, Tensor] = {}
        self._auxiliary_L: Tensor | None = None
        self._z_L: Tensor | None = None

    def first_time(self, layer: int, chunk: int) -> bool:
        """Return whether ``layer`` runs ``chunk`` for the first time, and record this run."""
        first = (layer, chunk) not in self._passed
        self._passed.add((layer, chunk))
        return first

    # -------------------------------------------------------------- rows

    def owners(self, state: ChunkState, device: torch.device) -> Tensor:
        """Return the pool index of each of this rank's rows: int64 [t].

        The index of padding rows is the number of pools.
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
        """Return the pool index of each row of ``state``."""
        owners = numpy.full(state.tokens, len(self.tokens), dtype=numpy.int64)
        for rows in state.rows:
            owners[rows.start : rows.stop] = self.pools.of[rows.span.document]
        return owners

    def valid(self, state: ChunkState, device: torch.device) -> Tensor:
        """Return a bool mask [t] of this rank's rows that are not padding."""
        return self.owners(state, device) < len(self.tokens)

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
        """Return the logits of ``layer``; their backward adds gradients of auxiliary losses.

        The first run of a chunk adds the chosen experts and the scores to the statistics. The first
        backward that needs the counts of a pool all-reduces them.

        Args:
            logits_tE: logits.
            scored: function from logits to the chosen experts [t, E] and the scores [t, E].
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
            counts_DLE, scores_DLE = self._sums(scores_tE)
            counts_DLE[:, layer].index_add_(0, owners_t, chosen_tE.to(counts_DLE.dtype))
            scores_DLE[:, layer].index_add_(0, owners_t, scores_tE.detach().to(scores_DLE.dtype))
        if not torch.is_grad_enabled():
            return logits_tE

        def gradient() -> Tensor:
            self._sum_over_ranks(state)
            assert self._counts_DLE is not None
            rules = self.balancing
            factor = fraction * rules.coefficient * rules.experts / rules.topk * self.scale
            weights_D = self._inverse(scores_tE) * self._once(
                "shares", self.pools.shares, scores_tE
            )
            per_pool_DE = self._counts_DLE[:, layer] * weights_D[:, None]
            return (per_pool_DE * factor).index_select(0, owners_t).to(scores_tE.dtype)

        return _Attached.apply(logits_tE, scores_tE, gradient)

    def _sums(self, scores_tE: Tensor) -> tuple[Tensor, Tensor]:
        if self._counts_DLE is None:
            dtype = torch.promote_types(scores_tE.dtype, torch.float32)
            shape = (len(self.tokens) + 1, self.layers, self.balancing.experts)
            self._counts_DLE = torch.zeros(shape, dtype=dtype, device=scores_tE.device)
            self._scores_DLE = torch.zeros_like(self._counts_DLE)
            self._auxiliary_L = torch.zeros(self.layers, dtype=dtype, device=scores_tE.device)
        assert self._scores_DLE is not None
        return self._counts_DLE, self._scores_DLE

    def _sum_over_ranks(self, state: ChunkState) -> None:
        """All-reduce the token counts of the chunk's pools, and add auxiliary losses to the log.

        One all-reduce covers all layers and all pools of the chunk that are not yet reduced. It
        runs in the backward of a document's last slice, in the first layer that needs the counts.
        The logged losses are this rank's parts: reduced counts times scores of this rank's rows.
        """
        documents = [rows.span.document for rows in state.rows] + list(state.local_documents)
        pools = dict.fromkeys(self.pools.of[document] for document in documents)
        new = [pool for pool in pools if pool not in self._summed]
        if not new:
            return
        self._summed.update(new)
        assert self._counts_DLE is not None and self._scores_DLE is not None
        which = on_device(torch.tensor(new), self._counts_DLE.device)
        counts_DLE = self._counts_DLE.index_select(0, which)
        if self.balancing.group is not None:
            dist.all_reduce(counts_DLE, group=self.balancing.group)
            self._counts_DLE.index_copy_(0, which, counts_DLE)
        # This rank's part of the losses, for the log: global counts times scores of its own rows.
        rules = self.balancing
        losses_DL = (counts_DLE * self._scores_DLE.index_select(0, which)).sum(-1)
        weights_D = self._inverse(counts_DLE).index_select(0, which) ** 2
        assert self._auxiliary_L is not None
        self._auxiliary_L += (losses_DL * weights_D[:, None]).sum(0) * (rules.experts / rules.topk)

    def _inverse(self, like: Tensor) -> Tensor:
        return self._once("inverse", [1 / tokens for tokens in self.tokens], like)

    def _once(self, name: str, of_pools: Sequence[float], like: Tensor) -> Tensor:
        """Return ``of_pools`` and 0 for padding: [D + 1] on the device of ``like``, cached."""
        if name not in self._of_pools:
            dtype = torch.promote_types(like.dtype, torch.float32)
            factors = torch.tensor([*of_pools, 0.0], dtype=dtype)
            self._of_pools[name] = on_device(factors, like.device)
        return self._of_pools[name]

    # -------------------------------------------------------------- z-loss

    def restrained(self, logits_tE: Tensor, layer: int, state: ChunkState, first: bool) -> Tensor:
        """Return the logits of ``layer``; their backward adds the z-loss's gradient.

        The z-loss is a loss per token, so it does not depend on the chunks. Padding has no loss. In
        the first run of a chunk, the z-loss is added to the log.

        Args:
            logits_tE: logits.
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
            weights_t = self._inverse(squares_t).index_select(0, owners_t)
            self._z_L[layer] += (squares_t.detach() * weights_t).sum()
        if not torch.is_grad_enabled():
            return logits_tE

        def gradient() -> Tensor:
            fractions_D = self._once("token shares", self.pools.token_fractions, squares_t)
            return fractions_D.index_select(0, owners_t).to(squares_t.dtype) * (
                coefficient * self.scale
            )

        return _Attached.apply(logits_tE, squares_t, gradient)

    # -------------------------------------------------------------- for the log

    def losses(self) -> dict[str, Tensor]:
        """Return this rank's part of every router loss: name in the log -> tensor [layers].

        The losses are sums over this replica's documents, not multiplied by their coefficients.
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
