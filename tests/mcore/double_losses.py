"""``pretrain_gpt`` with weights, gradients and optimizer in float64, which prints losses in full.

Megatron clips no gradients in it: ``--clip-grad 0``.
"""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.training import arguments, training

from megatron_epp.mcore.patching import cpu_host
from megatron_epp.pretrain_gpt import run
from tests.mcore.exact_line import write_line

log, validate = training.training_log, arguments.validate_args


def validate_args(*args: Any, **named: Any) -> Any:
    validated = validate(*args, **named)
    validated.params_dtype = torch.float64
    return validated


def training_log(
    losses: Mapping[str, Any], total: Any, rate: Any, iteration: int, *rest: Any, **named: Any
) -> bool:
    result = log(losses, total, rate, iteration, *rest, **named)
    for loss in losses.values():
        write_line(iteration, float(loss))
    return result


def main() -> None:
    arguments.validate_args, training.training_log = validate_args, training_log
    with cpu_host.double_precision():
        run()


if __name__ == "__main__":
    main()
