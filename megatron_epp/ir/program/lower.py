"""A plan's orders with their sends and receives: the program that each rank executes."""

from collections import deque
from collections.abc import Iterator, Sequence

from megatron_epp.ir.check import backward_of
from megatron_epp.ir.needs import needs_of
from megatron_epp.ir.op import HandOver, Kind, Message, Op, Post, StageOp, Transfer
from megatron_epp.ir.plan import Plan
from megatron_epp.ir.program.sequence import sequence
from megatron_epp.ir.rules import Rules

Item = Op | StageOp | Transfer | Post | HandOver
Program = tuple[Item, ...]


def lower(plan: Plan, rules: Rules | None = None) -> tuple[Program, ...]:
    """One program per rank, in which every message of the plan is sent and received once.

    All programs are the projection of one sequence of ops and messages (:mod:`.sequence`), in
    which a message follows the op that makes it and precedes the op that wants it:

        sequence   F0 of stage 0 | F0>1           | F1 of stage 0 | F0 of stage 1
        stage 0    F0              SEND:F0>1        F1
        stage 1                    POST:F0<0                        RECV:F0<0 F0

    A SEND stands right behind the op that makes its tensor. A POST, the receiver's half of it,
    stands behind the ops of the receiver that come before it in the sequence. A RECEIVE, before the
    op that wants the tensor, waits for it. Both ends of a link name its messages in one order, so
    neither tags nor a handshake for shapes are needed: a receiver that wants a later message first
    waits for those before it.

    Whoever stands first in the sequence can always go on, as everything that it needs stands
    before it. So nothing hangs, not even where a device takes its work from a single queue and
    sends meet their receives, and a wait for all that was issued so far returns at every point
    (tests/ir/queue_check.py).

    Which messages there are follows from the rule table: one for every need met on another rank.
    Between stages of one rank a HAND, behind the op that makes the tensor, gives it to the other
    stage as it is. Where a rank has several stages, the ops of all programs name theirs
    (``StageOp``).

    rules   default: those that govern ``plan``
    """
    return tuple(map(tuple, _programs(plan, range(plan.ranks), rules)))


def lower_rank(plan: Plan, rank: int, block: Sequence[Plan] = ()) -> Program:
    """``lower(plan)[rank]``, without the programs of the others.

    block   the plans that run in lockstep with it, itself among them: the same program for all, so
            that replicas which meet in their ops do not wait for each other's messages besides
    """
    return tuple(_programs(plan, (rank,), None, block)[rank])


def _programs(
    plan: Plan,
    ranks: range | tuple[int, ...],
    rules: Rules | None,
    block: Sequence[Plan] = (),
) -> list[list[Item]]:
    """A program per rank, empty for those that are not among ``ranks``."""
    programs: list[list[Item]] = [[] for _ in range(plan.ranks)]
    rank_of, shares_ranks = plan.rank_of, plan.shares_ranks
    wanted: dict[tuple[int, Op], list[Message]] = {}  # by consumer
    messages_of: dict[tuple[int, Op], list[Message]] = {}  # by producer
    for message, producer, consumer in _messages(plan, rules):
        source, target = message.link
        if target in ranks and source != target:
            wanted.setdefault((message.target, consumer), []).append(message)
        if source in ranks or target in ranks:
            messages_of.setdefault((message.source, producer), []).append(message)
    posted: dict[tuple[int, int], deque[Message]] = {}
    waited: set[Message] = set()
    for place in sequence(plan, rules, block):
        stage, op = place
        rank = rank_of[stage]
        if rank in ranks:
            program = programs[rank]
            for message in wanted.get(place, ()):
                while message not in waited:
                    arriving = posted[message.link].popleft()
                    waited.add(arriving)
                    program.append(Transfer(Kind.RECEIVE, arriving))
            program.append(StageOp(stage, op) if shares_ranks else op)
        for message in messages_of.get(place, ()):
            _, target = message.link
            if target == rank:
                programs[rank].append(HandOver(message))
                continue
            if rank in ranks:
                programs[rank].append(Transfer(Kind.SEND, message))
            if target in ranks:
                programs[target].append(Post(message))
                posted.setdefault(message.link, deque()).append(message)
    return programs


def _messages(plan: Plan, rules: Rules | None) -> Iterator[tuple[Message, Op, Op]]:
    """Every message with the op that makes it and the op that wants it, of another stage; those
    between stages of one rank, too."""
    needs, backwards, rank_of = needs_of(plan, rules), backward_of(plan), plan.rank_of
    for stage, order in enumerate(plan.orders):
        for op in order:
            for need, source, ops in needs(stage, op):
                if source == stage:
                    continue
                ranks = rank_of[source], rank_of[stage]
                producer = ops[0]
                if len(ops) > 1:
                    producer = Op(backwards[source][producer.chunk], producer.chunk)
                message = Message(need.payload, producer.chunk, source, stage, ranks)
                yield message, producer, op
