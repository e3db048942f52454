"""Layouts that --epp-layouts allows, and the choice of one for a number of devices.

Of the layouts that fit, the choice is the one that trains on the most devices; of several such
layouts, the fastest. It depends on the flags, the document lengths, the number of devices and, if a
run resumes, on that run's cost model and expert-parallel size. start.py makes the choice when a job
starts.
"""

import copy
import io
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from megatron_epp.ir.placement import EVENLY
from megatron_epp.mcore.choose.kept import kept_layout, resumes
from megatron_epp.mcore.flags.config import LAYOUT_KEY, PLACED_BY, placement_by_time
from megatron_epp.mcore.job.read_flags import prepare_parser, refusals_as_value_errors
from megatron_epp.planner.choose.partition import layout_text
from megatron_epp.safe_files import bounded_text
from megatron_epp.show.units import seconds_text

MOST_LAYOUTS = 256
DEGREES = "tp", "pp", "cp", "ep"


@dataclass(frozen=True, slots=True)
class AllowedLayout:
    """A line of the layouts file: degrees of parallelism, and the number of layers of each stage.

    If ``layers`` is empty, flags determine the layers. ``line`` is the line number in the file.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    layers: tuple[int, ...] = ()
    line: int = field(default=0, compare=False)

    def __str__(self) -> str:
        """Return the layout as a line of the file."""
        layers = f" layers {' '.join(map(str, self.layers))}" * bool(self.layers)
        return " ".join(f"{name} {getattr(self, name)}" for name in DEGREES) + layers

    def least_ranks(self, expert_tp: int | None) -> int:
        """Return the smallest number of ranks that can train with this layout.

        The number of ranks that train is a multiple of this number. ``expert_tp`` is the experts'
        tensor-parallel size; None: equal to ``tp``.
        """
        stage = self.tp * self.cp
        return self.pp * max(stage, self.ep * (expert_tp or self.tp) if self.ep > 1 else 1)

    def set_on(self, args: Any) -> None:
        """Set the degrees and layers of this layout in ``args``, before Megatron validates them."""
        args.tensor_model_parallel_size, args.context_parallel_size = self.tp, self.cp
        args.pipeline_model_parallel_size, args.expert_model_parallel_size = self.pp, self.ep
        args.sequence_parallel = args.sequence_parallel and self.tp > 1
        if self.layers:
            args.decoder_first_pipeline_num_layers = args.decoder_last_pipeline_num_layers = None
            even, mtp = len(set(self.layers)) == 1, args.mtp_num_layers or 0
            text = None if even and not mtp else layout_text(self.layers, mtp)
            args.pipeline_model_parallel_layout = text
            if placement_by_time(args):
                args.epp_placement = EVENLY
                setattr(args, PLACED_BY, f"--epp-layouts {args.epp_layouts} says so")


@dataclass(frozen=True, slots=True)
class ChosenLayout:
    """A layout for ``devices`` ranks: ``ranks`` ranks train, and the other ranks are spares.

    Attributes:
        seconds: Predicted seconds of an iteration; 0 if lengths or costs are unknown.
    """

    layout: AllowedLayout
    devices: int
    ranks: int
    seconds: float

    @property
    def has_spares(self) -> bool:
        """Whether some ranks do not train."""
        return self.ranks < self.devices

    @property
    def facts(self) -> dict[str, Any]:
        """Entries for this layout in the file of saved choices."""
        own = {name: getattr(self.layout, name) for name in DEGREES}
        own |= {"layers": list(self.layout.layers)} if self.layout.layers else {}
        return own | {"devices": self.devices, "ranks": self.ranks, "seconds": self.seconds}

    def line(self, path: str) -> str:
        """Return the line that rank 0 prints; ``path`` is the value of --epp-layouts."""
        waiting = [str(rank) for rank in range(self.ranks, self.devices)]
        spares = f"; spares: ranks {' '.join(waiting)}" if waiting else ""
        seconds = (
            f"predicted {seconds_text(self.seconds)} an iteration"
            if self.seconds
            else "lengths or costs not known"
        )
        return (
            f"--epp-layouts {path}: {self.layout} on {self.ranks} of {self.devices} devices, "
            f"{seconds}{spares}"
        )

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Return the layout with the entries of :attr:`facts`; raise a ValueError if one is bad."""
        numbers: dict[str, Any] = {name: facts.get(name) for name in (*DEGREES, "devices", "ranks")}
        if not all(isinstance(each, int) and 1 <= each <= 10**6 for each in numbers.values()):
            raise ValueError(f"{numbers}: expected numbers from 1 on")
        devices, ranks = numbers.pop("devices"), numbers.pop("ranks")
        layout = AllowedLayout(**numbers, layers=tuple(map(int, facts.get("layers", ()))))
        return cls(layout, devices, ranks, float(facts.get("seconds", 0)))

    def watch(self, parser: ArgumentParser) -> ArgumentParser:
        """Make ``parser`` set this layout's degrees and layers in its args; record the layout."""
        parse = parser.parse_args

        def parse_args(words: Sequence[str] | None = None, namespace: Any = None) -> Any:
            args = parse(words, namespace)
            self.layout.set_on(args)
            setattr(args, LAYOUT_KEY, self.facts)
            return args

        parser.parse_args = parse_args  # type: ignore[method-assign,assignment]
        return parser


