"""Entry point of torch (``torch.backends``): a message if MEGATRON_EPP is set.

In earlier versions this environment variable turned on a mode that was removed (scheduling mode).
Now it has no effect: Megatron's own schedule runs. An error here would abort every import of torch,
so this module only prints one line.
"""

import os
import sys

VARIABLE, OFF = "MEGATRON_EPP", ("", "0", "off", "false", "no")
INSTEAD = (
    "scheduling mode was removed; call megatron_epp.attach(model, adapter) after the model is "
    "wrapped (docs/guides/external_loops.md)"
)


def start() -> None:
    """Print one line on rank 0 if MEGATRON_EPP is set; raise no error."""
    value = os.environ.get(VARIABLE, "").strip().lower()
    if value not in OFF and os.environ.get("RANK", "0") == "0":
        line = f"megatron_epp: {VARIABLE}={value}: {INSTEAD}; Megatron's own schedule runs"
        print(line, file=sys.stderr, flush=True)
