"""Step: one iteration of the job, with the assignment of documents and every replica's plan.

    step v1
    lockstep 2                           # omitted if every replica runs independently
    deal 0: 0 2 3                        # documents of the global batch, in replica 0's order
    deal 1: 1                            # deal 1: - if the batch has no document for replica 1
    plan v1
    replica 0 of 2
    ...
    plan v1
    replica 1 of 2
    ...

``lockstep N`` divides the replicas into *lockstep groups* of N consecutive replicas. The replicas
of a group run the same ops in the same order on every stage, because the experts of a layer are
sharded over the group. :mod:`.program.op_template` defines what their plans have in common.

In a job that plans during training, each rank holds only the part of its own lockstep group. The
text of a part begins with ``part v1`` and ``division DIGEST``, a digest of the assignment of
documents to all replicas. The ``lockstep``, ``deal`` and ``plan`` lines of the group's replicas
follow, as above.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_epp.ir.chunk import EMPTY
from megatron_epp.ir.errors import PlanError, quoted
from megatron_epp.ir.plan import Plan, lines_of
from megatron_epp.ir.span import NUMBER

_PLAN = re.compile(r"\s*plan\s+v1\s*(#.*)?")
_OTHER_VERSION = re.compile(r"(plan|step) v(?!1$)[0-9]+")
_LOCKSTEP = re.compile(rf"lockstep ({NUMBER})")
_DIVISION = re.compile(r"division ([0-9a-f]+)")
_ASSIGNMENT = re.compile(rf"deal ({NUMBER}): ({NUMBER}(?: {NUMBER})*|{EMPTY})")


@dataclass(frozen=True, slots=True)
class Step:
    """Assignment of the global batch to the replicas, and the plan of each replica.

    Attributes:
        assignments: ``assignments[r]`` lists the documents of the global batch that replica r
            computes.
        plans: plan of each replica; document d of ``plans[r]`` is document ``assignments[r][d]`` of
            the global batch.
        lockstep: number of replicas of a lockstep group; 1 if replicas run independently.

    Example:
        >>> text = '''plan v1
        ... documents 900
        ... layers 2 2
        ... chunk 0: 0[0:900]
        ... stage 0: F0 B0
        ... stage 1: F0 B0
        ... '''
        >>> step = Step.parse(text)  # a plan's text is a step of one replica
        >>> step.replicas, step.lengths
        (1, (900,))
        >>> Step.parse(str(step)) == step
        True
    """

    assignments: tuple[tuple[int, ...], ...]
    plans: tuple[Plan, ...]
    lockstep: int = 1

    def __post_init__(self):
        assigned = sorted(document for assignment in self.assignments for document in assignment)
        if not assigned:
            raise PlanError("no replica is dealt a document; expected at least one")
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

    @classmethod
    def of_parts(cls, parts: Sequence["StepPart"]) -> "Step":
        """Return the step that consists of ``parts``, given in the order of the replicas."""
        return cls(
            tuple(assignment for part in parts for assignment in part.assignments),
            tuple(plan for part in parts for plan in part.plans),
            parts[0].lockstep,
        )

    @property
    def replicas(self) -> int:
        """Number of replicas of the job."""
        return len(self.plans)

    def part(self, replica: int) -> "StepPart":
        """Return the part of this step that the lockstep group of ``replica`` runs."""
        block = slice(first := replica - replica % self.lockstep, first + self.lockstep)
        return StepPart(self.assignments[block], self.plans[block])

    def block(self, replica: int) -> tuple[Plan, ...]:
        """Return the plans of the lockstep group of ``replica``."""
        return self.part(replica).plans

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens in every document of the global batch."""
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
        return "step v1\n" + _text(self.assignments, self.plans, self.lockstep, 0)

    @classmethod
    def parse(cls, text: str) -> "Step":
        """Return the step that ``text`` describes; a single plan's text is a step of one replica.

        Raises:
            PlanError: the text is not a valid step; the message names the line or the replica.
        """
        plans, head = _read(text)
        if not head and len(plans) == 1:
            return cls((tuple(range(len(plans[0].documents))),), plans)
        if not head or head[0] != "step v1":
            raise PlanError("expected the line 'step v1' before the plans of several replicas")
        assignments, lockstep = _assignments(head[1:], 0)
        return cls(assignments, plans, lockstep)


