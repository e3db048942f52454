"""Transformer Engine's layers on a host without a GPU, over a reference of its compiled part.

For certificates and tests: EPP_TE_ON_CPU=h100 (or b200: what its Python is told of the device) says
so, to a process and to those it starts. The reference is a folder of a checkout, beside this
package; what is computed by it is right or wrong as on a GPU, and far slower than local layers.
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

VARIABLE = "EPP_TE_ON_CPU"
DEVICE = "h100"  # where nobody says which
PACKAGES = ("transformer_engine", "transformer_engine_torch")
REFERENCE = Path(__file__).parents[3] / "tests" / "te_on_cpu"
_NAME = "epp_te_on_cpu"


def is_wanted() -> bool:
    """Whether this process is to have it."""
    return bool(os.environ.get(VARIABLE))


def is_started() -> bool:
    return _NAME in sys.modules


def start_reference() -> None:
    """Put the reference where Transformer Engine's Python finds it. ValueError: it is not there, or
    what it needs."""
    _reference().start(os.environ[VARIABLE])


def require_reference(device: str = DEVICE) -> str:
    """Have the processes that this one starts use it, as ``device`` where nobody says which; a line
    that says so. ValueError: there is none."""
    _require_folder()
    os.environ.setdefault(VARIABLE, device)
    return in_words()


def in_words() -> str:
    device = os.environ[VARIABLE]
    return f"Transformer Engine's layers over a reference of its kernels ({VARIABLE}={device})"


def _require_folder() -> None:
    if not (REFERENCE / "start.py").is_file():
        raise ValueError(
            "--transformer-impl transformer_engine: on a host without a GPU its layers run over a "
            f"reference that is part of a checkout of this project, and {REFERENCE} is not there"
        )


def _reference() -> ModuleType:
    _require_folder()
    if _NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            _NAME, REFERENCE / "__init__.py", submodule_search_locations=[str(REFERENCE)]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[_NAME] = module
        spec.loader.exec_module(module)
    return importlib.import_module(f"{_NAME}.start")
