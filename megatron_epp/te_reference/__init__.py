"""Transformer Engine without a GPU: its own Python layers over a reference in plain torch.

Transformer Engine's layers are Python around one compiled module, ``transformer_engine_torch``.
Here stands another of that name, of the functions that training calls, each written as its formula:

    module          the stand-in, and its error for what is not written
    enums           names of number formats, layouts, masks
    operands        what a kernel would misread, refused: strides, formats, sizes
    products        matrix products with bias, GELU, accumulation, in groups
    fp8/            scales of blocks (quantizers), of whole tensors, weights held in FP8 (primary)
    norms, activations, rotary, softmax, attention, flash, permutation, optimizers
    device          an H100, or a B200, as far as Python asks
    start           puts all of it in place, before Megatron is imported
    reference_switch    whether this process uses it

It computes in the format of its operands where a kernel does (sums in float32, one rounding at the
end), and in float64 from end to end, which no kernel knows. What it finds are errors of those who
call: wrong numbers, shapes, strides, counts. Times, memory and races it does not show.

Written from Transformer Engine's documentation and the calls of its Python layers, 2.20.2.
"""
