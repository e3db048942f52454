"""``pretrain_gpt`` that prints every iteration's loss and gradient norm in full precision."""

from collections.abc import Mapping
from typing import Any

from megatron.training import training

from megatron_epp.pretrain_gpt import run
from tests.mcore.exact_line import write_line

log = training.training_log


def training_log(
    losses: Mapping[str, Any], total: Any, rate: Any, iteration: int, *rest: Any, **named: Any
) -> bool:
    result = log(losses, total, rate, iteration, *rest, **named)
    for loss in losses.values():
        write_line(iteration, float(loss), float(rest[3]))
    return result


if __name__ == "__main__":
    training.training_log = training_log
    run()
