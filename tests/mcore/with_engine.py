"""``pretrain_gpt`` whose layers' linears behave as Transformer Engine's: tests/layers/engine.py.

Those of the MLP add their weights' gradients to the reduction's buffer themselves.
"""

from typing import Any

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

from megatron.core.tensor_parallel import RowParallelLinear  # noqa: E402

from megatron_epp.mcore.model import elastic_layers  # noqa: E402
from megatron_epp.mcore.trainer import entry  # noqa: E402
from megatron_epp.mcore.trainer.hooks import TrainerHooks  # noqa: E402
from tests.layers import engine  # noqa: E402


class EngineLinear(engine.Linear):
    """As Megatron wraps it: always the output and the bias that is left to add."""

    __module__ = "megatron.core.extensions.transformer_engine"

    def forward(self, x: Any) -> Any:
        output = super().forward(x)
        return output if self.return_bias else (output, None)


def as_engine(linear: Any, fused: bool) -> EngineLinear:
    rows, columns = linear.weight.shape
    made = EngineLinear(
        columns,
        rows,
        linear.bias is not None,
        return_bias=linear.skip_bias_add,
        unfused_bias=isinstance(linear, RowParallelLinear),
        fuse_wgrad_accumulation=fused,
    )
    made.weight, made.bias = linear.weight, linear.bias
    made.is_first_microbatch = True  # as it begins
    return made


def install_in_model(model: Any, *others: Any) -> None:
    for layer in model.decoder.layers:
        for parent, names, fused in (
            (layer.self_attention, ("linear_qkv", "linear_proj"), False),
            (layer.mlp, ("linear_fc1", "linear_fc2"), True),
        ):
            for name in names:
                setattr(parent, name, as_engine(getattr(parent, name), fused))
    elastic_layers.install_in_model(model, *others)


if __name__ == "__main__":
    entry.main(hooks=TrainerHooks(install_in_model=install_in_model))
