"""Process groups as slime, miles and ROLL have them: destroyed between two calls, and made anew.

``new_group`` returns an object that survives the group behind it; torch's functions are shown the
one of the moment. Links of ours connect as NCCL's do: when two ranks first speak over a group, each
waits there for the other. (gloo connects when a group is made, and would notice nothing.)
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.waiting import LAST_RESORT_SECONDS

PATIENCE = timedelta(seconds=LAST_RESORT_SECONDS)
QUERIES = """
    get_rank get_world_size get_backend get_global_rank get_group_rank get_process_group_ranks
    all_reduce all_gather all_gather_into_tensor all_gather_object all_to_all all_to_all_single
    broadcast broadcast_object_list reduce reduce_scatter reduce_scatter_tensor barrier
"""
MESSAGES = ("send", "recv", "isend", "irecv")


class Reloadable(dist.ProcessGroup):
    """``group`` is what speaks; its collectives are found by the functions below."""

    def __init__(self, group: Any, number: int, described: str):
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group, self.number, self.described = group, number, described
        self.spoken: set[tuple[int, int]] = set()

    def size(self) -> int:
        return self.group.size()

    def rank(self) -> int:
        return self.group.rank()

    def name(self) -> str:
        return self.group.name()

    def _get_backend(self, device: Any) -> Any:
        return self.group._get_backend(device)

    @property
    def bound_device_id(self) -> Any:
        return self.group.bound_device_id


class ReloadableWorld:
    """torch.distributed, patched; every rank makes one before Megatron makes its groups.

    late   links of ours that first spoke in the midst of ops, which send and receive ahead
    """

    def __init__(self, store: Any):
        self.store, self.generation, self.late = store, 0, 0
        self.made: list[tuple[tuple[Any, ...], dict[str, Any], Reloadable | None]] = []
        self.own = {name: getattr(dist, name) for name in (*QUERIES.split(), *MESSAGES)}
        self.new_group, make_op = dist.new_group, dist.P2POp
        dist.new_group = self._new_group
        for name in QUERIES.split():
            setattr(dist, name, self._shown(self.own[name]))
        for name in MESSAGES:
            setattr(dist, name, self._connected(self.own[name]))
        dist.P2POp = lambda op, tensor, peer, group=None: make_op(
            self.own[op.__name__], tensor, peer, after(group)
        )

    def _new_group(self, *words: Any, **named: Any) -> Any:
        group = self.new_group(*words, **named)
        if named.get("backend") == "gloo":  # as they do: groups of the host stay
            return group
        member = group is not dist.GroupMember.NON_GROUP_MEMBER
        described = named.get("group_desc") or ""
        wrapped = Reloadable(group, len(self.made), described) if member else None
        self.made.append((words, named, wrapped))
        return group if wrapped is None else wrapped

    def rebuild(self) -> None:
        """Destroy all groups but the world, and make them anew."""
        for *_, wrapped in self.made:
            if wrapped is not None:
                dist.destroy_process_group(wrapped.group)
        self._reload()

    def rebuild_world(self) -> None:
        """Destroy the world and all its groups, and make them anew."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        dist.barrier()
        dist.destroy_process_group()
        store = dist.PrefixStore(f"world {self.generation}", self.store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=PATIENCE)
        self._reload()

    def _reload(self) -> None:
        self.generation += 1
        for words, named, wrapped in self.made:
            group = self.new_group(*words, **named)
            if wrapped is not None:
                wrapped.group, wrapped.spoken = group, set()

    def _shown(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def shown(*words: Any, **named: Any) -> Any:
            return function(*map(after, words), **{k: after(v) for k, v in named.items()})

        return shown

    def _connected(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def connected(*words: Any, **named: Any) -> Any:
            group = named.get("group")
            if isinstance(group, Reloadable) and group.described.startswith("epp"):
                other = named.get("group_dst", named.get("group_src"))
                self.late += self._meet(group, group.rank(), other) and function.__name__[0] == "i"
            return self._shown(function)(*words, **named)

        connected.__name__ = function.__name__
        return connected

    def _meet(self, group: Reloadable, mine: int, other: int) -> bool:
        """Whether the two have not spoken before."""
        pair = min(mine, other), max(mine, other)
        if pair in group.spoken:
            return False
        group.spoken.add(pair)
        place = f"{self.generation}/{group.number}/{pair}"
        self.store.set(f"{place}/{mine}", "here")
        self.store.wait([f"{place}/{other}"], PATIENCE)
        return True


def after(group: Any) -> Any:
    return group.group if isinstance(group, Reloadable) else group
