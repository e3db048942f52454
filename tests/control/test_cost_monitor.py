"""What a measured op says of the cost model's figures, whatever became of its layers."""

from types import SimpleNamespace

from megatron_epp.control.cost_monitor import CostMonitor
from megatron_epp.cost.analytic import profile as analytic_profile
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.devices import DEVICES
from megatron_epp.cost.models import LayerShape, Model
from megatron_epp.cost.residuals import Residual
from megatron_epp.ir import Kind, Plan

PLAN = Plan.parse(
    "plan v1\ndocuments 40 20\nlayers 4\nchunk 0: 0[0:40]\nchunk 1: 1[0:20]\n"
    "recompute 0: 1o1f1n1k 4o\nstage 0: F0 F1 B1 B0\n"
)


COST = Cost(analytic_profile(Model("m", 4, 64, 176, 4, 2, 16, 1000), DEVICES["cpu"]), (4,), (1e9,))


def test_an_offloaded_layer_computes_what_a_kept_one_does() -> None:
    """The fit knows no letter ``o``: such a sample would end the job."""
    monitor = CostMonitor(SimpleNamespace(), [], may_refit=True)
    fields = dict.fromkeys(Residual.__dataclass_fields__, 0)
    for chunk, choice, tokens in ((0, "kfnk", 40), (1, "kkkk", 20)):
        one = Residual(
            **{**fields, "kind": Kind.BACKWARD, "chunk": chunk, "tokens": tokens, "measured": 2.0}
        )
        sample = monitor._sample(COST, PLAN, one)
        assert sample.choice == choice and sample.value == 2.0


def test_a_sample_says_of_which_kinds_the_layers_are() -> None:
    kinds = {"near": LayerShape(window=16), "far": LayerShape()}
    model = Model("m", 4, 64, 176, 4, 2, 16, 1000, kinds=kinds, pattern="near far 2*near")
    profile = analytic_profile(model, DEVICES["cpu"])
    cost = Cost(profile, (1, 3), (1e9,) * 2, layer_kinds=model.layer_kinds)
    plan = Plan.parse(
        "plan v1\ndocuments 40\nlayers 1 3\nchunk 0: 0[0:30]\nchunk 1: 0[30:40]\n"
        "recompute 0: 1k 1k\nrecompute 1: 1f2k 3k\nstage 0: F0 F1 B1 B0\nstage 1: F0 F1 B1 B0\n"
    )
    monitor = CostMonitor(SimpleNamespace(), [], may_refit=True)
    one = Residual(1, Kind.BACKWARD, 1, 10, 30, 1.0, 2.0)
    sample = monitor._sample(cost, plan, one)
    assert sample.kinds == ("far", "near", "near")
    assert sample.window_pairs == ((16, 10 * 16),) and sample.pairs == sum(range(31, 41))
    assert sample.context == 30
