"""What kinds of layers there are is known to their registries alone: nobody else asks.

A kind's own modules are those of ``cost/kinds`` and ``mcore/kinds``. Any other module that imports
one of them, or a class of Megatron's that only one kind has, or that reads a flag or a size that
only one kind has, knows a kind: that is a method of ``LayerKind``, or of ``Part``, instead.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields

import pytest

from megatron_epp.cost.kinds.layer import LayerShape
from tests.programs import ROOT

PACKAGE = "megatron_epp"
FOLDER = ROOT / PACKAGE
OWN = (
    "cost/kinds/",
    "mcore/kinds/",
)
REGISTRIES = (
    "cost.kinds.base",
    "cost.kinds.layer",
    "mcore.kinds.base",
    "mcore.kinds.certificate_base",
    "mcore.kinds.certificates",
    "mcore.kinds.limit",
    "mcore.kinds.modules",
    "mcore.kinds.mtp.mtp_layers",
    "mcore.kinds.positions",
    "mcore.kinds.registry",
)
OF_MEGATRON = (
    "megatron.core.transformer.moe",
    "megatron.core.transformer.multi_latent_attention",
    "megatron.core.transformer.experimental_attention_variant",
    "megatron.core.ssm",
)
# Flags, settings and sizes of one kind of layer, as args, configurations and LayerShape have them.
FIELDS = re.compile(
    r"num_experts|num_moe_experts|moe_\w+|active_experts|expert_hidden|shared_hidden"
    r"|multi_latent_attention|(kv|q)_lora_rank|qk_head_dim|qk_pos_emb_head_dim|v_head_dim"
    r"|dsa_\w+|kv_rank|query_rank|rotary_size|value_size"
    r"|window_size|window_attn_skip_freq|softmax_type|mamba_\w+|linear_\w+_head_dim"
)
SIZES = {field.name for field in fields(LayerShape)}
ALLOWED = {
    "mcore/model/stage.py": "statistics of routers are one ledger for the stage and its iteration",
    "cost/catalogue/hub_shape.py": "reads all kinds of layers out of the keys of a config.json",
    "cost/catalogue/megatron_flags.py": "writes flags of all kinds, without importing mcore",
    "mcore/certify/routing.py": "a certificate compares what routers leave beside gradients",
}


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of every import (all are absolute); import_module("...") is one."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, name.name) for name in names)
            case ast.ImportFrom(module=origin, names=names):
                yield from ((node.lineno, f"{origin}.{name.name}") for name in names)
            case ast.Call(
                func=ast.Name(id=called) | ast.Attribute(attr=called),
                args=[ast.Constant(value=str(name)), *_],
            ) if called in {"import_module", "__import__"}:
                yield node.lineno, name


def every_source() -> dict[str, str]:
    return {
        ".".join([PACKAGE, *file.relative_to(FOLDER).with_suffix("").parts]).removesuffix(
            ".__init__"
        ): file.read_text()
        for file in sorted(FOLDER.rglob("*.py"))
    }


def of_a_kind(name: str) -> bool:
    """Whether ``name``, of a module, is in the package of one kind, and of no registry."""
    if any(name == each or name.startswith(f"{each}.") for each in OF_MEGATRON):
        return True
    within = name.removeprefix(f"{PACKAGE}.")
    if within == name or any(within.startswith(each) for each in REGISTRIES):
        return False
    path = within.replace(".", "/")
    return any(path.startswith(each.removesuffix(".py")) for each in OWN) and path + "/" not in OWN


def known_kinds(path: str, source: str) -> Iterator[str]:
    """Places where the module at ``path`` knows a kind of layer; kinds' own may."""
    if path.startswith(OWN):
        return
    for line, name in imports(source):
        if of_a_kind(name):
            yield f"{path}:{line}: imports {name}"
    nodes = list(ast.walk(ast.parse(source)))
    asked = {id(arg) for node in nodes if isinstance(node, ast.Call) for arg in node.args}
    for node in nodes:
        match node:
            case ast.Attribute(attr=name):
                pass
            case ast.Constant(value=name) if id(node) in asked:
                pass
            case _:
                continue
        of_shape = isinstance(node, ast.Attribute) and re.search(
            r"(^|\.)shape$", ast.unparse(node.value)
        )
        if FIELDS.fullmatch(str(name)) or (of_shape and name in SIZES):
            yield f"{path}:{node.lineno}: reads {name}"


def test_nobody_else_knows_a_kind() -> None:
    found = {}
    for file in sorted(FOLDER.rglob("*.py")):
        path = str(file.relative_to(FOLDER))
        if lines := list(known_kinds(path, file.read_text())):
            found[path] = lines
    assert set(found) == set(ALLOWED), "\n".join(line for said in found.values() for line in said)


@pytest.mark.parametrize(
    "source",
    [
        "from megatron_epp.mcore.kinds.moe.kind import MoEKind",
        "def late():\n    from megatron_epp.mcore.kinds.moe import router",
        "from megatron_epp.cost.kinds.mla import MLAPart",
        "from megatron_epp.mcore.kinds.mla.module import MLALayer",
        "from megatron.core.transformer.moe.moe_layer import MoELayer",
        "def groups(args):\n    return [1] if args.num_experts else []",
        "def size(config):\n    return getattr(config, 'multi_latent_attention', False)",
        "def tail(layer):\n    return layer.shape.window",
        "def tail(shape):\n    return shape.kv_rank if shape.rotary_size else 0",
    ],
)
def test_the_guard_sees_it(source: str) -> None:
    assert list(known_kinds("mcore/choose/choices.py", source))
    assert not list(known_kinds("mcore/kinds/toys/kind.py", source))


@pytest.mark.parametrize(
    "source",
    [
        "from megatron_epp.mcore.kinds.registry import LAYER_KINDS",
        "from megatron_epp.cost.kinds.layer import LayerShape",
        "from megatron.core.transformer.identity_op import IdentityOp",
        "def groups(args):\n    return args.num_layers",
    ],
)
def test_the_guard_lets_pass(source: str) -> None:
    assert not list(known_kinds("mcore/choose/choices.py", source))


def test_the_guard_knows_every_flag_of_a_kind() -> None:
    from megatron_epp.mcore.kinds.registry import LAYER_KINDS

    asked = {name for kind in LAYER_KINDS for name in kind.FLAGS}
    assert asked
    assert {name for name in asked if not FIELDS.fullmatch(name)} == set()
