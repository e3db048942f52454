"""Adapters of frameworks, on micro-batches and forward steps of their shapes: what they cut, what
their losses meet, and what they refuse. scripts/upstream runs the frameworks' own steps."""

import functools
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from megatron_epp.frameworks.nemo_rl.slices import NemoSamples
from megatron_epp.frameworks.slime.slices import SlimeSamples
from megatron_epp.frameworks.swift.slices import SwiftPacks
from megatron_epp.frameworks.verl.slices import VerlSamples
from megatron_epp.mcore.loops.adapter import forest_of
from megatron_epp.mcore.loops.adapters import token_samples
from megatron_epp.mcore.loops.adapters.token_samples import zigzag_part
from megatron_epp.mcore.loops.microbatch_iterators import MicroBatches

LENGTHS = (3, 5)
TOKENS = [torch.tensor([7, 8, 9]), torch.tensor([7, 8, 1, 2, 3])]


def with_two_columns() -> list[torch.Tensor]:
    """Outputs of two samples: log-probabilities and entropies of their tokens."""
    return [torch.randn(length, 2, requires_grad=True) for length in LENGTHS]


def spans(adapter, batch) -> list[list[list[int]]]:
    """Tokens and labels of the second sample's rows 1 to 5."""
    rows = adapter.rows(batch, 1, 1, 5)
    return [rows[name].tolist() for name in ("tokens", "labels")]


def model() -> SimpleNamespace:
    return SimpleNamespace(training=True, module=SimpleNamespace(vp_stage=None))


@pytest.fixture(params=[0, 1])
def rank(request, monkeypatch) -> int:
    """This process is one of two context-parallel ranks."""
    for name, value in (("world_size", 2), ("rank", request.param)):
        found = f"get_context_parallel_{name}"
        monkeypatch.setattr(token_samples.mpu, found, lambda value=value: value)
    return request.param


def test_rows_of_a_context_parallel_rank(rank) -> None:
    whole = torch.arange(1.0, 6.0, requires_grad=True)
    assert zigzag_part(whole).tolist() == [[1, 2, 0, 0], [3, 4, 5, 0]][rank]
    zigzag_part(whole).sum().backward()
    assert whole.grad.tolist() == [[1, 1, 0, 0, 0], [0, 0, 1, 1, 1]][rank]
    assert zigzag_part(torch.ones(2, 3)).sum() == 3  # one row each, the others are padding


# ------------------------------------------------------------------ slime


class Source:
    """As slime's DataIterator: keys are read at an offset."""

    offset, micro_batch_indices = 0, ((0, 1),)

    def get_next(self, keys):
        self.offset += 1
        return {key: TOKENS if key == "tokens" else None for key in keys}


def slime_args(**changed) -> SimpleNamespace:
    known = {
        "context_parallel_size": 1, "rollout_top_p": 1.0, "loss_type": "policy_loss",
        "rollout_temperature": 1.0, "recompute_loss_function": True,
    }  # fmt: skip
    return SimpleNamespace(**known | changed)


def calculate_log_probs_and_entropy(logits, tokens, group, with_entropy=False, **others):
    raise AssertionError("made of logits that nobody has")


def slimes_loss(args, batch, logits):
    """As slime's: it asks for log-probabilities by name, and could be made again in a backward."""
    assert logits.dtype == torch.float32 and not args.recompute_loss_function
    found, entropy = calculate_log_probs_and_entropy(
        logits[0], None, None, with_entropy=True, with_entropy_grad=False
    )
    return (found[:, 0] ** 2).sum() + entropy.sum(), {"rows": len(found)}


def slimes_step(data_iterator, model):
    assert model.module.vp_stage is None
    batch, args = data_iterator.get_next(["tokens"]), slime_args()
    return model(batch["tokens"]), functools.partial(slimes_loss, args, batch)


def test_slimes_loss_finds_log_probabilities_in_the_place_of_logits() -> None:
    batch, adapter = MicroBatches(Source(), 1).item(0), SlimeSamples(slime_args())
    assert adapter.lengths(batch) == LENGTHS
    assert spans(adapter, batch) == [[[8, 1, 2, 3]], [[1, 2, 3, 0]]]
    adapter.sliced(slimes_step, model())
    outputs = with_two_columns()
    loss, report = adapter.loss(batch, outputs)
    assert report == {"rows": 8}
    loss.backward()
    for one in outputs:
        assert torch.equal(one.grad[:, 0], 2 * one[:, 0].detach())
        assert not one.grad[:, 1].any()  # its entropies carry no gradient
    with pytest.raises(AssertionError, match="nobody has"):  # the name is slime's own again
        calculate_log_probs_and_entropy(None, None, None)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"context_parallel_size": 2, "allgather_cp": True}, "ask for allgather_cp, which lays"),
        ({"rollout_top_p": 0.9}, "ask for rollout_top_p below 1, which leaves words out"),
        ({"loss_type": "custom_loss"}, "ask for loss_type custom_loss, which takes logits"),
        ({"use_routing_replay": True}, "ask for routing replay"),
    ],
)
def test_slimes_arguments_that_slices_do_not_serve(changed, says) -> None:
    with pytest.raises(ValueError, match=says):
        SlimeSamples(slime_args(**changed))


