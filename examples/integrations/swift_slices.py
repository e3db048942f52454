"""ms-swift's Megatron trainer in slices; swift_sft.sh passes this file to --external_plugins."""

from swift.megatron.callbacks import megatron_callbacks_map
from swift.megatron.callbacks.base import MegatronCallback

import megatron_epp
from megatron_epp.frameworks.swift.slices import SwiftPacks


class Slices(MegatronCallback):
    """Callback that attaches the trainer's model."""

    def on_train_begin(self) -> None:
        """Attach the wrapped model, before the first step."""
        megatron_epp.attach(self.trainer.wrapped_models, SwiftPacks(), memory_gib=40)


megatron_callbacks_map["slices"] = Slices
