"""Backend of ``certify`` for Megatron: what the processes of a certificate import and serve.

This module must not import Megatron or torch at the top, because every process imports the module
before it sets the environment.
"""

import sys
from contextlib import ExitStack
from typing import Any

from megatron_epp.certify.protocol import REFERENCE, Backend, Role
from megatron_epp.certify.trial import FLOAT64, Trial
from megatron_epp.mcore.patching import emulated_engine


def choose_engine(trial: Trial) -> str:
    """Select the CPU emulation of Transformer Engine if a model has Transformer Engine's layers.

    On GPUs, Transformer Engine's own kernels run instead.

    Returns:
        A message that the emulation is used; "" if it is not used.

    Raises:
        ValueError: The kernels on a GPU do not support the trial's dtype, or there is no emulation.
    """
    words = [word for words in trial.models for word in words]
    if not any(word.endswith("transformer_engine") for word in words):
        return ""
    if trial.device != "cpu":
        if trial.dtype == FLOAT64:
            raise ValueError(
                "--transformer-impl transformer_engine: its kernels on a GPU do not compute in "
                "float64; give --dtype bf16, or leave out --device"
            )
        return ""
    # An H100 has no mxfp8 GEMMs.
    device = "b200" if any(word.endswith("mxfp8") for word in words) else emulated_engine.DEVICE
    return emulated_engine.require(device)


def make_server(role: Role, until_the_end: ExitStack) -> Any:
    """Return the object that this process serves: the reference model, or a rank under test."""
    prepare_process(role, until_the_end)
    if role.rank == REFERENCE:
        from megatron_epp.mcore.certify.reference import ReferenceModel

        return ReferenceModel(role)
    from megatron_epp.mcore.certify.rank import Rank

    return Rank(role)


def prepare_process(role: Role, until_the_end: ExitStack) -> None:
    """Prepare this process for Megatron, before :func:`make_server` creates the object to serve.

    The stack ``until_the_end`` gets the contexts that must stay open until the process ends.

    Raises:
        ValueError: The rank runs on a GPU, and the host has no GPU for it.
    """
    from megatron_epp.mcore.patching import cpu_host, cuda_host, patch_points

    if role.on_gpu:
        if role.trial.dtype == FLOAT64:
            hide_transformer_engine()
        _require_gpu(role.rank)
        ranks = str(role.trial.degrees.ranks)
        cuda_host.prepare(["--epp", "--pipeline-model-parallel-size", ranks])
    cpu_host.install_cpu_host()
    patch_points.install(patch_points.ALWAYS_PATCH_POINTS)
    if role.trial.dtype == FLOAT64:
        until_the_end.enter_context(cpu_host.double_precision())
        if role.trial.device != "cpu":
            rotate_in_double()
            # Without Transformer Engine, Megatron refuses local norms with sequence parallelism.
            patch_points.install([patch_points.SEQUENCE_PARALLEL_NORM])


def hide_transformer_engine() -> None:
    """Hide Transformer Engine from Megatron. Call this function before Megatron is imported.

    If Transformer Engine is installed, Megatron's local layers use Transformer Engine's norms.
    The kernels of these norms do not compute in float64.
    """
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]


def rotate_in_double() -> None:
    """Patch Megatron to compute the frequencies of rotary embeddings on the CPU.

    The frequencies are converted to float64. Megatron computes them in float32 on the rank's
    device. A GPU's powers and cosines differ from a CPU's in the last bit, which caused an error of
    3e-7 in a certificate on an H200.
    """
    from functools import wraps

    import torch
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
        YarnRotaryEmbedding,
    )

    def on_host(make: Any) -> Any:
        @wraps(make)
        def init(self: Any, *inputs: Any, **named: Any) -> None:
            make(self, *inputs, **(named | {"use_cpu_initialization": True}))
            for name, value in list(vars(self).items()):
                if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                    setattr(self, name, value.double())

        return init

    for kind in (RotaryEmbedding, YarnRotaryEmbedding):
        kind.__init__ = on_host(kind.__init__)  # type: ignore[method-assign]


def _require_gpu(rank: int) -> None:
    from torch.cuda import device_count

    from megatron_epp.mcore.patching.cuda_host import SHARE, shares_gpus

    if device_count() <= (0 if shares_gpus() else rank):
        raise ValueError(
            f"--device cuda: every rank needs a GPU, rank {rank} too; this host has "
            f"{device_count()}: certify fewer ranks, set {SHARE}=1, or leave the flag out"
        )


def is_refusal(error: BaseException) -> bool:
    """Return whether ``error`` is caused by the user's input."""
    from megatron_epp.mcore.job.job_exit import is_users_mistake

    return is_users_mistake(error)


MEGATRON = Backend(
    choose_engine,
    make_server,
    is_refusal,
    (
        "megatron_epp.mcore.patching.preloaded",
        "megatron_epp.mcore.certify.rank",
        "megatron_epp.mcore.certify.reference",
    ),
)
