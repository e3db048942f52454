"""Transformer Engine on CPUs: its Python layers run with an emulation of its kernels in torch.

Transformer Engine's layers are Python around one compiled module, ``transformer_engine_torch``.
This package replaces that module with the functions that training calls, each written as its
formula. ``EPP_ENGINE=tests.engine`` selects it (megatron_epp/mcore/patching/emulated_engine.py):

    module          the replacement, and its error for missing functions
    enums           names of dtypes, layouts, masks
    operands        checks of operands that a kernel would misread: strides, dtypes, sizes
    products        matrix products with bias, GELU, accumulation; grouped products
    fp8/            quantisation by blocks and by tensors, primary weights in fp8
    norms, activations, rotary, softmax, attention, flash, permutation, optimizers
    device          the properties of an H100 or B200 that Python queries
    start           installation of the package, before Megatron is imported

The functions compute in the operands' dtype as kernels do: they sum in float32 and round once at
the end. They also support float64, which kernels do not. They reveal errors of their callers: wrong
values, shapes, strides and counts. They do not reproduce times, memory use or races.

The functions follow the documentation of Transformer Engine 2.20.2 and the calls of its layers.
test_kernels.py compares them with torch's own formulas; the other tests run layers with them.
"""

from tests.engine.start import install, is_installed

__all__ = ["install", "is_installed"]
