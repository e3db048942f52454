"""Switch that makes processes run Transformer Engine's layers over the reference of its kernels.

The switch is for certificates and tests. The variable ``EPP_TE_ON_CPU=h100`` (or ``b200``) names
the device that torch reports, in this process and its child processes. The layers compute the same
results as on a GPU, but are far slower than Megatron's local layers. Importing this module
does not import torch.
"""

import importlib
import os
import sys

VARIABLE = "EPP_TE_ON_CPU"
DEVICE = "h100"  # the default
PACKAGES = ("transformer_engine", "transformer_engine_torch")
_START = "megatron_epp.te_reference.start"


def is_wanted() -> bool:
    """Return whether the environment requests the reference."""
    return bool(os.environ.get(VARIABLE))


def is_started() -> bool:
    """Return whether this process uses the reference."""
    start = sys.modules.get(_START)
    return start is not None and start.is_reference_installed()


def start_reference() -> None:
    """Install the reference in this process.

    Raises:
        ValueError: if the device is unknown, or Transformer Engine's Python is missing.
    """
    importlib.import_module(_START).install_reference(os.environ[VARIABLE])


def require_reference(device: str = DEVICE) -> str:
    """Make child processes use the reference, and return the text of :func:`in_words`.

    If the environment already names a device, ``device`` is ignored.
    """
    os.environ.setdefault(VARIABLE, device)
    return in_words()


def in_words() -> str:
    """Return the line that reports of a run print if the run used the reference."""
    device = os.environ[VARIABLE]
    return f"Transformer Engine's layers over a reference of its kernels ({VARIABLE}={device})"
