"""torch.distributed.pipelining reads our CSV, and the 1F1B that it runs itself is ours."""

import pytest

from megatron_epp.show.torch_csv import to_torch_csv
from tests.show.plans import one_f_one_b, split_example

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


class Stage:
    """What torch's schedules ask of a stage: no processes, no tensors; it notes what it runs."""

    has_backward = True
    is_first = is_last = False

    def __init__(self, stages, stage=0):
        self.num_stages = self.group_size = stages
        self.stage_index = self.group_rank = stage
        self.stage_index_to_group_rank = {s: s for s in range(stages)}
        self.ran = []

    def forward_one_chunk(self, chunk, *args, **kwargs):
        self.ran.append(f"{self.stage_index}F{chunk}")

    def backward_one_chunk(self, chunk, **kwargs):
        self.ran.append(f"{self.stage_index}B{chunk}")

    def no_messages(self, *args):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_messages
    _get_init_p2p_neighbors_ops = _prepare_forward_infra = _prepare_backward_infra = no_messages
    perform_reduce_grad = clear_runtime_states = no_messages


def read(plan, tmp_path):
    path = tmp_path / "plan.csv"
    path.write_text(to_torch_csv(plan))
    runtime = schedules._PipelineScheduleRuntime([Stage(plan.stages)], len(plan.chunks))
    runtime._load_csv(str(path))
    return runtime


def simulate(runtime, stages):
    """torch's dry run of what it read, with the sends and receives of its own lowering."""
    orders = {
        rank: list(actions) for rank, actions in runtime.pipeline_order.items()
    }  # it eats them
    ordered = schedules._add_send_recv(orders, lambda stage: stage, stages)
    return schedules._simulate_comms_compute(ordered, lambda stage: stage, stages)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (4, 8), (4, 2), (8, 20)])
def test_torch_reads_and_runs_our_plans(tmp_path, stages, microbatches):
    runtime = read(one_f_one_b(stages, microbatches), tmp_path)
    simulated = simulate(runtime, stages)
    for rank in range(stages):
        ran = [str(a) for a in simulated[rank] if a is not None and a.is_compute_op]
        assert ran == [str(a) for a in runtime.pipeline_order[rank]]
        assert len(ran) == 2 * microbatches


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (8, 16), (3, 3)])
def test_the_1f1b_that_torch_runs_is_ours(tmp_path, stages, microbatches):
    """What its Schedule1F1B does. (The order that the same class reports is another: in torch
    2.11 its last stage's forwards are numbered from 1.)"""
    runtime = read(one_f_one_b(stages, microbatches), tmp_path)
    for rank in range(stages):
        stage = Stage(stages, rank)
        schedule = schedules.Schedule1F1B(stage, microbatches)
        schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
        assert stage.ran == [str(action) for action in runtime.pipeline_order[rank]]


def test_split_backwards_are_read(tmp_path):
    plan = split_example()
    assert to_torch_csv(plan).startswith("0F0,0F1,0F2,0I1,0W1,0B0,0I2,0W2\n")
    simulate(read(plan, tmp_path), 2)
