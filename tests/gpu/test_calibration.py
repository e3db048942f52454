"""What is measured before training says how long chunks take that are larger than those measured.

Layers as narrow as these take a host longer to issue than a GPU to compute, up to tens of thousands
of tokens.
"""

from statistics import median

import pytest

from megatron_epp.ir import KEEP, Kind
from megatron_epp.mcore.patching import emulated_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(emulated_engine.is_wanted(), reason="needs a GPU: its own clock"),
]
LARGE, PIECES = 131072, 32


def test_large_chunks_take_what_small_ones_foretell(alone) -> None:
    from megatron_epp.mcore.calibrate.clocks import IssueClock
    from megatron_epp.mcore.calibrate.probe import Shape, undisturbed
    from scripts.bench.single_stage import build_stage, probe_alone, profile_of

    model = build_stage(alone, 2, True, True)
    with undisturbed(model):
        profile, probe = profile_of(alone, model), probe_alone(alone, model)
        large, small = Shape(LARGE, pieces=PIECES), Shape(512)
        runs = [probe.layers(large, KEEP) for _ in range(6)][1:]
        issued = [probe.timed_by(IssueClock(probe.now)).layers(small, KEEP) for _ in range(6)][1:]
        device = [probe.layers(small, KEEP) for _ in range(6)][1:]
        busy = probe.after_work(Shape(8192, pieces=2))
        worked = [busy.layers(large, KEEP) for _ in range(6)][1:]
    for kind, name in ((Kind.FORWARD, "forward_seconds"), (Kind.BACKWARD, "backward_seconds")):
        measured = median(getattr(run, name) for run in runs)
        predicted = profile.op_seconds(kind, large.spans)
        print(f"{kind.value}: {1e3 * measured:.3f} ms, predicted {1e3 * predicted:.3f}")
        assert predicted == pytest.approx(measured, rel=0.25)
        # A device that has worked is as fast or slower, by what its power limit takes.
        assert 0.95 < median(getattr(run, name) for run in worked) / measured < 1.4
        assert median(getattr(run, name) for run in device) < profile.host_seconds[kind]
        host = median(getattr(run, name) for run in issued)
        assert profile.host_seconds[kind] == pytest.approx(host, rel=0.5)
