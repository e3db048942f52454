"""Whether programs hang on devices that take work in the order in which it was issued.

Two questions, for the messages of GPUs, whose sends and receives are kernels:

``stuck_in_one_queue``   each device has a single queue (CUDA_DEVICE_MAX_CONNECTIONS=1), so what
                         cannot start holds up all that was issued behind it, and sends meet their
                         receives: neither is done before the other has started
``hanging_waits``        queues are free of each other, but at some point of issue the host waits
                         for its whole device (cudaFree, the loading of a kernel, a new
                         communicator), and meanwhile issues nothing more

Programs that :func:`megatron_epp.ir.lower` makes pass both by construction; the checks are for
whoever issues in another order.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from megatron_epp.ir.op import Kind, Message, Op, Post, StageOp, Transfer
from megatron_epp.ir.program.lower import Item, Program

# (rank, index in its program)
Place = tuple[int, int]
Node = Place | Message
COMPUTE_STREAM = "compute"


def stuck_in_one_queue(programs: Sequence[Program], strict: bool = False) -> tuple[Place, ...]:
    """Where the ranks stand for ever, with one queue per device; nothing if all get through.

    A send or receive starts when the one before it on its link is done. ``strict``: nothing
    starts before all that was issued before it is done, transfers included.
    """
    at = [0] * len(programs)
    started: set[tuple[bool, Message]] = set()  # (whether its sender has, message)
    last: dict[tuple[bool, int, int], Message] = {}  # by end of a link

    def done(message: Message) -> bool:
        return (True, message) in started and (False, message) in started

    def passes(item: Item) -> bool:
        if isinstance(item, (Op, StageOp)):
            return True
        message = item.message
        if isinstance(item, Transfer) and item.kind is Kind.RECEIVE:
            return done(message)
        end = isinstance(item, Transfer), message
        before = last.get((end[0], *message.link))
        if end not in started and before is not None and not done(before):
            return False
        started.add(end)
        last[end[0], *message.link] = message
        return done(message) or not strict

    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program) and passes(program[at[rank]]):
                at[rank] += 1
                moved = True
    return tuple((rank, index) for rank, index in enumerate(at) if index < len(programs[rank]))


def hanging_waits(programs: Sequence[Program]) -> tuple[Place, ...]:
    """The items right behind which a wait for the whole device never returns.

    An op or a RECEIVE is done when what it stands behind on the compute stream is; a message, when
    what both its ends stand behind is: the compute streams, and their links' streams. For each of
    them, how far every host must have issued is the furthest of what it stands behind; an item that
    asks more of its own host than itself hangs a wait until that is issued.

    ValueError: programs that never end, wherever they wait.
    """
    behind: dict[Node, list[Node]] = {}
    places: dict[Node, list[Place]] = {}  # a message stands at both its ends
    for rank, program in enumerate(programs):
        streams: dict[object, Node] = {}  # what was last issued to each
        for index, item in enumerate(program):
            node: Node = (rank, index)
            streams_of: set[object] = {COMPUTE_STREAM}
            needs: list[Node] = []
            if not isinstance(item, (Op, StageOp)):
                if isinstance(item, Transfer) and item.kind is Kind.RECEIVE:
                    needs = [item.message]
                else:  # starts when what was computed before it is done, and the one before it
                    node = item.message
                    streams_of.add((isinstance(item, Post), *item.message.link))
            needs += [streams[stream] for stream in streams_of if stream in streams]
            behind.setdefault(node, []).extend(needs)
            places.setdefault(node, []).append((rank, index))
            for stream in streams_of - {COMPUTE_STREAM} or streams_of:
                streams[stream] = node
    furthest: dict[Node, list[int]] = {}
    for node in _causes_first(behind):
        reach = [-1] * len(programs)
        for other in behind[node]:
            reach = list(map(max, reach, furthest[other]))
        for rank, index in places[node]:
            reach[rank] = max(reach[rank], index)
        furthest[node] = reach
    asked = [[-1] * len(program) for program in programs]
    for node, found in places.items():
        for rank, index in found:
            asked[rank][index] = furthest[node][rank]
    return tuple(
        (rank, index)
        for rank, of_rank in enumerate(asked)
        for index, most in enumerate(accumulate(of_rank, max))
        if most > index
    )


def _causes_first[N](behind: Mapping[N, Sequence[N]]) -> Iterator[N]:
    """Every node after those that it stands behind."""
    ahead: dict[N, list[N]] = {node: [] for node in behind}
    missing = {node: len(others) for node, others in behind.items()}
    for node, others in behind.items():
        for other in others:
            ahead[other].append(node)
    ready = [node for node, count in missing.items() if count == 0]
    for node in ready:  # grows while it is read
        yield node
        for other in ahead[node]:
            missing[other] -= 1
            if missing[other] == 0:
                ready.append(other)
    if len(ready) < len(behind):
        stuck = next(str(node) for node, count in missing.items() if count)
        raise ValueError(f"programs that never end: {stuck} waits for itself")
