"""Sliding windows in certificates."""

from typing import Any, override

from megatron_epp.mcore.kinds.certificate_base import LayerCertificate
from megatron_epp.mcore.kinds.window.kind import WindowKind

# Window of a small model; random slices are shorter and longer than this window.
WINDOW = 7


class WindowCertificate(LayerCertificate):
    """Certificate of layers with sliding windows and sinks."""

    KIND = WindowKind()

    @override
    def small(
        self, args: Any, hidden: int, tp: int, head_size: int, step: int = 1
    ) -> dict[str, Any]:
        if not args.window_size or args.window_size[0] < 1:
            return {}
        return {"window_size": (WINDOW, *args.window_size[1:])}

    @override
    def small_words(self, args: Any) -> list[str]:
        words = [f"{args.softmax_type} sinks"] * (args.softmax_type != "vanilla")
        if args.window_size:
            pattern = args.window_attn_skip_freq
            layers = "" if pattern is None else f" in layers {''.join('fw'[w] for w in pattern)}"
            words.append(f"windows of {args.window_size[0]} tokens before each{layers}")
        return words
