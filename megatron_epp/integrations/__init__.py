"""Former import paths: ``megatron_epp.integrations.NAME`` is ``frameworks.NAME.shapes``."""

import sys
from importlib import import_module

_NAMES = ("areal", "bridge", "nemo_rl", "roll", "skyrl", "slime", "swift", "verl")
_MODULES = {name: f"{name}.shapes" for name in _NAMES} | {
    "framework": "caller",
    "known": "known",
    "rows": "rows",
}
for _name, _module in _MODULES.items():
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = import_module(
        f"megatron_epp.frameworks.{_module}"
    )
