"""How much a search may still do, counted in simulated ops and never in time: plans repeat."""

# Simulated ops per unit of --epp-effort. A core does about fifteen to twenty million a second, so
# that a unit is worth about a tenth of a second.
OPS_PER_EFFORT = 1_500_000


class Effort:
    """The ops that a search may still simulate; all else it does is charged in ops, too."""

    def __init__(self, effort: int):
        self.left = float(effort * OPS_PER_EFFORT)

    def spend(self, ops: float) -> None:
        self.left -= ops

    @property
    def spent(self) -> bool:
        return self.left <= 0
