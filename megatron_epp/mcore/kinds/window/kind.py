"""Sliding-window attention and attention sinks in Megatron's flags."""

from collections.abc import Sequence
from typing import Any, ClassVar, override

from megatron_epp.mcore.kinds.attention.kind import AttentionKind
from megatron_epp.mcore.kinds.base import LayerKind, mask_of_layers
from megatron_epp.mcore.kinds.limit import Limit


def _slices_window(model: Any) -> str | None:
    window = model.config.window_size
    if not window or (0 < window[0] < model.max_sequence_length and window[1] == 0):
        return None
    return (
        "slices compute windows of W tokens before each, fewer than the context: window_size "
        f"(W, 0), not {window}"
    )


def _flags_window(args: Any) -> bool:
    window = getattr(args, "window_size", None)
    fits = not window or (len(window) == 2 and 1 <= window[0] < args.seq_length and window[1] == 0)
    return not fits


def _slices_softmax(model: Any) -> str | None:
    kind = model.config.softmax_type
    refusal = f"slices do not compute a softmax of type {kind} (softmax_type)"
    return None if kind in ("vanilla", "learnable", "off-by-one") else refusal


class WindowKind(LayerKind):
    """Sliding windows (--window-size, --window-attn-skip-freq) and sinks (--softmax-type)."""

    NUMBERED = True
    FLAGS: ClassVar = {"window_size": None, "softmax_type": "vanilla"}
    LIMITS = (
        Limit(
            "windows other than W,0, or with W of at least the context (--window-size)",
            "give --window-size W,0 with W of at least 1 and below --seq-length, or leave it out",
            _flags_window,
            slices=_slices_window,
        ),
        Limit(
            "softmax types other than vanilla, learnable and off-by-one, in slices of external "
            "loops (--softmax-type)",
            "use one of these three",
            slices=_slices_softmax,
        ),
    )

    @override
    def layers(self, args: Any) -> tuple[bool, ...]:
        attention = AttentionKind().layers(args)
        if not getattr(args, "window_size", None):
            return (False,) * args.num_layers
        skip = args.window_attn_skip_freq
        if skip is None:
            return attention
        if isinstance(skip, int):
            windowed = tuple(number % skip != 0 for number in range(1, args.num_layers + 1))
        else:
            windowed = mask_of_layers("--window-attn-skip-freq", skip, args.num_layers)
        return tuple(a and b for a, b in zip(attention, windowed, strict=True))

    @override
    def sizes(self, args: Any) -> dict[str, Any]:
        return {"window": args.window_size[0] + 1}

    @override
    def in_layers(self, args: Any, mask: Sequence[bool]) -> dict[str, Any]:
        if not args.window_size or args.window_attn_skip_freq is None:
            return {}  # all layers of attention
        return {"window_attn_skip_freq": [int(there) for there in mask]}

    @override
    def layers_see(self, config: Any) -> Sequence[tuple[int | None, bool]]:
        from megatron.core.transformer.utils import is_layer_window_attention

        window, skip = config.window_size, config.window_attn_skip_freq
        windowed = {
            is_layer_window_attention(window, skip, number)
            for number in range(1, config.num_layers + 1)
        }
        sinks = config.softmax_type != "vanilla"
        return [(window[0] if there else None, sinks) for there in sorted(windowed)]

    @override
    def words(self, args: Any) -> list[str]:
        return [f"window {args.window_size[0]}"] if args.window_size else []
