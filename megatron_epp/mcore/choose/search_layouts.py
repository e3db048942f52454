"""Search of the fastest layout for a job's devices, for ``--epp-layouts auto``.

Like ``megatron_epp tune``, the search compares layouts, but by this job's flags, documents and cost
model. All layouts have the expert-parallel degree of the flags, because optimizer states of experts
cannot be loaded with another degree.
"""

import copy
import os
from argparse import Namespace

from megatron_epp.cost.build import even_layers
from megatron_epp.cost.cost import Cost
from megatron_epp.mcore.choose.choices import first_batches, first_cost_and_options
from megatron_epp.mcore.choose.layouts import (
    ALL_LAYOUTS,
    AllowedLayout,
    ChosenLayout,
    set_vocabulary_size,
    validated_with,
)
from megatron_epp.mcore.model.shape import model_shape
from megatron_epp.planner import Options
from megatron_epp.planner.tuning.layouts import JobRequest, Layout, layouts
from megatron_epp.planner.tuning.survey import ELASTIC, Choice, survey


def searched(wanted: Namespace, devices: int) -> ChosenLayout:
    """Return the layout that trains on the most devices; of several, the fastest.

    Args:
        wanted: Megatron's flags, not validated. The search keeps their expert-parallel degree and
            ignores their other parallel degrees.
        devices: Number of available ranks.

    Raises:
        ValueError: Document lengths are unknown, or no layout fits.
    """
    print(f"--epp-layouts {ALL_LAYOUTS}: searching layouts of {devices} devices ...", flush=True)
    search = _LayoutSearch(wanted)
    reasons: dict[Layout, str] = {}
    for ranks in range(devices, 0, -1):
        best, refused = search.best_of(ranks)
        reasons |= refused
        if best is not None:
            return ChosenLayout(search.allowed(best.layout), devices, ranks, best.seconds)
    said = "; ".join(f"{layout}: {why}" for layout, why in list(reasons.items())[:3])
    raise ValueError(
        f"--epp-layouts {ALL_LAYOUTS}: no layout fits {devices} devices ({said}); expected more "
        "devices, or a smaller model"
    )


class _LayoutSearch:
    """Search of a job's layouts for several numbers of devices."""

    def __init__(self, wanted: Namespace):
        self.wanted = wanted
        self.ep = int(wanted.expert_model_parallel_size or 1)
        alone = AllowedLayout(ep=self.ep)
        ranks = alone.least_ranks(wanted.expert_tensor_parallel_size)
        args = validated_with(wanted, alone, ranks)
        self.layers = int(args.num_layers)
        set_vocabulary_size(args)
        self.vocabulary = args.padded_vocab_size
        self.model = model_shape(args)
        self.batches = first_batches(args)

    def allowed(self, layout: Layout) -> AllowedLayout:
        """Return ``layout`` as AllowedLayout; ``layers`` is empty if ``pp`` divides the layers."""
        uneven = self.layers % layout.pp > 0
        layers = even_layers(self.layers, layout.pp) if uneven else ()
        return AllowedLayout(layout.tp, layout.pp, layout.cp, self.ep, tuple(layers))

    def best_of(self, ranks: int) -> tuple[Choice | None, dict[Layout, str]]:
        """Return the fastest layout that uses all ``ranks``, and refused layouts with reasons."""
        node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        refused: dict[Layout, str] = {}
        costs: dict[Layout, Cost] = {}
        options: Options | None = None
        for layout in layouts(self.model, ranks, node, 0, JobRequest(ep=self.ep)):
            if ranks % self._least(layout):
                continue
            try:
                costs[layout], options = self._cost(layout, ranks)
            except ValueError as error:
                refused[layout] = str(error).split("\n")[0]
        if options is None:
            return None, refused
        surveyed = survey(
            list(costs), self.batches, costs.__getitem__, options, top=1, partition=False
        )
        own = [choice for choice in surveyed.choices if choice.planner == ELASTIC]
        return (own[0] if own else None), {**refused, **surveyed.refused}

    def _least(self, layout: Layout) -> int:
        return self.allowed(layout).least_ranks(self.wanted.expert_tensor_parallel_size)

    def _cost(self, layout: Layout, ranks: int) -> tuple[Cost, Options]:
        """Return the cost of ops with ``layout`` on ``ranks`` ranks, and the planner's options."""
        args = copy.copy(validated_with(self.wanted, self.allowed(layout), ranks))
        args.epp_row_multiple, args.padded_vocab_size = args.epp_row_multiple or 1, self.vocabulary
        try:
            return first_cost_and_options(args, even_layers(self.layers, layout.pp))
        except OSError as error:
            raise ValueError(str(error)) from error
