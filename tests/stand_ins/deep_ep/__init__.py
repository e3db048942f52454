"""What DeepEP publishes for training, over gloo: rows and weights go where its kernels bring them.

By its README and by how Megatron calls it (core/transformer/moe/fused_a2a.py). Put this folder's
parent on PYTHONPATH. What its kernels cannot do ends in an AssertionError: other formats than bf16;
of HybridEP ranks with unlike numbers of rows, no multiple of 64, buffers that grow while a handle
waits for its backward. EPP_STAND_IN names a file that gets a line for every buffer and exchange.
"""

import os
from types import SimpleNamespace

import torch
import torch.distributed as dist

from deep_ep.utils import EventOverlap


def note(*words) -> None:
    if path := os.environ.get("EPP_STAND_IN"):
        with open(path, "a") as file:
            print(*words, file=file)


def gathered(x, group) -> list:
    """``x`` [rows, ...] of every rank."""
    sizes: list = [None] * group.size()
    dist.all_gather_object(sizes, len(x), group)
    padded = x.new_zeros((max(sizes), *x.shape[1:]))
    padded[: len(x)] = x
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def summed(x, sizes, group):
    """This rank's part of ``x`` [rows of all ranks, ...], added up over the ranks in float32."""
    total = x.float()
    dist.all_reduce(total, group=group)
    return total.split(sizes)[group.rank()].to(x.dtype).contiguous()


class Buffer:
    """Exchanges of any number of rows of each rank."""

    num_sms = 20

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0):
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        note("Buffer", group.rank(), num_nvl_bytes)

    @staticmethod
    def set_num_sms(number):
        assert number % 2 == 0
        Buffer.num_sms = number

    @staticmethod
    def get_dispatch_config(ranks):
        assert ranks in (2, 4, 8, 16, 24, 32, 64), f"Unsupported number of EP ranks: {ranks}"
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda hidden_bytes, ranks: hidden_bytes * ranks,
            get_rdma_buffer_size_hint=lambda hidden_bytes, ranks: 0,
        )

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx, num_experts, **how):
        ranks = self.group.size()
        owner = torch.where(topk_idx < 0, -1, topk_idx // (num_experts // ranks))
        is_in = torch.stack([(owner == rank).any(dim=1) for rank in range(ranks)], dim=1)
        of_experts = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        return is_in.sum(0).int(), None, of_experts.int(), is_in, EventOverlap(None)

    def dispatch(
        self, x, handle=None, topk_idx=None, topk_weights=None, num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None, is_token_in_rank=None, num_tokens_per_expert=None, **how,
    ):  # fmt: skip
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and len(x)
        rank = self.group.rank()
        all_x = torch.cat(gathered(x, self.group))
        if handle is not None:
            _, rows = handle
            return all_x[rows], None, None, None, None, EventOverlap(None)
        assert topk_weights.dtype == torch.float32
        note("dispatch", rank, len(x))
        each = len(num_tokens_per_expert) // self.group.size()
        indices = gathered(topk_idx, self.group)
        local = torch.cat(indices) - rank * each
        mine = (local >= 0) & (local < each)
        rows = mine.any(dim=1).nonzero().flatten()
        weights = torch.cat(gathered(topk_weights, self.group))
        local = torch.where(mine, local, -1)[rows]
        counts = torch.bincount(local[local >= 0], minlength=each).tolist()
        weights = torch.where(mine, weights, 0)[rows]
        handle = [len(one) for one in indices], rows
        return all_x[rows], local, weights, counts, handle, EventOverlap(None)

    def combine(self, x, handle, topk_weights=None, **how):
        assert x.dtype == torch.bfloat16 and x.is_contiguous()
        sizes, rows = handle
        back = x.new_zeros((sum(sizes), x.shape[1])).index_copy(0, rows, x)
        weights = None
        if topk_weights is not None:
            of_all = topk_weights.new_zeros((sum(sizes), topk_weights.shape[1]))
            weights = summed(of_all.index_copy(0, rows, topk_weights), sizes, self.group)
        return summed(back, sizes, self.group), weights, EventOverlap(None)


class HybridEPBuffer:
    """Exchanges of as many rows of every rank, no more than its buffers are made for."""

    def __init__(
        self, group, hidden_dim, max_num_of_tokens_per_rank, num_local_experts, use_fp8=False, **how
    ):
        self.group, self.hidden_dim, self.waiting = group, hidden_dim, 0
        self.rows = max_num_of_tokens_per_rank
        note("HybridEPBuffer", group.rank(), self.rows)

    def update_template_config(
        self, hidden_dim=None, num_of_tokens_per_rank=None, num_local_experts=None, **how
    ):
        if num_of_tokens_per_rank > self.rows:
            assert not self.waiting, "buffers grow while handles wait for their backward"
            self.rows = num_of_tokens_per_rank
            note("grown", self.group.rank(), self.rows)

    def dispatch_with_permute(
        self, *, hidden, routing_map=None, probs=None, scaling_factor=None,
        num_of_experts_per_rank=None, pad_multiple=None, num_permuted_tokens=None, handle=None,
        non_blocking=False,
    ):  # fmt: skip
        assert hidden.dtype == torch.bfloat16 and hidden.shape[1] == self.hidden_dim
        all_x = gathered(hidden, self.group)
        assert len({len(one) for one in all_x}) == 1, "ranks have unlike numbers of rows"
        assert len(hidden) % 64 == 0, f"{len(hidden)} rows are no multiple of 64"
        all_x = torch.cat(all_x)
        if handle is not None:
            self.waiting -= 1
            return all_x[handle.rows], None, None, handle.counts, handle
        self.update_template_config(num_of_tokens_per_rank=len(hidden))
        note("dispatch", self.group.rank(), len(hidden))
        assert routing_map.dtype == torch.bool and probs.dtype == torch.float32
        first = self.group.rank() * num_of_experts_per_rank
        local = slice(first, first + num_of_experts_per_rank)
        expert, rows = torch.cat(gathered(routing_map, self.group))[:, local].T.nonzero().T
        weights = torch.cat(gathered(probs, self.group))[:, local]
        counts = torch.bincount(expert, minlength=num_of_experts_per_rank)
        sizes = [len(hidden)] * self.group.size()
        handle = SimpleNamespace(
            rows=rows, expert=expert + first, counts=counts, sizes=sizes,
            experts=routing_map.shape[1],
        )  # fmt: skip
        self.waiting += torch.is_grad_enabled() or hidden.requires_grad
        return all_x[rows], weights[rows, expert], None, counts, handle

    def combine_with_unpermute(self, *, hidden, probs=None, handle=None, pad_multiple=None):
        back = hidden.new_zeros((sum(handle.sizes), hidden.shape[1])).float()
        back = back.index_add(0, handle.rows, hidden.float())
        weights = None
        if probs is not None:
            of_all = probs.new_zeros((sum(handle.sizes), handle.experts))
            weights = summed(
                of_all.index_put((handle.rows, handle.expert), probs), handle.sizes, self.group
            )
        return summed(back, handle.sizes, self.group).to(hidden.dtype), weights
