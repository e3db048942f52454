"""``pretrain_gpt`` with weights, gradients and optimizer in float64, which prints losses in full.

Megatron clips no gradients in it: ``--clip-grad 0``.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from megatron.training import arguments, training

from megatron_epp.mcore.patching import cpu_host
from megatron_epp.pretrain_gpt import run

log, validate = training.training_log, arguments.validate_args


def validate_args(*args: Any, **named: Any) -> Any:
    validated = validate(*args, **named)
    validated.params_dtype = torch.float64
    return validated


def training_log(
    losses: Mapping[str, Any], total: Any, rate: Any, iteration: int, *rest: Any, **named: Any
) -> bool:
    result = log(losses, total, rate, iteration, *rest, **named)
    for name, loss in losses.items():
        # In one call: a rank that writes a line and its end apart has other ranks' text between.
        os.write(1, f"\nexact: iteration {iteration} {float(loss)!r} {name}\n".encode())
    return result


def main() -> None:
    arguments.validate_args, training.training_log = validate_args, training_log
    with cpu_host.double_precision():
        run()


if __name__ == "__main__":
    main()
