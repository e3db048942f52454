"""A choice in a framework's own words: its degrees, layers, recompute and tokens of a micro-batch.

What these frameworks run is Megatron's own schedule with whole documents packed (in any order, by
level 0): of the survey's choices the fastest that needs no more, and what its plans recompute.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import KEEP, Plan
from megatron_epp.planner.choose.partition import layout_flags, layout_text
from megatron_epp.planner.options import Options
from megatron_epp.planner.tuning.layouts import Layout
from megatron_epp.planner.tuning.survey import STOCK, Choice, Survey, heaviest_plan

MEGATRON, BRIDGE, VERL, SLIME, SWIFT = "megatron", "bridge", "verl", "slime", "ms-swift"
FRAMEWORKS = (MEGATRON, BRIDGE, VERL, SLIME, SWIFT)
_ACTOR = "actor_rollout_ref.actor."


@dataclass(frozen=True, slots=True)
class StockSettings:
    """A job that Megatron's own schedule runs.

    layers       of the stages
    recomputed   of each, the most in any micro-batch
    tokens       of a micro-batch, over all ranks that share it
    ep           ranks that share a layer's experts
    """

    layout: Layout
    layers: tuple[int, ...]
    recomputed: int
    tokens: int
    ep: int = 1


def require_framework(name: str) -> None:
    """ValueError: it is not known."""
    if name not in FRAMEWORKS:
        raise ValueError(f"--for {name}: expected one of {', '.join(FRAMEWORKS)}")


def recomputed_layers(plans: Iterable[Plan]) -> int:
    """Most layers that a stage recomputes of any micro-batch."""
    return max(
        len(letters) - letters.count(KEEP)
        for plan in plans
        for of_stage in plan.recompute
        for letters in of_stage
    )


def stock_choice(
    made: Survey,
    batches: Sequence[Sequence[int]],
    cost_for: Callable[[Layout], Cost],
    options: Options,
    tokens: int,
) -> tuple[Choice, StockSettings]:
    """The fastest choice that Megatron's own schedule runs, and its settings. ValueError: no layout
    does without --epp."""
    choice = next((one for one in made.choices if one.planner == STOCK), None)
    if choice is None:
        raise ValueError(
            "no layout fits by Megatron's own schedule with documents packed, and frameworks run "
            "no other; without --for, tune looks at --epp"
        )
    cost = dataclasses.replace(cost_for(choice.layout), layers=choice.layers)
    plans = (heaviest_plan(lengths, cost, options, STOCK)[0].plan for lengths in batches)
    recomputed = recomputed_layers(plans)
    return choice, StockSettings(choice.layout, choice.layers, recomputed, tokens, choice.ep)


def settings_of(framework: str, job: StockSettings) -> list[str]:
    """Lines for ``framework``: flags, overrides, or a recipe's fields.

    ValueError: it cannot say them.
    """
    unit = 2 * job.layout.cp * job.layout.tp  # every rank has two parts of a document
    job = dataclasses.replace(job, tokens=-(-job.tokens // unit) * unit)
    say = {BRIDGE: _bridge, VERL: _verl, SLIME: _slime, SWIFT: _swift}.get(framework, _megatron)
    return list(say(job))


def _degrees(job: StockSettings) -> Iterator[tuple[str, str]]:
    layout = job.layout
    yield "tensor_model_parallel_size", str(layout.tp)
    yield "pipeline_model_parallel_size", str(layout.pp)
    yield "context_parallel_size", str(layout.cp)
    if job.ep > 1:
        yield "expert_model_parallel_size", str(job.ep)
        yield "expert_tensor_parallel_size", "1"


def _recompute(layers: int) -> Iterator[tuple[str, str]]:
    if layers:
        yield "recompute_granularity", "full"
        yield "recompute_method", "block"
        yield "recompute_num_layers", str(layers)


def _megatron(job: StockSettings) -> Iterator[str]:
    for name, value in (*_degrees(job), *_recompute(job.recomputed)):
        yield f"--{name.replace('_', '-')} {value}"
    if job.layout.tp > 1:
        yield "--sequence-parallel"
    if found := layout_flags(job.layers):
        pairs = zip(found[::2], found[1::2], strict=True)
        yield from (
            f"{name} '{value}'" if "|" in value else f"{name} {value}" for name, value in pairs
        )


def _slime(job: StockSettings) -> Iterator[str]:
    yield from _megatron(job)
    yield "--use-dynamic-batch-size"
    yield f"--max-tokens-per-gpu {job.tokens // job.layout.cp}"


def _swift(job: StockSettings) -> Iterator[str]:
    for line in _megatron(job):
        name, *value = line.split(" ", 1)
        yield f"--{name[2:].replace('-', '_')} {value[0] if value else 'true'}"
    yield "--packing true"
    yield f"--max_length {job.tokens}"


def _verl(job: StockSettings) -> Iterator[str]:
    for name, value in _degrees(job):
        yield f"{_ACTOR}megatron.{name}={value}"
    config = f"{_ACTOR}megatron.override_transformer_config."
    for name, value in _recompute(job.recomputed):
        yield f"{config}{name}={value}"
    ends = _ends(job.layers, VERL)
    for name, count in zip(("first", "last"), ends, strict=False):
        yield f"+{config}num_layers_in_{name}_pipeline_stage={count}"
    yield f"{_ACTOR}use_dynamic_bsz=True"
    yield f"{_ACTOR}ppo_max_token_len_per_gpu={job.tokens // job.layout.cp}"


def _bridge(job: StockSettings) -> Iterator[str]:
    for name, value in _degrees(job):
        yield f"cfg.model.{name} = {value}"
    if job.layout.tp > 1:
        yield "cfg.model.sequence_parallel = True"
    if len(set(job.layers)) > 1:
        yield f'cfg.model.pipeline_model_parallel_layout = "{layout_text(job.layers)}"'
    for name, value in _recompute(job.recomputed):
        yield f"cfg.model.{name} = {value if value.isdecimal() else repr(value)}"
    yield f"cfg.model.seq_length = cfg.dataset.seq_length = {job.tokens}"


def _ends(layers: Sequence[int], framework: str) -> tuple[int, ...]:
    """Layers of the first and last stage; none where all are even. ValueError: others differ."""
    if len(set(layers)) == 1:
        return ()
    if len(set(layers[1:-1])) > 1:
        raise ValueError(
            f"--for {framework}: stages of {' '.join(map(str, layers))} layers; it is told those "
            "of the first and the last alone: give --partition even"
        )
    return layers[0], layers[-1]
