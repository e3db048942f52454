"""The output layer and its loss where every stage, and every tensor-parallel rank, has some words.

    H   of a rank: logits of its words, merged with those of the ranks before    along a chain
    G   of a rank: the gradient of its words' rows, when all logits are known

What H passes on of a row is as much as an online softmax needs: the logarithm of the sum of
exponentials so far, the label's logit and row of the weight where they were met, and the mean of
the rows of the weight under the softmax so far. Behind the last words

    loss = lse - label's logit        gradient of hidden = mean - label's row

each times the row's weight in the loss, so that no logits are kept, and none but a block of them
ever lives. G makes them again: softmax = exp(logit - lse), the exact one.

Statistics are float32, or float64 where the hidden states are; means and rows have their dtype.

t rows of the chunk on this rank, T on its tensor-parallel group (more than t with sequence
parallelism, which spreads rows over them), H hidden size, V words of this rank
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.layers.concatenated import concatenated


@dataclass(frozen=True, slots=True)
class OutputWeightShard:
    """Rows [first, first + V) of the output layer's weight, one per word of the vocabulary; logits
    of ``block`` rows of the chunk live at once.

    group       the tensor-parallel ranks, which have other words; None: this rank is alone
    scattered   whether each of them has other rows of the chunk, too (sequence parallelism)
    hold        what counts a block's logits, which no autograd saves, as long as the token lives
                that it gives for them
    """

    weight_VH: Tensor
    first: int
    block: int
    group: dist.ProcessGroup | None = None
    scattered: bool = False
    hold: Callable[[Tensor], Any] = id

    def __post_init__(self):
        assert self.block >= 1

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def scatters(self) -> int:
        """Ranks that have some of the rows each."""
        return self.ranks if self.scattered else 1

    def gathered(self, tensor_t: Tensor) -> Tensor:
        """[t, ...] -> [T, ...]. Collective where rows are scattered."""
        if not self.scattered or self.ranks == 1:
            return tensor_t
        full_T = tensor_t.new_empty(len(tensor_t) * self.ranks, *tensor_t.shape[1:])
        dist.all_gather_into_tensor(full_T, tensor_t.contiguous(), group=self.group)
        return full_T

    def local(self, tensor_T: Tensor) -> Tensor:
        """[T, ...] -> [t, ...]: the rows that are here."""
        if not self.scattered or self.group is None:
            return tensor_T
        rows = len(tensor_T) // self.ranks
        return tensor_T[self.group.rank() * rows :][:rows]

    def summed(self, tensor_T: Tensor) -> Tensor:
        """[T, ...] of every rank -> [t, ...] of their sum. Collective."""
        if not self.scattered:
            dist.all_reduce(tensor_T, group=self.group)
            return tensor_T
        sum_t = tensor_T.new_empty(len(tensor_T) // self.ranks, *tensor_T.shape[1:])
        dist.reduce_scatter_tensor(sum_t, tensor_T.contiguous(), group=self.group)
        return sum_t

    def blocks(
        self, hidden_TH: Tensor, labels_T: Tensor, temperature_T: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield for every block its rows, their logits [t, V] in the statistics' format, where
        their labels stand among the words, and whether they do. Delete the logits before the next.
        """
        for rows in row_blocks(len(hidden_TH), self.block):
            logits_tV = hidden_TH[rows] @ self.weight_VH.t()
            logits_tV = logits_tV.to(statistics_dtype(hidden_TH.dtype))
            if temperature_T is not None:
                logits_tV.div_(temperature_T[rows, None])
            token = self.hold(logits_tV)
            place_t = labels_T[rows] - self.first
            met_t = (place_t >= 0) & (place_t < len(self.weight_VH))
            yield rows, logits_tV, place_t.masked_fill(~met_t, 0), met_t
            del logits_tV, token


