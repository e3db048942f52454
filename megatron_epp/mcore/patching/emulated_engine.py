"""Choice of a module that emulates Transformer Engine's compiled kernels on a CPU-only host.

Certificates and tests use it. The package has no emulation: ``EPP_ENGINE`` names a module, which
``install_cpu_host`` imports and installs in every process, also in the ranks of torchrun and the
processes of a certificate. In a checkout of this package, the module is ``tests.engine``.
``EPP_ENGINE_DEVICE=h100`` (or ``b200``) is the device that torch reports. The layers compute the
same results as on a GPU, but are far slower than Megatron's local layers.

Such a module has two functions: ``install(device)`` makes Transformer Engine importable before
Megatron is imported; ``is_installed()`` tells whether this process uses the emulation.
Importing emulated_engine.py does not import torch.
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

VARIABLE = "EPP_ENGINE"
DEVICE_VARIABLE = "EPP_ENGINE_DEVICE"
DEVICE = "h100"  # the default
OF_CHECKOUT = "tests.engine"
PACKAGES = ("transformer_engine", "transformer_engine_torch")
# Missing if the package was installed from a wheel.
_FILE = Path(__file__).parents[3].joinpath(*OF_CHECKOUT.split("."), "__init__.py")


def is_wanted() -> bool:
    """Return whether the environment names an emulation."""
    return bool(os.environ.get(VARIABLE))


def is_started() -> bool:
    """Return whether this process uses the emulation."""
    engine = sys.modules.get(os.environ.get(VARIABLE, ""))
    return engine is not None and engine.is_installed()


def start() -> None:
    """Install the emulation that the environment names, if any, in this process.

    Raises:
        ValueError: The module cannot be imported or is not an emulation, it does not know the
            device, or Transformer Engine's Python is missing.
    """
    if not is_wanted():
        return
    name = os.environ[VARIABLE]
    try:
        engine = _imported(name)
    except (ImportError, TypeError, ValueError) as error:  # names of unusual forms: TypeError
        raise ValueError(
            f"{VARIABLE}={name}: {error}; expected a module that emulates Transformer Engine's "
            f"kernels: {OF_CHECKOUT} in a checkout"
        ) from error
    if not (hasattr(engine, "install") and hasattr(engine, "is_installed")):
        raise ValueError(
            f"{VARIABLE}={name}: a module that emulates nothing; expected {OF_CHECKOUT}, in a "
            "checkout"
        )
    try:
        engine.install(_device())
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={name}: {error}") from error


def _imported(name: str) -> Any:
    # By its file, because a checkout of Megatron-LM on sys.path has a package tests, too.
    if name == OF_CHECKOUT and name not in sys.modules and _FILE.is_file():
        spec = importlib.util.spec_from_file_location(name, _FILE)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return importlib.import_module(name)


def require(device: str = DEVICE) -> str:
    """Make child processes use the emulation, and return the text of :func:`in_words`.

    If the environment already names a module or a device, the function does not change it.

    Raises:
        ValueError: The environment names no module, and this package is not part of a checkout.
    """
    if not is_wanted():
        if not _FILE.is_file():
            raise ValueError(
                "--transformer-impl transformer_engine: Transformer Engine's layers need a GPU "
                "(--device cuda) or a checkout of this project, which emulates their kernels"
            )
        os.environ[VARIABLE] = OF_CHECKOUT
    os.environ.setdefault(DEVICE_VARIABLE, device)
    return in_words()


def in_words() -> str:
    """Return the line that reports of a run print if the run used the emulation."""
    return (
        f"Transformer Engine's layers with emulated kernels ({VARIABLE}={os.environ[VARIABLE]}, "
        f"{_device()})"
    )


def _device() -> str:
    return os.environ.get(DEVICE_VARIABLE) or DEVICE
