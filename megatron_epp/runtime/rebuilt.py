"""Detection of process groups that a framework has destroyed and recreated.

slime, miles and ROLL free NCCL's resources around every rollout. Their ``new_group`` returns a
wrapper that survives; its ``group`` is the current process group. slime also destroys the default
group.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist


def speaking(group: Any) -> Any:
    """Return the group to which a wrapper currently refers, or ``group`` without a wrapper."""
    return getattr(group, "group", group)


class InitialisedGroups:
    """Process groups whose communicators are initialised, to detect when they are recreated."""

    def __init__(self, groups: Iterable[dist.ProcessGroup]):
        self.groups = tuple(groups)
        self._world = weakref.ref(_default())
        self._after = [weakref.ref(speaking(group)) for group in self.groups]

    @property
    def anew(self) -> bool:
        """Whether any of the groups, or the default group, has been recreated."""
        now = (speaking(group) for group in self.groups)
        return self._world() is not _default() or any(
            seen() is not one for seen, one in zip(self._after, now, strict=True)
        )


def _default() -> Any:
    return dist.distributed_c10d._get_default_group()
