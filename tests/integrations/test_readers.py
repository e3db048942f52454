"""Rows and documents of every framework's micro-batches, on shapes as its own code makes them.

scripts/upstream/integrations.py compares the same readers with the packing functions of checkouts.
"""

import functools
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from megatron_epp.frameworks.caller import Caller
from megatron_epp.frameworks.known import FRAMEWORKS, framework_of
from megatron_epp.planner.calls.microbatch import MicrobatchShape


def closing_over(module: str, **named):
    """A forward step written in ``module`` that closes over ``args`` or ``self``."""
    args, self = named.get("args"), named.get("self")

    def forward_step(data_iterator, model):
        return args, self

    forward_step.__module__ = module
    return forward_step


def method_of(module: str, **named):
    """A forward step that is a method of an object, handed on as a partial."""
    owner = type("Owner", (), {"step": lambda self, data_iterator, model: None})()
    owner.step.__func__.__module__ = module
    for name, value in named.items():
        setattr(owner, name, value)
    return functools.partial(owner.step, extra=1)


def read(step, micro_batch, tp=1, cp=1, **config) -> MicrobatchShape | None:
    framework = framework_of(step)
    assert framework is not None
    reader = framework.reader(Caller(step, SimpleNamespace(**config), tp, cp))
    return None if reader is None else reader(micro_batch)


def mask(*lengths: int, rows: int) -> torch.Tensor:
    return (torch.arange(rows)[None] < torch.tensor(lengths)[:, None]).long()


# ------------------------------------------------------------------ verl


def nested(*lengths: int) -> dict:
    tokens = [torch.zeros(length, dtype=torch.long) for length in lengths]
    return {"input_ids": torch.nested.nested_tensor(tokens, layout=torch.jagged)}


@pytest.mark.parametrize(
    ("settings", "degrees", "config", "expected"),
    [
        ({}, {}, {}, MicrobatchShape(37, 1, (5, 12, 20))),
        ({}, {"tp": 2, "cp": 2}, {}, MicrobatchShape(8 + 16 + 24, 1, (5, 12, 20))),
        ({}, {"tp": 2}, {"fp8": "hybrid"}, MicrobatchShape(256, 1, (5, 12, 20))),
        (
            {"pad_to_length": True, "pad_to_length_bucket": 100},
            {},
            {},
            MicrobatchShape(100, 1, (5, 12, 20)),
        ),
        ({"use_remove_padding": False}, {"tp": 8}, {}, MicrobatchShape(24, 3, (5, 12, 20))),
        ({"dynamic_context_parallel": True}, {}, {}, None),
        ({}, {}, {"experimental_attention_variant": "dsv4_hybrid"}, None),
    ],
)
def test_verl(settings, degrees, config, expected) -> None:
    settings = SimpleNamespace(**({"use_remove_padding": True, "pad_to_length": False} | settings))
    step = method_of("verl.workers.engine.megatron.transformer_impl", engine_config=settings)
    assert read(step, nested(5, 12, 20), **degrees, **config) == expected


# ------------------------------------------------------------------ slime, miles


class Source:
    """As far as a reader asks a source that is read at an offset."""

    def __init__(self, lengths, longest=None):
        self.tokens = [torch.zeros(length) for length in lengths]
        self.longest = longest and [longest] * len(lengths)

    def get_next(self, keys):
        known = {"tokens": self.tokens, "max_seq_lens": self.longest}
        return {key: known[key] for key in keys}


@pytest.mark.parametrize("module", ["slime.backends.megatron_utils.model", "miles.backends.x"])
@pytest.mark.parametrize(
    ("args", "degrees", "expected"),
    [
        ({}, {}, MicrobatchShape(48, 1, (5, 12, 20))),
        ({}, {"tp": 2, "cp": 2}, MicrobatchShape(64, 1, (5, 12, 20))),  # 8 + 12 + 20 = 40, by 64
        ({"allgather_cp": True}, {"cp": 2}, MicrobatchShape(64, 1, (5, 12, 20))),  # 37, by 32
    ],
)
def test_slime_and_miles(module, args, degrees, expected) -> None:
    args = SimpleNamespace(data_pad_size_multiplier=16, **args)
    step = closing_over(module, args=args)
    assert read(step, Source((5, 12, 20)), **degrees) == expected

    def wrapped(*words, **named):  # a bar of progress around it
        return forward_step_func(*words, **named)

    forward_step_func = step
    wrapped.__module__ = module
    assert read(wrapped, Source((5, 12, 20)), **degrees) == expected


