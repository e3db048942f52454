"""Plans that a planner makes for a certificate's batches, instead of the default random plans."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_epp.certify.batches import CONTEXT
from megatron_epp.ir import Plan

STAGE_BYTES = 1e15


@dataclass(frozen=True, slots=True)
class PlansOf:
    """Function that plans with the planner ``planner``; for the other fields, see ``Frame``.

    The function uses op costs of a large model (llama3-8b). Costs affect only the plan, and
    gradients do not depend on the plan.
    """

    planner: str
    layers: tuple[int, ...]
    place: tuple[int, ...]
    vocabulary_parallel: bool

    def __call__(self, lengths: Sequence[int]) -> Plan:
        """Return the plan for one replica, whose documents have these ``lengths`` in tokens.

        Raises:
            ValueError: The planner does not support these stages.
        """
        from megatron_epp.cost.build import named_cost
        from megatron_epp.cost.cost import Cost
        from megatron_epp.cost.layout import StageLayout
        from megatron_epp.planner.options import TRAINING_LEVERS, Options
        from megatron_epp.planner.replicas import plan_block

        profile = named_cost("llama3-8b", "h100-80g", pp=2, tp=8, logits_held=False).layout.profile
        layout = StageLayout(
            profile, self.layers, vocabulary_parallel=self.vocabulary_parallel, place=self.place
        )
        cost = Cost(layout, (STAGE_BYTES,) * layout.placement.ranks)
        options = Options(CONTEXT, TRAINING_LEVERS - {"local"})
        (planned,) = plan_block(self.planner, lengths, cost, options).planned
        return planned.plan
