"""Choice of the parallel layout at start: the fastest that --epp-layouts allows on the devices.

Rank 0 chooses before Megatron reads its flags, and the other ranks read the choice from torchrun's
store. Ranks without a place in the layout are spares. They join no process group, and wait until
the training ends or torchrun ends them.
"""

import copy
import io
import json
import os
import socket
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch

from megatron_epp.cost.cost import Cost
from megatron_epp.mcore.choose.kept import LAYOUT_KEY, kept_layout, resumes
from megatron_epp.mcore.job.job_exit import AGENT_STORE, torchrun_store
from megatron_epp.mcore.job.read_flags import prepare_parser, refusals_as_value_errors
from megatron_epp.planner import Options
from megatron_epp.planner.choose.partition import layout_text
from megatron_epp.safe_files import bounded_text

ALL_LAYOUTS = "auto"
SPARE_POLL_SECONDS, SPARE_PATIENCE_SECONDS = 0.5, 1800.0
MOST_LAYOUTS = 256
_DEGREES = "tp", "pp", "cp", "ep"


@dataclass(frozen=True, slots=True)
class AllowedLayout:
    """A line of the layouts file: degrees of parallelism, and the layers of each stage.

    Empty ``layers``: Megatron's flags decide the layers.
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
        return " ".join(f"{name} {getattr(self, name)}" for name in _DEGREES) + layers

    def least_ranks(self, expert_tp: int | None) -> int:
        """Return the smallest number of ranks the layout can train on.

        The number of ranks of a job is a multiple of it.
        """
        stage = self.tp * self.cp
        return self.pp * max(stage, self.ep * (expert_tp or self.tp) if self.ep > 1 else 1)

    def set_on(self, args: Any) -> None:
        """Override the degrees on ``args``, before Megatron validates them."""
        args.tensor_model_parallel_size, args.context_parallel_size = self.tp, self.cp
        args.pipeline_model_parallel_size, args.expert_model_parallel_size = self.pp, self.ep
        args.sequence_parallel = args.sequence_parallel and self.tp > 1
        if self.layers:
            args.decoder_first_pipeline_num_layers = args.decoder_last_pipeline_num_layers = None
            even, mtp = len(set(self.layers)) == 1, args.mtp_num_layers or 0
            text = None if even and not mtp else layout_text(self.layers, mtp)
            args.pipeline_model_parallel_layout, args.epp_partition = text, "flags"


@dataclass(frozen=True, slots=True)
class ChosenLayout:
    """A layout for ``devices`` ranks, of which ``ranks`` train; the others are spares.

    ``seconds`` is the predicted time of an iteration, 0 if lengths or costs are unknown.
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
        """Return the entries that are saved next to the checkpoint."""
        own = {name: getattr(self.layout, name) for name in _DEGREES}
        own |= {"layers": list(self.layout.layers)} if self.layout.layers else {}
        return own | {"devices": self.devices, "ranks": self.ranks, "seconds": self.seconds}

    def line(self, path: str) -> str:
        """Return the line that rank 0 prints; ``path`` is the value of --epp-layouts."""
        waiting = [str(rank) for rank in range(self.ranks, self.devices)]
        spares = f"; spares: ranks {' '.join(waiting)}" if waiting else ""
        seconds = (
            f"predicted {self.seconds:.4g} s an iteration"
            if self.seconds
            else "lengths or costs not known"
        )
        return (
            f"--epp-layouts {path}: {self.layout} on {self.ranks} of {self.devices} devices, "
            f"{seconds}{spares}"
        )

    def to_json(self) -> str:
        """Return the JSON text that :meth:`from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "ChosenLayout":
        """Parse the text of :meth:`to_json`, which rank 0 stores for the other ranks."""
        entries = json.loads(text)
        of_layout = entries.pop("layout")
        layers = tuple(of_layout.pop("layers"))
        return cls(AllowedLayout(**of_layout, layers=layers), **entries)

    def watch(self, parser: ArgumentParser) -> ArgumentParser:
        """Make ``parser`` override the parsed degrees with this layout."""
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

    A degree that a line leaves out is 1; ``layers`` come last; ``#`` begins a comment.

    Raises:
        ValueError: A line is not a layout (the message has its number), or the number of layouts is
            not between 1 and ``MOST_LAYOUTS``.
    """
    layouts = []
    text = bounded_text(Path(path), "layouts, one a line, as in tp 1 pp 2 cp 1 ep 1 layers 4 4")
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
        elif word in _DEGREES and word not in degrees:
            degrees[word] = _number(word, next(rest, ""))
        else:
            raise ValueError(f"{word[:40]!r}: expected each of {', '.join(_DEGREES)} once, layers")
    if layers and degrees.setdefault("pp", len(layers)) != len(layers):
        raise ValueError(f"layers of {len(layers)} stages; expected those of pp {degrees['pp']}")
    return AllowedLayout(**degrees, layers=layers, line=line)


