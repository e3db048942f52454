"""Reference model of the project's own certificates."""

import pickle
from dataclasses import fields, replace
from typing import override

from megatron_epp.certify.batches import CONTEXT, Frame
from megatron_epp.certify.protocol import ModelSetup
from megatron_epp.mcore.certify.reference import ReferenceModel
from megatron_epp.mcore.kinds.mtp.kind import mtp_depths
from megatron_epp.mcore.kinds.registry import require_shared
from tests.certify.frame import CheckedFrame
from tests.certify.planned import PlansOf


class CheckedReference(ReferenceModel):
    """Reference model for documents with prefixes, and for plans of planners."""

    @override
    def prepare(self, turn: int) -> ModelSetup:
        setup = super().prepare(turn)
        frame, planner, plans = setup.frame, self.trial.planner, None
        if planner is not None:
            if frame.lockstep > 1:
                raise ValueError(
                    f"--planner {planner}: experts over replicas run in lockstep; leave it out"
                )
            plans = PlansOf(planner, frame.layers, frame.place, frame.vocabulary_parallel)
            plans([CONTEXT, CONTEXT // 2])  # raises early if the planner refuses these stages
        args = pickle.loads(setup.args)
        if self.trial.trees:
            require_shared(args, "--trees", ahead=not self.trial.loop)
        drawn = {one.name: getattr(frame, one.name) for one in fields(Frame)}
        if self.trial.trees or self.trial.documents or plans is not None:
            drawn["alone"] = 0
        self.frame = CheckedFrame(
            **drawn,
            trees=self.trial.trees,
            make_plan=plans,
            documents=self.trial.documents or 0,
            depths=mtp_depths(args) if self.trial.trees else 0,
        )
        return replace(setup, frame=self.frame)
