"""Emulated kernels beside the formulas of torch, and what they refuse; no Transformer Engine.

Products, norms, rotary embeddings and attention in float64 are those of Megatron's local layers in
test_certificate.py."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.engine import attention, enums, module, norms, optimizers, products, rotary
from tests.engine.fp8 import primary, quantizers
from tests.engine.operands import Misread

pytestmark = pytest.mark.everything

WORKSPACE = torch.empty(16, dtype=torch.uint8)
F64 = torch.float64
THD = enums.NVTE_QKV_Layout.NVTE_THD_THD_THD
BOTTOM_RIGHT = enums.NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK


@pytest.fixture(scope="module", autouse=True)
def host() -> None:
    """Stand-ins for the parts of torch.cuda that fp8 tensors of the emulation ask for."""
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()


def drawn(*shape: int, dtype: torch.dtype = F64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=F64).to(dtype)


def near(found: Tensor, expected: Tensor) -> None:
    found, expected = found.detach(), expected.detach()
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 1e-13 * float(expected.abs().max() + 1)


def product(a: Tensor, b: Tensor, layout: str = "TN", out: Tensor | None = None, **given) -> list:
    wanted = {"bias": None, "accumulate": False, "output_dtype": None} | given
    bias = wanted["bias"]
    return products.generic_gemm(
        a, layout[0] == "T", b, layout[1] == "T", out, None, wanted["output_dtype"], bias,
        getattr(a, "dtype", F64) if bias is None else bias.dtype, False, None, False, WORKSPACE, 16,
        wanted["accumulate"], False,
    )  # fmt: skip


# ------------------------------------------------------------------ products


def test_halves_are_rounded_once() -> None:
    a, b = drawn(4, 600, dtype=torch.bfloat16), drawn(3, 600, dtype=torch.bfloat16)
    assert torch.equal(product(a, b)[0], (b.float() @ a.float().T).bfloat16())
    main = torch.full((3, 4), 1e-3)
    product(a, b, out=main, accumulate=True)
    near(main.double(), (b.float() @ a.float().T + 1e-3).double())


def grouped(rows: list[int], out: Tensor, splits: list[int]) -> None:
    weights = [drawn(4, 6, seed=i) for i in range(len(rows))]
    empty = [torch.empty(0)] * len(rows)
    products.te_general_grouped_gemm(
        weights, True, list(drawn(sum(rows), 6).split(rows)), False, [out], F64, splits, empty, F64,
        True, empty, False, [WORKSPACE] * products.STREAMS, 16, False, False, 0,
    )  # fmt: skip


def test_the_bias_of_a_gradient_is_the_sum_of_its_rows() -> None:
    grad = drawn(5, 4)
    found, same = products.bgrad_quantize(grad, None)
    near(found, grad.sum(0))
    assert same is grad


# ------------------------------------------------------------------ attention


def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: list[int], most: int = 64) -> None:
    boundaries = torch.tensor(cu_seqlens, dtype=torch.int32)
    kind, thd = enums.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX, enums.NVTE_QKV_Format.NVTE_THD
    attention.fused_attn_fwd(
        most, most, True, 0.3, 0.0, True, THD, thd, thd, enums.NVTE_Bias_Type.NVTE_NO_BIAS,
        BOTTOM_RIGHT, kind, (-1, 0), True, boundaries, boundaries, q, k, v, q.dtype, None, None,
        None, None, None, None, None, None, None, 0, False, False,
    )  # fmt: skip


# ------------------------------------------------------------------ optimizers


@pytest.mark.parametrize("mode", [0, 1])
def test_adam_is_torchs(mode) -> None:
    parameter, gradient = drawn(5), drawn(5, seed=10)
    theirs = torch.nn.Parameter(parameter.clone())
    kind = torch.optim.AdamW if mode else torch.optim.Adam
    optimizer = kind([theirs], lr=0.1, weight_decay=0.3)
    half, first, second = parameter.bfloat16(), torch.zeros(5, dtype=F64), torch.zeros(5, dtype=F64)
    for step in (1, 2):
        theirs.grad = gradient
        optimizer.step()
        lists = [[gradient], [half], [first], [second], [parameter]]
        options = (0.1, 0.9, 0.999, 1e-8, step, mode, 1, 0.3)
        optimizers.multi_tensor_adam(1, torch.zeros(1), lists, *options)
    assert torch.allclose(parameter, theirs.detach(), rtol=1e-9)
    assert torch.equal(half, parameter.bfloat16())


def test_an_overflow_is_noted_and_the_norm_is_of_all() -> None:
    flag, target = torch.zeros(1), torch.empty(2)
    optimizers.multi_tensor_scale(1, flag, [[torch.tensor([1.0, torch.inf])], [target]], 2.0)
    assert flag.item() == 1 and target[0] == 2
    norm, each = optimizers.multi_tensor_l2norm(1, flag, [[drawn(3), drawn(4)]], True)
    near(norm[0], torch.cat([drawn(3), drawn(4)]).norm())
    near(each[1], drawn(4).norm())


# ------------------------------------------------------------------ refused


MISREAD = {
    "strides of a product": (lambda: product(drawn(6, 4).T, drawn(5, 6)), "has strides (1, 4)"),
    "splits of other rows": (
        lambda: grouped([3, 4], torch.empty(7, 4, dtype=F64), [4, 3]),
        "splits [4, 3] of operands with [3, 4] rows",
    ),
    "a norm's weight": (
        lambda: norms.rmsnorm_fwd(drawn(5, 8), drawn(8).float(), 1e-5, None, None, F64, 0, False),
        "a weight of torch.float32 for torch.float64",
    ),
    "a table that ends": (
        lambda: rotary.fused_rope_forward(
            drawn(9, 1, 2, 4), drawn(8, 1, 1, 4), None, enums.NVTE_QKV_Format.NVTE_SBHD, False,
            None, 1, 0,
        ),
        "the table ends at 8",
    ),
    "more rows than are said": (
        lambda: attend(drawn(5, 4, 8), drawn(5, 2, 8), drawn(5, 2, 8), [0, 5], most=4),
        "5 rows, and 4 are said to be the most",
    ),
    "lists that do not match": (
        lambda: optimizers.multi_tensor_scale(1, torch.zeros(1), [[drawn(3)], [drawn(4)]], 1.0),
        "tensors of [3, 4] elements side by side",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", MISREAD)
def test_what_a_kernel_would_misread_is_refused(what) -> None:
    call, says = MISREAD[what]
    with pytest.raises(Misread) as error:
        call()
    assert says in str(error.value)


def test_what_is_not_written_says_so_by_its_name() -> None:
    made = module.emulated_kernels()
    with pytest.raises(NotImplementedError, match=r"transformer_engine_torch\.ep_combine is not"):
        made.ep_combine(1)
    with pytest.raises(NotImplementedError, match="a str is not written"):
        made.rmsnorm_fwd(drawn(5, 8), drawn(8), 1e-5, None, "quantizer", F64, 0, False)
    with pytest.raises(NotImplementedError, match="CommOverlap is not written"):
        made.CommOverlap()


# ------------------------------------------------------------------ quantised operands


class Float8BlockQuantizer(SimpleNamespace):
    """As Transformer Engine's asks for blocks of 1 x 128, or 128 x 128."""


