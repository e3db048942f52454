"""``tests/mcore/double_losses.py`` whose last rank takes strikes (strikes.py) while it trains."""

from collections.abc import Callable
from typing import Any

from tests.attack import strikes


def strike_before(holder: Any, name: str, moment: Callable[[], str]) -> None:
    """Have calls of a function be a moment of strikes."""
    from megatron.training import get_args

    function = getattr(holder, name)

    def struck(*args: Any, **named: Any) -> Any:
        now = moment()
        iteration = 0 if now == "restart" else get_args().curr_iteration + 1
        strikes.strike_if_due(now, iteration)
        return function(*args, **named)

    setattr(holder, name, struck)


def main() -> None:
    """Train. The imports stay in here: strikes are listened for before libraries start threads."""
    strikes.join()

    import torch
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from megatron.training import training

    from megatron_epp.mcore.model.stage import ModelStage
    from tests.mcore import double_losses

    def of_forward() -> str:
        return "forward" if torch.is_grad_enabled() else "evaluation"

    strike_before(ModelStage, "_run_backward", lambda: "iteration")
    strike_before(ModelStage, "forward", of_forward)
    # All tensors are written, and nothing says yet that they are.
    strike_before(FileSystemWriterAsync, "retrieve_write_results", lambda: "save")
    strike_before(training, "load_checkpoint", lambda: "restart")
    double_losses.main()


if __name__ == "__main__":
    main()