def test_miles_side_by_side() -> None:
    args = SimpleNamespace(data_pad_size_multiplier=16, qkv_format="bshd")
    step = closing_over("miles.backends.megatron_utils.model", args=args)
    assert read(step, Source((5, 12), 24)) == MicrobatchShape(24, 2, (5, 12))
    assert read(step, Source((5, 12), 24), cp=5) == MicrobatchShape(30, 2, (5, 12))


# ------------------------------------------------------------------ the others


def test_swift() -> None:
    places = torch.cat([torch.arange(5), torch.arange(12), torch.arange(3)])[None]
    step = method_of("swift.megatron.trainers.trainer", args=SimpleNamespace(padding_free=True))
    in_a_row = {"input_ids": torch.zeros(1, 20, dtype=torch.long), "position_ids": places}
    assert read(step, in_a_row) == MicrobatchShape(20, 1, (5, 12, 3))
    of_pictures = in_a_row | {"position_ids": torch.zeros(3, 1, 20), "text_position_ids": places}
    assert read(step, of_pictures) == MicrobatchShape(20, 1, (5, 12, 3))
    step = method_of("swift.megatron.trainers.trainer", args=SimpleNamespace(padding_free=False))
    samples = {"input_ids": torch.zeros(2, 20), "position_ids": torch.arange(20).expand(2, 20)}
    assert read(step, samples) == MicrobatchShape(20, 2)


@pytest.mark.parametrize(
    "boundaries",
    [{"cu_seqlens_q": [0, 5, 17, 20]}, {"cu_seqlens": [0, 5, 17, 20, -1, -1]}],
)
def test_bridge(boundaries) -> None:
    step = closing_over("megatron.bridge.training.gpt_step")
    batch = {"tokens": torch.zeros(1, 20)} | {k: torch.tensor([v]) for k, v in boundaries.items()}
    assert read(step, batch) == MicrobatchShape(20, 1, (5, 12, 3))
    assert read(step, {"tokens": torch.zeros(2, 20)}) == MicrobatchShape(20, 2)


def test_nemo_rl() -> None:
    step = functools.partial(closing_over("nemo_rl.models.megatron.train"), draft_model=None)
    batch = SimpleNamespace(
        input_ids=torch.zeros(1, 24), cu_seqlens_padded=torch.tensor([0, 8, 24])
    )
    assert read(step, batch) == MicrobatchShape(24, 1, (8, 16))
    samples = SimpleNamespace(input_ids=torch.zeros(2, 24), cu_seqlens_padded=None)
    assert read(step, samples) == MicrobatchShape(24, 2)


@pytest.mark.parametrize(
    ("packed", "degrees", "config", "expected"),
    [
        (True, {"tp": 2, "cp": 2}, {}, MicrobatchShape(8 + 16 + 24, 1, (5, 12, 20))),
        (True, {"cp": 2}, {"fp8": "e4m3"}, MicrobatchShape(3 * 32, 1, (5, 12, 20))),
        (False, {"tp": 8}, {}, MicrobatchShape(24, 3, (5, 12, 20))),
    ],
)
def test_skyrl(packed, degrees, config, expected, monkeypatch) -> None:
    monkeypatch.setattr(metadata, "version", {"skyrl": "0.3.1"}.__getitem__)
    wrapper = SimpleNamespace(remove_microbatch_padding=packed)
    step = closing_over("skyrl.backends.skyrl_train.workers.megatron.x", self=wrapper)
    batch = {"sequences": torch.zeros(3, 32), "attention_mask": mask(5, 12, 20, rows=32)}
    assert read(step, batch, **degrees, **config) == expected


