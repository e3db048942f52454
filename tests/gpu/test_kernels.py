"""The kernels of this device: the test that training makes at its start, on heads of many kinds."""

import pytest

from megatron_epp.mcore.patching import emulated_engine

pytestmark = pytest.mark.gpu

# Heads, groups and size; and what layers see: inputs before each, and sinks.
KINDS = {
    "all alone": (8, 8, 128),
    "grouped": (32, 8, 128),
    "one key": (8, 1, 128),
    "small": (4, 2, 64),
    "odd": (6, 3, 96),
    "windows": (4, 2, 64, 128, False),
    "sinks": (4, 2, 64, None, True),
    "windows and sinks": (4, 2, 64, 128, True),
}
SINKS_CUDNN = 92600  # as cuDNN counts its releases; Transformer Engine 2.20 refuses older ones

# Of a slice and its context; an emulated kernel holds a head's scores.
LONG = (96, 4096) if emulated_engine.is_wanted() else (2048, 24576)


@pytest.fixture(params=["torch", "te"])
def kernel_of(request):
    """(heads, groups, size): a kernel of that name."""
    import torch

    from megatron_epp.layers.attention.layer_attention import Heads
    from megatron_epp.mcore.model.attention import _KERNELS

    if request.param == "te":
        request.getfixturevalue("engine")
    return lambda heads, groups, size: _KERNELS[request.param](
        Heads(heads, groups, size, size**-0.5, torch.bfloat16)
    )


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, "bfloat16") for kind in KINDS]
    + [(kind, "float16") for kind, seen in KINDS.items() if len(seen) == 3],
)
def test_the_self_test_passes(kernel_of, kind, dtype) -> None:
    import torch

    from megatron_epp.layers.attention.selftest import require_right
    from megatron_epp.mcore.model.attention import this_device

    heads, groups, size, *seen = KINDS[kind]
    kernel = kernel_of(heads, groups, size)
    if seen:
        version = torch.backends.cudnn.version() or 0
        known = version >= SINKS_CUDNN or emulated_engine.is_wanted()
        if kernel.name == "te" and seen[1] and not known:
            pytest.skip(f"sinks of packed documents need cuDNN {SINKS_CUDNN}, here is {version}")
        kernel = kernel.of_layers(*seen)
    given = size**-0.5, getattr(torch, dtype), this_device(), 0, *seen
    require_right(kernel, heads, groups, size, *given)


@pytest.mark.parametrize("kind", ["small", "odd"])
def test_the_self_test_passes_with_a_mask_for_calls_without_context(engine, kind) -> None:
    import torch

    from megatron_epp.layers.attention.selftest import require_right
    from megatron_epp.layers.attention.te import TransformerEngineKernel
    from megatron_epp.mcore.model.attention import this_device

    heads, groups, size = KINDS[kind]
    kernel = TransformerEngineKernel(heads, groups, size, size**-0.5)
    kernel.use_top_left(True)
    require_right(kernel, heads, groups, size, size**-0.5, torch.bfloat16, this_device())


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


def test_a_long_context_is_computed_in_slices(kernel_of) -> None:
    """Of 24K tokens (4K without a GPU), the last slice: forward and backward against the other
    kernels' numbers is what the self-test does; here the lengths are real, and the reference is
    float32 by head."""
    import torch

    from megatron_epp.layers.attention.selftest import ALLOWANCE, errors
    from megatron_epp.mcore.model.attention import this_device

    sizes = [LONG], 4, 1, (128, 128), 128**-0.5, torch.bfloat16, this_device()
    ours, plain = errors(kernel_of(4, 1, 128), *sizes)
    assert all(mine <= ALLOWANCE * theirs for mine, theirs in zip(ours, plain, strict=True))


def test_training_takes_transformer_engine_where_it_is(alone, engine) -> None:
    assert alone.attention.name == "te"
