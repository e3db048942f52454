"""Zero-centred norms are x / norm(x) * (1 + weight), from a weight of zero on."""

import pytest
import torch

from megatron_epp.layers.norms import ZERO_CENTERED, ZeroCenteredLayerNorm, ZeroCenteredRMSNorm

EPS = 1e-5


@pytest.mark.parametrize("kind", [ZeroCenteredLayerNorm, ZeroCenteredRMSNorm])
def test_the_formula(kind) -> None:
    torch.manual_seed(1)
    norm = kind(6, eps=EPS).double()
    assert not any(parameter.any() for parameter in norm.parameters())
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(4, 6, dtype=torch.float64)
    centred = x - x.mean(-1, keepdim=True) if kind is ZeroCenteredLayerNorm else x
    scaled = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
    expected = scaled * (1 + norm.weight)
    if kind is ZeroCenteredLayerNorm:
        expected = expected + norm.bias
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("plain", list(ZERO_CENTERED))
def test_they_begin_as_torchs_do_and_keep_its_names(plain) -> None:
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))
    mine, theirs = ZERO_CENTERED[plain](6, eps=EPS), plain(6, eps=EPS)
    assert torch.equal(mine(x), theirs(x))
    assert mine.state_dict().keys() == theirs.state_dict().keys()
