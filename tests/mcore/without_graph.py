"""Breaks adapters on purpose: the first layer's input takes no part in autograd where the embedding
is frozen. Run inside a rank (``Trial.interfere``)."""

from typing import Any
from unittest.mock import patch

from megatron_epp.mcore.model import hooks
from megatron_epp.mcore.setup import Hooks


def install_in_model(*arguments: Any) -> None:
    with patch.object(hooks, "_from_here_on", lambda forward: forward):
        hooks.install_in_model(*arguments)


HOOKS = Hooks(install_in_model=install_in_model)
