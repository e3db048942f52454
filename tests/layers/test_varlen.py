"""Kernels for queries and keys of different lengths, given chunks: against whole documents."""

import dataclasses
import re

import pytest
import torch

from megatron_epp.layers.attention import selftest as selftest_module
from megatron_epp.layers.attention import varlen
from megatron_epp.layers.attention.layer_attention import Heads
from megatron_epp.layers.attention.padded import PaddedKernel
from megatron_epp.layers.attention.reference import ReferenceKernel
from megatron_epp.layers.attention.selftest import require_right
from megatron_epp.layers.attention.varlen import CuSeqlens
from tests.layers.runner import HEAD_SIZE, SCALE, Varlen, documents, plan_of

HEADS, GROUPS = 4, 2


def test_whole_documents_are_one_call_and_a_slice_is_another(monkeypatch) -> None:
    """The lengths of a chunk's calls go to the device in one copy, for all of its layers."""
    copies: list[list[int]] = []
    monkeypatch.setattr(
        varlen, "on_device", lambda tensor, device: (copies.append(tensor.tolist()), tensor)[1]
    )
    calls: list[list[tuple[int, int]]] = []

    class Counting(ReferenceKernel):
        def forward(self, call, backward):
            calls.append(call.cu_seqlens.lengths)
            return super().forward(call, backward)

    class Counted(Varlen):
        kernel = Counting(SCALE)

    plan = plan_of((11, 4, 3, 2), ["0[0:6]", "1[0:4] 2[0:3] 0[6:11] 3[0:2]"], "F0 F1 B1 B0")
    Counted(plan, documents(plan.documents, 2, 1, torch.float64)).run()
    assert calls == [[(6, 6)], [(4, 4), (3, 3)], [(5, 11)], [(2, 2)]]
    assert copies == [[0, 6, 0, 6], [0, 4, 7, 0, 4, 7, 0, 5, 0, 11, 0, 2, 0, 2]]


def test_keys_and_values_that_the_store_keeps_are_not_saved_again() -> None:
    given = documents((11,), 2, 1, torch.float64)
    runner = Varlen(plan_of((11,), ["0[0:6]", "0[6:11]"], "F0 F1 B1 B0"), given)
    for chunk in range(2):
        assert len(runner.forward(chunk).out.grad_fn.saved_tensors) == 1  # q
    given = documents((11, 4), 2, 1, torch.float64)
    runner = Varlen(plan_of((11, 4), ["0[0:6] 1[0:4]", "0[6:11]"], "F0 F1 B1 B0"), given)
    assert len(runner.forward(0).out.grad_fn.saved_tensors) == 3  # of the whole one


# ------------------------------------------------------------------ the self-test at start


class Upside(ReferenceKernel):
    """The mask aligned at the top left, as some kernels do it."""

    name = "upside"

    def _attend(self, q_THD, k_SGD, v_SGD, cu_seqlens):
        short = CuSeqlens.of(*([q for q, _ in cu_seqlens.lengths],) * 2, q_THD.device)
        keys, at = [], 0
        for queries, count in cu_seqlens.lengths:
            keys += range(at, at + queries)
            at += count
        return super()._attend(q_THD, k_SGD[keys], v_SGD[keys], short)


class Forgetful(ReferenceKernel):
    name = "forgetful"

    def backward(self, grad_THD, call, kept):
        dq, dk, dv = super().backward(grad_THD, call, kept)
        return dq, dk, dv * 0


class Lost(ReferenceKernel):
    name = "lost"

    def forward(self, call, backward):
        return torch.full_like(call.q_THD, torch.nan), None


def selftest(kernel, dtype=torch.bfloat16) -> None:
    require_right(kernel, HEADS, GROUPS, HEAD_SIZE, SCALE, dtype, torch.device("cpu"))


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (Upside, "back end upside, a slice after its context: the output is off by"),
        (Forgetful, "back end forgetful, a document: the gradient of the values is off by 1 "),
        (Lost, "back end lost, a document: the output is off by nan"),
    ],
)
def test_the_self_test_names_what_is_wrong(kernel, says) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        selftest(kernel(SCALE))


