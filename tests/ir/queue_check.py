"""Whether programs hang on devices that take work in the order in which it was issued.

Two questions, for the messages of GPUs, whose sends and receives are kernels:

``stuck_in_one_queue``   each device has a single queue (CUDA_DEVICE_MAX_CONNECTIONS=1), so what
                         cannot start holds up all that was issued behind it, and sends meet their
                         receives: neither is done before the other has started
``hanging_waits``        queues are free of each other, but at some point of issue the host waits
                         for its whole device (cudaFree, the loading of a kernel, a new
                         communicator), and meanwhile issues nothing more

NCCL has a stream for every group and, in it, for every two ranks, whichever way they send: messages
of one payload between them wait for each other. ``replicas``: so many sets of programs, one behind
the other, that run in lockstep: an op is a rendezvous of the ranks of its stage in all of them.

Programs that :func:`megatron_epp.ir.lower` makes pass both by construction; the checks are for
whoever issues in another order.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from megatron_epp.ir.op import HandOver, Kind, Message, Op, StageOp, Transfer
from megatron_epp.ir.program.lower import Item, Program

# (rank, index in its program)
Place = tuple[int, int]
# What all ranks know alike: a message of one replica, an op of a stage where it is a rendezvous.
Shared = tuple[int, Message | Op | StageOp]
Node = Place | Shared
COMPUTE_STREAM = "compute"


def stuck_in_one_queue(
    programs: Sequence[Program], strict: bool = False, replicas: int = 1
) -> tuple[Place, ...]:
    """Where the ranks stand for ever, with one queue per device; nothing if all get through.

    A send or receive starts when the one before it on its stream is done. ``strict``: nothing
    starts before all that was issued before it is done, transfers included.
    """
    at, stages = [0] * len(programs), len(programs) // replicas
    started: dict[Shared, set[int]] = {}  # by whom
    last: dict[tuple[int, object], Shared] = {}  # by rank and stream

    def done(message: Shared) -> bool:
        return len(started.get(message, ())) == 2

    def passes(rank: int, item: Item) -> bool:
        if isinstance(item, HandOver):
            return True
        if isinstance(item, (Op, StageOp)):
            met = started.setdefault((rank % stages, item), set())
            met.add(rank)
            return len(met) == replicas
        message = rank // stages, item.message
        if isinstance(item, Transfer) and item.kind is Kind.RECEIVE:
            return done(message)
        by = started.setdefault(message, set())
        before = last.get((rank, _stream(item.message)))
        if rank not in by and before is not None and not done(before):
            return False
        by.add(rank)
        last[rank, _stream(item.message)] = message
        return done(message) or not strict

    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program) and passes(rank, program[at[rank]]):
                at[rank] += 1
                moved = True
    return tuple((rank, index) for rank, index in enumerate(at) if index < len(programs[rank]))


def _stream(message: Message) -> object:
    return message.payload, frozenset(message.link)


def hanging_waits(programs: Sequence[Program], replicas: int = 1) -> tuple[Place, ...]:
    """The items right behind which a wait for the whole device never returns.

    An op or a RECEIVE is done when what it stands behind on the compute stream is; a message, when
    what both its ends stand behind is: the compute streams, and the streams of messages. For each
    of them, how far every host must have issued is the furthest of what it stands behind; an item
    that asks more of its own host than itself hangs a wait until that is issued.

    ValueError: programs that never end, wherever they wait.
    """
    after: dict[Node, list[Node]] = {}
    places: dict[Node, list[Place]] = {}  # a message stands at both its ends
    stages = len(programs) // replicas
    for rank, program in enumerate(programs):
        streams: dict[object, Node] = {}  # what was last issued to each
        for index, item in enumerate(program):
            if isinstance(item, HandOver):
                continue
            node: Node = (rank, index)
            streams_of: set[object] = {COMPUTE_STREAM}
            needs: list[Node] = []
            if isinstance(item, (Op, StageOp)):
                node = (rank % stages, item) if replicas > 1 else node
            elif isinstance(item, Transfer) and item.kind is Kind.RECEIVE:
                needs = [(rank // stages, item.message)]
            else:  # starts when what was computed before it is done, and the one before it
                node = rank // stages, item.message
                streams_of.add(_stream(item.message))
            needs += [streams[stream] for stream in streams_of if stream in streams]
            after.setdefault(node, []).extend(needs)
            places.setdefault(node, []).append((rank, index))
            for stream in streams_of - {COMPUTE_STREAM} or streams_of:
                streams[stream] = node
    furthest: dict[Node, list[int]] = {}
    for node in _causes_first(after):
        reach = [-1] * len(programs)
        for other in after[node]:
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


def _causes_first[N](after: Mapping[N, Sequence[N]]) -> Iterator[N]:
    """Every node after those that it stands behind."""
    ahead: dict[N, list[N]] = {node: [] for node in after}
    missing = {node: len(others) for node, others in after.items()}
    for node, others in after.items():
        for other in others:
            ahead[other].append(node)
    ready = [node for node, count in missing.items() if count == 0]
    for node in ready:  # grows while it is read
        yield node
        for other in ahead[node]:
            missing[other] -= 1
            if missing[other] == 0:
                ready.append(other)
    if len(ready) < len(after):
        stuck = next(str(node) for node, count in missing.items() if count)
        raise ValueError(f"programs that never end: {stuck} waits for itself")
