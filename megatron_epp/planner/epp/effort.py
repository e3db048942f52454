"""How much a search may still do: counted in work, never in time, so that plans repeat."""

# Simulated ops per unit of --epp-effort. A core does about fifteen to twenty million a second.
OPS_PER_EFFORT = 1_500_000


class Budget:
    """Ops that a search may simulate; everything else it does is charged as so many ops."""

    def __init__(self, effort: int):
        self.left = float(effort * OPS_PER_EFFORT)

    def spend(self, ops: float) -> None:
        self.left -= ops

    @property
    def spent(self) -> bool:
        return self.left <= 0
