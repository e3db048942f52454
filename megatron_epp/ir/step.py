"""One iteration of the whole job: which replica gets which document, and every replica's plan.

step v1
lockstep 2                           # left out where every replica runs for itself
deal 0: 0 2 3                        # documents of the global batch, in replica 0's order
deal 1: 1
plan v1
replica 0 of 2
...
plan v1
replica 1 of 2
...

``lockstep N``: N neighbouring replicas, a *block*, run the same ops on every stage in the same
order, as their ranks share the experts of a layer (:mod:`.program.skeleton`: what must be alike).
"""

import hashlib
import re
from dataclasses import dataclass

from megatron_epp.ir.errors import PlanError, quoted
from megatron_epp.ir.plan import Plan, lines_of
from megatron_epp.ir.span import NUMBER

_PLAN = re.compile(r"\s*plan\s+v1\s*(#.*)?")
_OTHER_VERSION = re.compile(r"(plan|step) v(?!1$)[0-9]+")
_LOCKSTEP = re.compile(rf"lockstep ({NUMBER})")
_ASSIGNMENT = re.compile(rf"deal ({NUMBER}): ({NUMBER}(?: {NUMBER})*)")


@dataclass(frozen=True, slots=True)
class Step:
    """deals[r] are the documents of the global batch that replica r computes; plans[r] its plan.

    Document d of plans[r] is document deals[r][d] of the global batch. ``lockstep`` neighbouring
    replicas are a block that runs op by op together; 1: every replica runs for itself.
    """

    assignments: tuple[tuple[int, ...], ...]
    plans: tuple[Plan, ...]
    lockstep: int = 1

    def __post_init__(self):
        assigned = sorted(document for assignment in self.assignments for document in assignment)
        if not self.assignments or not all(self.assignments):
            raise PlanError("a replica is dealt no document; expected at least one for each")
        if assigned != list(range(len(assigned))):
            raise PlanError("a document of the batch is dealt twice or never")
        if len(self.plans) != len(self.assignments):
            raise PlanError(f"{len(self.plans)} plans for {len(self.assignments)} replicas")
        for replica, (assignment, plan) in enumerate(
            zip(self.assignments, self.plans, strict=True)
        ):
            if (plan.replica, plan.replicas) != (replica, len(self.plans)):
                raise PlanError(
                    f"plan {replica} is for replica {plan.replica} of {plan.replicas}; "
                    f"expected {replica} of {len(self.plans)}"
                )
            if len(plan.documents) != len(assignment):
                raise PlanError(
                    f"replica {replica} is dealt {len(assignment)} documents; "
                    f"its plan is for {len(plan.documents)}"
                )
            if plan.layers != self.plans[0].layers:
                raise PlanError(f"replica {replica}: layers differ from replica 0's")
            if plan.place != self.plans[0].place:
                raise PlanError(f"replica {replica}: places of stages differ from replica 0's")
        if self.lockstep < 1 or len(self.plans) % self.lockstep:
            raise PlanError(
                f"lockstep {self.lockstep}: expected a divisor of the {len(self.plans)} replicas"
            )

    def block(self, replica: int) -> tuple[Plan, ...]:
        """The plans of the replicas that run in lockstep with ``replica``, its own among them."""
        first = replica - replica % self.lockstep
        return self.plans[first : first + self.lockstep]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Inputs of every document of the global batch."""
        lengths = [0] * sum(map(len, self.assignments))
        for assignment, plan in zip(self.assignments, self.plans, strict=True):
            for document, length in zip(assignment, plan.documents, strict=True):
                lengths[document] = length
        return tuple(lengths)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical text, as 64 hexadecimal digits."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    def __str__(self) -> str:
        assignments = (
            f"deal {r}: {' '.join(map(str, assignment))}\n"
            for r, assignment in enumerate(self.assignments)
        )
        lockstep = f"lockstep {self.lockstep}\n" if self.lockstep > 1 else ""
        return "step v1\n" + lockstep + "".join(assignments) + "".join(map(str, self.plans))

    @classmethod
    def parse(cls, text: str) -> "Step":
        """The step that ``text`` describes; a single plan's text is a step of one replica."""
        lines = lines_of(text)
        starts = [number for number, line in enumerate(lines) if _PLAN.fullmatch(line)]
        if not starts:
            other = next(filter(_OTHER_VERSION.fullmatch, map(_words, lines)), None)
            if other is not None:
                raise PlanError(f"{quoted(other)}: another version; this program reads v1")
            raise PlanError("no 'plan v1' line; expected a plan or a step as --epp-record writes")
        plans = []
        for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
            plans.append(Plan.of_lines(enumerate(lines[start:stop], start + 1)))
        head = [words for line in lines[: starts[0]] if (words := _words(line))]
        if not head and len(plans) == 1:
            return cls((tuple(range(len(plans[0].documents))),), tuple(plans))
        if not head or head[0] != "step v1":
            raise PlanError("expected the line 'step v1' before the plans of several replicas")
        rest, lockstep = head[1:], 1
        if rest and rest[0].split()[0] == "lockstep":
            line = rest.pop(0)
            match = _LOCKSTEP.fullmatch(line)
            if match is None or (lockstep := int(match[1])) < 2:
                raise PlanError(
                    f"{quoted(line)}: expected 'lockstep N' of at least 2 replicas, or no such line"
                )
        assignments: list[tuple[int, ...]] = []
        for line in rest:
            match = _ASSIGNMENT.fullmatch(line)
            if match is None or int(match[1]) != len(assignments):
                raise PlanError(f"{quoted(line)}: expected 'deal {len(assignments)}: DOCUMENT ...'")
            assignments.append(tuple(map(int, match[2].split())))
        return cls(tuple(assignments), tuple(plans), lockstep)


def _words(line: str) -> str:
    """Return the words of ``line`` with one blank between them, without its comment."""
    return " ".join(line.split("#")[0].split())
