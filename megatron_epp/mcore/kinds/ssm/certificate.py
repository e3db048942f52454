"""SSM and linear-attention layers in certificates."""

from typing import Any, override

from megatron_epp.mcore.kinds.certificate_base import LayerCertificate
from megatron_epp.mcore.kinds.ssm.gated_delta_net import make_rule_double
from megatron_epp.mcore.kinds.ssm.kind import GatedDeltaNetKind, MambaKind, SSMKind

# State sizes of small models: unequal, so that an exchange of the two would show.
SMALL_KEYS, SMALL_VALUES = 6, 4
STATE_GROUPS = 2
MOST_STATE_HEADS = 4


class SSMCertificate(LayerCertificate):
    """Certificate of SSM and linear-attention layers.

    The small model has fewer heads, groups and channels of states. It has at most 4 heads per
    group, unless 4 heads cannot be sharded over the context-parallel ranks.
    """

    KIND: SSMKind
    SIZES: tuple[str, str, str, str]  # flags: heads, groups, channels of keys and of values

    @override
    def small(
        self, args: Any, hidden: int, tp: int, head_size: int, step: int = 1
    ) -> dict[str, Any]:
        if not self.KIND.asked(args):
            return {}
        sizes = (*self.small_heads(args, tp), SMALL_KEYS, SMALL_VALUES)
        return dict(zip(self.SIZES, sizes, strict=True))

    @override
    def small_words(self, args: Any) -> list[str]:
        return self.KIND.words(args)

    def small_heads(self, args: Any, tp: int) -> tuple[int, int]:
        """Return small numbers (heads, groups) that can be sharded over the TP and CP ranks."""
        self.KIND.require(args, tp)
        heads, groups = self.KIND.counts(args)
        cp = args.context_parallel_size
        counts = range(min(STATE_GROUPS, groups // tp), groups // tp + 1)
        few = next((count for count in counts if self.KIND.shares(count, cp)), groups // tp)
        ratios = range(min(heads // groups, MOST_STATE_HEADS), heads // groups + 1)
        ratio = next((ratio for ratio in ratios if not few * ratio % cp), heads // groups)
        return few * ratio * tp, few * tp


class MambaCertificate(SSMCertificate):
    """Certificate of Mamba-2 layers."""

    KIND = MambaKind()
    SIZES = ("mamba_num_heads", "mamba_num_groups", "mamba_state_dim", "mamba_head_dim")


class GatedDeltaNetCertificate(SSMCertificate):
    """Certificate of gated delta nets."""

    KIND = GatedDeltaNetKind()
    SIZES = ("linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim",
             "linear_value_head_dim")  # fmt: skip

    @override
    def make_double(self, args: Any) -> None:
        if self.KIND.asked(args):
            make_rule_double()
