"""Environment variables of a process with ``--epp`` on a GPU, set before the process starts CUDA.

    CUDA_DEVICE_MAX_CONNECTIONS  32   number of hardware queues. With one queue, a device runs work
                                      in the order of issue, so ops wait for earlier messages whose
                                      sender or receiver is late. Scripts for
                                      Megatron's own schedules export 1; this module replaces it and
                                      logs a warning
    CUDA_MODULE_LOADING       EAGER   with lazy loading, a kernel's first use may wait for all work
                                      on the device, including messages that this host sends later
    PYTORCH_CUDA_ALLOC_CONF           expandable_segments:True, because every chunk has a new size;
                                      freeing memory then need not wait for the device
    NVTE_EXT_MARGIN_SM            4   number of multiprocessors that Transformer Engine's GEMMs
                                      leave free, with several stages. A waiting message is a
                                      kernel that occupies up to 2 multiprocessors. 0: no margin.
                                      Norms read NVTE_FWD_LAYERNORM_SM_MARGIN and NVTE_BWD_...
    CUDNN_HOME                        torch's own cuDNN, if it is a Python package. Transformer
                                      Engine would use a CUDA toolkit's cuDNN first; if its version
                                      differs from torch's, there is no fused attention
    EPP_SHARE_GPUS                    1 (set by the user, for tests): several ranks run on each GPU
                                      of this host. NCCL refuses two ranks on one GPU, so each rank
                                      gets its own NCCL_HOSTID and sends over sockets

On an H200 (scripts/gpu/held_sms.py), a GEMM takes longer by these factors while a message waits:

    message of 2 thread blocks    1.09 to 1.20 without a margin, 1.00 to 1.18 with a margin of 4
    message of 4 thread blocks    1.07 to 1.30 without a margin, 1.07 to 1.35 with a margin of 4

With a margin of 8, the factors are 1.00 to 1.08, but a GEMM without a message takes 4 to 15%
longer. Without a margin, a norm of 7168 columns does not start while a message waits. With a
margin of 4, the norm starts, and is not slower.

Other variables that the user has set are unchanged. Megatron asserts CUDA_DEVICE_MAX_CONNECTIONS=1
for tensor and context parallelism on devices before Blackwell, where Megatron's own overlap depends
on the order of issue. The CUDA driver reads the variable only when a process creates its context.
So :func:`prepare` creates the context, and then sets the variable to the value that Megatron
expects.
"""

import importlib.util
import logging
import os
from collections.abc import Sequence

import torch

logger = logging.getLogger(__name__)

CONNECTIONS, QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", "32"
DEFAULTS = {CONNECTIONS: QUEUES, "CUDA_MODULE_LOADING": "EAGER"}
MARGIN, LEFT_FREE = "NVTE_EXT_MARGIN_SM", 4
# Norms have their own margins, because some norm kernels start only when all their blocks fit.
NORM_MARGINS = ("NVTE_FWD_LAYERNORM_SM_MARGIN", "NVTE_BWD_LAYERNORM_SM_MARGIN")
CUDNN = ("CUDNN_HOME", "CUDNN_PATH")  # where Transformer Engine looks, in this order
SHARE = "EPP_SHARE_GPUS"
SOCKETS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
}
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the second is the newer name
# Compiled fusions (core/jit.py) get a new size with every chunk. In each mode of autograd, a fusion
# compiles once for a fixed size and once for any size. Beyond Dynamo's own limit of 8, it would run
# uncompiled without a message.
RECOMPILATIONS = 64


