"""I and W of Transformer Engine's linears: the numbers of B, in any order of the Ws.

In float64, with emulated kernels; tests/gpu/test_split.py has the same on a device.
"""

import gc
import weakref
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from megatron_epp.layers.wgrad.linear import DeferredWeightGrads
from megatron_epp.layers.wgrad.te_linear import can_defer, deferred_forward
from megatron_epp.mcore.patching import emulated_engine
from megatron_epp.runtime.kv_store import Store
from megatron_epp.runtime.memory_meter import SavedBytesMeter
from tests.layers.test_deferred import _Mark, _Marked

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not emulated_engine.is_wanted(), reason="kernels of GPUs have no float64"),
]
T, H, FFN = 5, 8, 12
KINDS = {
    "no bias": {"bias": False},
    "bias in the product": {},
    "bias for others": {"return_bias": True},
}


@pytest.fixture(scope="module", autouse=True)
def host() -> Iterator[None]:
    """Before the first import of Transformer Engine."""
    from megatron_epp.mcore.patching import cpu_host, patch_points

    cpu_host.install_cpu_host()
    linears = patch_points.COLUMN_LINEAR, patch_points.ROW_LINEAR
    patch_points.install(linears)
    yield
    patch_points.remove(linears)


class Net(nn.Module):
    """A layer's MLP. ``deferred``: where its linears leave their weights' gradients, or None: B."""

    def __init__(self, **words):
        import transformer_engine.pytorch as te

        super().__init__()
        words |= {"params_dtype": torch.float64, "device": "cpu"}
        self.first = te.LayerNormLinear(H, FFN, normalization="RMSNorm", **words)
        self.second = te.Linear(FFN, H, **words)

    def forward(self, x: Tensor, deferred: DeferredWeightGrads | None = None) -> Tensor:
        for linear in (self.first, self.second):
            if deferred is None or not torch.is_grad_enabled():
                x = linear(x)
            else:
                x = deferred_forward(linear, linear, deferred, x)
            if isinstance(x, tuple):
                x = x[0] + x[1]
            x = x.tanh()
        return x


def nets(**words) -> tuple[Net, Net]:
    torch.manual_seed(0)
    net, other = Net(**words), Net(**words)
    other.load_state_dict(net.state_dict())
    for parameter in (*net.parameters(), *other.parameters()):
        parameter.main_grad = torch.zeros_like(parameter)
        parameter.grad_added_to_main_grad = False
        parameter.ran = []
    return net, other


def reduce(net: Net) -> list:
    """Megatron's hooks, on the node that adds up a gradient: each asks for one and takes it away.
    What is returned must live as long as the hooks are to."""
    nodes = []
    for name, parameter in net.named_parameters():

        def hook(*unused, name=name, parameter=parameter):
            assert parameter.grad is not None, f"{name}: no gradient"
            if not parameter.grad_added_to_main_grad:
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None
            parameter.ran.append(name)

        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(hook)
        nodes.append(node)
    return nodes


def chunks(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randn(T, 1, H, dtype=torch.float64, generator=generator) for _ in range(2))
        for _ in range(count)
    ]


def inputs(net: Net, deferreds: Sequence[DeferredWeightGrads | None]) -> list[Tensor]:
    """F of every chunk, then B or I in reverse; the gradients of their inputs."""
    made = []
    for (x, gradient), deferred in zip(chunks(), deferreds, strict=True):
        x = x.clone().requires_grad_()
        made.append((x, net(x, deferred), gradient))
    for _, y, gradient in reversed(made):
        y.backward(gradient)
    return [x.grad for x, _, _ in made]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [(2, 1, 0), (0, 1, 2), (1, 2, 0), (0, 2)])
def test_i_and_w_are_b_in_any_order(kind, order, fused) -> None:
    """Beside a whole backward, too; and the module is left as it was."""
    split, whole = nets(fuse_wgrad_accumulation=fused, **KINDS[kind])
    alive = reduce(split), reduce(whole)
    before, store = dict(split.named_parameters()), split.first.wgrad_store
    deferreds = [DeferredWeightGrads() if chunk in order else None for chunk in range(3)]
    for mine, theirs in zip(inputs(split, deferreds), inputs(whole, [None] * 3), strict=True):
        assert torch.equal(mine, theirs)
    assert dict(split.named_parameters()) == before
    assert split.first.wgrad_store is store and not store.delay_wgrad_compute()
    for chunk in order:
        assert len(deferreds[chunk]) == 2
        deferreds[chunk].accumulate_all()
        assert not len(deferreds[chunk])
    for mine, theirs in zip(split.parameters(), whole.parameters(), strict=True):
        assert theirs.main_grad.norm() > 0
        assert torch.allclose(mine.main_grad, theirs.main_grad, rtol=1e-12, atol=1e-12)
        assert mine.ran == theirs.ran and len(mine.ran) == 3
    del alive


def test_of_a_deferred_weight_no_hook_runs_in_i() -> None:
    net, _ = nets()
    alive = reduce(net)
    deferreds = [DeferredWeightGrads(), DeferredWeightGrads(), DeferredWeightGrads()]
    inputs(net, deferreds)
    named = dict(net.named_parameters())
    assert named.pop("first.layer_norm_weight").ran  # autograd's, in I
    assert [p.ran for p in named.values()] == [[]] * 4
    # A bias whose gradient comes out of the same product comes with its weight, either way round.
    second = net.second
    assert second.bias in deferreds[0] and second.weight in deferreds[0]
    deferreds[0].accumulate(second.bias)
    assert second.bias not in deferreds[0] and second.weight not in deferreds[0]
    assert len(second.weight.ran) == len(second.bias.ran) == 1
    del alive


