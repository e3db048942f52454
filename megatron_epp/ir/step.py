"""Step: one iteration of the job, with the assignment of documents and every replica's plan.

    step v1
    lockstep 2                           # omitted if every replica runs independently
    deal 0: 0 2 3                        # documents of the global batch, in replica 0's order
    deal 1: 1                            # deal 1: - if the batch has no document for replica 1
    ends 1: 0                            # the plan documents in which documents of deal 1 end
    plan v1
    replica 0 of 2
    ...
    plan v1
    replica 1 of 2
    ...

``lockstep N`` divides the replicas into *lockstep groups* of N consecutive replicas. The replicas
of a group run the same ops in the same order on every stage, because the experts of a layer are
sharded over the group. :mod:`.program.op_template` defines what their plans have in common.

Documents of the batch with common tokens share documents of the plan: a document of the batch
consists of the plan document in which it *ends* and all documents that this one continues (the
``prefix`` lines of the plan). ``ends R`` follows ``deal R`` and has the same order. Without it,
the n-th document of ``deal R`` ends in document n of the plan. The line is printed only if the plan
has prefixes or the numbers differ.

In a job that plans during training, each rank holds only the part of its own lockstep group. The
text of a part begins with ``part v1`` and, unless the whole step is known, ``division DIGEST``, a
digest of the assignment of documents to all replicas. The lines of the group's replicas follow, as
above.
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
_ENDS = re.compile(rf"ends ({NUMBER}): ({NUMBER}(?: {NUMBER})*)")
Numbers = tuple[tuple[int, ...], ...]  # for every replica


@dataclass(frozen=True, slots=True)
class Step:
    """Assignment of the global batch to the replicas, and the plan of each replica.

    Attributes:
        assignments: ``assignments[r]`` lists the documents of the global batch that replica r
            computes.
        plans: plan of each replica.
        lockstep: number of replicas of a lockstep group; 1 if replicas run independently.
        ends: ``ends[r][i]`` is the document of ``plans[r]`` in which document ``assignments[r][i]``
            of the global batch ends; it and the documents that it continues make up the document.
            If ``ends`` or ``ends[r]`` is given as an empty tuple, ``ends[r][i]`` is i.

    Raises:
        PlanError: a document of the batch is assigned twice or never, the batch has no documents,
            or the fields contradict each other.

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

    assignments: Numbers
    plans: tuple[Plan, ...]
    lockstep: int = 1
    ends: Numbers = ()

    def __post_init__(self):
        assigned = sorted(document for assignment in self.assignments for document in assignment)
        if not assigned:
            raise PlanError("no replica is dealt a document; expected at least one")
        if assigned != list(range(len(assigned))):
            raise PlanError("a document of the batch is dealt twice or never")
        if len(self.plans) != len(self.assignments):
            raise PlanError(f"{len(self.plans)} plans for {len(self.assignments)} replicas")
        for replica, plan in enumerate(self.plans):
            if (plan.replica, plan.replicas) != (replica, len(self.plans)):
                raise PlanError(
                    f"plan {replica} is for replica {plan.replica} of {plan.replicas}; "
                    f"expected {replica} of {len(self.plans)}"
                )
            if plan.layers != self.plans[0].layers:
                raise PlanError(f"replica {replica}: layers differ from replica 0's")
            if plan.place != self.plans[0].place:
                raise PlanError(f"replica {replica}: places of stages differ from replica 0's")
        if self.lockstep < 1 or len(self.plans) % self.lockstep:
            raise PlanError(
                f"lockstep {self.lockstep}: expected a divisor of the {len(self.plans)} replicas"
            )
        object.__setattr__(self, "ends", _checked_ends(self.assignments, self.plans, self.ends))

    @classmethod
    def of_parts(cls, parts: Sequence["StepPart"]) -> "Step":
        """Return the step that consists of ``parts``, given in the order of the replicas."""
        return cls(
            tuple(assignment for part in parts for assignment in part.assignments),
            tuple(plan for part in parts for plan in part.plans),
            parts[0].lockstep,
            tuple(ends for part in parts for ends in part.ends),
        )

    @property
    def replicas(self) -> int:
        """Number of replicas of the job."""
        return len(self.plans)

    def part(self, replica: int) -> "StepPart":
        """Return the part of this step that the lockstep group of ``replica`` runs."""
        block = slice(first := replica - replica % self.lockstep, first + self.lockstep)
        return StepPart(self.assignments[block], self.plans[block], ends=self.ends[block])

    def block(self, replica: int) -> tuple[Plan, ...]:
        """Return the plans of the lockstep group of ``replica``."""
        return self.part(replica).plans

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of every document of the global batch, including those shared with others."""
        lengths: dict[int, int] = {}
        for assignment, plan, ends in zip(self.assignments, self.plans, self.ends, strict=True):
            lengths.update(zip(assignment, _lengths(plan, ends), strict=True))
        return tuple(lengths[document] for document in range(len(lengths)))

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical text, as 64 hexadecimal digits."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    def __str__(self) -> str:
        return "step v1\n" + _text(self, 0)

    @classmethod
    def parse(cls, text: str) -> "Step":
        """Return the step that ``text`` describes; a single plan's text is a step of one replica.

        Every document of a single plan is a document of the batch, unless other documents continue
        it from its end. It is then only a prefix of these.

        Raises:
            PlanError: the text is not a valid step; the message names the line or the replica.
        """
        plans, head = _read(text)
        if not head and len(plans) == 1:
            documents = plans[0].documents
            inner = {(prefix.document, prefix.stop) for prefix in plans[0].prefixes if prefix}
            leaves = tuple(d for d, length in enumerate(documents) if (d, length) not in inner)
            return cls((tuple(range(len(leaves))),), plans, ends=(leaves,))
        if not head or head[0] != "step v1":
            raise PlanError("expected the line 'step v1' before the plans of several replicas")
        assignments, ends, lockstep = _assignments(head[1:], 0)
        return cls(assignments, plans, lockstep, ends)


@dataclass(frozen=True, slots=True)
class StepPart:
    """Part of a step that one lockstep group runs.

    Attributes:
        assignments: documents of the global batch that each replica of the group computes.
        plans: plan of each replica.
        division: digest of the assignment of documents to all replicas of the job; empty if the
            whole step is known, as in :meth:`Step.part`.
        ends: documents of the plans in which the documents of the batch end, as in :class:`Step`.

    Raises:
        PlanError: a document of the batch is assigned twice, the replicas are not one lockstep
            group, or the fields contradict each other.
    """

    assignments: Numbers
    plans: tuple[Plan, ...]
    division: str = ""
    ends: Numbers = ()

    def __post_init__(self):
        documents = [document for held in self.assignments for document in held]
        if len(set(documents)) != len(documents):
            raise PlanError("a document of the batch is assigned twice")
        if len(self.assignments) != len(self.plans):
            raise PlanError(f"{len(self.plans)} plans for {len(self.assignments)} replicas")
        numbers = [(plan.replica, plan.replicas) for plan in self.plans]
        if numbers != [(self.first + at, self.replicas) for at in range(len(self.plans))]:
            raise PlanError("the plans are not those of neighbouring replicas of one job")
        if self.first % self.lockstep or self.replicas % self.lockstep:
            raise PlanError(
                f"{self.lockstep} replicas from {self.first} on are not a lockstep group"
            )
        ends = _checked_ends(self.assignments, self.plans, self.ends, self.first)
        object.__setattr__(self, "ends", ends)

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
        """Return the documents of the batch that ``replica`` computes (``assignments``)."""
        return self.assignments[replica - self.first]

    def ends_of(self, replica: int) -> tuple[int, ...]:
        """Return the document of the plan in which each of :meth:`documents_of` ends."""
        return self.ends[replica - self.first]

    def lengths_of(self, replica: int) -> tuple[int, ...]:
        """Return the tokens of each of :meth:`documents_of`, with those shared with others."""
        return _lengths(self.plan_of(replica), self.ends_of(replica))

    def samples_of(self, replica: int) -> Numbers:
        """Return, by document of a replica's plan, the documents of the batch that contain it.

        They have the order of :meth:`documents_of`; the tokens of the plan's document are read from
        the first of them.

        Raises:
            PlanError: a document of the plan continues only a part of another document.
        """
        plan = self.plan_of(replica)
        for number, span in enumerate(plan.prefixes):
            if span is not None and span.stop < plan.documents[span.document]:
                raise PlanError(
                    f"replica {replica}: prefix {number}: {span} is a part of document "
                    f"{span.document} of {plan.documents[span.document]} inputs; expected all "
                    f"of it in a step: inputs from {span.stop} on are a document that continues it"
                )
        samples: list[list[int]] = [[] for _ in plan.documents]
        for sample, end in zip(self.documents_of(replica), self.ends_of(replica), strict=True):
            for node in _path(plan, end):
                samples[node].append(sample)
        return tuple(map(tuple, samples))

    def __str__(self) -> str:
        division = f"division {self.division}\n" if self.division else ""
        return f"part v1\n{division}" + _text(self, self.first)

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
        assignments, ends, lockstep = _assignments(head[2 if match else 1 :], plans[0].replica)
        if not lockstep == len(plans) == len(assignments):
            raise PlanError(f"{len(plans)} plans in a part of {lockstep} replicas in lockstep")
        return cls(assignments, plans, match[1] if match else "", ends)


def _path(plan: Plan, end: int) -> tuple[int, ...]:
    """Return the documents of ``plan`` that make up a document of the batch with ``end``."""
    return (*(prefix.document for prefix in plan.prefix_of(end)), end)


def _lengths(plan: Plan, ends: Sequence[int]) -> tuple[int, ...]:
    return tuple(plan.offset(end) + plan.documents[end] for end in ends)


def _checked_ends(
    assignments: Numbers, plans: Sequence[Plan], ends: Numbers, first: int = 0
) -> Numbers:
    """Return ``ends``, with the numbers of the plan's documents for an empty entry."""
    if ends and len(ends) != len(plans):
        raise PlanError(f"ends of {len(ends)} replicas; expected {len(plans)}")
    every = []
    for at, (assignment, plan) in enumerate(zip(assignments, plans, strict=True)):
        replica, documents = first + at, len(plan.documents)
        own = ends[at] if ends else ()
        if not own and len(assignment) != documents:
            raise PlanError(
                f"replica {replica} is dealt {len(assignment)} documents; its plan is for "
                f"{documents}"
            )
        if own and len(own) != len(assignment):
            raise PlanError(
                f"ends {replica}: {len(own)} numbers; expected one for each of the "
                f"{len(assignment)} documents of deal {replica}"
            )
        if own and not 0 <= min(own) <= max(own) < documents:
            odd = next(end for end in own if not 0 <= end < documents)
            raise PlanError(f"ends {replica}: document {odd}; the plan has {documents}")
        every.append(own or tuple(range(documents)))
        if own and len(set(own)) < documents:
            held = {node for end in set(own) for node in _path(plan, end)}
            if missing := set(range(documents)) - held:
                raise PlanError(
                    f"ends {replica}: document {min(missing)} of the plan is part of no document "
                    "of the batch"
                )
    return tuple(every)