@dataclass(frozen=True, slots=True)
class Statistics:
    """Softmax statistics over the words so far. ``rows``: None where no gradient is wanted."""

    lse_t: Tensor  # logarithm of the sum of their logits' exponentials
    logit_t: Tensor  # the label's, 0 where the label is none of them
    rows: "WeightRows | None"

    def merged(self, other: "Statistics") -> "Statistics":
        """Merged with those of other words. The rows of both are given up for the result's."""
        lse_t = torch.logaddexp(self.lse_t, other.lse_t)
        rows = None
        if self.rows is not None and other.rows is not None:
            mean_tH, others_tH = self.rows.mean_tH, other.rows.mean_tH
            mean_tH *= softmax_mass(self.lse_t, lse_t, mean_tH)
            others_tH *= softmax_mass(other.lse_t, lse_t, mean_tH)
            mean_tH += others_tH
            label_tH = self.rows.label_tH
            label_tH += other.rows.label_tH
            rows = WeightRows(mean_tH, label_tH)
        return Statistics(lse_t, self.logit_t + other.logit_t, rows)

    @property
    def losses_t(self) -> Tensor:
        """Loss of every row, once these are all words."""
        return self.lse_t - self.logit_t


@dataclass(frozen=True, slots=True)
class WeightRows:
    """Mean of the weight's rows under the softmax of the words so far, and the label's row, 0 where
    the label is none of them."""

    mean_tH: Tensor
    label_tH: Tensor

    def gradient(self, weights_t: Tensor) -> Tensor:
        """Gradient of the hidden states, once these are all words; ``weights``: of the losses."""
        return (self.mean_tH - self.label_tH) * weights_t[:, None].to(self.mean_tH.dtype)


def statistics_dtype(hidden: torch.dtype) -> torch.dtype:
    return torch.promote_types(hidden, torch.float32)


def statistics(
    hidden_tH: Tensor, labels_T: Tensor, words: OutputWeightShard, gradient: bool
) -> Statistics:
    """H: of the t rows here, over the words of this rank and of its tensor-parallel group.

    ``gradient``: with the rows that it needs. Collective over the group.
    """
    hidden_TH = words.gathered(hidden_tH).to(words.weight_VH.dtype)
    own = _local_statistics(hidden_TH, labels_T, words, gradient)
    if words.ranks == 1:
        return own
    lse_T = log_of_sums(own.lse_t, words)
    logit_T = own.logit_t.clone()
    dist.all_reduce(logit_T, group=words.group)
    rows = None
    if own.rows is not None:
        mean_TH = own.rows.mean_tH * softmax_mass(own.lse_t, lse_T, own.rows.mean_tH)
        # [T, 2, H], so that a sum that scatters gives each rank its rows of both.
        both = torch.stack((mean_TH, own.rows.label_tH), 1)
        both = words.summed(both)
        rows = WeightRows(both[:, 0], both[:, 1])
    return Statistics(words.local(lse_T), words.local(logit_T), rows)


def _local_statistics(
    hidden_TH: Tensor, labels_T: Tensor, words: OutputWeightShard, gradient: bool
) -> Statistics:
    total, weight_VH = len(hidden_TH), words.weight_VH
    dtype = statistics_dtype(hidden_TH.dtype)
    lse_T = hidden_TH.new_empty(total, dtype=dtype)
    logit_T = torch.empty_like(lse_T)
    rows = None
    if gradient:
        rows = WeightRows(torch.empty_like(hidden_TH), torch.empty_like(hidden_TH))
    for block, logits_tV, place_t, met_t in words.blocks(hidden_TH, labels_T):
        lse_t = lse_T[block] = torch.logsumexp(logits_tV, 1)
        label_t = logits_tV.gather(1, place_t[:, None])[:, 0]
        logit_T[block] = label_t.masked_fill(~met_t, 0)
        if rows is not None:
            softmax_tV = logits_tV.sub_(lse_t[:, None]).exp_().to(weight_VH.dtype)
            torch.matmul(softmax_tV, weight_VH, out=rows.mean_tH[block])
            # Not times met_t: a row that is not finite would leave its trace where it is not met.
            rows.label_tH[block] = weight_VH[place_t].masked_fill_(~met_t[:, None], 0)
            del softmax_tV
        del logits_tV
    return Statistics(lse_T, logit_T, rows)


