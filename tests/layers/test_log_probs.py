"""Log-probabilities and entropies by blocks of rows, and their gradients, beside the plain way."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_epp.layers.lm_head.log_probs import block_log_probs
from megatron_epp.layers.lm_head.vocabulary import OutputWeightShard

ROWS, HIDDEN, WORDS, BLOCK = 23, 4, 50, 9


def material(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """hidden, weight, labels, temperature, and what the two results weigh in a loss."""
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, dtype=torch.float64) * 2
    weight = torch.randn(WORDS, HIDDEN, dtype=torch.float64)
    labels, temperature = torch.randint(0, WORDS, (ROWS,)), 0.5 + torch.rand(ROWS)
    shares = torch.randn(2, ROWS, dtype=torch.float64) * (torch.arange(ROWS) % 4 > 0)
    return hidden.to(dtype), weight.to(dtype), labels, temperature.to(torch.float64), shares


def plain(dtype: torch.dtype, tempered: bool, entropy: bool) -> list[torch.Tensor]:
    hidden, weight, labels, temperature, shares = material(dtype)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = hidden @ weight.t()
    if tempered:
        logits = logits / temperature[:, None]
    every = logits.log_softmax(1)
    made = every.gather(1, labels[:, None])[:, 0]
    entropies = -(every.exp() * every).sum(1) if entropy else torch.zeros_like(made)
    (shares[0] * made + shares[1] * entropies).sum().backward()
    return [made.detach(), entropies.detach(), hidden.grad, weight.grad]


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes, whatever its shape."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor):
                held = one.untyped_storage().nbytes() // one.element_size()
                self.elements = max(self.elements, held)
        return made


def by_blocks(dtype: torch.dtype, tempered: bool, entropy: bool) -> list[torch.Tensor]:
    hidden, weight, labels, temperature, shares = material(dtype)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    words = OutputWeightShard(weight.detach(), 0, BLOCK)
    with LargestTensor() as largest:
        made, entropies = block_log_probs(
            hidden, weight, labels, words, temperature if tempered else None, entropy
        )
        (shares[0] * made + shares[1] * entropies).sum().backward()
    assert largest.elements == BLOCK * WORDS > weight.numel() + hidden.numel()
    return [made.detach(), entropies.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("tempered", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
def test_values_and_gradients_are_the_plain_ones(tempered, entropy) -> None:
    expected = plain(torch.float64, tempered, entropy)
    for found, wanted in zip(by_blocks(torch.float64, tempered, entropy), expected, strict=True):
        assert torch.allclose(found, wanted, rtol=0, atol=1e-12)


def test_what_is_frozen_has_no_gradient() -> None:
    hidden, weight, labels, _, _ = material(torch.float64)
    words = OutputWeightShard(weight, 0, BLOCK)
    made, _ = block_log_probs(hidden.requires_grad_(), weight, labels, words)
    made.sum().backward()
    assert weight.grad is None and hidden.grad is not None
    with torch.no_grad():
        again, _ = block_log_probs(hidden, weight, labels, words, entropy=False)
    assert torch.equal(again, made)


def test_far_logits_do_not_overflow() -> None:
    hidden, weight, labels, _, _ = material(torch.float32)
    words = OutputWeightShard(weight, 0, BLOCK)
    made, entropies = block_log_probs(hidden * 1e3, weight, labels, words)
    assert torch.isfinite(made).all() and torch.isfinite(entropies).all()
