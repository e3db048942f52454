"""How layers are built where the attention is ours: Megatron's own layers, but for one condition.

Megatron's local attention refuses context parallelism when it is built. Ours takes its place before
it ever runs, so it is built as for one rank.
"""

import copy
from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training.models.gpt import default_layer_spec


def allow_context_parallelism(description: Any) -> None:
    """Make the model that ``description`` (Megatron's GPTModelConfig) builds accept it."""
    wanted = description.transformer_layer_spec

    def spec(description: Any, vp_stage: int | None = None) -> Any:
        if wanted is None:
            made = default_layer_spec(description, vp_stage)
        else:
            made = copy.deepcopy(wanted if isinstance(wanted, ModuleSpec) else wanted(description))
        # Layers of one kind are one description; of several kinds, a list of them, by reference.
        for layer in getattr(made, "layer_specs", None) or [made]:
            attention = layer.submodules.self_attention.submodules
            if attention.core_attention is DotProductAttention:
                attention.core_attention = _as_for_one_rank
        return made

    description.transformer_layer_spec = spec


def _as_for_one_rank(config: Any, **others: Any) -> DotProductAttention:
    alone = copy.copy(config)
    alone.context_parallel_size = 1
    return DotProductAttention(config=alone, **others)
