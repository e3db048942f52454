"""Stage modules of a rank: Megatron's model chunks, one for each stage placed on the rank.

Megatron builds each stage module as if the pipeline were longer and had one rank per stage:

    placement 1 0 0 1 on two ranks: rank 0 builds the modules of ranks 1 and 2 of four

Each stage module has its own configuration, layout and pipeline group, which describe the longer
pipeline. From these, Megatron derives the module's layers, their numbers, embedding, final norm and
output layer. Checkpoint keys do not depend on stages. The trainer uses the job's process groups, so
losses, norms and the optimizer see a pipeline with the job's number of ranks.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, override

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.training.models.gpt import GPTModelBuilder
from megatron.training.models.hybrid import HybridModelBuilder

from megatron_epp.mcore.hybrid.pattern import with_boundaries
from megatron_epp.mcore.placing.requested import STAGE_LAYERS, local_stages, place_of


class PartGroup:
    """Pipeline group of a stage module, with one rank per stage; it is never used for messages."""

    def __init__(self, stage: int, stages: int):
        self.stage, self.stages = stage, stages
        # HybridModel calls functions of torch.distributed, which look up groups in this table.
        dist.distributed_c10d._world.pg_group_ranks[self] = {dist.get_rank(): stage}  # type: ignore[index]

    def rank(self) -> int:
        """Return the stage, which equals the rank in the longer pipeline."""
        return self.stage

    def size(self) -> int:
        """Return the number of stages."""
        return self.stages


class PartLayout(PipelineParallelLayerLayout):
    """Layout of all stages; layer number and offset are always those of the stage ``stage``."""

    def __init__(self, text: str, stages: int, stage: int):
        super().__init__(text, stages)
        self.stage = stage

    @override
    def get_num_layers_to_build(self, *args: Any, **others: Any) -> int:
        return super().get_num_layers_to_build(*args, **others | {"pp_rank": self.stage})

    @override
    def get_layer_offset(self, *args: Any, **others: Any) -> int:
        return super().get_layer_offset(*args, **others | {"pp_rank": self.stage})


class _Parts:
    """Mixin with which Megatron's model builders build all stage modules of a rank.

    ``build_model`` builds the rank's first stage module, and ``other_stages`` builds the rest.
    """

    _model_config: Any

    @property
    def stages(self) -> tuple[int, ...]:
        place = self._model_config.epp_place
        return local_stages(place, mpu.get_pipeline_model_parallel_group().rank())

    def build_model(self, pg_collection: Any, *args: Any, **others: Any) -> Any:
        return self.part(pg_collection, self.stages[0])

    def other_stages(self, models: list[Any], pg_collection: Any) -> list[Any]:
        added = [self.part(pg_collection, stage) for stage in self.stages[1:]]
        for model in added:
            model.model_type = models[0].model_type
        return [*models, *added]

    def part(self, pg_collection: Any, stage: int) -> Any:
        """Build the stage module of ``stage``."""
        description, layers = self._model_config, self._model_config.epp_layers
        own, groups = copy.copy(description), copy.copy(pg_collection)
        own.transformer = config = copy.copy(description.transformer)
        config.pipeline_model_parallel_size = stages = len(layers)
        if getattr(description, "hybrid_layer_pattern", None) is None:
            from megatron_epp.planner.choose.partition import layout_text

            text = layout_text(layers, config.mtp_num_layers or 0)
            config.pipeline_model_parallel_layout = PartLayout(text, stages, stage)
        else:
            own.hybrid_layer_pattern = with_boundaries(description.hybrid_layer_pattern, layers)
        groups.pp = PartGroup(stage, stages)
        builder = type(self)(own)  # type: ignore[call-arg]
        with _as_rank(stage, stages):
            return super(_Parts, builder).build_model(  # type: ignore[misc]
                groups, pre_process=stage == 0, post_process=stage == stages - 1
            )


class GPTParts(_Parts, GPTModelBuilder):
    """Builder of a rank's stage modules, for GPTModel."""


class HybridParts(_Parts, HybridModelBuilder):
    """Builder of a rank's stage modules, for HybridModel."""


_BUILDERS = {GPTModelBuilder: GPTParts, HybridModelBuilder: HybridParts}


@contextmanager
def _as_rank(stage: int, stages: int) -> Iterator[None]:
    """Make Megatron's parallel state report rank ``stage`` of a pipeline of ``stages`` ranks."""
    mpu.set_pipeline_model_parallel_rank(stage)
    mpu.set_pipeline_model_parallel_world_size(stages)
    try:
        yield
    finally:
        mpu.set_pipeline_model_parallel_rank(None)
        mpu.set_pipeline_model_parallel_world_size(None)


def place_parts(description: Any, args: Any) -> None:
    """Make Megatron's trainer build the stages that ``args`` place on this rank.

    The function sets the builder of ``description``, the ModelConfig, and adds hooks that run
    before its other hooks. If ``args`` contain no placement, the function does nothing.
    """
    if not place_of(args):
        return
    builder = _BUILDERS[description.get_builder_cls()]
    description.builder = f"{builder.__module__}.{builder.__qualname__}"
    description.epp_place = place_of(args)
    description.epp_layers = tuple(getattr(args, STAGE_LAYERS))
    description.pre_wrap_hooks.insert(0, partial(_build_other_stages, description))
    description.post_wrap_hooks.insert(0, _in_groups_of_the_job)


def _build_other_stages(description: Any, models: list[Any]) -> list[Any]:
    """Append the rank's other stage modules to its first (Megatron's pre-wrap hook)."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    builder = description.get_builder_cls()(description)
    return builder.other_stages(models, ProcessGroupCollection.use_mpu_process_groups())


def _in_groups_of_the_job(models: list[Any]) -> list[Any]:
    """Set the job's pipeline group on the stage modules (Megatron's post-wrap hook)."""
    for model in models:
        module = model
        while module is not None:
            groups = vars(module).get("pg_collection")
            stage = getattr(groups, "pp", None)
            if isinstance(stage, PartGroup):
                module.pg_collection = copy.copy(groups)
                module.pg_collection.pp = mpu.get_pipeline_model_parallel_group()
                if isinstance(module, Float16Module):
                    # Float16Module recognises the last stage by these two attributes, and converts
                    # the losses of that stage to float32.
                    module.vp_stage, module.vp_size = stage.rank(), stage.size()
            module = getattr(module, "module", None)
    return models
