"""A plan's orders with their sends and receives: the program that each stage executes."""

from collections import deque

from megatron_epp.ir.check import backward_of, rules_of
from megatron_epp.ir.op import Kind, Message, Op, Payload, Transfer
from megatron_epp.ir.plan import Plan
from megatron_epp.ir.slices import slices_of

Program = tuple[Op | Transfer, ...]


def lower(plan: Plan) -> tuple[Program, ...]:
    """One program per stage, in which every message of the plan is sent and received once.

    A SEND stands right behind the op that makes its tensor. A RECEIVE marks where its tensor must
    have arrived; it may be posted earlier. Both ends of a link name its messages in one order,
    the order of sending: a receiver that wants a later message first receives those before it, so
    neither tags nor a handshake for shapes are needed, and a plan that passes ``check`` cannot
    deadlock in its messages as long as sends do not block.

    Which messages there are follows from the rule table: one for every need met by another stage.
    """
    rules, slices, backwards = rules_of(plan), slices_of(plan), backward_of(plan)
    wanted: list[dict[Op, list[Message]]] = [{} for _ in plan.orders]  # by consumer
    made: list[dict[Op, list[Message]]] = [{} for _ in plan.orders]  # by producer
    for stage, order in enumerate(plan.orders):
        for op in order:
            for need in rules[op.kind].needs:
                source = stage + need.stage
                chunk = slices.related(op.chunk, need.chunk)
                if need.stage == 0 or not 0 <= source < plan.stages or chunk < 0:
                    continue
                forward = need.kinds == (Kind.FORWARD,)
                payload = Payload.ACTIVATION if forward else Payload.GRADIENT
                producer = Op(Kind.FORWARD if forward else backwards[source][chunk], chunk)
                message = Message(payload, chunk, source, stage)
                wanted[stage].setdefault(op, []).append(message)
                made[source].setdefault(producer, []).append(message)
    links: dict[tuple[int, int], deque[Message]] = {}
    for stage, order in enumerate(plan.orders):
        for op in order:
            for message in made[stage].get(op, ()):
                links.setdefault(message.link, deque()).append(message)
    programs = []
    for stage, order in enumerate(plan.orders):
        program: list[Op | Transfer] = []
        received: set[Message] = set()
        for op in order:
            for message in wanted[stage].get(op, ()):
                while message not in received:
                    arriving = links[message.link].popleft()
                    received.add(arriving)
                    program.append(Transfer(Kind.RECEIVE, arriving))
            program.append(op)
            program.extend(Transfer(Kind.SEND, m) for m in made[stage].get(op, ()))
        programs.append(tuple(program))
    return tuple(programs)