def test_a_forward_that_fails_gives_the_module_back() -> None:
    net, _ = nets()
    linear, weight, store = net.first, net.first.weight, net.first.wgrad_store

    def fails(x):
        assert linear.weight is not weight and linear.wgrad_store is not store
        raise MemoryError

    with pytest.raises(MemoryError):
        deferred_forward(linear, fails, DeferredWeightGrads(), torch.ones(1))
    assert linear.weight is weight and linear.wgrad_store is store


def test_between_i_and_w_inputs_and_gradients_are_held_and_no_graph() -> None:
    net, _ = nets(bias=False)
    meter = SavedBytesMeter(net.parameters())
    deferred = DeferredWeightGrads()
    (x, gradient), *_ = chunks()
    with meter.watch(Store({})):
        mark = _Mark()
        alive = weakref.ref(mark)
        y = net(_Marked.apply(x.requires_grad_(), mark), deferred)
        del mark
        assert alive() is not None
        y.backward(gradient)
        del y
        gc.collect()
        assert alive() is None
        # Of both linears: the input, and the output's gradient.
        assert meter.now == 8 * T * ((H + FFN) + (FFN + H))
        deferred.accumulate_all()
        assert meter.now == 0


def test_linears_defer_inside_the_context_and_are_given_back() -> None:
    from megatron_epp.mcore.model.split_backward import Deferral

    net, _ = nets(bias=False)
    module, deferred = net.second, DeferredWeightGrads()
    x = torch.ones(2, 1, FFN, dtype=torch.float64, requires_grad=True)
    module.forward = wrapped = module.forward  # as recompute wraps what a linear saves
    with Deferral(nn.Sequential(module)) as deferral:
        module(x).sum().backward()
        plain, module.weight.grad = module.weight.grad, None
        with deferral.into(deferred), torch.no_grad():
            module(x)
        with deferral.into(deferred):
            module(x).sum().backward()
        assert module.weight.grad is None and deferred.weights == (module.weight,)
    assert module.forward is wrapped
    deferred.accumulate_all()
    assert torch.equal(module.weight.grad, plain)
    with Deferral(nn.Sequential(net.first)):
        pass
    assert "forward" not in vars(net.first)


def test_which_modules_can() -> None:
    from megatron_epp.mcore.model.split_backward import kept_in_input

    net, _ = nets()
    assert kept_in_input(net) == []
    assert can_defer(net.first) and can_defer(net.second)
    net.second.weight_names = ["query", "key"]
    assert not can_defer(net.second)
    assert kept_in_input(net) == [type(net.second).__name__]
    assert not can_defer(nn.Linear(2, 2))


def test_grouped_linears_compute_their_weight_gradients_in_i_and_leave_nothing() -> None:
    import transformer_engine.pytorch as te

    from megatron_epp.mcore.model.split_backward import Deferral, kept_in_input

    torch.manual_seed(0)
    made = {"bias": False, "params_dtype": torch.float64, "device": "cpu"}
    dense, experts = te.Linear(H, FFN, **made), te.GroupedLinear(2, FFN, H, **made)
    model = nn.ModuleList([dense, experts])
    assert kept_in_input(model) == ["GroupedLinear"]
    x = torch.randn(T, H, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(T, H, dtype=torch.float64)
    experts(dense(x), [T - 2, 2]).backward(gradient)
    whole = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    meter, deferred = SavedBytesMeter(model.parameters()), DeferredWeightGrads()
    with meter.watch(Store({})), Deferral(model) as deferral:
        with deferral.into(deferred):
            y = experts(dense(x), [T - 2, 2])
        y.backward(gradient)
        del y
        gc.collect()
        assert meter.now == 8 * T * (H + FFN)  # of the dense linear alone
        assert deferred.weights == (dense.weight,)
        assert all(parameter.grad is not None for parameter in experts.parameters())
        deferred.accumulate_all()
    for parameter, expected in zip(model.parameters(), whole, strict=True):
        assert torch.equal(parameter.grad, expected)


@pytest.mark.everything
def test_i_leaves_the_rows_of_the_tensor_parallel_group(tmp_path) -> None:
    """A layer's measured bytes from I to W against those of the analytic cost model."""
    from megatron_epp.cost.build import named_cost
    from megatron_epp.cost.catalogue.models import Model
    from megatron_epp.cost.profile import Profile
    from megatron_epp.ir import Chunk, Span
    from megatron_epp.mcore.trainer.profile_command import main

    sizes = """
        --num-layers 1 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4
        --group-query-attention --num-query-groups 2 --vocab-size 127 --swiglu --disable-bias-linear
        --normalization RMSNorm --position-embedding-type rope --seq-length 512
        --untie-embeddings-and-output-weights --transformer-impl transformer_engine --bf16
    """
    words = [*sizes.split(), "--sequence-parallel"]
    main(["--pp", "1", "--tp", "2", "-o", str(tmp_path / "x.json"), *words])
    measured = Profile.load(str(tmp_path / "x.json")).weight_input_bytes.per_token
    model = Model("m", 1, 256, 512, 4, 2, 64, 128, gated=True)
    cost = named_cost(model, "h100-80g", pp=1, tp=2, zero=1, logits_held=False)
    loads = cost.loads((Chunk((Span(0, 0, 1000),)),), (1000,))
    counted = cost.memory.weight_input_bytes(loads)[0, 0] / 1000
    assert measured == pytest.approx(counted, rel=0.02)