# ------------------------------------------------------------------ ms-swift


def pack() -> dict:
    tokens = torch.cat(TOKENS)[None]
    places = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return {"input_ids": tokens, "labels": tokens.clone(), "position_ids": places}


class MegatronTrainer:
    """As ms-swift's: its forward step shifts labels where they are, for its loss."""

    def __init__(self, **args):
        self.args = SimpleNamespace(**{"task_type": "causal_lm", "context_parallel_size": 1} | args)

    def forward_step(self, data_iterator, model):
        assert model.module.vp_stage is None
        data = next(data_iterator)
        data["labels"] = torch.roll(data["labels"], -1, dims=-1)
        return model(**data), lambda output: (output * data["labels"]).sum()


def test_swifts_documents_begin_where_positions_do() -> None:
    batch, adapter = pack(), SwiftPacks()
    assert adapter.lengths(batch) == LENGTHS
    rows = adapter.rows(batch, 0, 1, 3)
    assert rows["input_ids"].tolist() == [[8, 9]]
    assert rows["labels"].tolist() == [[9, 7]]  # shifted along the pack, as swift does
    adapter.sliced(MegatronTrainer().forward_step, model())
    outputs = [torch.ones(length, requires_grad=True) for length in LENGTHS]
    adapter.loss(batch, outputs).backward()
    assert outputs[0].grad.tolist() == [8, 9, 7]
    assert outputs[1].grad.tolist() == [8, 1, 2, 3, 7]
    assert torch.equal(batch["labels"], batch["input_ids"])  # as they were


def test_swifts_loss_is_of_the_rows_that_it_cuts_for_a_rank(rank) -> None:
    """Documents that it pads to twice the ranks, with documents of nothing behind them."""
    places = torch.cat([torch.arange(4), torch.arange(8), torch.arange(4)])[None]
    batch = {name: 100 + torch.arange(16)[None] for name in ("input_ids", "labels")}
    adapter, met = SwiftPacks(), []

    class Trainer(MegatronTrainer):
        def forward_step(self, data_iterator, model):
            next(data_iterator)
            return None, lambda output: met.append(output)

    Trainer.forward_step.__qualname__ = "MegatronTrainer.forward_step"
    adapter.sliced(Trainer(context_parallel_size=2).forward_step, model())
    assert adapter.lengths({**batch, "position_ids": places}) == (4, 8, 4)
    adapter.loss({**batch, "position_ids": places}, torch.arange(16.0).split([4, 8, 4]))
    own = [[0, 3, 4, 5, 10, 11, 12, 15], [1, 2, 6, 7, 8, 9, 13, 14]][rank]
    assert met[0].tolist() == [own] and adapter.partial_loss


def test_swift_micro_batches_and_trainers_that_slices_do_not_serve() -> None:
    adapter, whole = SwiftPacks(), pack()
    with pytest.raises(ValueError, match=r"has pixel_values; its slices are of text"):
        adapter.lengths({**whole, "pixel_values": torch.ones(1)})
    beside = {name: one.expand(2, -1) for name, one in whole.items()}
    with pytest.raises(ValueError, match=r"input_ids \[2, 8\].*expected packed samples"):
        adapter.lengths(beside)
    with pytest.raises(ValueError, match="the forward step is slimes_step; expected Megatron"):
        adapter.sliced(slimes_step, model())
    with pytest.raises(ValueError, match="ask for task_type seq_cls"):
        adapter.sliced(MegatronTrainer(task_type="seq_cls").forward_step, model())
    others = {"context_parallel_size": 2, "cp_partition_mode": "contiguous"}
    with pytest.raises(ValueError, match="ask for cp_partition_mode contiguous; leave it out"):
        adapter.sliced(MegatronTrainer(**others).forward_step, model())


# ------------------------------------------------------------------ verl


class Batch(dict):
    """As far as a TensorDict is asked."""

    def to(self, device):
        return self


class Engine:
    enable_routing_replay = False

    def __init__(self, **changed):
        off = "context_parallel_size", "dynamic_context_parallel", "use_fused_kernels"
        known = dict.fromkeys((*off, "pad_to_length"), 0) | {"use_remove_padding": True}
        self.engine_config = SimpleNamespace(**known | changed)

    def forward_step(self, batch_iter, model, logits_processor_func, postprocess_micro_batch_func):
        raise AssertionError("slices are drawn by ours")

    def step(self, loss):
        finish = functools.partial(self.finish, loss)
        return functools.partial(
            self.forward_step, logits_processor_func=loss, postprocess_micro_batch_func=finish
        )

    def finish(self, loss, output, data):
        return loss(output, data), {"keys": sorted(output)}


