"""The frameworks whose micro-batches are known, found by where a forward step is written."""

from typing import Any

from megatron_epp.frameworks.areal.shapes import areal_reader
from megatron_epp.frameworks.bridge.shapes import bridge_reader
from megatron_epp.frameworks.caller import Framework, written_in
from megatron_epp.frameworks.nemo_rl.shapes import nemo_rl_reader
from megatron_epp.frameworks.roll.shapes import roll_reader
from megatron_epp.frameworks.skyrl.shapes import skyrl_reader
from megatron_epp.frameworks.slime.shapes import slime_reader
from megatron_epp.frameworks.swift.shapes import swift_reader
from megatron_epp.frameworks.verl.shapes import verl_reader

FRAMEWORKS = (
    Framework("verl", ("verl",), verl_reader),
    Framework("slime", ("slime",), slime_reader),
    Framework("miles", ("miles",), slime_reader),
    Framework("ms-swift", ("swift",), swift_reader),
    Framework("Megatron-Bridge", ("megatron.bridge",), bridge_reader),
    Framework("NeMo-RL", ("nemo_rl",), nemo_rl_reader),
    Framework("SkyRL", ("skyrl", "skyrl_train"), skyrl_reader),
    Framework("AReaL", ("areal",), areal_reader),
    Framework("ROLL", ("roll", "mcore_adapter"), roll_reader),
)


def framework_of(forward_step: Any) -> Framework | None:
    """The framework that wrote ``forward_step`` or what it wraps; None: none that is known."""
    for module in written_in(forward_step):
        for framework in FRAMEWORKS:
            for package in framework.packages:
                if module == package or module.startswith(package + "."):
                    return framework
    return None
