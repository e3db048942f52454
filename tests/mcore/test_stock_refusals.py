"""What planner/stock.py leaves out is what Megatron refuses, and what it keeps Megatron accepts."""

import inspect

import pytest

from megatron_epp.planner.choose.partition import layout_text

pytest.importorskip("megatron.core")

from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import TransformerConfig

MODEL = {
    "num_layers": 16,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_moe_experts": 8,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
    "bf16": True,
    "pipeline_dtype": "bfloat16",
    "overlap_moe_expert_parallel_comm": True,
}
WHOLE_LAYERS = {
    "recompute_granularity": "full",
    "recompute_method": "block",
    "recompute_num_layers": 1,
}


@pytest.mark.parametrize(
    ("placed", "refused"),
    [
        ({"pipeline_model_parallel_size": 1}, ""),
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, ""),
        ({"pipeline_model_parallel_size": 2}, "virtual_pipeline_model_parallel_size"),
        ({"pipeline_model_parallel_size": 1, **WHOLE_LAYERS}, "full recomputation"),
    ],
)
def test_the_overlap_of_experts(placed: dict, refused: str) -> None:
    if not refused:
        TransformerConfig(**MODEL, **placed)
        return
    with pytest.raises(AssertionError, match=refused):
        TransformerConfig(**MODEL, **placed)


def test_interleaved_stages_need_a_micro_batch_for_every_rank() -> None:
    """Any larger number runs if all micro-batches form one group: nothing is left over."""
    text = inspect.getsource(schedules.forward_backward_pipelining_with_interleaving)
    assert "config.microbatch_group_size_per_vp_stage > num_microbatches" in text
    assert "config.microbatch_group_size_per_vp_stage < pipeline_parallel_size" in text
    assert "num_microbatches % config.microbatch_group_size_per_vp_stage" in text


def test_the_layout_flag_takes_uneven_interleaved_stages() -> None:
    layers = (2, 1, 2, 1)
    layout = PipelineParallelLayerLayout.from_str(layout_text(layers), 2)
    assert layout.virtual_pipeline_model_parallel_size == 2
    counts = [sum(str(kind).endswith("decoder") for kind in stage) for stage in _in_order(layout)]
    assert tuple(counts) == layers


def _in_order(layout: PipelineParallelLayerLayout) -> list:
    """Return the layers of every stage, in the order of the model."""
    ranks = layout.layout
    return [ranks[rank][virtual] for virtual in range(2) for rank in range(2)]
