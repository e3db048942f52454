"""Frameworks with known micro-batches, identified by the module of a forward step."""

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
    Framework("verl", ("verl",), verl_reader, "input_ids"),
    Framework("slime", ("slime",), slime_reader, "tokens"),
    Framework("miles", ("miles",), slime_reader, "tokens"),
    Framework("ms-swift", ("swift",), swift_reader, "input_ids"),
    Framework("Megatron-Bridge", ("megatron.bridge",), bridge_reader, "tokens"),
    Framework("NeMo-RL", ("nemo_rl",), nemo_rl_reader, "input_ids"),
    Framework("SkyRL", ("skyrl", "skyrl_train"), skyrl_reader, "attention_mask"),
    Framework("AReaL", ("areal",), areal_reader, "padded_mb's cu_seqlens"),
    Framework("ROLL", ("roll", "mcore_adapter"), roll_reader, "input_ids and attention_mask"),
)


def framework_of(forward_step: Any) -> Framework | None:
    """Return the framework that defines ``forward_step`` or a function inside it, or None."""
    for module in written_in(forward_step):
        for framework in FRAMEWORKS:
            for package in framework.packages:
                if module == package or module.startswith(package + "."):
                    return framework
    return None