# ------------------------------------------------------------------ the file


def read_layouts(path: str) -> tuple[AllowedLayout, ...]:
    """Return the layouts of a file, one per line: ``tp 2 pp 4 cp 1 ep 1 layers 7 8 8 7``.

    A degree that is missing in a line is 1. With ``layers``, which come last in a line, a missing
    ``pp`` is the number of the values of ``layers``. ``#`` begins a comment.

    Raises:
        ValueError: The file cannot be read, a line is not a layout (the message contains the line
            number), or the number of layouts is not between 1 and ``MOST_LAYOUTS``.
    """
    layouts = []
    if path == "auto" and not Path(path).exists():
        raise ValueError(
            "--epp-layouts auto is no longer searched; expected a file with one layout per line "
            "(python -m megatron_epp tune --gpus N --lengths FILE prints the line of N devices)"
        )
    try:
        text = bounded_text(Path(path), "layouts, one a line, as in tp 1 pp 2 cp 1 ep 1 layers 4 4")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"--epp-layouts {path}: {why}; expected a file of layouts") from error
    for number, line in enumerate(text.split("\n"), 1):
        if words := line.split("#")[0].split():
            try:
                layouts.append(_layout(words, number))
            except ValueError as error:
                raise ValueError(f"--epp-layouts {path}:{number}: {error}") from None
    if not 1 <= len(layouts) <= MOST_LAYOUTS:
        raise ValueError(
            f"--epp-layouts {path}: {len(layouts)} layouts; expected 1 to {MOST_LAYOUTS}, one a "
            "line"
        )
    return tuple(layouts)


def _layout(words: Sequence[str], line: int) -> AllowedLayout:
    degrees: dict[str, int] = {}
    layers: tuple[int, ...] = ()
    rest = iter(words)
    for word in rest:
        if word == "layers":
            layers = tuple(_number(word, text) for text in rest)
        elif word in DEGREES and word not in degrees:
            degrees[word] = _number(word, next(rest, ""))
        else:
            raise ValueError(f"{word[:40]!r}: expected each of {', '.join(DEGREES)} once, layers")
    if layers and degrees.setdefault("pp", len(layers)) != len(layers):
        raise ValueError(f"layers of {len(layers)} stages; expected those of pp {degrees['pp']}")
    return AllowedLayout(**degrees, layers=layers, line=line)


def _number(word: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:7]) <= 10**5 and len(text) < 7):
        raise ValueError(f"{word} {text[:40]!r}: expected a number from 1 on")
    return int(text)


# ------------------------------------------------------------------ the choice


def choice(
    wanted: Namespace,
    devices: int,
    seconds_of: Callable[[Namespace, AllowedLayout], float | None],
) -> ChosenLayout:
    """Return the layout that fits and trains on the most devices; of several, the fastest.

    Args:
        wanted: Megatron's flags, not validated.
        devices: Number of available ranks.
        seconds_of: Function that predicts the seconds of an iteration from validated flags and a
            layout. It returns None if plans exceed the memory budget.

    Raises:
        ValueError: The file is not valid, a line of it contradicts the flags, or no layout fits the
            devices, the memory budget and the checkpoint.
    """
    path, expert_tp = wanted.epp_layouts, wanted.expert_tensor_parallel_size
    filled: dict[AllowedLayout, int] = {}
    validated: dict[AllowedLayout, Namespace] = {}
    impossible: dict[AllowedLayout, str] = {}
    for layout in read_layouts(path):
        least = layout.least_ranks(expert_tp)
        filled[layout] = devices - devices % least
        try:
            validated[layout] = validated_with(wanted, layout, filled[layout] or least)
        except ValueError as error:
            impossible[layout] = str(error)
    if len(set(impossible.values())) == 1 and len(impossible) == len(filled) > 1:
        raise ValueError(next(iter(impossible.values())))  # other flags are wrong, not the layouts
    for layout, why in impossible.items():
        raise ValueError(f"--epp-layouts {path}:{layout.line}: {layout}: {why}")
    least = min(layout.least_ranks(expert_tp) for layout in filled)
    if least > devices:
        raise ValueError(
            f"--epp-layouts {path}: no layout fits the {devices} devices that are there; expected "
            f"at least {least}, or a line with smaller degrees"
        )
    refused: list[str] = []
    for ranks in sorted({count for count in filled.values() if count}, reverse=True):
        able = [layout for layout, count in filled.items() if count == ranks]
        predicted = {}
        for layout in able:
            if (reason := resume_refusal(validated[layout], layout)) is not None:
                refused.append(f"{layout}: {reason}")
            elif (seconds := seconds_of(validated[layout], layout)) is None:
                refused.append(f"{layout}: its plans need more memory than there is")
            else:
                predicted[layout] = seconds
        if predicted:
            best = min(predicted, key=lambda layout: predicted[layout])
            return ChosenLayout(best, devices, ranks, predicted[best])
    raise ValueError(
        f"--epp-layouts {path}: no layout fits {devices} devices ({'; '.join(refused[:3])}); "
        "expected more devices, or a line with other degrees"
    )


