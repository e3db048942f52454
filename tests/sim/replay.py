"""An independent replay: slow, obvious, event by event, from the rules as prose.

It shares nothing with the simulator but the plan and the table: it neither reads the rule table
nor walks the orders in topological order. Time advances from event to event; a set of tensors is
alive on every rank.
"""

import heapq
import itertools
from collections import deque

from megatron_epp.ir import Item, Kind, Op, Payload, Plan, Table


class Replay:
    """start, stop and peak by (stage, op); peak and left bytes by rank."""

    def __init__(self, plan: Plan, table: Table):
        self.plan, self.table = plan, table
        self.vocabulary = any("H" in str(op) for op in plan.orders[0])
        self.slices: dict[int, list[int]] = {}  # cut document -> its chunks in token order
        for document in range(len(plan.documents)):
            spans = sorted(
                (span.start, chunk)
                for chunk, c in enumerate(plan.chunks)
                for span in c.spans
                if span.document == document
            )
            if len(spans) > 1:
                self.slices[document] = [chunk for _, chunk in spans]
        # Documents that continue others, read off the text, as a person would.
        lines = [line for line in str(plan).split("\n") if line.startswith("prefix ")]
        self.parent: dict[int, tuple[int, int]] = {}
        for line in lines:
            _, child, span = line.split()
            parent, _, stop = span.rstrip("]").partition("[0:")
            self.parent[int(child.rstrip(":"))] = int(parent), int(stop)
        self.before: dict[int, int] = {}  # chunk -> the chunk with what it continues
        self.kept: dict[int, tuple[int, set[int]]] = {}  # document -> its first chunk, its readers
        self._tie()
        self.start: dict[tuple[int, Op], float] = {}
        self.stop: dict[tuple[int, Op], float] = {}
        self.op_peak: dict[tuple[int, Op], float] = {}
        # The rank of every stage; read off the text, as a person would.
        said = [line.split()[1:] for line in str(plan).split("\n") if line.startswith("place")]
        self.rank = list(map(int, said[0])) if said else list(range(len(plan.layers)))
        ranks = max(self.rank) + 1
        self.alive = [dict[tuple, float]() for _ in range(ranks)]
        self.resident = [0.0] * ranks
        for stage, resident in enumerate(table.resident_bytes):
            self.resident[self.rank[stage]] += float(resident)
        self.peak = list(self.resident)
        self.sent: list[tuple] = []  # (payload, chunk, source, ready, depart, arrive)
        self._run()

    def _tie(self) -> None:
        lies = {(s.document, s.stop): c for c, k in enumerate(self.plan.chunks) for s in k.spans}
        firsts = {
            s.document: c for c, k in enumerate(self.plan.chunks) for s in k.spans if s.start == 0
        }
        for document, chunks in self.slices.items():
            for one, other in itertools.pairwise(chunks):
                self.before[other] = one
            self.kept[document] = chunks[0], set(chunks[1:])
        for document, place in self.parent.items():
            if lies[place] != firsts[document]:
                self.before[firsts[document]] = lies[place]
            mine = {c for (d, _), c in lies.items() if d == document}
            while document in self.parent:
                document, _ = self.parent[document]
                self.kept.setdefault(document, (firsts[document], set()))[1].update(mine)

    # --- what the rules say ----------------------------------------------------------------------

    def _after(self, chunk: int) -> list[int]:
        """Chunks that continue what ``chunk`` holds."""
        return [other for other, before in self.before.items() if before == chunk]

    def _done(self, stage: int, letters: str, chunk: int) -> bool:
        return any((stage, Op(Kind(letter), chunk)) in self.stop for letter in letters)

    def _may_start(self, stage: int, op: Op, inbox: set) -> bool:
        chunk = op.chunk
        match op.kind:
            case Kind.FORWARD:
                before = self.before.get(chunk)
                return (stage == 0 or (Payload.ACTIVATION, chunk) in inbox) and (
                    before is None or self._done(stage, "F", before)
                )
            case Kind.BACKWARD | Kind.INPUT:
                if self.plan.forward_only:
                    raise AssertionError("a backward in a plan of forwards")
                last = stage == self.plan.stages - 1
                loss = not self.vocabulary or self._done(stage, "H", chunk)
                return (
                    self._done(stage, "F", chunk)
                    and (loss if last else (Payload.GRADIENT, chunk) in inbox)
                    and all(self._done(stage, "BI", after) for after in self._after(chunk))
                )
            case Kind.HEAD:
                return (Payload.HEAD, chunk) in inbox
            case Kind.HEAD_WEIGHT:
                last = stage == self.plan.stages - 1
                return self._done(stage, "H" if last else "BI", chunk)
            case _:
                return self._done(stage, "I", chunk)

    def _seconds(self, stage: int, op: Op) -> float:
        seconds = self.table.seconds[op.kind][stage][op.chunk]
        if op.kind in (Kind.BACKWARD, Kind.INPUT):
            seconds += self.table.recompute_seconds[stage][op.chunk]
        return seconds

    def _begin(self, stage: int, op: Op) -> None:
        rank = self.rank[stage]
        held, chunk, alive = self.table.held_bytes, op.chunk, self.alive[rank]
        new: dict[tuple, float] = {
            ("workspace",): self.table.workspace_bytes[op.kind][stage][chunk]
        }
        if op.kind is Kind.FORWARD:
            if not self.plan.forward_only:
                new["activations", chunk] = held[Item.ACTIVATIONS][stage][chunk]
            for document, (first, _) in self.kept.items():
                if first == chunk:
                    new["kv", document] = held[Item.KV][stage][document]
        elif op.kind is Kind.HEAD:
            if not self.plan.forward_only:
                new["head inputs", chunk] = held[Item.HEAD_INPUTS][stage][chunk]
        elif op.kind in (Kind.BACKWARD, Kind.INPUT):
            for document, (_, readers) in self.kept.items():
                if chunk in readers and (stage, "kv grads", document) not in alive:
                    new["kv grads", document] = held[Item.KV_GRADIENTS][stage][document]
            if op.kind is Kind.INPUT:
                new["weight inputs", chunk] = held[Item.WEIGHT_INPUTS][stage][chunk]
        new = {(stage, *name): size for name, size in new.items()}
        assert not new.keys() & alive.keys(), "made twice"
        alive |= new
        bytes_now = sum(alive.values()) + self.resident[rank]
        self.op_peak[stage, op] = bytes_now
        self.peak[rank] = max(self.peak[rank], bytes_now)

    def _end(self, stage: int, op: Op) -> None:
        chunk, alive = op.chunk, self.alive[self.rank[stage]]
        gone: list[tuple] = [("workspace",)]
        if op.kind in (Kind.BACKWARD, Kind.INPUT):
            gone.append(("activations", chunk))
            for document, (first, _) in self.kept.items():
                if first == chunk:
                    gone += [("kv", document), ("kv grads", document)]
        elif op.kind is Kind.WEIGHT:
            gone.append(("weight inputs", chunk))
        elif op.kind is Kind.HEAD_WEIGHT:
            gone.append(("head inputs", chunk))
        if self.plan.forward_only and op.kind is Kind.FORWARD:
            for document, (_, readers) in self.kept.items():
                seen = {c for c in readers if c == chunk or self._done(stage, "F", c)}
                if chunk in readers and seen == readers:
                    gone.append(("kv", document))
        for tensor in gone:
            del alive[(stage, *tensor)]  # a KeyError: freed before it was made

    def _message(self, stage: int, op: Op) -> tuple[int, Payload] | None:
        if op.kind is Kind.FORWARD and stage + 1 < self.plan.stages:
            return stage + 1, Payload.ACTIVATION
        if op.kind in (Kind.BACKWARD, Kind.INPUT) and stage > 0:
            return stage - 1, Payload.GRADIENT
        if op.kind is Kind.FORWARD and self.vocabulary:  # of the last stage: round to the first
            return 0, Payload.HEAD
        if op.kind is Kind.HEAD and stage + 1 < self.plan.stages:
            return stage + 1, Payload.HEAD
        return None

    # --- time ------------------------------------------------------------------------------------

    def _run(self) -> None:
        plan, table = self.plan, self.table
        waiting = [deque(order) for order in plan.rank_orders]
        running = [False] * len(waiting)
        inbox: list[set] = [set() for _ in plan.layers]
        links: dict[tuple[int, int], deque] = {}
        busy: set[tuple[int, int]] = set()
        events: list[tuple] = []  # (time, number, what, ...)
        number = 0
        now = 0.0

        def at(time: float, *what) -> None:
            nonlocal number
            number += 1
            heapq.heappush(events, (time, number, *what))

        while True:
            for rank, coming in enumerate(waiting):
                if not running[rank] and coming:
                    stage, op = coming[0]
                    if self._may_start(stage, op, inbox[stage]):
                        coming.popleft()
                        running[rank] = True
                        self.start[stage, op] = now
                        self._begin(stage, op)
                        at(now + self._seconds(stage, op), "stop", stage, op)
            for link, queue in links.items():
                if queue and link not in busy:
                    payload, chunk, source, target, ready = queue.popleft()
                    busy.add(link)
                    between = source if payload is Payload.HEAD else min(source, target)
                    seconds = table.link_seconds[payload][between][chunk]
                    at(now + seconds, "free", link)
                    arrive = now + seconds + table.link_latency_seconds
                    at(arrive, "arrive", target, payload, chunk)
                    self.sent.append((payload, chunk, source, ready, now, arrive))
            if not events:
                break
            # One event at a time: what it allows starts before the next is looked at.
            now, _, what, *rest = heapq.heappop(events)
            if what == "stop":
                stage, op = rest
                self.stop[stage, op] = now
                running[self.rank[stage]] = False
                self._end(stage, op)
                if (message := self._message(stage, op)) is not None:
                    target, payload = message
                    link = self.rank[stage], self.rank[target]
                    if link[0] == link[1]:  # handed over on the rank
                        inbox[target].add((payload, op.chunk))
                    else:
                        sent = (payload, op.chunk, stage, target, now)
                        links.setdefault(link, deque()).append(sent)
            elif what == "free":
                busy.discard(rest[0])
            else:
                stage, payload, chunk = rest
                inbox[stage].add((payload, chunk))
        assert not any(waiting), "some ops never started"

    @property
    def seconds(self) -> float:
        return max(self.stop.values())
