"""Transformer Engine on CPUs: its own Python layers over a reference of its kernels in torch.

Transformer Engine's layers are Python around one compiled module, ``transformer_engine_torch``.
This package replaces that module with the functions that training calls, each written as its
formula:

    module          the replacement, and its error for missing functions
    enums           names of dtypes, layouts, masks
    operands        refusal of operands that a kernel would misread: strides, dtypes, sizes
    products        matrix products with bias, GELU, accumulation, in groups
    fp8/            quantisation by blocks and by tensors, primary weights in fp8
    norms, activations, rotary, softmax, attention, flash, permutation, optimizers
    device          the properties of an H100 or B200 that Python queries
    start           installation of the package, before Megatron is imported
    reference_switch    environment variable that selects the package

The functions compute in the operands' dtype as kernels do: sums in float32, rounded once at the
end. They also compute in float64 throughout, which kernels do not support. They detect errors of
callers: wrong values, shapes, strides, counts. They do not reproduce times, memory use and races.

Written from Transformer Engine's documentation and the calls of its Python layers, 2.20.2.
"""
