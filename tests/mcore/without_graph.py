"""A fault of adapters: the first layer's input takes no part in autograd where the embedding
is frozen. Run inside a rank (``Trial.interfere``)."""

from typing import Any
from unittest.mock import patch

from megatron_epp.mcore.model import elastic_layers
from megatron_epp.mcore.trainer.hooks import TrainerHooks


def install_in_model(*arguments: Any) -> None:
    with patch.object(elastic_layers, "_from_here_on", lambda forward: forward):
        elastic_layers.install_in_model(*arguments)


HOOKS = TrainerHooks(install_in_model=install_in_model)