def _number(word: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:7]) <= 10**5 and len(text) < 7):
        raise ValueError(f"{word} {text[:40]!r}: expected a number from 1 on")
    return int(text)


# ------------------------------------------------------------------ the choice


def choose_allowed_layout(
    search: Callable[[Namespace, int], ChosenLayout],
) -> ChosenLayout | None:
    """Return the layout of this start; None without --epp-layouts.

    Every rank that torchrun started calls it. On the ranks that train, it sets ``WORLD_SIZE`` to
    their number.

    Args:
        search: Finds the fastest of all layouts for a number of devices, for --epp-layouts auto.

    Raises:
        ValueError: The file cannot be used, or no layout fits. Nothing was written.
    """
    if not any(word.partition("=")[0] == "--epp-layouts" for word in sys.argv):
        return None  # do not parse all flags twice
    from megatron.training.arguments import parse_args

    with refusals_as_value_errors():
        wanted = parse_args(prepare_parser)
    if not wanted.epp or wanted.epp_layouts is None:
        return None
    rank, devices = wanted.rank, wanted.world_size
    key = f"layout of {devices}"
    if rank == 0:
        answer = ""
        try:
            chosen = as_before(wanted, devices)
            if chosen is None and wanted.epp_layouts == ALL_LAYOUTS:
                chosen = search(wanted, devices)
            chosen = chosen or choice(wanted, devices, predicted_seconds)
            answer = chosen.to_json()
        finally:
            if devices > 1:
                meeting_store().set(key, answer)
        print(chosen.line(wanted.epp_layouts), flush=True)
    else:
        store, began = meeting_store(), time.monotonic()
        while not store.check([key]) and time.monotonic() - began < SPARE_PATIENCE_SECONDS:
            time.sleep(SPARE_POLL_SECONDS)  # the search may outlast the timeout of the store
        answer = store.get(key).decode()
        if not answer:
            raise ValueError(f"--epp-layouts {wanted.epp_layouts}: rank 0 has chosen none")
        chosen = ChosenLayout.from_json(answer)
    if rank < chosen.ranks:
        os.environ["WORLD_SIZE"] = str(chosen.ranks)
    return chosen


def as_before(wanted: Namespace, devices: int) -> ChosenLayout | None:
    """Return the layout of the checkpoint's run, if that run had as many ``devices``.

    Returns None if no layout was saved, or if the file no longer allows it.

    Raises:
        ValueError: The file cannot be used, or the saved choices are damaged.
    """
    kept = kept_layout(wanted) if resumes(wanted) else None
    if kept is None or kept.get("devices") != devices:
        return None
    numbers = {name: kept.get(name, 0) for name in (*_DEGREES, "ranks")}
    if not all(isinstance(number, int) and 1 <= number <= 10**6 for number in numbers.values()):
        return None
    ranks, layers = numbers.pop("ranks"), tuple(map(int, kept.get("layers", ())))
    layout = AllowedLayout(**numbers, layers=layers)
    if wanted.epp_layouts != ALL_LAYOUTS and layout not in read_layouts(wanted.epp_layouts):
        return None
    return ChosenLayout(layout, devices, ranks, float(kept.get("seconds", 0)))


@cache
def meeting_store() -> Any:
    """Return the store that all ranks of a start share: torchrun's, or one on rank 0.

    Without torchrun's store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), rank 0 opens one at
    ``MASTER_PORT``. The process group later asks for a store at that port and gets the same one.
    """
    if os.environ.get(AGENT_STORE) == "True":
        return torchrun_store()
    return torch.distributed.TCPStore(
        host_name=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
        world_size=None,
        is_master=os.environ["RANK"] == "0",
        timeout=timedelta(seconds=SPARE_PATIENCE_SECONDS),
        wait_for_workers=False,
        multi_tenant=True,
    )


def choice(
    wanted: Namespace,
    devices: int,
    seconds_of: Callable[[Namespace, AllowedLayout], float | None],
) -> ChosenLayout:
    """Return the fastest layout that fits, among those that use the most of the ``devices``.

    Args:
        wanted: Megatron's flags, not validated.
        devices: Number of ranks available.
        seconds_of: Predicts the seconds of an iteration from validated flags; None if plans do not
            fit the memory.

    Raises:
        ValueError: A line cannot run at all, or no layout fits.
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
        raise ValueError(next(iter(impossible.values())))  # the fault of other flags
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
            if (reason := _resume_refusal(validated[layout], layout)) is not None:
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
    """Return the flags with ``layout``, validated by Megatron and by --epp for ``ranks`` ranks.

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