def weight_gradients(
    hidden_tH: Tensor, labels_T: Tensor, weights_T: Tensor, lse_t: Tensor, words: OutputWeightShard
) -> Iterator[Tensor]:
    """G: what the rows add to the gradient of ``words.weight``, a block of them at a time: [V, H].

    lse       over all words     weights   of the rows' losses
    Collective over the group where it is scattered.
    """
    weight_VH = words.weight_VH
    hidden_TH, lse_T = words.gathered(hidden_tH).to(weight_VH.dtype), words.gathered(lse_t)
    for block, logits_tV, place_t, met_t in words.blocks(hidden_TH, labels_T):
        slope_tV = logits_tV.sub_(lse_T[block, None]).exp_()
        slope_tV.scatter_add_(1, place_t[:, None], -met_t[:, None].to(slope_tV.dtype))
        slope_tV *= weights_T[block, None].to(slope_tV.dtype)
        gradient_VH = slope_tV.to(hidden_TH.dtype).t() @ hidden_TH[block]
        del logits_tV, slope_tV
        yield gradient_VH


def log_of_sums(lse_T: Tensor, words: OutputWeightShard) -> Tensor:
    """Log-sum-exp over all ranks' words."""
    most_T = lse_T.clone()
    dist.all_reduce(most_T, dist.ReduceOp.MAX, group=words.group)
    sum_T = torch.exp(lse_T - most_T)
    dist.all_reduce(sum_T, group=words.group)
    return most_T + sum_T.log_()


def softmax_mass(lse_t: Tensor, of_t: Tensor, like_tH: Tensor) -> Tensor:
    """Softmax mass of some words among more words: [t, 1]."""
    return torch.exp(lse_t - of_t)[:, None].to(like_tH.dtype)


def row_blocks(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


# ------------------------------------------------------------------ messages


@dataclass(frozen=True, slots=True)
class Packing:
    """The one tensor that several travel in: ``rows`` rows of ``wide`` tensors of H numbers in
    ``dtype``, and of ``narrow`` statistics, whose bits take the place of as many numbers."""

    rows: int
    hidden: int
    wide: int
    narrow: int
    dtype: torch.dtype

    @property
    def _numbers(self) -> int:
        """Numbers that take a statistic's place."""
        return statistics_dtype(self.dtype).itemsize // self.dtype.itemsize

    @property
    def elements(self) -> int:
        return self.rows * (self.wide * self.hidden + self.narrow * self._numbers)

    def pack(self, wide: tuple[Tensor, ...], narrow: tuple[Tensor, ...]) -> Tensor:
        """[elements]; ``wide`` are of t * H numbers each, ``narrow`` of t."""
        assert (len(wide), len(narrow)) == (self.wide, self.narrow)
        parts = [tensor.reshape(-1).to(self.dtype) for tensor in wide]
        kind = statistics_dtype(self.dtype)
        parts += [tensor.to(kind).contiguous().view(self.dtype) for tensor in narrow]
        return concatenated(parts)

    def unpack(self, flat: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Views of [t, H], and copies of [t]."""
        sizes = [self.rows * self.hidden] * self.wide + [self.rows * self._numbers] * self.narrow
        parts = flat.split(sizes)
        kind = statistics_dtype(self.dtype)
        wide = tuple(part.view(self.rows, self.hidden) for part in parts[: self.wide])
        # A copy: a view of wider numbers must begin at a multiple of their size.
        return wide, tuple(part.clone().view(kind) for part in parts[self.wide :])