def verls_batch(**others) -> Batch:
    nested = torch.nested.as_nested_tensor(TOKENS, layout=torch.jagged)
    return Batch(input_ids=nested, temperature=torch.tensor([1.0, 0.5]), **others)


@pytest.mark.parametrize("entropy", [False, True])
def test_verls_loss_gets_nested_log_probabilities(entropy) -> None:
    batch, adapter = verls_batch(calculate_entropy=entropy), VerlSamples()
    assert tuple(adapter.lengths(batch)) == LENGTHS
    # Labels are shifted along the pack; samples of 5 tokens are padded for 2 tensor ranks.
    assert spans(adapter, batch) == [[[8, 1, 2, 3]], [[1, 2, 3, 7]]]
    assert spans(VerlSamples(tensor_ranks=2), batch)[1] == [[1, 2, 3, 0]]
    assert adapter.rows(batch, 1, 1, 5)["temperature"].tolist() == [[0.5] * 4]
    # Of two tokens alike the second is followed by another one; and what is sampled more coldly
    # has other log-probabilities.
    alike = Batch({**batch, "temperature": 1.0})
    shares = [
        forest_of(adapter, each, 0, 8, n).shares for each, n in ((alike, 2), (alike, 1), (batch, 1))
    ]
    assert shares == [False, True, False]

    def loss(output, data):
        assert output["log_probs"].offsets().tolist() == [0, 3, 8]
        return (output["log_probs"].values() * torch.arange(8.0)).sum()

    adapter.sliced(Engine().step(loss), model())
    outputs = with_two_columns()
    made, report = adapter.loss(batch, outputs)
    assert report["keys"] == (["entropy", "log_probs"] if entropy else ["log_probs"])
    made.backward()
    assert [one.grad[:, 0].tolist() for one in outputs] == [[0, 1, 2], [3, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("release", "label"), [("0.8.2", 7), ("0.9.0", 7), ("0.9.1", 0), ("0.10.0.dev0", 0)]
)
def test_verls_context_parallel_ranks_count_a_sample_once(release, label, monkeypatch) -> None:
    """A sample's last label is its first token, or padding: of a short one, and from 0.9.1 on of
    every sample that is padded. Each of its ranks tells a share of the tokens."""
    monkeypatch.setattr(metadata, "version", {"verl": release}.__getitem__)
    batch, adapter = verls_batch(), VerlSamples(context_ranks=2)
    assert spans(adapter, batch)[1] == [[1, 2, 3, label]]
    assert adapter.rows(batch, 0, 2, 3)["labels"].tolist() == [[0]]
    assert adapter.after([torch.tensor([9, 8, 7, 6])], 0) == 9  # as long as its rows
    assert adapter.lengths(batch) == LENGTHS

    class OfTokens(Engine):
        def finish(self, loss, output, data):
            return output["log_probs"].values().sum(), torch.tensor(4), {}

    adapter.sliced(OfTokens(context_parallel_size=2).step(None), model())
    assert adapter.loss(batch, with_two_columns())[1] == 8


def test_verls_engines_and_micro_batches_that_slices_do_not_serve() -> None:
    adapter = VerlSamples()
    for name in ("use_fused_kernels", "dynamic_context_parallel", "pad_to_length"):
        with pytest.raises(ValueError, match=f"its engine asks for {name}"):
            adapter.sliced(Engine(**{name: True}).step(None), model())
    with pytest.raises(ValueError, match="is not its Megatron engine's"):
        adapter.sliced(functools.partial(slimes_step), model())
    with pytest.raises(ValueError, match="asks for distillation_use_topk; slices give"):
        adapter.lengths(verls_batch(distillation_use_topk=True))
    with pytest.raises(ValueError, match="asks for multi_modal_inputs"):
        adapter.lengths(verls_batch(multi_modal_inputs=[{"pixel_values": 1}]))


# ------------------------------------------------------------------ NeMo-RL


class TheirLoss:
    use_fused_linear_logprobs = False

    def __init__(self, takes: str = "logprob"):
        self.input_type = SimpleNamespace(value=takes)

    def __call__(self, data, made):
        assert self.use_fused_linear_logprobs
        return (made[:, :-1] * data["weights"]).sum(), {}


class LossPostProcessor:
    """As NeMo-RL's, which is known by its name."""

    def __init__(self, loss_fn, prepare_fn=None):
        self.loss_fn, self.prepare_fn = loss_fn, prepare_fn

    def __call__(self, data_dict, packed_seq_params, global_valid_seqs, global_valid_toks):
        assert packed_seq_params is global_valid_seqs is None and global_valid_toks == 6
        return functools.partial(self.loss_fn, data_dict)


class LogprobsPostProcessor:
    use_fused_linear_logprobs = False

    def __call__(self, data_dict, input_ids, cu_seqlens_padded):
        assert self.use_fused_linear_logprobs
        return lambda made: (None, made)


class MultimodalBatch(Batch):
    def get_multimodal_dict(self, **how):
        return self.get("pictures", {})


def nemos_batch(**others) -> SimpleNamespace:
    tokens = torch.stack([torch.tensor([7, 8, 9, 0, 0]), TOKENS[1]])
    data = MultimodalBatch(input_ids=tokens, input_lengths=torch.tensor(LENGTHS), **others)
    return SimpleNamespace(data_dict=data)


def nemos_step(processor, **named):
    return functools.partial(slimes_step, post_processing_fn=processor, **named)


def test_nemo_rls_loss_gets_log_probabilities_side_by_side() -> None:
    adapter, weights = NemoSamples(), torch.arange(8.0).view(2, 4)
    batch, processor = nemos_batch(weights=weights), LossPostProcessor(TheirLoss())
    assert tuple(adapter.lengths(batch)) == LENGTHS
    assert spans(adapter, batch) == [[[8, 1, 2, 3]], [[1, 2, 3, 0]]]
    adapter.sliced(nemos_step(processor, global_valid_toks=6), model())
    outputs = [torch.ones(length, requires_grad=True) for length in LENGTHS]
    loss, _ = adapter.loss(batch, outputs)
    loss.backward()
    assert [one.grad.tolist() for one in outputs] == [[0, 1, 2], [4, 5, 6, 7, 0]]
    assert not processor.loss_fn.use_fused_linear_logprobs  # as it was
    adapter.sliced(nemos_step(LogprobsPostProcessor()), model())
    assert adapter.loss(batch, outputs)[1].tolist() == [[1, 1, 1, 0, 0], [1] * 5]


@pytest.mark.parametrize(
    ("processor", "named", "says"),
    [
        (None, {}, "post-processed by NoneType; expected LossPostProcessor or Logprobs"),
        (LossPostProcessor(TheirLoss("logit")), {}, "asks for a loss of logits, where slices give"),
        (LossPostProcessor(TheirLoss(), print), {}, "asks for a prepare_fn, which takes logits"),
        (LogprobsPostProcessor(), {"draft_model": 1}, "asks for a draft model; leave it out, or"),
        (LogprobsPostProcessor(), {"use_router_replay": True}, "asks for router replay"),
        (
            LogprobsPostProcessor(),
            {"sampling_params": SimpleNamespace(top_k=None, top_p=0.9, temperature=1.0)},
            "asks for top-k or top-p sampling, which leaves words out",
        ),
    ],
)
def test_nemo_rls_steps_that_slices_do_not_serve(processor, named, says) -> None:
    with pytest.raises(ValueError, match=says):
        NemoSamples().sliced(nemos_step(processor, **named), model())


def test_nemo_rls_pictures_are_refused() -> None:
    with pytest.raises(ValueError, match="has pixels; its slices are of text"):
        NemoSamples().lengths(nemos_batch(pictures={"pixels": 1}))


# ------------------------------------------------------------------ Megatron-Bridge


def test_bridges_stored_schedule_is_replaced_before_its_first_callback(monkeypatch) -> None:
    """Its train() asks for the schedule before on_train_start."""
    from megatron.core.pipeline_parallel import schedules

    from megatron_epp.mcore.loops.install import installed

    callbacks = SimpleNamespace(Callback=type("Callback", (), {}))
    losses = SimpleNamespace(masked_next_token_loss=lambda mask, losses: (losses * mask).sum())
    monkeypatch.setitem(sys.modules, "megatron.bridge.training.callbacks", callbacks)
    monkeypatch.setitem(sys.modules, "megatron.bridge.training.losses", losses)
    from megatron_epp.frameworks.bridge.slices import slices_callback

    attached = {}
    monkeypatch.setattr(
        "megatron_epp.attach", lambda model, adapter, **named: attached.update(named, of=adapter)
    )
    callback = slices_callback(memory_gib=40)
    try:
        stored = schedules.forward_backward_pipelining_without_interleaving
        assert stored.__megatron_epp__ is installed()
        callback.on_train_start(SimpleNamespace(model=[model()]))
    finally:
        installed().remove()
    assert attached["memory_gib"] == 40
    batch = {"loss_mask": torch.tensor([[1.0, 0.0]])}
    assert attached["of"].loss_of(batch, torch.tensor([[2.0, 3.0]])) == 2