def validated_with(wanted: Namespace, layout: AllowedLayout, ranks: int) -> Namespace:
    """Return args for ``layout`` on ``ranks`` ranks, after validation by Megatron and --epp.

    Raises:
        ValueError: Megatron or --epp refuses the flags.
    """
    from megatron.training.arguments import (
        core_transformer_config_from_args,
        parse_args,
        validate_args,
    )

    from megatron_epp.mcore.capabilities import refusals
    from megatron_epp.mcore.flags.config import elastic_defaults
    from megatron_epp.mcore.kinds.registry import kind_defaults
    from megatron_epp.mcore.patching.uneven_batches import undivided_evaluation
    from megatron_epp.mcore.placing.placeholder import placeholder

    laid_out = copy.copy(wanted)
    layout.set_on(laid_out)

    def prepare(parser: ArgumentParser) -> ArgumentParser:
        parser = prepare_parser(parser)
        parser.set_defaults(**elastic_defaults(laid_out) | kind_defaults(laid_out))
        parser.set_defaults(**placeholder(laid_out))
        return undivided_evaluation(parser)

    with redirect_stdout(io.StringIO()), refusals_as_value_errors():
        args = parse_args(prepare)
        layout.set_on(args)
        args.rank, args.world_size = 1, ranks  # only rank 0 prints
        if sum(layout.layers) not in (0, args.num_layers):
            raise ValueError(f"layers of {args.num_layers} in all are expected")
        refusals.require_equal_stages(args)
        validate_args(args)
        core_transformer_config_from_args(args)  # checks heads and experts
        refusals.refuse(args)
        args.rank = 0
    return args


def resume_refusal(args: Namespace, layout: AllowedLayout) -> str | None:
    """Return the reason why the checkpoint cannot be loaded with ``layout``; None if it can."""
    resumed_ep = (kept_layout(args) or {}).get("ep") if resumes(args) else None
    if args.no_load_optim or resumed_ep in (None, layout.ep):
        return None
    return f"the optimizer's states of experts load with ep {resumed_ep} alone (--no-load-optim)"


def predicted_seconds(args: Namespace, layout: AllowedLayout) -> float | None:
    """Return the predicted seconds of an iteration, as the mean over the first batches.

    The result is 0 if lengths or costs are unknown, and None if the plans exceed the memory budget.
    The function uses the first valid cost model of :func:`.choices.cost_models`.
    """
    from megatron_epp.control.step_source import planned_documents
    from megatron_epp.cost.build import even_layers
    from megatron_epp.mcore.choose.choices import first_batches, first_cost_and_options
    from megatron_epp.mcore.model.shape import stage_layers
    from megatron_epp.planner.choose.choice import heaviest_part, sketched_seconds

    args = copy.copy(args)
    if args.step_batch_size_schedule:  # use the largest batch size
        sizes = (part.split(":")[1] for part in args.step_batch_size_schedule.split())
        args.global_batch_size, args.step_batch_size_schedule = max(map(int, sizes)), None
    stages = args.pipeline_model_parallel_size
    args.epp_row_multiple = args.epp_row_multiple or 1
    set_vocabulary_size(args)
    try:
        if layout.layers:
            layers = layout.layers
        elif placement_by_time(args):
            layers = even_layers(args.num_layers, stages)
        else:
            layers = tuple(stage_layers(args, stages, None))
        batches = [*map(planned_documents, first_batches(args))]
        cost, options = first_cost_and_options(args, layers)
    except (OSError, ValueError):
        return 0.0
    planner = args.epp_planner
    held = [heaviest_part(batch, cost, options, planner) for batch in batches]
    seconds = sketched_seconds(cost, held, options, planner)
    return None if seconds is None else seconds / len(held)


def set_vocabulary_size(args: Namespace) -> None:
    """Set the padded vocabulary size in ``args``, as Megatron does when training begins."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    with redirect_stdout(io.StringIO()):
        build_tokenizer(args)
