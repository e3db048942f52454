"""A device whose layers take products, pairs and launches alone: closed forms by hand."""

import dataclasses
from pathlib import Path

from megatron_epp.cost.catalogue.devices import DEVICES

SIMPLE = dataclasses.replace(
    DEVICES["h100-80g"],
    tail_seconds=0.0,
    host_forward_seconds=0.0,
    host_backward_seconds=0.0,
    memory_efficiency=0.0,
    gather_latency_seconds={},
    group_bytes_per_second={2: 179e9, 4: 156e9, 8: 145e9, 16: 40e9, 32: 24e9, 64: 19e9},
)

# A device of its own for tests that record which choice a planner makes between close ones: better
# constants of the catalogue change such choices, and would change what these tests are about.
OLD_H100 = str(Path(__file__).parent / "old_h100.json")
