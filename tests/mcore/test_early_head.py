"""The early head around Megatron's output layer, where ranks share a chunk's rows."""

import pytest
import torch
from torch import Tensor, nn

from megatron_epp.mcore.lm_head import fused_head
from megatron_epp.mcore.lm_head.fused_head import FusedHead

ROWS, HIDDEN, VOCABULARY = 12, 6, 20
MINE = slice(0, ROWS // 2)  # this rank's rows of the chunk
GROUP = object()


class Output(nn.Module):
    """As much of ColumnParallelLinear as an output layer shows; its whole vocabulary is here."""

    def __init__(self, shared: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64))
        self.output_size_per_partition = VOCABULARY
        self.sequence_parallel, self.disable_grad_reduce = shared, False
        self.tp_group = GROUP
        self.fails = False

    def forward(self, hidden: Tensor, weight: Tensor | None, runtime_gather_output: bool | None):
        assert not self.sequence_parallel, "it would gather rows that are gathered already"
        if self.fails:
            raise torch.OutOfMemoryError("no memory")
        return hidden @ (self.weight if weight is None else weight).T, None


def run(output: Output, hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    def losses(these: Tensor, logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits[:, 0], these[0], reduction="none")[None]

    return FusedHead(weights)(
        hidden_states=hidden,
        output_layer=output,
        output_weight=None,
        labels=labels,
        runtime_gather_output=None,
        compute_language_model_loss=losses,
        scale_logits=lambda logits: logits,
        config=None,
    )


@pytest.fixture
def rows(monkeypatch) -> Tensor:
    """All rows of the chunk; what is exchanged is made up: the other rank's come from here."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, 1, HIDDEN, dtype=torch.float64)

    def gather(part: Tensor, group: object) -> Tensor:
        assert group is GROUP and torch.equal(part, x[MINE])
        return x.clone()

    def scatter(gradient: Tensor, group: object) -> Tensor:
        assert group is GROUP and gradient.shape == x.shape
        return gradient[MINE].clone()

    monkeypatch.setattr(fused_head, "gather_from_sequence_parallel_region", gather)
    monkeypatch.setattr(fused_head, "reduce_scatter_to_sequence_parallel_region", scatter)
    monkeypatch.setattr(fused_head, "CPU_BLOCK_TOKENS", 5)
    return x


def test_gathered_rows_are_taken_in_blocks(rows) -> None:
    """Numbers are those of one rank with all rows, and no block has more rows than it should."""
    labels, weights = torch.randint(0, VOCABULARY, (1, ROWS)), torch.rand(1, ROWS).double()
    alone, shared = Output(shared=False), Output(shared=True)
    shared.weight.data.copy_(alone.weight)
    sizes: list[int] = []
    shared.register_forward_pre_hook(lambda module, given: sizes.append(given[0].shape[0]))
    whole, half = rows.clone().requires_grad_(), rows[MINE].clone().requires_grad_()
    expected, found = (
        run(output, hidden, labels, weights) for output, hidden in ((alone, whole), (shared, half))
    )
    for losses in (expected, found):
        (losses * weights).sum().backward()
    assert sizes == [5, 5, 2]
    assert torch.equal(found, expected)
    assert torch.equal(shared.weight.grad, alone.weight.grad)
    assert torch.equal(half.grad, whole.grad[MINE])


def test_the_output_layer_is_left_as_it_was(rows) -> None:
    output = Output(shared=True)
    output.fails = True
    labels, weights = torch.zeros(1, ROWS, dtype=torch.long), torch.ones(1, ROWS).double()
    with pytest.raises(torch.OutOfMemoryError):
        run(output, rows[MINE], labels, weights)
    assert output.sequence_parallel and not output.disable_grad_reduce