@pytest.mark.parametrize(
    ("packed", "degrees", "config", "multiple"),
    [
        (True, {}, {"fp8_recipe": "blockwise"}, 16),
        (True, {"cp": 2}, {"fp8_recipe": "blockwise"}, 32),
        (True, {"tp": 2}, {"fp8_recipe": "blockwise"}, 256),
        (True, {"tp": 2, "cp": 2}, {}, 512),
        (True, {}, {"fp8_recipe": "mxfp8"}, 32),
        (True, {"tp": 2, "cp": 2}, {"fp8_recipe": SimpleNamespace(value="mxfp8")}, 128),
        (False, {"tp": 2}, {"fp8_recipe": "mxfp8"}, 64),
        (False, {"tp": 2}, {"fp8_recipe": "blockwise"}, 256),
        (True, {"tp": 2}, {"fp8_recipe": "auto"}, None),
    ],
)
@pytest.mark.parametrize("release", ["0.4.0", "0.4.1.dev3", None])
def test_skyrl_in_fp8(packed, degrees, config, multiple, release, monkeypatch) -> None:
    """From 0.4.0 on; a checkout that pip does not know of is taken for the newest."""

    def version(name: str) -> str:
        if release is None:
            raise metadata.PackageNotFoundError(name)
        return {"skyrl": release}[name]

    monkeypatch.setattr(metadata, "version", version)
    wrapper = SimpleNamespace(remove_microbatch_padding=packed)
    step = closing_over("skyrl.backends.skyrl_train.workers.megatron.x", self=wrapper)
    batch = {"sequences": torch.zeros(3, 32), "attention_mask": mask(5, 12, 20, rows=32)}
    found = read(step, batch, **degrees, fp8="e4m3", **config)
    lengths = (5, 12, 20)
    if multiple is None:
        assert found is None
    elif packed:
        rows = sum(-(-length // multiple) * multiple for length in lengths)
        assert found == MicrobatchShape(rows, 1, lengths)
    else:
        assert found == MicrobatchShape(multiple, 3, lengths)


def test_skyrl_rows_of_several_documents() -> None:
    wrapper = SimpleNamespace(remove_microbatch_padding=True)
    step = closing_over("skyrl.backends.skyrl_train.workers.megatron.x", self=wrapper)
    parts = [torch.tensor([5, 12]), torch.tensor([20])]
    batch = {"attention_mask": mask(17, 20, rows=32), "sub_seq_lengths": parts}
    assert read(step, batch, tp=4) == MicrobatchShape(8 + 12 + 20, 1, (5, 12, 20))


def test_areal() -> None:
    step = closing_over("areal.engine.megatron_engine")
    item = SimpleNamespace(padded_mb={"cu_seqlens": torch.tensor([0, 8, 24, 256])})
    assert read(step, item) == MicrobatchShape(256, 1, (8, 16, 232))
    assert read(step, SimpleNamespace(padded_mb={"trie_node": 1})) is None
    engine = SimpleNamespace(use_padded_seq=True)  # of layers that take no packed documents
    assert read(closing_over("areal.engine.megatron_engine", self=engine), item) == (
        MicrobatchShape(232, 3, (8, 16, 232))
    )


def test_roll() -> None:
    strategy = "roll.distributed.strategy.megatron_strategy"
    batch = {"input_ids": torch.zeros(3, 32), "attention_mask": mask(5, 12, 20, rows=32)}
    step = method_of(strategy, use_sequence_packing=True)
    packed = read(step, SimpleNamespace(batch=batch), tp=2, cp=4)
    assert packed == MicrobatchShape(16 + 16 + 32, 1, (5, 12, 20))
    step = method_of(strategy, use_sequence_packing=False)
    assert read(step, SimpleNamespace(batch=batch), cp=2) == MicrobatchShape(32, 3, (5, 12, 20))
    trainer = method_of("mcore_adapter.trainer.trainer")
    assert read(trainer, batch) == MicrobatchShape(32, 3, (5, 12, 20))


# ------------------------------------------------------------------ who is known


def test_every_framework_is_found_by_where_its_forward_step_is_written() -> None:
    for framework in FRAMEWORKS:
        for package in framework.packages:
            assert framework_of(closing_over(f"{package}.training.step")) is framework
    for module in ("megatron.core", "__main__", "verlorn.engine", "my.verl.engine"):
        assert framework_of(closing_over(module)) is None


def test_what_cannot_be_known_is_not_guessed() -> None:
    """A forward step that closes over nothing: of slime's no padding, of verl's no engine."""
    assert read(closing_over("slime.model"), None) is None
    assert read(closing_over("verl.engine"), None) is None