def _text(step: Step | StepPart, first: int) -> str:
    lines = [f"lockstep {step.lockstep}\n"] if step.lockstep > 1 else []
    every = zip(step.assignments, step.ends, step.plans, strict=True)
    for replica, (assignment, ends, plan) in enumerate(every, first):
        lines.append(f"deal {replica}: {' '.join(map(str, assignment)) or EMPTY}\n")
        if plan.prefixes or ends != tuple(range(len(ends))):
            lines.append(f"ends {replica}: {' '.join(map(str, ends))}\n")
    return "".join(lines) + "".join(map(str, step.plans))


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


def _assignments(head: list[str], first: int) -> tuple[Numbers, Numbers, int]:
    """Return the assignments of documents in ``head``, their ends, and a lockstep group's size.

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
    ends: list[tuple[int, ...]] = []
    for line in rest:
        replica = first + len(assignments)
        match = _ENDS.fullmatch(line)
        if match is not None and ends and not ends[-1] and int(match[1]) == replica - 1:
            ends[-1] = tuple(map(int, match[2].split()))
            continue
        match = _ASSIGNMENT.fullmatch(line)
        if match is None or int(match[1]) != replica:
            also = f" or 'ends {replica - 1}: DOCUMENT ...'" if ends and not ends[-1] else ""
            raise PlanError(f"{quoted(line)}: expected 'deal {replica}: DOCUMENT ...'{also}")
        numbers = match[2] if match[2] != EMPTY else ""
        assignments.append(tuple(map(int, numbers.split())))
        ends.append(())
    return tuple(assignments), tuple(ends), lockstep


def _words(line: str) -> str:
    """Return the words of ``line`` joined by single blanks, without its comment."""
    return " ".join(line.split("#")[0].split())
