"""Watcher thread, which reports a rank without progress and ends it after the timeout.

A lost message is otherwise invisible: NCCL's waits return at once and the device blocks; gloo's
waits block silently until the group's timeout. The thread reads the rank's :class:`CurrentOp` at
intervals, so it does not slow the ops.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from megatron_epp.ir import Kind, Message, Op, Payload, Transfer
from megatron_epp.runtime.executor import CurrentOp, OutsidePhase
from megatron_epp.runtime.store_answer import answer_within

PATIENCE_SECONDS = 30.0  # without progress, before the first line; the interval then doubles
# Factor on this patience for phases outside this package (checkpoint, optimizer).
ELSEWHERE_PATIENCE = 10
# Time after the timeout at which a rank is ended that has not failed by itself, as gloo does.
GRACE_SECONDS = 5.0
STORE_SECONDS = 5.0  # how long a line waits for the names of missing ranks
LOST_STATUS = 1


class Watcher:
    """Thread that watches the current op of a rank.

    Args:
        current_op: record of the rank's current op.
        ranks: global rank of each pipeline rank.
        rank: global rank of this process.
        timeout: timeout of the process groups.
        patience_seconds: time without progress before the thread prints its first line; None for
            PATIENCE_SECONDS. In an :class:`~megatron_epp.runtime.executor.OutsidePhase`, it is
            ELSEWHERE_PATIENCE times as long.
        grace_seconds: time after the timeout before the rank is ended.
        tell: function that receives the lines; None prints them to stderr.
        end: function that ends the process with a status.
        together: global ranks that run every op together with this rank, in lockstep; () without
            lockstep.
        missing: function that returns the global ranks that a phase waits for; () if they are not
            known.
    """

    def __init__(
        self,
        current_op: CurrentOp,
        ranks: Sequence[int],
        rank: int,
        timeout: timedelta,
        patience_seconds: float | None = None,
        grace_seconds: float = GRACE_SECONDS,
        tell: Callable[[str], None] | None = None,
        end: Callable[[int], object] = os._exit,
        together: Sequence[int] = (),
        missing: Callable[[], Sequence[int]] = tuple,
    ):
        self.current_op, self.ranks, self.rank = current_op, tuple(ranks), rank
        self.patience_seconds = PATIENCE_SECONDS if patience_seconds is None else patience_seconds
        self.last_seconds = timeout.total_seconds() + grace_seconds
        self.tell, self.end = tell or _to_stderr, end
        self.together, self.missing = tuple(together), missing
        self.ended = False
        self._since, self._after = -1.0, 0.0

    def start(self) -> None:
        """Start a daemon thread that calls :meth:`look` until it ends the process."""
        threading.Thread(target=self._watch, name="megatron_epp-watcher", daemon=True).start()

    def _watch(self) -> None:
        while not self.ended:
            time.sleep(self.look())

    def look(self) -> float:
        """Print a line after a long time without progress; end the process after the timeout.

        The process is not ended while it computes, or in a phase outside this package.

        Returns:
            The seconds until the next look.
        """
        if self._since != self.current_op.since:  # progress
            self._since, self._after = self.current_op.since, self.patience_seconds
            if isinstance(self.current_op.what, OutsidePhase):
                self._after *= ELSEWHERE_PATIENCE
        quiet = time.monotonic() - self._since
        if quiet >= self.last_seconds and self._waits_for_others():
            self.ended = True
            self.tell(f"{self.line()}; given up")
            self.end(LOST_STATUS)
        elif quiet >= self._after:
            self.tell(self.line())
            while self._after <= quiet:
                self._after *= 2
        next_look = self._after - quiet
        if quiet < self.last_seconds:
            next_look = min(next_look, self.last_seconds - quiet)
        return min(self.patience_seconds, next_look)  # the next op may block at once

    def _waits_for_others(self) -> bool:
        what = self.current_op.what
        if isinstance(what, Op):
            return self._arriving() is not None
        return not isinstance(what, OutsidePhase)

    def _arriving(self) -> Message | None:
        """Return the message that the device, but not the host, waits for; None without one."""
        links = self.current_op.links
        try:
            return None if links is None else links.oldest_arriving()
        except RuntimeError:  # the communicator is gone
            return None

    def line(self) -> str:
        """Return a line with the rank, its op, the seconds in the op, and the awaited message."""
        what, line = self.current_op.what, f"rank {self.rank} does not move: {self.current_op}"
        if isinstance(what, Transfer):
            return f"{line}: {self._explained(what)}"
        message = self._arriving()
        if message is None:
            if isinstance(what, Op) and self.together:
                ranks = " ".join(map(str, self.together))
                return f"{line}, which ranks {ranks} run together, their replicas being in lockstep"
            if isinstance(what, str) and not isinstance(what, OutsidePhase):
                missing = self._missing()
                return f"{line}; {_named(missing)} not there yet" if missing else line
            return line
        transfer = Transfer(Kind.RECEIVE, message)
        return f"{line}; its device waits for {transfer}: {self._explained(transfer)}"

    def _missing(self) -> Sequence[int]:
        try:
            return answer_within(STORE_SECONDS, self.missing, otherwise=())
        except RuntimeError:  # the store is gone
            return ()

    def _explained(self, transfer: Transfer) -> str:
        """Return which rank ``transfer`` waits for, and which op makes the message, as text."""
        message = transfer.message
        maker = {Payload.ACTIVATION: "F", Payload.GRADIENT: "B (or I)", Payload.HEAD: "H"}
        if message.payload is Payload.HEAD and message.target == 0:
            maker[Payload.HEAD] = "F"  # of the last stage
        awaited = f"what {maker[message.payload]} of chunk {message.chunk} makes"
        source, target = message.link
        if transfer.kind is Kind.SEND:
            other, place, verb = message.target, target, "has not taken"
        else:
            other, place, verb = message.source, source, "has not sent"
        rank = self.ranks[place] if place < len(self.ranks) else "unknown"
        return f"stage {other} (rank {rank}) {verb} {awaited}"


def _named(ranks: Sequence[int]) -> str:
    names = " ".join(map(str, ranks))
    return f"ranks {names} are" if len(ranks) > 1 else f"rank {names} is"


def _to_stderr(line: str) -> None:
    print(f"megatron_epp: {line}", file=sys.stderr, flush=True)