class MXFP8Quantizer(SimpleNamespace):
    """As Transformer Engine's asks for blocks of 1 x 32."""


def quantised(x: Tensor, kind: str, columnwise: bool):
    """``x`` [T, K] in one direction."""
    rows, columns = x.shape
    across, byte = columnwise and kind != "mxfp8", torch.uint8
    data = torch.empty((columns, rows) if across else (rows, columns), dtype=byte)
    given = {"_dtype": F64, "_fp8_dtype": enums.DType.kFloat8E4M3, "size": lambda: x.shape}
    names = [f"_{way}wise_{what}" for way in ("row", "column") for what in ("data", "scale_inv")]
    made = type("MXFP8Tensor" if kind == "mxfp8" else "Blocks", (SimpleNamespace,), {})(
        **given, **dict.fromkeys(names)
    )
    if kind == "mxfp8":
        quantizer = MXFP8Quantizer(dtype=enums.DType.kFloat8E4M3, optimize_for_gemm=False)
        made._with_gemm_swizzled_scales = False
        scales = torch.empty(2 * len(x) + 128, 2 * columns + 128, dtype=byte)
    else:
        made._is_2D_scaled = kind == "squares"
        quantizer = Float8BlockQuantizer(
            dtype=enums.DType.kFloat8E4M3, force_pow_2_scales=True, amax_epsilon=0.0,
            block_scaling_dim=1 + made._is_2D_scaled,
        )  # fmt: skip
        scales = torch.empty(2 * len(x) + 128, 2 * columns + 128)
    way = "columnwise" if columnwise else "rowwise"
    setattr(made, f"_{way}_data", data)
    setattr(made, f"_{way}_scale_inv", scales)
    return quantizers.quantize(x, quantizer, made)


