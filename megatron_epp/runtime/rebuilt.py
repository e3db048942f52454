"""Process groups that a framework destroys and makes anew: whether they have spoken since.

slime, miles and ROLL free what NCCL holds around every rollout. Their ``new_group`` returns an
object that survives; the group that speaks is its ``group``, another one each time. slime destroys
the default group as well.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist


def speaking(group: Any) -> Any:
    """The group behind ``group``, itself where no framework stands in between."""
    return getattr(group, "group", group)


class InitialisedGroups:
    """``groups`` as they are now, each of which has spoken."""

    def __init__(self, groups: Iterable[dist.ProcessGroup]):
        self.groups = tuple(groups)
        self._world = weakref.ref(_default())
        self._after = [weakref.ref(speaking(group)) for group in self.groups]

    @property
    def anew(self) -> bool:
        """Whether one is another than those that have spoken, or the world is."""
        now = (speaking(group) for group in self.groups)
        return self._world() is not _default() or any(
            seen() is not one for seen, one in zip(self._after, now, strict=True)
        )


def _default() -> Any:
    return dist.distributed_c10d._get_default_group()
