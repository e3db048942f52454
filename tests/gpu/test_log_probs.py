"""Log-probabilities and entropies by blocks on this device, beside all logits in float64."""

import pytest
import torch
from torch import Tensor

from megatron_epp.layers.lm_head.log_probs import block_log_probs
from megatron_epp.layers.lm_head.vocabulary import OutputWeightShard
from megatron_epp.mcore.model.attention import this_device
from megatron_epp.mcore.patching import emulated_engine

pytestmark = pytest.mark.gpu

ROWS, HIDDEN, WORDS, BLOCK = (
    (130, 64, 515, 32) if emulated_engine.is_wanted() else (4099, 2048, 32_003, 512)
)


def results(log_probs_T: Tensor, entropy_T: Tensor, *leaves: Tensor) -> list[Tensor]:
    """Both results and the leaves' gradients, of a loss that weighs every row differently."""
    rows = torch.arange(ROWS, device=log_probs_T.device)
    of_log_probs, of_entropies = (rows % 7 - 3).double(), (rows % 5).double() / 8
    loss = (log_probs_T.double() * of_log_probs + entropy_T.double() * of_entropies).sum()
    return [log_probs_T.detach(), entropy_T.detach(), *torch.autograd.grad(loss, leaves)]


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Tensor) -> list[Tensor]:
    hidden, weight = (one.detach().requires_grad_() for one in (hidden, weight))
    logits = (hidden @ weight.t()).to(torch.promote_types(hidden.dtype, torch.float32))
    every = (logits / temperature[:, None].to(logits.dtype)).log_softmax(1)
    entropies = -(every.exp() * every).sum(1)
    return results(every.gather(1, labels[:, None])[:, 0], entropies, hidden, weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_errors_are_at_most_twice_those_of_all_logits_at_once(dtype: torch.dtype) -> None:
    device, generator = this_device(), torch.Generator().manual_seed(5)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(WORDS, HIDDEN, generator=generator) / HIDDEN**0.5
    weight = weight.to(device, dtype).requires_grad_()
    labels = torch.randint(0, WORDS, (ROWS,), generator=generator).to(device)
    temperature = (0.5 + torch.rand(ROWS, generator=generator)).to(device)
    words = OutputWeightShard(weight.detach(), 0, BLOCK)
    made = block_log_probs(hidden, weight, labels, words, temperature)
    ours = results(*made, hidden, weight)
    own = plain(hidden, weight, labels, temperature)
    exact = plain(hidden.double(), weight.double(), labels, temperature.double())
    for name, found, alike, wanted in zip(
        ("log-probabilities", "entropies", "hidden", "weight"), ours, own, exact, strict=True
    ):
        error, unit = ((one.double() - wanted).norm() for one in (found, alike))
        assert float(unit) > 0 and float(error) <= 2 * float(unit), (name, error, unit)