def values(made, columnwise: bool) -> Tensor:
    return quantizers.operand("test", "x", made, columnwise)


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("kind", ["blocks", "squares", "mxfp8"])
def test_quantised_tensors_are_near_and_blocks_have_powers_of_two(kind, columnwise) -> None:
    x = drawn(160, 288)
    made = quantised(x, kind, columnwise)
    found = values(made, columnwise)
    allowed = 2**-4 * x.abs() + 2**-10 / 224 * x.abs().amax()  # digits; steps of the smallest
    assert bool(((found - x).abs() <= allowed).all())
    doubled = values(quantised(2 * x, kind, columnwise), columnwise)
    assert torch.equal(doubled, 2 * found)  # another exponent, and nothing else
    with pytest.raises(Misread, match=r"x is read by .*, and has no such data"):
        values(made, not columnwise)


def test_rows_of_other_documents_do_not_change_a_row() -> None:
    """And of what is summed over rows only the smallest numbers."""
    x, other = drawn(96, 128), 300 * drawn(64, 128, seed=1)
    for kind in ("blocks", "mxfp8"):
        alone = values(quantised(x, kind, False), False)
        beside = values(quantised(torch.cat((x, other)), kind, False), False)
        assert torch.equal(beside[:96], alone)
    alone = values(quantised(x, "blocks", True), True)
    beside = values(quantised(torch.cat((x, other)), "blocks", True), True)
    changed = (beside[:96] - alone).abs().max() / other.abs().max()
    assert 0 < float(changed) <= 2**-10 / 224


def test_products_take_quantised_operands_in_their_direction() -> None:
    x, weight = drawn(32, 64), drawn(48, 64, seed=1)
    a, b = quantised(weight, "squares", False), quantised(x, "blocks", False)
    made = product(a, b, output_dtype=F64)[0]
    expected = values(b, False) @ values(a, False).T
    near(made, expected)
    with pytest.raises(Misread, match="A is read by columns"):
        product(a, b, "NN", output_dtype=F64)
    with pytest.raises(Misread, match="one of A and B is quantised"):
        product(a, x, output_dtype=F64)
    with pytest.raises(Misread, match="quantised products over 24"):
        product(quantised(x[:24], "blocks", True), quantised(x[:24], "blocks", True), "NT",
                output_dtype=F64)  # fmt: skip


# ------------------------------------------------------------------ one scale, and held weights


class Float8CurrentScalingQuantizer(SimpleNamespace):
    """As Transformer Engine's asks for one scale."""