@dataclass(frozen=True, slots=True)
class StepPart:
    """Part of a step that one lockstep group runs.

    Attributes:
        assignments: documents of the global batch that each replica of the group computes.
        plans: plan of each replica; document d of ``plans[i]`` is document ``assignments[i][d]`` of
            the global batch.
        division: digest of the assignment of documents to all replicas of the job; empty if the
            whole step is known, as in :meth:`Step.part`.
    """

    assignments: tuple[tuple[int, ...], ...]
    plans: tuple[Plan, ...]
    division: str = ""

    def __post_init__(self):
        documents = [document for held in self.assignments for document in held]
        if len(set(documents)) != len(documents):
            raise PlanError("a document of the batch is assigned twice")
        if list(map(len, self.assignments)) != [len(plan.documents) for plan in self.plans]:
            raise PlanError("a replica's plan is not for the documents that it is assigned")
        numbers = [(plan.replica, plan.replicas) for plan in self.plans]
        if numbers != [(self.first + at, self.replicas) for at in range(len(self.plans))]:
            raise PlanError("the plans are not those of neighbouring replicas of one job")
        if self.first % self.lockstep or self.replicas % self.lockstep:
            raise PlanError(
                f"{self.lockstep} replicas from {self.first} on are not a lockstep group"
            )

    @property
    def first(self) -> int:
        """Data-parallel rank of the first replica of this part."""
        return self.plans[0].replica

    @property
    def replicas(self) -> int:
        """Number of replicas of the job."""
        return self.plans[0].replicas

    @property
    def lockstep(self) -> int:
        """Size of the lockstep group: the number of replicas in this part."""
        return len(self.plans)

    def plan_of(self, replica: int) -> Plan:
        """Return the plan of ``replica``, which must be in this part."""
        return self.plans[replica - self.first]

    def documents_of(self, replica: int) -> tuple[int, ...]:
        """Return the documents of the batch that ``replica`` computes, in the order of its plan."""
        return self.assignments[replica - self.first]

    def __str__(self) -> str:
        division = f"division {self.division}\n" if self.division else ""
        return f"part v1\n{division}" + _text(
            self.assignments, self.plans, self.lockstep, self.first
        )

    @classmethod
    def parse(cls, text: str) -> "StepPart":
        """Return the part that ``text`` describes.

        Raises:
            PlanError: the text is not a valid part; the message names the line or the replica.
        """
        plans, head = _read(text)
        if not head or head[0] != "part v1":
            raise PlanError("expected the line 'part v1' before the plans of a part")
        match = _DIVISION.fullmatch(head[1]) if len(head) > 1 else None
        assignments, lockstep = _assignments(head[2 if match else 1 :], plans[0].replica)
        if not lockstep == len(plans) == len(assignments):
            raise PlanError(f"{len(plans)} plans in a part of {lockstep} replicas in lockstep")
        return cls(assignments, plans, match[1] if match else "")


def _text(
    assignments: Sequence[Sequence[int]], plans: Sequence[Plan], lockstep: int, first: int
) -> str:
    lines = (
        f"deal {replica}: {' '.join(map(str, assignment)) or EMPTY}\n"
        for replica, assignment in enumerate(assignments, first)
    )
    line = f"lockstep {lockstep}\n" if lockstep > 1 else ""
    return line + "".join(lines) + "".join(map(str, plans))


def _read(text: str) -> tuple[tuple[Plan, ...], list[str]]:
    """Return the plans in ``text`` (at least one), and the lines before the first plan."""
    lines = lines_of(text)
    starts = [number for number, line in enumerate(lines) if _PLAN.fullmatch(line)]
    if not starts:
        other = next(filter(_OTHER_VERSION.fullmatch, map(_words, lines)), None)
        if other is not None:
            raise PlanError(f"{quoted(other)}: another version; this program reads v1")
        raise PlanError("no 'plan v1' line; expected a plan or a step as --epp-record writes")
    plans = tuple(
        Plan.of_lines(enumerate(lines[start:stop], start + 1))
        for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True)
    )
    return plans, [words for line in lines[: starts[0]] if (words := _words(line))]


def _assignments(head: list[str], first: int) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Return the assignments of documents in ``head``, and the size of a lockstep group.

    The first assignment must be that of replica ``first``, and the others must follow in order.
    """
    rest, lockstep = head, 1
    if rest and rest[0].split()[0] == "lockstep":
        line, *rest = rest
        match = _LOCKSTEP.fullmatch(line)
        if match is None or (lockstep := int(match[1])) < 2:
            raise PlanError(
                f"{quoted(line)}: expected 'lockstep N' of at least 2 replicas, or no such line"
            )
    assignments: list[tuple[int, ...]] = []
    for replica, line in enumerate(rest, first):
        match = _ASSIGNMENT.fullmatch(line)
        if match is None or int(match[1]) != replica:
            raise PlanError(f"{quoted(line)}: expected 'deal {replica}: DOCUMENT ...'")
        numbers = match[2] if match[2] != EMPTY else ""
        assignments.append(tuple(map(int, numbers.split())))
    return tuple(assignments), lockstep


def _words(line: str) -> str:
    """Return the words of ``line`` joined by single blanks, without its comment."""
    return " ".join(line.split("#")[0].split())
