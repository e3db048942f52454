"""A calibration leaves no trace: what is trained afterwards is as if nobody had measured."""

import sys

import pytest

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.transformer import TransformerConfig  # noqa: E402

from megatron_epp.mcore.calibrate.probe import undisturbed  # noqa: E402
from tests.mcore.runs import flags, trained  # noqa: E402


def traces(model: DistributedDataParallel) -> dict[str, object]:
    """All that a probe might leave behind, as it is now."""
    groups = model.bucket_groups
    return {
        "hooks": sorted(str(type(m)) for m in model.remove_forward_pre_hook_handles),
        "gathers": [(g.param_gather_handle is not None, g.param_gather_dispatched) for g in groups],
        "reductions": [(g.grad_reduce_handle is not None, g.is_last_microbatch) for g in groups],
        "counts": [dict(g.per_param_grad_ready_counts) for g in groups],
        "gradients": [p.grad for p in model.parameters()],
        "main_grads": [p.main_grad.tolist() for p in model.parameters()],
        "random": torch.get_rng_state().tolist(),
        "tracked": {
            k: v.tolist() for k, v in tensor_parallel.get_cuda_rng_tracker().states_.items()
        },
    }


def main(how: str) -> None:
    """Megatron's DDP with several buckets and overlapped parameter gathers, one layer of it probed
    as a calibration does, then trained for two iterations.

    Args:
        how: "nothing" (not probed), "probe", or "error" (the probe raises in its middle).
    """
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 1)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        use_distributed_optimizer=True,
        bucket_size=1000,
    )
    layers = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    model = DistributedDataParallel(config, ddp, layers)
    assert len(model.bucket_groups) > 1
    x = torch.randn(4, 32)
    before = traces(model)
    try:
        if how != "nothing":
            with undisturbed(model):
                layers[0](torch.randn(4, 32).requires_grad_()).sum().backward()
                with tensor_parallel.get_cuda_rng_tracker().fork():
                    torch.rand(3)
                if how == "error":
                    raise RuntimeError("no memory")
    except RuntimeError as error:
        assert str(error) == "no memory", error
    after = traces(model)
    for name, was in before.items():
        assert after[name] == was, f"{name}: {was} became {after[name]}"
    model.disable_forward_pre_hook(param_sync=False)  # as Megatron's trainer begins
    for _ in range(2):
        model.zero_grad_buffer()
        model(x).sum().backward()
        model.finish_grad_sync()
        if not model.remove_forward_pre_hook_handles:
            model.enable_forward_pre_hook()
    dist.destroy_process_group()
    print("trained")


@pytest.mark.parametrize("how", ["nothing", "probe", "error"])
def test_distributed_data_parallelism_is_left_as_it_was_found(how):
    """Probing one layer finishes its bucket's parameter gather, which dispatches the next one's;
    left in flight that gather ends iteration 2 with Megatron's own assertion."""
    run = trained([how], processes=1, program=(__file__,))
    assert run.output.rstrip().endswith("trained")


@pytest.mark.everything
@pytest.mark.parametrize("placement", ["even", "v"])
def test_measured_calibration_under_every_overlap_of_the_example_scripts(
    placement: str, corpus, tmp_path
):
    """Two replicas of two pipeline ranks, several buckets: the flags of examples/ with the cost
    model that they get, measured at start."""
    words = flags(
        corpus,
        epp=True,
        epp_placement=placement,
        epp_cost_model=None,
        ddp_bucket_size=4000,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        train_iters=3,
        epp_record=tmp_path / "saved",
    )
    assert len(trained(words, processes=4).losses) == 3
    assert (tmp_path / "saved" / "epp-cost-model.json").exists()


if __name__ == "__main__":
    main(sys.argv[1])
