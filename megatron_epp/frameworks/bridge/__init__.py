"""Megatron-Bridge: its micro-batches are samples, which mcore/loops/adapters/samples.py cuts."""

RELIES_ON = (
    "megatron.bridge.training.gpt_step.forward_step",
    "megatron.bridge.training.gpt_step.get_batch",
    "megatron.bridge.training.gpt_step.get_batch_from_iterator",
)