def of_one_scale(x: Tensor):
    quantizer = Float8CurrentScalingQuantizer(
        dtype=enums.DType.kFloat8E4M3, force_pow_2_scales=False, amax_epsilon=0.0,
        with_amax_reduction=False,
    )  # fmt: skip
    made = SimpleNamespace(
        _fp8_dtype=enums.DType.kFloat8E4M3, _dtype=F64, _scale_inv=torch.empty(1),
        _data=torch.empty(x.shape, dtype=torch.uint8), _transpose_invalid=True,
        _transpose=torch.empty(x.shape[::-1], dtype=torch.uint8),
    )  # fmt: skip
    return quantizers.quantize(x, quantizer, made)


def test_one_scale_is_the_largest_numbers_and_its_transpose_is_not_read_when_stale() -> None:
    x = drawn(48, 64)
    made = of_one_scale(x)
    found = values(made, False)
    assert bool(((found - x).abs() <= 2**-4 * x.abs() + 2**-10 / 448 * x.abs().amax()).all())
    assert float((found.abs().amax() / x.abs().amax() - 1).abs()) < 1e-6
    assert torch.equal(values(made, True), found)
    made._transpose_invalid = True
    with pytest.raises(Misread, match="x is read by columns, and has none"):
        values(made, True)


def test_parts_of_a_weight_are_cast_as_the_whole() -> None:
    x, cut = drawn(160, 96).float(), 37 * 96 + 5
    parts = ((x.flatten()[:cut], 0), (x.flatten()[cut:], cut))
    scale, inverse, noop = torch.empty(1), torch.empty(1), torch.zeros(1)
    amaxes = [torch.empty(1) for _ in parts]
    for (part, _), amax in zip(parts, amaxes, strict=True):
        primary.compute_amax(part, amax)
    lists = [[torch.maximum(*amaxes)], [scale], [inverse]]
    primary.multi_tensor_compute_scale_and_scale_inv(1, noop, lists, 448.0, False, 0.0)
    assert torch.equal(inverse, of_one_scale(x)._scale_inv)

    squares, out = quantised(x, "squares", False), torch.empty(x.numel(), dtype=torch.uint8)
    amaxes = [torch.zeros(2, 1) for _ in parts]
    for (part, start), amax in zip(parts, amaxes, strict=True):
        primary.fp8_block_scaling_compute_partial_amax(part, amax, *x.shape, start, 128)
    scale, inverse = torch.empty(2, 1), torch.empty(2, 1)
    lists = [[torch.maximum(*amaxes)], [scale], [inverse]]
    primary.multi_tensor_compute_scale_and_scale_inv(1, noop, lists, 448.0, True, 0.0)
    assert torch.equal(inverse, squares._rowwise_scale_inv[:2, :1])
    for part, start in parts:
        to = out[start : start + len(part)]
        given = (part, to, scale, *x.shape, start, 128, enums.DType.kFloat8E4M3)
        primary.fp8_block_scaling_partial_cast(*given)
    assert torch.equal(out, squares._rowwise_data.flatten())

    ways = [quantised(x, "mxfp8", columnwise) for columnwise in (False, True)]
    scales = ways[0]._rowwise_scale_inv, ways[1]._columnwise_scale_inv
    amaxes = [[torch.zeros(one.shape) for one in scales] for _ in parts]
    for (part, start), both in zip(parts, amaxes, strict=True):
        primary.mxfp8_scaling_compute_partial_amax(part, *both, *x.shape, start)
    made = [torch.empty_like(one) for one in scales]
    largest = [torch.maximum(*each) for each in zip(*amaxes, strict=True)]
    primary.multi_tensor_compute_scale_inv_e8m0(1, None, [largest, made])
    outs = [torch.empty(x.numel(), dtype=torch.uint8) for _ in ways]
    for part, start in parts:
        to = [one[start : start + len(part)] for one in outs]
        primary.mxfp8_scaling_partial_cast(part, *to, *made, *x.shape, start)
    assert torch.equal(outs[0], ways[0]._rowwise_data.flatten())
    assert torch.equal(outs[1], ways[1]._columnwise_data.flatten())
