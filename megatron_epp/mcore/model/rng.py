"""Saving and restoring of random states, so that a repeated run draws equal random numbers."""

from typing import Any

import torch
from megatron.core import tensor_parallel


def random_states() -> Any:
    """Return the random states of the CPU, the current GPU and Megatron's RNG tracker."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    return (
        torch.get_rng_state(),
        torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        tracker.get_states() if tracker.is_initialized() else None,
    )


def restore_random_states(states: Any) -> None:
    """Set the random states of CPU, GPU and RNG tracker to a result of :func:`random_states`."""
    cpu, cuda, tracked = states
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
    if tracked is not None:
        tensor_parallel.get_cuda_rng_tracker().set_states(tracked)
