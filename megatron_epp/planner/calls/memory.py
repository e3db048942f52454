"""What a loop's chunks hold between forward and backward, estimated from the model's shape."""

from dataclasses import dataclass
from typing import Any

from megatron_epp.cost.analytic import ELEMENT_BYTES, profile
from megatron_epp.cost.devices import GIB, device
from megatron_epp.cost.models import Model
from megatron_epp.ir import FULL, KEEP, PlanError


@dataclass(frozen=True, slots=True)
class Memory:
    """budget_bytes: of a stage's chunks. The others are bytes per token, of a layer but for logits,
    which the last stage holds of the chunk that a loss follows."""

    budget_bytes: float
    kept: float
    kept_of_cut: float
    recomputed: float
    recomputed_of_cut: float
    logits: float

    @classmethod
    def of(cls, config: Any, vocabulary: int, budget_bytes: float) -> "Memory":
        """By the configuration of Megatron's GPTModel. Figures are those of fused kernels."""
        model = Model(
            name="loop",
            layers=config.num_layers,
            hidden=config.hidden_size,
            ffn_hidden=config.ffn_hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_query_groups or config.num_attention_heads,
            head_size=config.kv_channels,
            vocabulary=vocabulary,
            gated=bool(config.gated_linear_unit),
            tied=False,
        )
        made = profile(model, device("cpu"))
        scale = config.params_dtype.itemsize / ELEMENT_BYTES / config.tensor_model_parallel_size
        gradient = made.kv_gradient_bytes_per_token
        kept, recomputed = (made.saved_bytes[letter].per_token for letter in (KEEP, FULL))
        carried = made.kv_bytes_per_token + gradient
        return cls(
            budget_bytes,
            scale * kept,
            scale * (kept + gradient),
            scale * recomputed,
            scale * (recomputed + carried),
            scale * made.last_bytes.per_token,
        )

    def too_little(self, of: str, tokens: int) -> PlanError:
        """To raise where no order ``of`` chunks fits; ``tokens``: of the longest micro-batch."""
        return PlanError(
            f"attach(memory_gib={self.budget_bytes / GIB:.6g}): no order of {of} holds so little, "
            f"not even with all layers recomputed; expected more, for a micro-batch of {tokens} "
            "tokens"
        )
