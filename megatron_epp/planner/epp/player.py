"""Prepared chunkings played by policies of the list scheduler."""

import dataclasses
from dataclasses import dataclass

from megatron_epp.cost.layer_kinds import Counts
from megatron_epp.planner.epp.preparation import Preparation, PreparedChunking
from megatron_epp.planner.order.emit import Draft, merge_iw
from megatron_epp.planner.order.list_scheduler import Schedule, list_schedule
from megatron_epp.planner.order.policies import PolicyParams, policies, policy_of
from megatron_epp.planner.order.replay import replayed

STRICT = PolicyParams(strict=True)


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A prepared chunking played by one policy."""

    seconds: float
    over_bytes: float
    prepared: PreparedChunking
    policy: PolicyParams
    schedule: Schedule
    name: str

    @property
    def rank(self) -> tuple[float, float]:
        return self.over_bytes, self.seconds

    def draft(self) -> Draft:
        kinds, chunks = self.schedule.kinds, self.schedule.chunks
        if self.policy.split:
            kinds = merge_iw(self.schedule, self.prepared.work)
        return Draft(
            self.prepared.chunking,
            self.prepared.counts,
            kinds,
            chunks,
            self.prepared.pipelines,
            note=f"{self.name}; {self.policy}",
            stages=self.schedule.stages if self.prepared.work.place else None,
        )


class Player(Preparation):
    """A preparation, and the orders that policies lead to; each is charged to the effort."""

    @property
    def split(self) -> bool:
        return "wsplit" in self.levers

    def recomputed(self, candidate: Candidate, counts: Counts) -> Candidate | None:
        """``candidate`` with other recompute choices, in its policy or in the very orders that it
        has, what is better; None where the effort is spent."""
        prepared = self.recounted(candidate.prepared, counts)
        if prepared is None:
            return None
        anew = self.play(prepared, candidate.policy, candidate.name)
        return min(anew, self.replay(prepared, candidate), key=lambda option: option.rank)

    def replay(self, prepared: PreparedChunking, candidate: Candidate) -> Candidate:
        """``prepared``, of the same chunks, in the orders of ``candidate``."""
        self._spend_play(prepared, candidate.policy)
        schedule = replayed(prepared.work, candidate.schedule)
        return dataclasses.replace(
            candidate,
            seconds=schedule.seconds,
            over_bytes=schedule.over_bytes,
            prepared=prepared,
            schedule=schedule,
        )

    def play(self, prepared: PreparedChunking, policy: PolicyParams, name: str) -> Candidate:
        self._spend_play(prepared, policy)
        sizes = prepared.chunking.sizes
        schedule = list_schedule(
            prepared.work, policy_of(policy, prepared.work, sizes, prepared.min_in_flight)
        )
        return Candidate(schedule.seconds, schedule.over_bytes, prepared, policy, schedule, name)

    def _spend_play(self, prepared: PreparedChunking, policy: PolicyParams) -> None:
        # H and G, where there are any, are no choice of the policy and are not counted.
        work = prepared.work
        self.effort.spend(work.stages * work.chunks * (3 if policy.split else 2))

    def best_policy(
        self, prepared: PreparedChunking, name: str, *, many: bool = False
    ) -> Candidate:
        tight, strict = bool(prepared.counts), "window" not in self.levers
        placed = bool(self.cost.layout.place)
        chosen = list(policies(self.split, many=many, strict=strict, tight=tight, placed=placed))
        if (
            self.cost.layout.vocabulary_parallel
        ):  # 1F1B as it stands has no slack for the way of an H
            chosen = [*chosen[1:], chosen[0]]
        best: Candidate | None = None
        for policy in chosen:
            if best is not None and self.effort.spent:
                break
            played = self.play(prepared, policy, name)
            if best is None or played.rank < best.rank:
                best = played
        assert best is not None
        return best
