"""Megatron as the backend of a certificate: what its processes import, and serve with.

Importing this stays light: every process does so before it has set its environment.
"""

from contextlib import ExitStack
from typing import Any

from megatron_epp.certify.protocol import REFERENCE, Backend, Role
from megatron_epp.certify.trial import FLOAT64, Trial
from megatron_epp.te_reference import reference_switch


def choose_engine(trial: Trial) -> str:
    """Have the processes run Transformer Engine's layers over a reference of its kernels, where a
    model asks for them and not for GPUs. ValueError: there is none."""
    words = [word for words in trial.models for word in words]
    if trial.device != "cpu" or not any(word.endswith("transformer_engine") for word in words):
        return ""
    # An H100 has no such products.
    device = "b200" if any(word.endswith("mxfp8") for word in words) else reference_switch.DEVICE
    return reference_switch.require_reference(device)


def make_server(role: Role, until_the_end: ExitStack) -> Any:
    from megatron_epp.mcore.patching import cpu_host, cuda_host, patch_points

    if role.on_gpu:
        _require_gpu(role.rank)
        ranks = str(role.trial.degrees.ranks)
        cuda_host.prepare(["--epp", "--pipeline-model-parallel-size", ranks])
    cpu_host.install_cpu_host()
    patch_points.install(patch_points.ALWAYS_PATCH_POINTS)
    if role.trial.dtype == FLOAT64:
        until_the_end.enter_context(cpu_host.double_precision())
    if role.trial.loop is not None:
        from megatron_epp.mcore.certify.loops.loop_rank import LoopRank
        from megatron_epp.mcore.certify.loops.reference_loop import ReferenceLoop

        return ReferenceLoop(role) if role.rank == REFERENCE else LoopRank(role)
    if role.rank == REFERENCE:
        from megatron_epp.mcore.certify.reference import ReferenceModel

        return ReferenceModel(role)
    from megatron_epp.mcore.certify.rank import Rank

    return Rank(role)


def _require_gpu(rank: int) -> None:
    from torch.cuda import device_count

    if device_count() <= rank:
        raise ValueError(
            f"--device cuda: every rank needs a GPU, rank {rank} too; this host has "
            f"{device_count()}: certify fewer ranks, or leave the flag out"
        )


def is_refusal(error: BaseException) -> bool:
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
