"""``pretrain_gpt`` of a process in which deep_ep's stand-in is installed (tests/stand_ins).

Megatron has looked for it when it was imported: it looks again.
"""

import importlib
import sys
from pathlib import Path

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()
sys.path.insert(0, str(Path(__file__).parents[1] / "stand_ins"))

from megatron.core.transformer.moe import fused_a2a, token_dispatcher  # noqa: E402

from megatron_epp.mcore.trainer import entry  # noqa: E402

importlib.reload(fused_a2a)
for name in vars(token_dispatcher).keys() & vars(fused_a2a).keys():
    if not name.startswith("__"):
        setattr(token_dispatcher, name, getattr(fused_a2a, name))

if __name__ == "__main__":
    assert fused_a2a.HAVE_DEEP_EP and fused_a2a.HAVE_HYBRIDEP
    entry.main()
