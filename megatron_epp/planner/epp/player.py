"""Simulation of prepared chunkings with policies of the list scheduler."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.layer_kinds import Counts
from megatron_epp.planner.epp.preparation import Preparation, PreparedChunking
from megatron_epp.planner.order.emit import Draft
from megatron_epp.planner.order.list_scheduler import Schedule, list_schedule
from megatron_epp.planner.order.policies import PolicyParams, policies, policy_of
from megatron_epp.planner.order.replay import merged, replayed

STRICT = PolicyParams(strict=True)


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A chunking with its recompute, and its simulated schedule for one scheduling policy."""

    seconds: float
    over_bytes: float
    prepared: PreparedChunking
    policy: PolicyParams
    schedule: Schedule
    name: str

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key: bytes over the budget, then seconds."""
        return self.over_bytes, self.seconds

    def draft(self) -> Draft:
        """Return the candidate's plan as arrays."""
        return Draft(
            self.prepared.chunking,
            self.prepared.counts,
            self.schedule.kinds,
            self.schedule.chunks,
            note=f"{self.name}; {self.policy}",
            stages=self.schedule.stages if self.prepared.work.place else None,
        )


class Player(Preparation):
    """Preparation of chunkings and their simulation with policies; both spend effort."""

    @property
    def split(self) -> bool:
        """Whether backwards may be split into I and W."""
        return "wsplit" in self.levers

    def recomputed(self, candidate: Candidate, counts: Counts) -> Candidate | None:
        """Return ``candidate`` with new recompute ``counts``; None if no effort is left."""
        prepared = self.recounted(candidate.prepared, counts)
        if prepared is None:
            return None
        anew = self.play(prepared, candidate.policy, candidate.name)
        return min(anew, self.replay(prepared, candidate), key=lambda option: option.rank)

    def replay(self, prepared: PreparedChunking, candidate: Candidate) -> Candidate:
        """Return ``prepared`` simulated in the op order of ``candidate``, with the same chunks."""
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
        """Return the simulated candidate in which ``policy`` schedules the ops of ``prepared``."""
        self._spend_play(prepared, policy)
        schedule = list_schedule(
            prepared.work, policy_of(policy, prepared.work, prepared.min_in_flight)
        )
        if policy.split:
            schedule = merged(prepared.work, schedule)
        return Candidate(schedule.seconds, schedule.over_bytes, prepared, policy, schedule, name)

    def _spend_play(self, prepared: PreparedChunking, policy: PolicyParams) -> None:
        # The policy does not choose when H and G run, so these ops are not charged.
        work = prepared.work
        self.effort.spend(work.stages * work.chunks * (3 if policy.split else 2))

    def best_policy(
        self, prepared: PreparedChunking, name: str, *, many: bool = False
    ) -> Candidate:
        """Try a few policies, or ``many``, while effort is left; return the best candidate."""
        best: Candidate | None = None
        for policy in self._policies(bool(prepared.counts), many=many):
            if best is not None and self.effort.spent:
                break
            played = self.play(prepared, policy, name)
            if best is None or played.rank < best.rank:
                best = played
        assert best is not None
        return best

    def _spend_policies(self, prepared: PreparedChunking) -> None:
        """Spend the effort of :meth:`best_policy` for tight memory, without a simulation."""
        for number, policy in enumerate(self._policies(tight=True)):
            if number and self.effort.spent:
                break
            self._spend_play(prepared, policy)

    def _policies(self, tight: bool, *, many: bool = False) -> list[PolicyParams]:
        placed = bool(self.cost.layout.place)
        chosen = list(policies(self.split, many=many, tight=tight, placed=placed))
        if self.cost.layout.vocabulary_parallel:
            # Pure 1F1B leaves no slack for an H, so it goes last.
            return [*chosen[1:], chosen[0]]
        return chosen

    def unbounded(self, kept: PreparedChunking, name: str) -> Candidate:
        """Return the best schedule for unlimited memory, with ``over_bytes`` set to infinite."""
        ample = np.full_like(kept.work.headroom_bytes, np.inf)
        work = dataclasses.replace(kept.work, headroom_bytes=ample)
        ample_kept, left = dataclasses.replace(kept, work=work), self.effort.left
        played = [self.play(ample_kept, policy, name) for policy in self._policies(tight=True)]
        best = min(played, key=lambda each: each.seconds)
        self.effort.left = left
        return dataclasses.replace(best, over_bytes=np.inf, prepared=kept)
