"""LM head and loss with vocabulary parallelism: each stage and TP rank has some vocabulary rows.

    H   logits of the rank's vocabulary rows, merged into the statistics of earlier stages
    G   weight gradient of the rank's vocabulary rows, after H of the last stage

H sends the state of an online softmax for each chunk row: the log-sum-exp so far, the
softmax-weighted mean of the weight rows so far, and the label's logit and weight row (both 0 until
a rank has that vocabulary row). After the last vocabulary row

    loss = lse - label's logit        gradient of hidden = mean - label's row

where both are multiplied by the chunk row's weight in the total loss. No logits are saved, and only
a block of logits is alive at a time. G recomputes the logits: softmax = exp(logit - lse) is exact.

Statistics are float32, or float64 for float64 hidden states. Mean weight rows and label weight rows
have the dtype of the hidden states.

Shape suffixes: t rows of the chunk on this rank, T rows on its tensor-parallel group (t < T if
sequence parallelism shards the rows), H hidden size, V vocabulary rows of this rank
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
    """Rows [first, first + V) of the LM head's weight, one per vocabulary entry.

    Attributes:
        weight_VH: [vocabulary rows, hidden size] the rows of the weight.
        first: vocabulary index of the first row.
        block: number of chunk rows whose logits are alive at a time.
        group: tensor-parallel ranks, over which the vocabulary is sharded; None for a single rank.
        scattered: whether the chunk's rows are sharded over ``group`` too (sequence parallelism).
        hold: function from a block's logits to an object. The memory meter counts the logits, which
            autograd does not save, as long as the object lives.
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
        """Number of tensor-parallel ranks."""
        return 1 if self.group is None else self.group.size()

    @property
    def scatters(self) -> int:
        """Number of ranks over which the chunk's rows are sharded."""
        return self.ranks if self.scattered else 1

    def gathered(self, tensor_t: Tensor) -> Tensor:
        """Return rows [T, ...], all-gathered from [t, ...] if the chunk's rows are sharded."""
        if not self.scattered or self.ranks == 1:
            return tensor_t
        full_T = tensor_t.new_empty(len(tensor_t) * self.ranks, *tensor_t.shape[1:])
        dist.all_gather_into_tensor(full_T, tensor_t.contiguous(), group=self.group)
        return full_T

    def local(self, tensor_T: Tensor) -> Tensor:
        """Return the rows [t, ...] of this rank from [T, ...]."""
        if not self.scattered or self.group is None:
            return tensor_T
        rows = len(tensor_T) // self.ranks
        return tensor_T[self.group.rank() * rows :][:rows]

    def summed(self, tensor_T: Tensor) -> Tensor:
        """Sum [T, ...] over the ranks of ``group``, and return this rank's rows [t, ...].

        Sharded rows are reduce-scattered. Otherwise t = T, and ``tensor_T`` is all-reduced in
        place.
        """
        if not self.scattered:
            dist.all_reduce(tensor_T, group=self.group)
            return tensor_T
        sum_t = tensor_T.new_empty(len(tensor_T) // self.ranks, *tensor_T.shape[1:])
        dist.reduce_scatter_tensor(sum_t, tensor_T.contiguous(), group=self.group)
        return sum_t

    def blocks(
        self, hidden_TH: Tensor, labels_T: Tensor, temperature_T: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield the rows of every block, their logits, their labels' indices, and a mask.

        ``hidden_TH`` are the hidden states, ``labels_T`` the labels of the rows, and
        ``temperature_T`` the divisors of their logits (None for 1). Logits are [t, V] in the
        statistics' dtype, for t rows of a block. Indices are relative to ``first``. The mask is
        true where the label is among this rank's vocabulary rows; elsewhere the index is 0. The
        caller must delete the logits before the next block.
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
    """Softmax statistics of chunk rows over the vocabulary rows that have been processed so far.

    Attributes:
        lse_t: [local rows] log-sum-exp of the logits of these vocabulary rows.
        logit_t: [local rows] logit of the label; 0 if these vocabulary rows do not include it.
        rows: weight rows that the gradient needs; None if no gradient is computed.
    """

    lse_t: Tensor
    logit_t: Tensor
    rows: "WeightRows | None"

    def merged(self, other: "Statistics") -> "Statistics":
        """Return the statistics over the vocabulary rows of this object and of ``other``.

        The weight rows of both objects are overwritten; use neither object afterwards.
        """
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
        """Loss of every chunk row, if the statistics cover all vocabulary rows."""
        return self.lse_t - self.logit_t


@dataclass(frozen=True, slots=True)
class WeightRows:
    """Softmax-weighted mean of the weight rows so far, and the label's weight row.

    Both are [local rows, hidden size]. The label's weight row is 0 if the label is not among the
    vocabulary rows so far.
    """

    mean_tH: Tensor
    label_tH: Tensor

    def gradient(self, weights_t: Tensor) -> Tensor:
        """Return the gradient [t, H] of the hidden states, if all vocabulary rows are merged.

        ``weights_t`` [local rows] are the weights of the rows' losses in the total loss.
        """
        return (self.mean_tH - self.label_tH) * weights_t[:, None].to(self.mean_tH.dtype)


def statistics_dtype(hidden: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics for hidden states of dtype ``hidden``: at least float32."""
    return torch.promote_types(hidden, torch.float32)


def statistics(
    hidden_tH: Tensor, labels_T: Tensor, words: OutputWeightShard, gradient: bool
) -> Statistics:
    """Compute op H, the softmax statistics of this rank's t rows.

    The statistics cover the vocabulary rows of all ranks of ``words.group`` (tensor parallelism).
    All ranks of this group must call this function.

    Args:
        hidden_tH: [local rows, hidden size] hidden states of this rank's rows.
        labels_T: [rows] labels of the rows of all ranks of the group.
        words: this rank's vocabulary rows.
        gradient: whether to compute the weight rows for the gradient.
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
        # [T, 2, H], so that a reduce-scatter gives each rank its rows of both.
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
            # Masked instead of multiplied by met_t: a non-finite row would otherwise leave NaN.
            rows.label_tH[block] = weight_VH[place_t].masked_fill_(~met_t[:, None], 0)
            del softmax_tV
        del logits_tV
    return Statistics(lse_T, logit_T, rows)


def weight_gradients(
    hidden_tH: Tensor, labels_T: Tensor, weights_T: Tensor, lse_t: Tensor, words: OutputWeightShard
) -> Iterator[Tensor]:
    """Yield the summands [V, H] of op G, the weight gradient: one per block of chunk rows.

    If rows are sharded, hidden states and statistics are first all-gathered over the group.

    Args:
        hidden_tH: [local rows, hidden size] hidden states of this rank's rows.
        labels_T: [rows] labels of the rows of all ranks of the group.
        weights_T: [rows] weights of these rows' losses.
        lse_t: [local rows] log-sum-exp over all vocabulary rows.
        words: this rank's vocabulary rows.
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
    """All-reduce ``lse_T`` [rows] to the log-sum-exp over the vocabulary rows of all ranks."""
    most_T = lse_T.clone()
    dist.all_reduce(most_T, dist.ReduceOp.MAX, group=words.group)
    sum_T = torch.exp(lse_T - most_T)
    dist.all_reduce(sum_T, group=words.group)
    return most_T + sum_T.log_()


def softmax_mass(lse_t: Tensor, of_t: Tensor, like_tH: Tensor) -> Tensor:
    """Return exp(lse_t - of_t) as [t, 1] in the dtype of ``like_tH``.

    This is the total softmax probability of the vocabulary rows that ``lse_t`` covers, if ``of_t``
    covers all vocabulary rows.
    """
    return torch.exp(lse_t - of_t)[:, None].to(like_tH.dtype)


def row_blocks(total: int, size: int) -> Iterator[slice]:
    """Yield slices of ``size`` rows that cover ``total`` rows; the last may be shorter."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


# ------------------------------------------------------------------ messages


@dataclass(frozen=True, slots=True)
class Packing:
    """Layout of a message with a number of tensors [rows, hidden] and statistics [rows].

    ``wide`` is the number of tensors [rows, hidden], and ``narrow`` the number of statistics. The
    message has dtype ``dtype``; the bits of a statistic are stored in elements of this dtype.
    """

    rows: int
    hidden: int
    wide: int
    narrow: int
    dtype: torch.dtype

    @property
    def _numbers(self) -> int:
        """Number of elements that hold one statistic."""
        return statistics_dtype(self.dtype).itemsize // self.dtype.itemsize

    @property
    def elements(self) -> int:
        """Number of elements of the message."""
        return self.rows * (self.wide * self.hidden + self.narrow * self._numbers)

    def pack(self, wide: tuple[Tensor, ...], narrow: tuple[Tensor, ...]) -> Tensor:
        """Return the message [elements] of ``wide`` tensors [t, H] and ``narrow`` tensors [t]."""
        assert (len(wide), len(narrow)) == (self.wide, self.narrow)
        parts = [tensor.reshape(-1).to(self.dtype) for tensor in wide]
        kind = statistics_dtype(self.dtype)
        parts += [tensor.to(kind).contiguous().view(self.dtype) for tensor in narrow]
        return concatenated(parts)

    def unpack(self, flat: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return views [t, H] of the wide tensors, and copies [t] of the narrow tensors."""
        sizes = [self.rows * self.hidden] * self.wide + [self.rows * self._numbers] * self.narrow
        parts = flat.split(sizes)
        kind = statistics_dtype(self.dtype)
        wide = tuple(part.view(self.rows, self.hidden) for part in parts[: self.wide])
        # A copy, because a view of a wider dtype must be aligned.
        return wide, tuple(part.clone().view(kind) for part in parts[self.wide :])
