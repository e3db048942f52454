"""Megatron's column-parallel linear with a norm in front: Transformer Engine's, where it is not."""

from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor


class NormedColumnParallelLinear(ColumnParallelLinear):
    """Its norm's parameters are ``layer_norm_weight`` and ``layer_norm_bias``, as in Transformer
    Engine's LayerNormLinear: checkpoints have the same keys."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **others: Any):
        super().__init__(input_size, output_size, config=config, **others)
        norm = WrappedTorchNorm(config, input_size, eps=config.layernorm_epsilon)
        for name, parameter in norm.named_parameters():
            self.register_parameter(f"layer_norm_{name}", parameter)
        # No module of this one, whose parameters would have two names.
        self._norm = (norm,)

    def forward(self, input_: Tensor, *args: Any, **others: Any) -> Any:
        (norm,) = self._norm
        return super().forward(norm(input_), *args, **others)
