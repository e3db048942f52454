"""One network device of gloo for all groups of a process.

torch creates a device for every gloo group, and a thread for every device. While no messages
arrive, each thread wakes about 125 times a second. Megatron creates dozens of groups. With as many
ranks as cores, these threads add one to five per cent to the time of an op.
"""

from datetime import timedelta
from functools import wraps
from typing import Any

import torch.distributed as dist


def share_gloo_device() -> None:
    """Make later gloo groups use the first group's device, unless they are created with options."""
    group: Any = dist.ProcessGroupGloo
    original = group.__init__
    first: list[Any] = []

    @wraps(original)
    def init(self: Any, store: Any, rank: int, size: int, *arguments: Any, **named: Any) -> None:
        settings = (*arguments, *named.values())
        if not all(isinstance(setting, timedelta) for setting in settings):
            original(self, store, rank, size, *arguments, **named)
        elif not first:
            original(self, store, rank, size, *arguments, **named)
            first.append(self.options)
        else:
            options = group._Options()
            options._devices, options._threads = first[0]._devices, first[0]._threads
            for timeout in settings:
                options._timeout = timeout
            original(self, store, rank, size, options)

    group.__init__ = init
