"""Lowering: turn a plan's orders into programs with sends and receives, one per rank."""

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
    """Return one program per rank, in which every message of the plan is sent and received once.

    All programs are projections of one sequence of ops and messages (:mod:`.sequence`). In this
    sequence a message comes after the op that produces it and before the op that needs it:

        sequence   F0 of stage 0 | F0>1           | F1 of stage 0 | F0 of stage 1
        stage 0    F0              SEND:F0>1        F1
        stage 1                    POST:F0<0                        RECV:F0<0 F0

    A SEND comes directly after the op that produces its tensor. The receiver posts the message
    (POST) after all its ops that precede the message in the sequence. The receiver waits for the
    tensor (RECV) before the op that needs the tensor. Both ends issue the messages of a link in the
    same order, so neither tags nor a handshake for shapes are needed. A receiver that needs a later
    message first waits for all earlier messages of the link.

    The first item in the sequence that has not run can always run, because everything that it needs
    precedes it. The programs therefore cannot deadlock, even if a device has a single queue in
    which sends wait for their receives. A rank may also wait at any point for all work that it has
    issued (tests/ir/queue_check.py).

    The rule table determines the messages: one for every need that another rank meets. Between
    stages of one rank a HAND item (``HandOver``), directly after the op that produces the tensor,
    replaces the message. If a rank has several stages, all ops name their stage (``StageOp``).

    Args:
        plan: plan to lower.
        rules: rule table; default: ``rules_of(plan)``.

    Raises:
        PlanError: the plan cannot run (:func:`~megatron_epp.ir.check.walk`).
    """
    return tuple(map(tuple, _programs(plan, range(plan.ranks), rules)))


def lower_rank(plan: Plan, rank: int, block: Sequence[Plan] = ()) -> Program:
    """Return ``lower(plan)[rank]`` without building the other programs.

    Args:
        plan: plan to lower.
        rank: pipeline rank.
        block: plans of the lockstep group, including ``plan``; empty without lockstep. All plans of
            the group get the same program. The replicas wait for each other in the collectives of
            their ops; equal programs avoid additional waits for messages.

    Raises:
        PlanError: the plan cannot run (:func:`~megatron_epp.ir.check.walk`).
    """
    return tuple(_programs(plan, (rank,), None, block)[rank])


def _programs(
    plan: Plan,
    ranks: range | tuple[int, ...],
    rules: Rules | None,
    block: Sequence[Plan] = (),
) -> list[list[Item]]:
    """Return one program per pipeline rank; programs of ranks outside ``ranks`` are empty."""
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
    """Yield (message, op that produces it, op that needs it) for every need between stages.

    The two stages may be on the same rank.
    """
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
