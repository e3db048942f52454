"""The kernels of this device: the test that training makes at its start, on heads of many kinds."""

import pytest

from megatron_epp.mcore.patching import emulated_engine

pytestmark = pytest.mark.gpu

HEADS = {
    "all alone": (8, 8, 128),
    "grouped": (32, 8, 128),
    "one key": (8, 1, 128),
    "small": (4, 2, 64),
    "odd": (6, 3, 96),
}
# What layers see: inputs in front of each, and sinks.
SEEN = {"windows": (128, False), "sinks": (None, True), "windows and sinks": (128, True)}


SINKS_CUDNN = 92600  # as cuDNN counts its releases; Transformer Engine 2.20 refuses older ones

# Of a slice and its context; an emulated kernel holds a head's scores.
LONG = (96, 4096) if emulated_engine.is_wanted() else (2048, 24576)


def kernel_of(name: str, heads: int, groups: int, size: int):
    import torch

    from megatron_epp.layers.attention.layer_attention import Heads
    from megatron_epp.mcore.model.attention import _KERNELS

    return _KERNELS[name](Heads(heads, groups, size, size**-0.5, torch.bfloat16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("name", ["torch", "te"])
def test_the_self_test_passes(name, kind, dtype, request) -> None:
    import torch

    from megatron_epp.layers.attention.selftest import require_right
    from megatron_epp.mcore.model.attention import this_device

    if name == "te":
        request.getfixturevalue("engine")
    heads, groups, size = HEADS[kind]
    kernel = kernel_of(name, heads, groups, size)
    require_right(
        kernel, heads, groups, size, size**-0.5, getattr(torch, dtype), this_device()
    )  # fmt: skip


@pytest.mark.parametrize("kind", SEEN)
@pytest.mark.parametrize("name", ["torch", "te"])
def test_the_self_test_passes_with(name, kind, request) -> None:
    import torch

    from megatron_epp.layers.attention.selftest import require_right
    from megatron_epp.mcore.model.attention import this_device

    if name == "te":
        request.getfixturevalue("engine")
        version = torch.backends.cudnn.version() or 0
        if SEEN[kind][1] and version < SINKS_CUDNN and not emulated_engine.is_wanted():
            pytest.skip(f"sinks of packed documents need cuDNN {SINKS_CUDNN}, here is {version}")
    heads, groups, size = HEADS["small"]
    kernel = kernel_of(name, heads, groups, size).of_layers(*SEEN[kind])
    require_right(
        kernel, heads, groups, size, size**-0.5, torch.bfloat16, this_device(), 0, *SEEN[kind]
    )  # fmt: skip


def test_latents_heads_are_taken_as_they_are(engine) -> None:
    """Queries and keys of 192 channels, values of 128; FlashAttention 2 has one size."""
    import torch

    from megatron_epp.layers.attention.layer_attention import Heads
    from megatron_epp.layers.attention.selftest import require_right
    from megatron_epp.mcore.model.attention import _KERNELS, this_device

    heads = Heads(4, 4, 192, 192**-0.5, torch.bfloat16, 128)
    kernel = _KERNELS["te"](heads)
    require_right(kernel, 4, 4, 192, heads.scale, heads.dtype, this_device(), 128)
    with pytest.raises(ValueError, match="heads of 192, of values 128: expected one size"):
        _KERNELS["torch"](heads)


@pytest.mark.parametrize("name", ["torch", "te"])
def test_a_long_context_is_computed_in_slices(name, request) -> None:
    """Of 24K tokens (4K without a GPU), the last slice: forward and backward against the other
    kernels' numbers is what the self-test does; here the lengths are real, and the reference is
    float32 by head."""
    from megatron_epp.layers.attention.selftest import ALLOWANCE, errors
    from megatron_epp.mcore.model.attention import this_device

    import torch  # isort: skip

    if name == "te":
        request.getfixturevalue("engine")
    kernel = kernel_of(name, 4, 1, 128)
    ours, plain = errors(kernel, [LONG], 4, 1, (128, 128), 128**-0.5, torch.bfloat16, this_device())
    assert all(mine <= ALLOWANCE * theirs for mine, theirs in zip(ours, plain, strict=True))


def test_training_takes_transformer_engine_where_it_is(alone, engine) -> None:
    assert alone.attention.name == "te"