def test_backwards_are_timed_in_turn_after_work(monkeypatch) -> None:
    """The median of what the clock says of each kernel's backwards, without its forwards."""
    monkeypatch.setattr(selftest_module, "TIMED_TOKENS", 8)
    monkeypatch.setattr(selftest_module, "WORK_SECONDS", 0.0)
    ran: list[tuple[str, str]] = []

    class Noted(ReferenceKernel):
        def __init__(self, name: str):
            super().__init__(SCALE)
            self.name = name

        def forward(self, call, backward):
            ran.append((self.name, "F"))
            return super().forward(call, backward)

        def backward(self, grad_THD, call, kept):
            ran.append((self.name, "B"))
            return super().backward(grad_THD, call, kept)

    class Clock:
        """Seconds: of the first kernel 5, of the other 3; the first time a hundred more."""

        def start(self):
            assert ran[-1][1] == "F"

        def mark(self):
            name, op = ran[-1]
            assert op == "B"
            late = 100 * (ran.count((name, "B")) <= 2)
            return late + (5.0 if name == "one" else 3.0)

        def seconds(self, mark):
            return mark

    heads = Heads(HEADS, GROUPS, HEAD_SIZE, SCALE, torch.float32)
    kernels = [Noted("one"), Noted("other")]
    cpu = torch.device("cpu")
    assert selftest_module.backward_seconds(kernels, heads, cpu, Clock) == [5.0, 3.0]
    names = [name for name, op in ran if op == "B"]
    assert names[-14:] == ["one", "other"] * 7


class OneSize(ReferenceKernel):
    """As FlashAttention 2: heads of one size."""

    def _attend(self, q_THD, k_SGD, v_SGD, cu_seqlens):
        assert q_THD.shape[2] == k_SGD.shape[2] == v_SGD.shape[2] == 16
        return super()._attend(q_THD, k_SGD, v_SGD, cu_seqlens)


class OffByOne(ReferenceKernel):
    """A window that counts the query's own key."""

    name = "off by one"

    def __init__(self, scale, before=None):
        super().__init__(scale, None if before is None else before - 1)

    def of_layers(self, before, sinks):
        return OffByOne(self.scale, before)


class Sinkless(ReferenceKernel):
    name = "sinkless"

    def _attend(self, q_THD, k_SGD, v_SGD, cu_seqlens, sinks_H=None):
        sinks_H = None if sinks_H is None else sinks_H - 100
        return super()._attend(q_THD, k_SGD, v_SGD, cu_seqlens, sinks_H)


@pytest.mark.parametrize(("before", "sinks"), [(100, False), (None, True), (5, True)])
def test_the_self_test_tries_windows_and_sinks(before, sinks) -> None:
    def try_it(kernel) -> None:
        require_right(
            kernel.of_layers(before, sinks), HEADS, GROUPS, HEAD_SIZE, SCALE, torch.float32,
            torch.device("cpu"), 0, before, sinks,
        )  # fmt: skip

    try_it(ReferenceKernel(SCALE))
    if before is not None:
        with pytest.raises(ValueError, match="off by one, a document in windows: the output"):
            try_it(OffByOne(SCALE))
    if sinks:
        with pytest.raises(ValueError, match=r"back end sinkless, a document.*: the output"):
            try_it(Sinkless(SCALE))


class FromOutput(ReferenceKernel):
    """As flash kernels: the sinks' gradient follows from the rounded output."""

    name, factor = "from output", 1.0

    def of_layers(self, before, sinks):
        return type(self)(self.scale, before)

    def backward(self, grad_THD, call, kept):
        *gradients, _ = super().backward(grad_THD, call, kept)
        out_THD, _ = self.forward(call, False)
        exact = dataclasses.replace(
            call, q_THD=call.q_THD.double(), k_SGD=call.k_SGD.double(),
            v_SGD=torch.ones_like(call.v_SGD[..., :1]).double(), sinks_H=call.sinks_H.double(),
        )  # fmt: skip
        weights_TH1 = 1 - self.forward(exact, False)[0]
        products_THD = weights_TH1.float() * grad_THD.float() * out_THD.float()
        return *gradients, -self.factor * products_THD.sum((0, 2)).to(grad_THD.dtype)


class Doubled(FromOutput):
    name, factor = "doubled", 2.0


@pytest.mark.parametrize("seed", [97, 112])
def test_sinks_whose_gradients_nearly_cancel_are_no_fault_of_the_kernel(seed, monkeypatch) -> None:
    """Of 150 seeds, those of which few tokens left least of the sinks' gradient."""
    monkeypatch.setattr(selftest_module, "SEED", seed)
    small = 2, 1, 8, 0.35, torch.bfloat16, torch.device("cpu"), 8, 32, True
    require_right(FromOutput(0.35, 32), *small)
    with pytest.raises(ValueError, match=r"doubled, .*: the gradient of the sinks is off by"):
        require_right(Doubled(0.35, 32), *small)


@pytest.mark.parametrize("sizes", [(16, 8), (8, 16), (12, 12)])
def test_kernels_of_one_size_take_others(sizes) -> None:
    """A size that is a multiple of 8, here 16."""
    size, value = sizes
    kernel, cpu = PaddedKernel(OneSize(SCALE), 16, 16), torch.device("cpu")
    for judge in (ReferenceKernel(SCALE), kernel):
        require_right(judge, HEADS, GROUPS, size, SCALE, torch.float32, cpu, value)
    with pytest.raises(AssertionError):
        require_right(OneSize(SCALE), HEADS, GROUPS, size, SCALE, torch.float32, cpu, value)
