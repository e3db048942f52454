"""Hosts that issue ops slower than the cost model assumes.

Training measures the time of its host, but keeps the stages that were chosen before.
"""

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.profile import ANALYTIC
from megatron_epp.ir import Kind

SLOW_HOST = 2.0  # host time in multiples of the assumed one


def assumes_host_time(cost: Cost) -> bool:
    """Return whether hosts take time to issue ops, by an assumption rather than a measurement."""
    analytic = cost.layout.profile.provenance.kind == ANALYTIC
    return analytic and bool(cost.seconds.host[Kind.FORWARD].any())


def with_hosts(cost: Cost, factor: float) -> Cost:
    """Return ``cost`` with the host time multiplied by ``factor``."""
    return cost.with_coefficients_times({"host_seconds": factor, "expert_host_seconds": factor})
