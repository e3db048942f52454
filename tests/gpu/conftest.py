"""What GPU tests share: Megatron in this process, with layers by Transformer Engine where it is."""

import os
from dataclasses import replace

import pytest

MODEL = """
    --num-layers 2 --hidden-size 512 --ffn-hidden-size 1024 --num-attention-heads 8
    --group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm
    --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --seq-length 4096 --max-position-embeddings 4096
    --micro-batch-size 1 --global-batch-size 4 --train-iters 1 --lr 1e-4 --eval-iters 0
    --tokenizer-type NullTokenizer --vocab-size 511 --bf16 --no-gradient-accumulation-fusion
"""
# Megatron's own layers on a GPU without NVIDIA apex.
LOCAL = """
    --transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion
    --no-bias-dropout-fusion --no-bias-swiglu-fusion
"""


def has_engine() -> bool:
    """Whether Transformer Engine can be imported: whole, with its torch extension."""
    import torch  # noqa: F401  before it, so that libnccl is found

    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


@pytest.fixture(scope="session", autouse=True)
def host() -> None:
    """Before the first import of Megatron; nothing where there is a GPU."""
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()


@pytest.fixture(scope="session")
def engine() -> None:
    if not has_engine():
        pytest.skip("needs a GPU and Transformer Engine")


@pytest.fixture(scope="session")
def alone():
    """This process as a world of its own; bf16."""
    from scripts.bench.single_stage import start_single_process

    started = start_single_process(MODEL.split() + ([] if has_engine() else LOCAL.split()))
    # This process listens there from now on: what it starts has to look for a port of its own.
    os.environ.pop("MASTER_PORT", None)
    return started


@pytest.fixture(scope="session")
def in_float64(alone):
    """A world as ``alone`` whose layers are Megatron's own in float64, with plain attention."""
    import copy

    import torch

    from megatron_epp.layers.attention.reference import ReferenceKernel
    from megatron_epp.layers.attention.varlen import VarlenAttention

    args = copy.copy(alone.args)
    args.bf16, args.params_dtype, args.transformer_impl = False, torch.float64, "local"
    args.no_persist_layer_norm, args.apply_rope_fusion = True, False
    args.bias_swiglu_fusion = args.bias_dropout_fusion = False
    attention = VarlenAttention(ReferenceKernel(args.kv_channels**-0.5))
    return replace(alone, args=args, attention=attention)
