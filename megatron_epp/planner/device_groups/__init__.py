"""Methods without a pipeline, simulated: flexsp, megatron-hybrid-cp."""
