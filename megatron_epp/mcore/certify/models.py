"""Construction of the small model in this process, with the functions of Megatron's trainer."""

from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.utils import get_model_config
from megatron.training.global_vars import set_args
from megatron.training.training import get_megatron_ddp_config

from megatron_epp.mcore.certify.adapters import adapt
from megatron_epp.mcore.certify.shards import main_copy
from megatron_epp.mcore.job import megatron_gpt
from megatron_epp.mcore.kinds.certificates import LAYER_CERTIFICATES
from megatron_epp.mcore.kinds.modules import kinds_of_layer
from megatron_epp.mcore.kinds.mtp.mtp_layers import layers_of
from megatron_epp.mcore.model.layer_spec import described, fix_layer_spec
from megatron_epp.mcore.placing.parts import place_parts


def join(meeting: Path, rank: int, ranks: int, patience: timedelta, backend: str = "gloo") -> None:
    """Initialise torch.distributed with a file store, which needs no free port.

    Args:
        meeting: Path of the store's file.
        rank: This rank.
        ranks: Size of the world.
        patience: Timeout of collectives.
        backend: Backend of torch.distributed.
    """
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(meeting), ranks),  # a URL would quote blanks in the path
        rank=rank,
        world_size=ranks,
        timeout=patience,
    )


def begin(args: Namespace, seed: int) -> None:
    """Create Megatron's process groups for ``args``, and seed the random number generators."""
    set_args(args)
    if args.params_dtype == torch.float64:
        for kind in LAYER_CERTIFICATES:
            kind.make_double(args)
    for kind in LAYER_CERTIFICATES:
        kind.forget_losses()  # entries have one value per layer of the model before
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        get_embedding_ranks=megatron_gpt.embedding_ranks,
        create_gloo_process_groups=args.use_gloo_process_groups,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def reference_model(args: Namespace, by_engine: bool) -> Any:
    """Build Megatron's model, add features that its local layers lack, and return the model.

    With ``by_engine``, the model has the checkpoint keys of Transformer Engine's layers.
    """
    description = described(args)
    fix_layer_spec(description)
    model = description.get_builder_cls()(description).build_model(
        ProcessGroupCollection.use_mpu_process_groups()
    )
    _make_double(args, [model])
    for layer in dict.fromkeys(layers_of(model)):
        there = {type(module.KIND) for module in kinds_of_layer(layer)}
        for kind in LAYER_CERTIFICATES:
            if type(kind.KIND) in there:
                kind.fix_reference(layer, by_engine)
    return model


def _make_double(args: Namespace, models: list[Any]) -> list[Any]:
    """Convert all parameters to float64 if that is the dtype of ``args``, and return ``models``.

    Megatron creates some parameters in float32, whatever the dtype of ``args`` is.
    """
    if args.params_dtype == torch.float64:
        for parameter in (parameter for model in models for parameter in model.parameters()):
            parameter.data = parameter.data.double()
    return models


class ChangingWeights:
    """Changes of weights between batches, in place of an optimizer, to reveal stale caches.

    :meth:`change` multiplies all matrices by -0.5 and by -2 in turn. These factors cause no
    rounding, and an fp8 scale cannot absorb the change of sign.
    """

    def __init__(self, *models: Any):
        self._matrices = [one for model in models for one in model.parameters() if one.dim() > 1]
        self._factors = cycle((-0.5, -2.0))

    def change(self) -> None:
        """Change the weights for the next batch."""
        factor = next(self._factors)
        with torch.no_grad():
            for matrix in self._matrices:
                if is_float8tensor(matrix):  # quantised again, as in an optimizer step
                    matrix.copy_(main_copy(matrix).mul_(factor))
                else:
                    matrix.data.mul_(factor)


def elastic_models(
    args: Namespace,
    install: Callable[[Any], None],
    lora_rank: int = 0,
) -> list[Any]:
    """Return this rank's stage modules, wrapped in DDP and configured as in Megatron's ``train``.

    See ``train`` in megatron/training/training.py (about line 3530 in Megatron 0.19.2).

    Args:
        args: Megatron's args.
        install: Function that adds the job's hooks to the model configuration. These hooks run
            after the hook that adds adapters.
        lora_rank: Rank of the LoRA adapters; 0 for no adapters.
    """
    description = described(args)
    fix_layer_spec(description)
    description.pre_wrap_hooks.append(partial(_make_double, args))
    if lora_rank:
        description.pre_wrap_hooks.append(lambda models: [adapt(one, lora_rank) for one in models])
    install(description)
    place_parts(description, args)
    models = description.get_builder_cls()(description).build_distributed_models(
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        ddp_config=get_megatron_ddp_config(args),
        data_parallel_random_init=False,
    )
    config = get_model_config(models[0])
    if args.overlap_grad_reduce:
        config.no_sync_func = _one_or_all([model.no_sync for model in models])
        if args.align_grad_reduce:
            config.grad_sync_func = _one_or_all([model.start_grad_sync for model in models])
    config.finalize_model_grads_func = finalize_model_grads
    return models


def _one_or_all(functions: list[Any]) -> Any:
    return functions if len(functions) > 1 else functions[0]
