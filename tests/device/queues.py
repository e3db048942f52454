"""Work of devices, put off for as long as nobody waits for it, and the hosts that issue it.

    host of rank 0    F0   SEND   F1        a thread each, one of them runs at a time
    compute stream    [F0]-------[F1]       tasks of a stream run one behind the other, and behind
    message's stream       `-[SEND]          the tasks of other streams that it was told to wait for
                              |
    rank 1            ... [RECEIVE]         both ends of a message are one task

What has been issued may run at any time at which nothing that it stands behind is missing. Which of
these times is an ``Order``'s choice: at once, not before a host waits for it, each stream in its
own way, or by chance.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from threading import Semaphore, Thread, local
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


class Stuck(RuntimeError):
    """All hosts wait, and nothing that they wait for can ever run."""


class Abandoned(RuntimeError):
    """Another host ended with an error: this one does not go on."""


@dataclass(frozen=True)
class Order:
    """Chance with which a task runs when it can, though nobody waits for it: of compute streams and
    of others; None: every stream has its own, drawn when it is made.

    one_queue   a device takes up nothing before all that was issued to it earlier is done
    hasty       chance with which a host lets another go on when it has issued something
    """

    name: str
    compute: float | None
    others: float | None
    one_queue: bool = False
    hasty: float = 0.0


ORDERS = (
    Order("early", 1.0, 1.0, hasty=0.1),
    Order("late", 0.0, 0.0),
    Order("compute late", 0.0, 1.0, hasty=0.1),
    Order("others late", 1.0, 0.0),
    Order("by chance", None, None, hasty=0.3),
    Order("one queue", 0.0, 0.0, one_queue=True),
)


class Task:
    """``act`` of ``parts``, one part of every host that takes part; ``missing``: hosts that have
    not issued theirs."""

    __slots__ = ("act", "after", "done", "lost", "missing", "name", "parts", "streams")

    def __init__(self, name: str, act: Callable[[Any], object] | None, missing: int = 1):
        self.name, self.act, self.missing = name, act, missing
        self.after: list[Task] = []
        self.streams: list[Stream] = []
        self.parts: dict[Hashable, Any] = {}
        self.done = 0  # the how many-th task it was
        self.lost = False

    def ready(self) -> bool:
        return not self.missing and all(task.done for task in self.after)


class Stream:
    """Tasks of one rank that run one behind the other; ``of_host``: its device knows nothing of
    them."""

    def __init__(self, rank: int, eagerness: float, of_host: bool):
        self.rank, self.eagerness, self.of_host = rank, eagerness, of_host
        self.queue: deque[Task] = deque()
        self.last: Task | None = None


class _Host:
    def __init__(self, rank: int):
        self.rank, self.turn = rank, Semaphore(0)
        self.over = self.waits = False
        self.waits_for = ""
        self.current: Stream | None = None
        self.last: Task | None = None
        self.result: Any = None
        self.freed: list[Callable[[], None]] = []


HERE = local()  # .world and .host of this thread


class World:
    """``ranks`` hosts with a device each."""

    def __init__(self, ranks: int, order: Order, seed: int):
        self.order, self.random = order, Random(f"{order.name} {seed}")
        self.hosts = [_Host(rank) for rank in range(ranks)]
        self.streams: dict[Hashable, Stream] = {}
        self._eager: list[Stream] = []
        self._meetings: dict[Hashable, Task] = {}
        self._over = Semaphore(0)
        self._errors: list[BaseException] = []
        self.count = 0

    # -------------------------------------------------------------- hosts

    def run(
        self, program: Callable[[int], Any], within: Callable[[], Sequence[Any]] = tuple
    ) -> list[Any]:
        """What ``program(rank)`` returns on every host; ``within``: contexts of each. The first
        error of a host is raised."""
        threads = [Thread(target=self._live, args=(h, program, within)) for h in self.hosts]
        for thread in threads:
            thread.daemon = True
            thread.start()
        self.hosts[0].turn.release()
        self._over.acquire()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        return [host.result for host in self.hosts]

    def _live(self, host: _Host, program: Callable[[int], Any], within: Any) -> None:
        host.turn.acquire()
        HERE.world, HERE.host = self, host
        host.current = self.stream(host.rank, "compute")
        try:
            if not self._errors:
                with ExitStack() as stack:
                    for context in within():
                        stack.enter_context(context)
                    host.result = program(host.rank)
        except BaseException as error:
            if not isinstance(error, Abandoned):
                self._errors.append(error)
        host.over = True
        others = [other for other in self.hosts if not other.over]
        if not others:
            self._over.release()
            return
        free = [other for other in others if not other.waits or self._errors]
        # Who waits looks again: if in vain, it says so.
        self.random.choice(free or others).turn.release()

    def _yield_to(self, others: Sequence[_Host]) -> None:
        chosen = self.random.choice(others)
        chosen.turn.release()
        HERE.host.turn.acquire()
        if self._errors:
            raise Abandoned

    def wait(self, task: Task | None) -> None:
        """The host of this thread stands still until ``task`` is done."""
        host = HERE.host
        while task is not None and not self.drive(task):
            host.waits, host.waits_for = True, task.name
            others = [other for other in self.hosts if not other.waits and not other.over]
            if not others:
                standing = "; ".join(
                    f"rank {one.rank} waits for {one.waits_for}" for one in self.hosts if one.waits
                )
                raise Stuck(standing)
            self._yield_to(others)
        host.waits = False

    # -------------------------------------------------------------- tasks

    def stream(self, rank: int, name: Hashable, of_host: bool = False) -> Stream:
        found = self.streams.get((rank, name))
        if found is None:
            wanted = self.order.compute if name == "compute" else self.order.others
            if wanted is None:
                wanted = self.random.choice((0.0, 0.3, 0.9, 1.0))
            found = self.streams[rank, name] = Stream(rank, wanted, of_host)
            if wanted:
                self._eager.append(found)
        return found

    def issue(
        self,
        stream: Stream | None,
        name: str,
        act: Callable[[Any], object] | None = None,
        after: Iterable[Task | None] = (),
        meeting: Hashable = None,
        hosts: int = 1,
        part: Any = None,
    ) -> Task:
        """The next task of ``stream``; None: a meeting of hosts alone. ``meeting``: the name by
        which ``hosts`` hosts know it, each of which issues a ``part`` of it."""
        host = HERE.host
        self.free_memory()
        task = self._meetings.get(meeting) if meeting is not None else None
        if task is None:
            task = Task(name, act, hosts)
            if meeting is not None:
                self._meetings[meeting] = task
        causes = [*after]
        if stream is not None:
            causes.append(stream.last)
            stream.last = task
            stream.queue.append(task)
            task.streams.append(stream)
            if self.order.one_queue and not stream.of_host:
                causes.append(host.last)
                host.last = task
        task.after += [cause for cause in causes if cause is not None and not cause.done]
        task.parts[host.rank] = part
        task.missing -= 1
        for other in self.hosts:
            other.waits = False
        self._settle()
        if self.order.hasty and self.random.random() < self.order.hasty:
            others = [one for one in self.hosts if one is not host and not one.over]
            if others:
                self._yield_to(others)
        return task

    def free_memory(self) -> None:
        """Issue what follows from memory that this host has let go since it last asked."""
        freed, HERE.host.freed = HERE.host.freed, []
        for act in freed:
            act()

    def _settle(self) -> None:
        moved = True
        while moved:
            moved = False
            for stream in self.random.sample(self._eager, len(self._eager)):
                while stream.queue:
                    head = stream.queue[0]
                    if head.done:
                        stream.queue.popleft()
                        continue
                    if not head.ready():
                        break
                    if self.random.random() >= min(one.eagerness for one in head.streams):
                        break
                    self._do(head)
                    moved = True

    def drive(self, task: Task) -> bool:
        """Run what ``task`` stands behind, in any order, and nothing else; whether it is done."""
        stack, seen = [task], set()
        while stack:
            top = stack[-1]
            if top.done:
                stack.pop()
                continue
            if id(top) not in seen:
                seen.add(id(top))
                causes = [cause for cause in top.after if not cause.done and id(cause) not in seen]
                if causes:
                    self.random.shuffle(causes)
                    stack += causes
                    continue
            stack.pop()
            if top.ready():
                self._do(top)
        return bool(task.done)

    def _do(self, task: Task) -> None:
        self.count += 1
        task.done = self.count
        act, task.act, task.after = task.act, None, []
        if act is not None:
            with _disable_current_modes(), torch.no_grad():
                act(task)
        task.parts = {}
        for stream in task.streams:
            while stream.queue and stream.queue[0].done:
                stream.queue.popleft()
