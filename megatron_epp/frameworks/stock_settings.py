"""Settings of a job that Megatron's own schedule runs: degrees, layers, recompute, tokens.

The frameworks of ``tune --for`` run Megatron's own schedule with packed unsliced documents (in
scheduling mode, micro-batches may run in any order). The settings come from the fastest choice that
the layout search finds for this schedule. They include the recompute in the plans of this choice.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import KEEP, Plan
from megatron_epp.planner.choose.partition import layout_flags
from megatron_epp.planner.options import Options
from megatron_epp.planner.registry import PACKED
from megatron_epp.planner.tuning.layouts import Layout
from megatron_epp.planner.tuning.survey import Choice, Survey, heaviest_plan


@dataclass(frozen=True, slots=True)
class StockSettings:
    """A job that Megatron's own schedule runs.

    Attributes:
        layout: Parallelism degrees of the job.
        layers: Layers of every stage.
        recomputed: Largest number of layers that a stage recomputes for a micro-batch.
        tokens: Tokens of a micro-batch, summed over its context-parallel ranks.
        ep: Number of ranks over which a layer's experts are sharded.
    """

    layout: Layout
    layers: tuple[int, ...]
    recomputed: int
    tokens: int
    ep: int = 1


def recomputed_layers(plans: Iterable[Plan]) -> int:
    """Return the largest number of layers that a stage recomputes for a micro-batch."""
    return max(
        len(modes) - modes.count(KEEP)
        for plan in plans
        for of_stage in plan.recompute
        for modes in of_stage
    )


def stock_choice(
    surveyed: Survey,
    batches: Sequence[Sequence[int]],
    cost_for: Callable[[Layout], Cost],
    options: Options,
    tokens: int,
) -> tuple[Choice, StockSettings]:
    """Return the fastest choice that Megatron's own schedule can run, and the choice's settings.

    Args:
        surveyed: Result of the search over layouts and planners, fastest choice first.
        batches: Document lengths of the batches.
        cost_for: Function from a layout to its cost model.
        options: The planner's options.
        tokens: Tokens of a micro-batch.

    Raises:
        ValueError: No layout fits in memory without --epp.
    """
    choice = next((one for one in surveyed.choices if one.planner == PACKED), None)
    if choice is None:
        raise ValueError(
            "no layout fits by Megatron's own schedule with documents packed, and frameworks run "
            "no other; without --for, tune looks at --epp"
        )
    cost = cost_for(choice.layout).replace(layers=choice.layers)
    plans = (heaviest_plan(lengths, cost, options, PACKED)[0].plan for lengths in batches)
    recomputed = recomputed_layers(plans)
    return choice, StockSettings(choice.layout, choice.layers, recomputed, tokens, choice.ep)


def degrees(job: StockSettings) -> Iterator[tuple[str, str]]:
    """Yield (name in TransformerConfig, value) of every parallelism degree of ``job``."""
    layout = job.layout
    yield "tensor_model_parallel_size", str(layout.tp)
    yield "pipeline_model_parallel_size", str(layout.pp)
    yield "context_parallel_size", str(layout.cp)
    if job.ep > 1:
        yield "expert_model_parallel_size", str(job.ep)
        yield "expert_tensor_parallel_size", "1"


def recompute(layers: int) -> Iterator[tuple[str, str]]:
    """Yield (name in TransformerConfig, value) for full recompute of ``layers`` per stage."""
    if layers:
        yield "recompute_granularity", "full"
        yield "recompute_method", "block"
        yield "recompute_num_layers", str(layers)


def megatron_flags(job: StockSettings) -> Iterator[str]:
    """Yield the flags of Megatron-LM for ``job``, such as ``--context-parallel-size 2``."""
    for name, value in (*degrees(job), *recompute(job.recomputed)):
        yield f"--{name.replace('_', '-')} {value}"
    if job.layout.tp > 1:
        yield "--sequence-parallel"
    if flags_of_layers := layout_flags(job.layers):
        pairs = zip(flags_of_layers[::2], flags_of_layers[1::2], strict=True)
        yield from (
            f"{name} '{value}'" if "|" in value else f"{name} {value}" for name, value in pairs
        )


def first_and_last_layers(layers: Sequence[int], framework: str) -> tuple[int, ...]:
    """Return the numbers of layers of the first and last stage; () if all stages are equal.

    Raises:
        ValueError: Stages between the first and the last differ from each other.
    """
    if len(set(layers)) == 1:
        return ()
    if len(set(layers[1:-1])) > 1:
        raise ValueError(
            f"--for {framework}: stages of {' '.join(map(str, layers))} layers; it is told those "
            "of the first and the last alone: give --partition even"
        )
    return layers[0], layers[-1]
