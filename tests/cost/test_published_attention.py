"""Reading K and V against published times of attention.

FlashAttention-3 (arXiv 2407.08608), figure 5: forward on one H100 80GB SXM5, head size 128, no
mask, 16 heads, 16K tokens in sequences of equal length; Tflops by that length. Every sequence's K
and V are read once for all its queries, as a slice reads those of its context.
"""

import dataclasses

import pytest

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import MODELS, Model
from megatron_epp.cost.columns import CONTEXT
from megatron_epp.ir import Kind

TOKENS, HEADS, HEAD_SIZE = 16384, 16, 128
PUBLISHED = {512: 467, 1024: 565, 2048: 625, 4096: 638, 8192: 646, 16384: 648}  # Tflops
HIDDEN = HEADS * HEAD_SIZE
MODEL = Model("attention", 1, HIDDEN, 4 * HIDDEN, HEADS, HEADS, HEAD_SIZE, 1000)


def predicted_tflops(length: int, *, kv_read: bool) -> float:
    # The rate that the longest sequences reach stands for the kernel's.
    device = dataclasses.replace(DEVICES["h100-80g"], attention_flops=PUBLISHED[16384] * 1e12)
    made = profile(MODEL, device, kv_read=kv_read)
    seconds = TOKENS * length * made.layer_seconds[Kind.FORWARD].per_pair
    seconds += TOKENS * made.column_seconds.get(CONTEXT, {}).get(Kind.FORWARD, 0.0)
    return 4 * TOKENS * length * HIDDEN / seconds / 1e12


@pytest.mark.parametrize(("length", "tflops"), PUBLISHED.items())
def test_reading_k_and_v_explains_the_published_times(length: int, tflops: float) -> None:
    assert predicted_tflops(length, kv_read=True) == pytest.approx(tflops, rel=0.06)


def test_without_it_short_sequences_are_far_off() -> None:
    assert predicted_tflops(512, kv_read=False) > 1.35 * PUBLISHED[512]


def test_windows_and_halves_without_attention_carry_no_context() -> None:
    made = profile(MODELS["gpt-oss-20b"], DEVICES["h100-80g"], kv_read=True)
    for figures in made.kinds.values():
        assert bool(figures.column_seconds.get(CONTEXT, {})) == (figures.window == 0)


def test_a_device_without_a_rate_has_none() -> None:
    unknown = dataclasses.replace(DEVICES["cpu"], memory_bytes_per_second=0.0)
    assert not profile(MODELS["llama3-8b"], unknown, kv_read=True).column_seconds.get(CONTEXT, {})


def test_backward_moves_seven_times_as_much() -> None:
    """K and V, their gradients written, read and added to float32: 14 bytes against 2."""
    made = profile(MODELS["llama3-8b"], DEVICES["h100-80g"], kv_read=True).column_seconds.get(
        CONTEXT, {}
    )
    assert made[Kind.BACKWARD] == made[Kind.INPUT] == pytest.approx(7 * made[Kind.FORWARD])
    assert made[Kind.WEIGHT] == 0
