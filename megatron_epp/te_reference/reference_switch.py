"""Whether this process runs Transformer Engine's layers over the reference of its compiled part.

For certificates and tests: ``EPP_TE_ON_CPU=h100`` (or ``b200``: the device that its Python is told
of) applies to a process and to those it starts. Results are right or wrong as on a GPU, and far
slower than those of local layers. Importing this module imports no torch.
"""

import importlib
import os
import sys

VARIABLE = "EPP_TE_ON_CPU"
DEVICE = "h100"  # the default
PACKAGES = ("transformer_engine", "transformer_engine_torch")
_START = "megatron_epp.te_reference.start"


def is_wanted() -> bool:
    """Return whether this process is to use the reference."""
    return bool(os.environ.get(VARIABLE))


def is_started() -> bool:
    """Return whether this process uses the reference."""
    start = sys.modules.get(_START)
    return start is not None and start.is_reference_installed()


def start_reference() -> None:
    """Put the reference where Transformer Engine's Python finds it.

    Raises:
        ValueError: the device is unknown, or Transformer Engine's Python is missing.
    """
    importlib.import_module(_START).install_reference(os.environ[VARIABLE])


def require_reference(device: str = DEVICE) -> str:
    """Have the processes that this one starts use the reference; return a line that says so.

    Args:
        device: used unless the environment names another one.
    """
    os.environ.setdefault(VARIABLE, device)
    return in_words()


def in_words() -> str:
    """Return the line that reports say of a run over the reference."""
    device = os.environ[VARIABLE]
    return f"Transformer Engine's layers over a reference of its kernels ({VARIABLE}={device})"
