"""Transformer Engine on CPUs: its own Python layers over a reference of its kernels in torch.

Transformer Engine's layers are Python around one compiled module, ``transformer_engine_torch``.
This package replaces that module with the functions that training calls, each written as its
formula:

    module          the replacement, and its error for missing functions
    enums           names of dtypes, layouts, masks
    operands        refusal of what a kernel would misread: strides, dtypes, sizes
    products        matrix products with bias, GELU, accumulation, in groups
    fp8/            scales of blocks (quantizers), of tensors, primary weights in fp8
    norms, activations, rotary, softmax, attention, flash, permutation, optimizers
    device          an H100, or a B200, as far as Python queries it
    start           installs all of it, before Megatron is imported
    reference_switch    whether this process uses it

It computes in the operands' dtype as kernels do: sums in float32, rounded once at the end. It also
computes in float64 throughout, which kernels do not support. It finds errors of callers: wrong
values, shapes, strides, counts. It does not show times, memory and races.

Written from Transformer Engine's documentation and the calls of its Python layers, 2.20.2.
"""
