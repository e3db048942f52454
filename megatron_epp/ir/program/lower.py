"""A plan's orders with their sends and receives: the program that each stage executes."""

from collections import deque
from collections.abc import Iterator, Sequence

from megatron_epp.ir.check import backward_of
from megatron_epp.ir.needs import needs_of
from megatron_epp.ir.op import Kind, Message, Op, Post, Transfer
from megatron_epp.ir.plan import Plan
from megatron_epp.ir.program.sequence import sequence
from megatron_epp.ir.rules import Rules

Program = tuple[Op | Transfer | Post, ...]


def lower(plan: Plan, rules: Rules | None = None) -> tuple[Program, ...]:
    """One program per stage, in which every message of the plan is sent and received once.

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
    (:mod:`ir.program.queue_check`).

    Which messages there are follows from the rule table: one for every need met by another stage.

    rules   default: those that govern ``plan``
    """
    return tuple(map(tuple, _programs(plan, range(plan.stages), rules)))


def lower_stage(plan: Plan, stage: int, block: Sequence[Plan] = ()) -> Program:
    """``lower(plan)[stage]``, without the programs of the others.

    block   the plans that run in lockstep with it, itself among them: the same program for all, so
            that replicas which meet in their ops do not wait for each other's messages besides
    """
    return tuple(_programs(plan, (stage,), None, block)[stage])


def _programs(
    plan: Plan,
    stages: range | tuple[int, ...],
    rules: Rules | None,
    block: Sequence[Plan] = (),
) -> list[list[Op | Transfer | Post]]:
    """A program per stage, empty for those that are not among ``stages``."""
    programs: list[list[Op | Transfer | Post]] = [[] for _ in plan.orders]
    wanted: dict[tuple[int, Op], list[Message]] = {}  # by consumer
    made: dict[tuple[int, Op], list[Message]] = {}  # by producer
    for message, producer, consumer in _messages(plan, rules):
        if message.target in stages:
            wanted.setdefault((message.target, consumer), []).append(message)
        if message.source in stages or message.target in stages:
            made.setdefault((message.source, producer), []).append(message)
    posted: dict[tuple[int, int], deque[Message]] = {}
    waited: set[Message] = set()
    for place in sequence(plan, rules, block):
        stage, op = place
        if stage in stages:
            program = programs[stage]
            for message in wanted.get(place, ()):
                while message not in waited:
                    arriving = posted[message.link].popleft()
                    waited.add(arriving)
                    program.append(Transfer(Kind.RECEIVE, arriving))
            program.append(op)
        for message in made.get(place, ()):
            if stage in stages:
                programs[stage].append(Transfer(Kind.SEND, message))
            if message.target in stages:
                programs[message.target].append(Post(message))
                posted.setdefault(message.link, deque()).append(message)
    return programs


def _messages(plan: Plan, rules: Rules | None) -> Iterator[tuple[Message, Op, Op]]:
    """Every message with the op that makes it and the op that wants it."""
    needs, backwards = needs_of(plan, rules), backward_of(plan)
    for stage, order in enumerate(plan.orders):
        for op in order:
            for need, source, ops in needs(stage, op):
                if source == stage:
                    continue
                producer = ops[0]
                if len(ops) > 1:
                    producer = Op(backwards[source][producer.chunk], producer.chunk)
                yield Message(need.payload, producer.chunk, source, stage), producer, op