def _resume_refusal(args: Namespace, layout: AllowedLayout) -> str | None:
    """Return the reason why the checkpoint cannot be loaded with ``layout``; None if it can."""
    kept = kept_layout(args) if resumes(args) else None
    if kept is None or args.no_load_optim or kept.get("ep") in (None, layout.ep):
        return None
    return f"the optimizer's states of experts load with ep {kept['ep']} alone (--no-load-optim)"


def predicted_seconds(args: Namespace, layout: AllowedLayout) -> float | None:
    """Return the mean predicted seconds of the first batches; 0 if unknown, None if too large.

    None means that the plans need more memory than there is. The cost model is the one measured
    next to the checkpoint, else --epp-cost-model, else the coefficients of the device.
    """
    from megatron_epp.cost.build import even_layers
    from megatron_epp.mcore.choose.choices import first_batches
    from megatron_epp.mcore.flags.config import layers_by_time
    from megatron_epp.mcore.model.shape import stage_layers
    from megatron_epp.planner.choose.choice import heaviest, sketched_seconds

    args = copy.copy(args)
    if args.step_batch_size_schedule:  # the largest size
        sizes = (part.split(":")[1] for part in args.step_batch_size_schedule.split())
        args.global_batch_size, args.step_batch_size_schedule = max(map(int, sizes)), None
    stages = args.pipeline_model_parallel_size
    args.epp_row_multiple = args.epp_row_multiple or 1
    set_vocabulary_size(args)
    try:
        if layout.layers:
            layers = layout.layers
        elif layers_by_time(args):
            layers = even_layers(args.num_layers, stages)
        else:
            layers = tuple(stage_layers(args, stages, None))
        batches = first_batches(args)
        cost, options = first_cost_and_options(args, layers)
    except (OSError, ValueError):
        return 0.0
    held = [heaviest(lengths, cost) for lengths in batches]
    seconds = sketched_seconds(cost, held, options, args.epp_planner)
    return None if seconds is None else seconds / len(held)


def set_vocabulary_size(args: Namespace) -> None:
    """Set the vocabulary size on ``args``, as Megatron does when training begins."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    with redirect_stdout(io.StringIO()):
        build_tokenizer(args)


def first_cost_and_options(args: Namespace, layers: tuple[int, ...]) -> tuple[Cost, Options]:
    """Return the job's cost from the first readable cost model, and its planner's options.

    Raises:
        OSError: No cost model can be read.
        ValueError: No cost model is valid.
    """
    from megatron_epp.mcore.choose.choices import cost_and_options

    *better, last = cost_models(args)
    for source in better:
        args.epp_cost_model = source
        with suppress(OSError, ValueError):
            return cost_and_options(args, layers)
    args.epp_cost_model = last
    return cost_and_options(args, layers)


def cost_models(args: Namespace) -> Iterator[str | None]:
    """Yield values of --epp-cost-model: the checkpoint's own measurement, then the user's."""
    from megatron_epp.mcore.calibrate.profile_file import FILE_NAME

    if args.epp_cost_model is None and args.load and (Path(args.load) / FILE_NAME).exists():
        yield str(Path(args.load) / FILE_NAME)
    yield args.epp_cost_model


# ------------------------------------------------------------------ spares


def wait_as_spare(chosen: ChosenLayout) -> None:
    """Wait, on a spare rank, until the training of the other ranks ends."""
    rank = os.environ["RANK"]
    print(
        f"megatron_epp: rank {rank} on {socket.gethostname()} waits as a spare: {chosen.layout} "
        f"has no place for it among {chosen.devices} devices",
        flush=True,
    )
    store, key = meeting_store(), _end_of(chosen)
    with suppress(RuntimeError):  # the store on rank 0 ends with rank 0
        while not store.check([key]):
            time.sleep(SPARE_POLL_SECONDS)


def release_spares(chosen: ChosenLayout | None) -> None:
    """Let the spares end; only rank 0 of the training ranks writes the key."""
    if chosen is not None and chosen.has_spares and os.environ.get("RANK") == "0":
        meeting_store().set(_end_of(chosen), "ended")


def _end_of(chosen: ChosenLayout) -> str:
    return f"end of {chosen.ranks} of {chosen.devices}"
