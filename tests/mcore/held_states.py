"""Run over two ranks: what Megatron's buffers and optimizers hold for a parameter, a line for each
way in which a job may hold it."""

import json
from types import SimpleNamespace
from typing import Any

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402

from megatron_epp.mcore.job.job_cost import training_states  # noqa: E402

SIZE = 256
WAYS = (
    {"use_distributed_optimizer": True},
    {"use_distributed_optimizer": False},
    {"use_distributed_optimizer": True, "accumulate_allreduce_grads_in_fp32": False},
    {"use_distributed_optimizer": False, "optimizer": "sgd"},
    {"use_distributed_optimizer": True, "params_dtype": torch.float32},
)


def job(**changes: Any) -> SimpleNamespace:
    """Megatron's flags."""
    named = {
        "params_dtype": torch.bfloat16,
        "accumulate_allreduce_grads_in_fp32": True,
        "main_params_dtype": torch.float32,
        "exp_avg_dtype": torch.float32,
        "exp_avg_sq_dtype": torch.float32,
        "optimizer": "adam",
        "sgd_momentum": 0.9,
        "optimizer_cpu_offload": False,
        "optimizer_offload_fraction": 1.0,
        "use_distributed_optimizer": False,
    }
    return SimpleNamespace(**named | changes)


def held(args: SimpleNamespace) -> float:
    """Bytes for each of this rank's parameters, behind a step."""
    half = args.params_dtype == torch.bfloat16
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, bf16=half)
    model: Any = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE, bias=False))
    model.config = config
    if half:
        model = Float16Module(config, model)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    model = DistributedDataParallel(config, ddp, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer=args.optimizer,
            lr=1e-3,
            bf16=half,
            params_dtype=args.params_dtype,
            use_distributed_optimizer=args.use_distributed_optimizer,
            sgd_momentum=args.sgd_momentum,
        ),
        [model],
    )
    model(torch.ones(2, SIZE, dtype=args.params_dtype)).sum().backward()
    model.finish_grad_sync()
    optimizer.step()
    # By where they lie: many are views of one buffer.
    places: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> None:
        if tensor.numel() > 1:
            places[tensor.data_ptr()] = max(
                places.get(tensor.data_ptr(), 0), tensor.numel() * tensor.itemsize
            )

    for parameter in model.parameters():
        note(parameter.data)
        note(parameter.main_grad)
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                note(parameter.data)
                for state in one.optimizer.state[parameter].values():
                    if isinstance(state, torch.Tensor):
                        note(state)
    return sum(places.values()) / SIZE**2


def main() -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 1)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    for way in WAYS:
        states = training_states(job(**way))
        expected = states.zero1_resident + states.zero1_sharded / dist.get_world_size()
        if dist.get_rank() == 0:
            print("held", json.dumps([str(way), held(job(**way)), expected]))
        else:
            held(job(**way))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
