"""What a measured op says of the cost model's figures, whatever became of its layers."""

from types import SimpleNamespace

from megatron_epp.control.cost_monitor import CostMonitor
from megatron_epp.cost.residuals import Residual
from megatron_epp.ir import Kind, Plan

PLAN = Plan.parse(
    "plan v1\ndocuments 40 20\nlayers 4\nchunk 0: 0[0:40]\nchunk 1: 1[0:20]\n"
    "recompute 0: 1o1f1n1k 4o\nstage 0: F0 F1 B1 B0\n"
)


def test_an_offloaded_layer_computes_what_a_kept_one_does() -> None:
    """The fit knows no letter ``o``: such a sample would end the job."""
    monitor = CostMonitor(SimpleNamespace(), [], may_refit=True)
    fields = dict.fromkeys(Residual.__dataclass_fields__, 0)
    for chunk, choice, tokens in ((0, "kfnk", 40), (1, "kkkk", 20)):
        one = Residual(
            **{**fields, "kind": Kind.BACKWARD, "chunk": chunk, "tokens": tokens, "measured": 2.0}
        )
        sample = monitor._sample(PLAN, one)
        assert sample.choice == choice and sample.value == 2.0
