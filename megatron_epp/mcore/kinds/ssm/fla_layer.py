"""Layers of external frameworks, built of flash-linear-attention's modules, on chunks.

The framework's own forward computes a chunk. During this forward, its convolutions and its rule
(the function that computes the recurrence) are replaced. ``FlaLayer`` contains their names.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any

from torch import Tensor

from megatron_epp.layers.ssm.carried import CarriedStates
from megatron_epp.layers.ssm.fla_calls import apply_rule, convolve_calls
from megatron_epp.mcore.data.chunk_params import ChunkParams
from megatron_epp.mcore.kinds.ssm.fla_kernels import suit_many_sizes


@dataclass(frozen=True, slots=True)
class FlaLayer:
    """Names of the convolutions and of the rule of a flash-linear-attention layer.

    Attributes:
        convolutions: Attributes of the layer that are ShortConvolutions, in the order of calls.
        package: Package from which the layer imports its rule.
        rule: Name in ``package`` of the function that computes the recurrence.
    """

    convolutions: tuple[str, ...]
    package: str
    rule: str


# Kimi delta attention (arXiv 2510.26692) has a decay for each channel of a key.
KDA = FlaLayer(("q_conv1d", "k_conv1d", "v_conv1d"), "fla.ops.kda", "chunk_kda")


def install_fla_layer(module: Any, index: int, kind: FlaLayer) -> None:
    """Wrap the forward of ``module`` to compute chunks, and patch fla's kernels for many sizes.

    During the forward of a chunk, the convolutions and the rule are replaced by functions that
    carry states between slices.

    Args:
        module: Module whose forward accepts hidden states, and ``packed_seq_params`` by name.
        index: Index of the layer in the stage.
        kind: Names of the convolutions and of the rule.
    """
    suit_many_sizes()
    original: Callable[..., Any] = module.forward
    convolutions = [getattr(module, name) for name in kind.convolutions]
    channels = [len(convolution.weight) for convolution in convolutions]
    taps = convolutions[0].weight.shape[-1]

    @wraps(original)
    def forward(*inputs: Any, packed_seq_params: Any = None, **others: Any) -> Any:
        others["packed_seq_params"] = packed_seq_params
        if not isinstance(packed_seq_params, ChunkParams):
            return original(*inputs, **others)
        state = packed_seq_params.state
        states = CarriedStates(state, state.layer(index), taps, sum(channels))
        package, first = import_module(kind.package), 0
        with ExitStack() as during:
            for convolution, count in zip(convolutions, channels, strict=True):
                replacement = _convolution(convolution.forward, states, first)
                during.enter_context(_replaced(convolution, "forward", replacement))
                first += count
            rule = _rule(getattr(package, kind.rule), states)
            during.enter_context(_replaced(package, kind.rule, rule))
            return original(*inputs, **others)

    module.forward = forward


def _convolution(original: Callable[..., Any], states: CarriedStates, first: int) -> Callable:
    """Return a replacement of a ShortConvolution's forward.

    ``first`` is the convolution's first channel among the channels of all convolutions.
    """

    def forward(x: Tensor, *, cu_seqlens: Any = None, **options: Any) -> tuple[Tensor, None]:
        def of_call(rows_1LC: Tensor, boundaries: Tensor) -> Tensor:
            return original(x=rows_1LC, cu_seqlens=boundaries, **options)[0]

        return convolve_calls(x[0], states, of_call, first)[None], None

    return forward


def _rule(original: Callable[..., Any], states: CarriedStates) -> Callable[..., Any]:
    """Return a replacement of the rule ``original`` that carries states between slices."""

    def rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: None = None,
        output_final_state: bool = False,
        cu_seqlens: Any = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        assert initial_state is None and not output_final_state, "the store has the states"
        return apply_rule(original, (q, k, v, g, beta), states, **options), None

    return rule


@contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Replace the attribute ``name`` of ``holder`` in this context.

    The original may be an attribute of the class of ``holder``.
    """
    own = vars(holder).get(name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(holder, name)
        else:
            setattr(holder, name, own)