def prepare(flags: Sequence[str]) -> None:
    """Set the environment, and create the CUDA context on this rank's GPU.

    ``flags`` are the program's flags. Without --epp, or without a GPU, the function does nothing.

    Raises:
        ValueError: This host has fewer GPUs than ranks, NVTE_EXT_MARGIN_SM is not a whole number,
            or EPP_SHARE_GPUS is neither 0 nor 1.
    """
    if "--epp" not in flags:
        return
    stages = _stages(flags)
    chosen = {name: value for name, value in DEFAULTS.items() if name not in os.environ}
    if not any(name in os.environ for name in ALLOCATOR):
        chosen[ALLOCATOR[0]] = "expandable_segments:True"
    if stages > 1:
        margin = os.environ.get(MARGIN, str(LEFT_FREE))
        margins = dict.fromkeys((MARGIN, *NORM_MARGINS), margin)
        chosen |= {name: value for name, value in margins.items() if name not in os.environ}
    chosen |= own_cudnn()
    os.environ.update(chosen)
    if not torch.cuda.is_available():
        for name in chosen:
            del os.environ[name]
        return
    if os.environ[CONNECTIONS] == "1" and stages > 1:
        os.environ[CONNECTIONS] = DEFAULTS[CONNECTIONS]
        if os.environ.get("RANK", "0") == "0":
            logger.warning(
                "%s=1 is taken as %s: with one hardware queue, ops of an elastic pipeline stand "
                "after messages that wait; Megatron is shown the 1 that it asks for",
                CONNECTIONS,
                DEFAULTS[CONNECTIONS],
            )
    rank, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if shares_gpus():
        host = f"epp-{os.environ.get('RANK', '0')}-{rank}"
        rank %= devices
        os.environ.update({**SOCKETS, "NCCL_HOSTID": host, "LOCAL_RANK": str(rank)})
    if rank >= devices:
        raise ValueError(
            f"local rank {rank}, but this host has {devices} GPU(s): start one process per GPU "
            "(--nproc-per-node), or look at CUDA_VISIBLE_DEVICES; for tests, "
            f"{SHARE}=1 lets ranks share a GPU"
        )
    torch.cuda.set_device(rank)
    torch.zeros(1, device="cuda")
    os.environ[CONNECTIONS] = "1"
    if (left_free := _margin()) > 0:
        torch._C._set_sm_carveout_experimental(left_free)

    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILATIONS)


def own_cudnn() -> dict[str, str]:
    """Return {CUDNN_HOME: folder of cuDNN's Python package}.

    The result is {} without this package, or if CUDNN_HOME or CUDNN_PATH is already set.
    """
    if any(name in os.environ for name in CUDNN):
        return {}
    try:
        package = importlib.util.find_spec("nvidia.cudnn")
    except ModuleNotFoundError:  # nvidia is missing
        return {}
    places = [] if package is None else list(package.submodule_search_locations or ())
    return {CUDNN[0]: places[0]} if places else {}


def shares_gpus() -> bool:
    """Return whether the user lets several ranks of this host share a GPU.

    Raises:
        ValueError: EPP_SHARE_GPUS is neither 0 nor 1.
    """
    value = os.environ.get(SHARE, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{SHARE}={value}: expected 0 or 1")
    return value == "1"


def one_queue(device: torch.device) -> str | None:
    """Return a warning if a framework has started CUDA with one hardware queue; None otherwise.

    The framework has created the CUDA context, so the number of queues cannot change any more.
    """
    if device.type != "cuda" or os.environ.get(CONNECTIONS) != "1":
        return None
    return (
        f"{CONNECTIONS}=1: with one hardware queue, ops wait for pending messages, and "
        f"planned orders may gain nothing; export {CONNECTIONS}={QUEUES} where the framework lets "
        "you (docs/guides/frameworks.md)"
    )


def _margin() -> int:
    text = os.environ.get(MARGIN, "0")
    if not text.isdecimal():
        raise ValueError(f"{MARGIN}={text}: expected a whole number of multiprocessors")
    return int(text)


def _stages(flags: Sequence[str]) -> int:
    """Return the value of --pipeline-model-parallel-size; 1 if it is missing or invalid."""
    name = "--pipeline-model-parallel-size"
    count = "1"
    for word, following in zip(flags, [*flags[1:], ""], strict=True):
        if word == name:
            count = following
        elif word.startswith(name + "="):
            count = word.partition("=")[2]
    return int(count) if count.isdecimal() else 1
