"""torch.distributed.pipelining reads our CSV, and the 1F1B that it runs itself is ours."""

import pytest

from megatron_epp.ir import Plan, PlanError, check
from megatron_epp.show.torch_csv import micro_batches, to_torch_csv
from tests.cli.commands import refused, said
from tests.runtime.world import run
from tests.show.plans import example, one_f_one_b, split_example, vocabulary_example

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


# The last stage computes chunk 2 first, and some backwards are in halves.
REORDERED = Plan.parse("""\
plan v1
documents 3 2 4
layers 1 1
chunk 0: 0[0:3]
chunk 1: 1[0:2]
chunk 2: 2[0:4]
stage 0: F2 F0 F1 I2 B0 W2 B1
stage 1: F2 I2 F0 W2 B0 F1 B1
""")


def test_micro_batches_are_numbered_in_the_last_stages_order(tmp_path):
    """In which torch counts losses."""
    check(REORDERED)
    assert micro_batches(REORDERED) == (2, 0, 1)
    assert to_torch_csv(REORDERED) == "0F0,0F1,0F2,0I0,0B1,0W0,0B2\n1F0,1I0,1F1,1W0,1B1,1F2,1B2\n"
    simulate(read(REORDERED, tmp_path), 2)


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        (example(), "slices of documents"),
        (split_example(), "slices of documents"),
        (vocabulary_example(), "ops H and G"),
        (
            Plan.parse(str(REORDERED).replace("recompute 1: 1k 1k 1k", "recompute 1: 1k 1f 1k")),
            "recompute or offload choices",
        ),
        (
            Plan.parse(
                "plan v1\ndocuments 3\nlayers 1\nchunk 0: 0[0:3]\nchunk 1: -\n"
                "stage 0: F0 F1 B0 B1\n"
            ),
            "chunks without a document",
        ),
    ],
)
def test_what_the_file_has_no_words_for_is_refused(plan, what):
    with pytest.raises(PlanError, match=f"^the plan has {what}, which torch's schedules do not"):
        to_torch_csv(plan)


def test_draw_says_which_chunk_a_micro_batch_is(capsys, tmp_path):
    plan, path = tmp_path / "a.plan", tmp_path / "x.csv"
    plan.write_text(str(REORDERED))
    assert f"{path}: micro-batches 0, 1, ... are the plan's chunks 2 0 1\n" in said(
        capsys, "draw", plan, "-o", path
    )
    assert path.read_text() == to_torch_csv(REORDERED)
    plan.write_text(str(example()))
    told = refused(capsys, "draw", plan, "-o", path)
    assert f"-o {path}: the plan has slices of documents" in told


WIDTH = 4


def in_torch(rank: int, text: str, path: str) -> dict[str, list[float]]:
    """A step of two stages in torch's own runtime, by our order: losses and gradients."""
    import torch
    from torch.distributed.pipelining import PipelineStage

    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2)]
    rows = torch.randn(len(REORDERED.chunks), WIDTH, dtype=torch.float64)
    labels = torch.randn_like(rows)
    order = list(micro_batches(REORDERED))

    def loss(output, label):
        return (output - label).square().sum()

    stage = PipelineStage(layers[rank], rank, 2, torch.device("cpu"))
    runtime = schedules._PipelineScheduleRuntime([stage], len(order), loss, scale_grads=False)
    with open(path if rank == 0 else f"{path}.1", "w") as file:
        file.write(text)
    runtime._load_csv(file.name)
    losses: list[torch.Tensor] = []
    if rank == 0:
        runtime.step(rows[order])
    else:
        runtime.step(target=labels[order], losses=losses)
    whole = [layer.weight.detach().clone() for layer in layers]
    own = layers[rank].weight.grad
    plain = [torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2)]
    for copy, layer, weight in zip(plain, layers, whole, strict=True):
        copy.load_state_dict({"weight": weight, "bias": layer.bias.detach()})
    each = [loss(plain[1](plain[0](rows[chunk])), labels[chunk]) for chunk in order]
    torch.stack(each).sum().backward()
    wanted = plain[rank].weight.grad
    assert own is not None and wanted is not None
    return {
        "gradient": [float((own - wanted).abs().max() / wanted.abs().max())],
        "losses": [float(a - b.detach()) for a, b in zip(losses, each, strict=False)],
    }


def test_torchs_own_runtime_computes_our_order(tmp_path):
    found = run(2, in_torch, tmp_path, to_torch_csv(REORDERED), str(tmp_path / "plan.csv"))
    for answer in found:
        assert isinstance(answer, dict), answer
        assert answer["gradient"][0] < 1e-14
    assert len(found[1]["losses"]) == 3 and max(map(abs, found[1]["losses"])) < 1e-13
