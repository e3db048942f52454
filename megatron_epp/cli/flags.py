"""Flags of the commands that do not need torch: dataclass fields with type, default and help."""

import argparse
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from megatron_epp.corpus.lengths import DEFAULT_SEED, distribution_names
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import MODELS
from megatron_epp.cost.network.topology import FLAT, TOPOLOGIES
from megatron_epp.cost.profile import DISPATCHERS
from megatron_epp.flag_fields import (
    add_flags,
    flag,
    one_of,
    whole_number,
)
from megatron_epp.planner.options import LEVERS
from megatron_epp.planner.settings import shared_setting


def numbers(text: str) -> tuple[int, ...]:
    """Parse positive integers separated by commas."""
    return tuple(map(whole_number(1, 1_000_000), text.split(",")))


# More documents are an error: planning them would take minutes.
MOST_DOCUMENTS = 32_768


def degree(text: str) -> int:
    """Parse a parallel degree; ``auto`` of earlier versions is refused by name."""
    if text == "auto":
        raise argparse.ArgumentTypeError(
            "'auto' is no longer searched; expected a number (tune --gpus N finds the fastest)"
        )
    return whole_number(1)(text)


def file_to_write(text: str) -> str:
    """Return the output path ``text``; refuse a folder before planning, which may take minutes."""
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: is a folder; expected a file name")
    return text


MODEL_HELP = (
    f"Model: {', '.join(MODELS)}, a JSON file, or a config.json of transformers (the file, its "
    "folder, or org/name in Hugging Face's cache)."
)
LIKE = flag(
    None,
    "Read a config.json as if its model_type were this one, which has the same layers.",
    ("MODEL_TYPE", str),
)
# (metavar, type function)
COUNT, NUMBER, INDEX = ("N", whole_number(1)), ("N", whole_number(0)), ("I", whole_number(0))
TOKENS, MULTIPLE = ("TOKENS", whole_number(1)), ("TOKENS", whole_number(1, 1 << 20))
DEGREE, NODES = ("N", degree), ("N", whole_number(1, 1_000_000))
NAMED, FILE = ("NAME|FILE", str), ("FILE", str)
SWITCH = ("HOW", one_of("auto", "on", "off"))


LENGTHS_HELP = (
    "Lengths of documents: a text file (also .gz) with one length per line, or one group with "
    "common prefixes, such as 3000+(1200,800+(900,700)); a Megatron .idx; texts or chats in "
    ".jsonl or .parquet; or a shipped distribution: " + ", ".join(distribution_names()) + "."
)


@dataclass
class DocumentFlags:
    """The corpus of documents, and options for drawing batches from it."""

    TITLE: ClassVar = "documents"

    lengths: str = flag(
        None,
        LENGTHS_HELP,
        ("FILE|NAME", str),
        required=True,
    )
    tokenizer: str | None = flag(
        None,
        "tokenizer.json, or its folder, to count the tokens of texts and chats (default: four "
        "bytes per token).",
        FILE,
    )
    context: int = flag(0, "Maximum length of a document (default: no limit).", TOKENS)
    overlong: str = shared_setting("overlong")
    global_batch_size: int | None = flag(
        None,
        "Documents per batch, over all replicas. Default: 512; for one batch of a text file with "
        "at most 16384 lengths, all documents in order.",
        ("N", whole_number(1, MOST_DOCUMENTS)),
    )
    seed: int = flag(
        DEFAULT_SEED,
        f"Seed of the shuffle, as in training (default: {DEFAULT_SEED}, as in Megatron).",
        NUMBER,
    )
    share_from: int | None = flag(
        None,
        "Compute prefixes of at least N equal tokens once per replica (planner epp), as training "
        "does with --epp-share-from. This needs tokens: an .idx with its .bin, or --tokenizer.",
        COUNT,
    )


@dataclass
class MachineFlags:
    """The model, machine and layout for which a plan is made."""

    TITLE: ClassVar = "model and machine"

    model: str | None = flag(None, MODEL_HELP, NAMED)
    like: str | None = LIKE
    device: str | None = flag(
        None,
        f"Device: {', '.join(DEVICES)}, or a JSON file.",
        NAMED,
    )
    cost_model: str | None = shared_setting("cost_model", " Default: the analytic cost model.")
    pp: int | None = flag(None, "Number of pipeline ranks.", DEGREE)
    cp: int | None = flag(1, "Context-parallel (Ulysses) degree (default: 1).", DEGREE)
    tp: int | None = flag(1, "Tensor-parallel degree (default: 1).", COUNT)
    dp: int | None = flag(1, "Number of data-parallel replicas (default: 1).", COUNT)
    ep: int | None = flag(
        None,
        "Expert-parallel degree: a divisor of tp x cp (default: the largest that divides the "
        "experts), or a multiple, with which replicas share experts and run in lockstep.",
        COUNT,
    )
    layers: tuple[int, ...] | None = flag(
        None, "Transformer layers of each stage (default: even).", NUMBER, nargs="+"
    )
    placement: str | None = shared_setting(
        "placement",
        " Default: auto, or one stage per rank if --layers is given. In compare, auto is for epp; "
        "the other planners have one stage per rank.",
        default=None,
    )
    vocab_parallel: str | None = shared_setting(
        "vocab_parallel", " In compare, only epp shards the LM head."
    )
    layer_kinds: str | None = flag(
        None,
        "Layer kinds from the first layer to the last, such as '3*dense 58*experts', if "
        "--cost-model has several kinds and there is no --model.",
        ("KINDS", str),
    )
    memory_budget_gib: tuple[float, ...] | None = shared_setting(
        "memory_budget_gib", " Default: the budget of the device."
    )
    zero: str | None = flag(
        None,
        "1: every device keeps its weights. 3: states are sharded, and layers are gathered for "
        "every chunk, which training with --epp does not support (default: 1).",
        ("1|3", one_of("1", "3")),
    )


@dataclass
class PlansMachineFlags(MachineFlags):
    """The machine that runs an existing plan; stages and their placement are in the plan."""

    NOTE: ClassVar = "The defaults are the options that `plan -o` wrote into the plan's comment."
    OMIT: ClassVar = ("pp", "placement")

    cp: int | None = flag(None, "Context-parallel (Ulysses) degree (default: 1).", COUNT)
    tp: int | None = flag(None, "Tensor-parallel degree (default: 1).", COUNT)
    dp: int | None = flag(
        None, "Number of data-parallel replicas (default: as in the plan).", COUNT
    )
    layers: tuple[int, ...] | None = flag(
        None,
        "Transformer layers of each stage (default: as in the plan).",
        NUMBER,
        nargs="+",
    )
    vocab_parallel: str | None = flag(
        None,
        "on: require that the plan shards the LM head over the stages. off: require that it does "
        "not. auto (default): accept both.",
        SWITCH,
    )
    multiple: int | None = flag(
        None,
        "Pad chunks to a multiple of this (default: as training pads the plan's documents).",
        MULTIPLE,
    )


@dataclass
class DrawnMachineFlags(PlansMachineFlags):
    """The machine for which ``draw`` predicts times; optional."""

    model: str | None = flag(
        None,
        f"{MODEL_HELP} Without a model, every op takes a round number of units.",
        NAMED,
    )


class CheckedMachineFlags(PlansMachineFlags):
    """The machine of ``check``, to compare a plan with the machine's memory budget."""

    NOTE: ClassVar = "With a model, the command also checks the plan's memory."


@dataclass
class AssumptionFlags:
    """Assumptions of an analytic cost model."""

    TITLE: ClassVar = "assumptions of the analytic cost model"

    topology: str | None = flag(
        None,
        f"Network of the devices: {', '.join(TOPOLOGIES)}, a JSON file, or {FLAT} (rates depend on "
        "the size of a group only). Default: nodes, with the device's number of devices per node.",
        NAMED,
    )
    moe_token_dispatcher_type: str | None = flag(
        None,
        "Token dispatcher: alltoall sends every copy of a token (default, as in training); flex "
        "sends one copy per node and device that needs it.",
        ("HOW", one_of(*DISPATCHERS)),
    )


ASSUMPTIONS = tuple(field.name for field in fields(AssumptionFlags))


def _planners_help() -> str:
    # Imported late: these modules load a compiler and a solver.
    from megatron_epp.planner.comparison_methods import comparison_methods
    from megatron_epp.planner.registry import COMPARED, STOCK

    default = ", ".join((*COMPARED, STOCK, *comparison_methods()))
    return f"Planners to compare (default: {default})."


@dataclass
class PlannerFlags:
    """The planner and its levers, effort and restrictions."""

    TITLE: ClassVar = "planner"

    planner: str | tuple[str, ...] | None = shared_setting("planner")
    levers: str = shared_setting("levers")
    host_memory_gib: float | None = shared_setting("host_memory_gib", " Default: unlimited.")
    effort: int | None = shared_setting("effort", default=None)
    multiple: int | None = flag(
        None,
        "Pad chunks to a multiple of this (default: as training on the device does).",
        MULTIPLE,
    )


@dataclass
class PlannersFlags(PlannerFlags):
    """The planner's options in ``compare``, with several planners."""

    planner: str | tuple[str, ...] | None = flag(None, _planners_help, ("NAME", str), nargs="+")


@dataclass
class PlanFileFlags:
    """The plan file that a command reads."""

    plan: str = flag(None, "Plan or step file; - for stdin.", ("PLAN", str), positional=True)


@dataclass
class ReplicaFlags:
    """The replica to read from a step with several replicas."""

    replica: int = flag(0, "Replica to read from a step (default: 0).", NUMBER)


@dataclass
class JsonFlags:
    """Option for JSON output."""

    json: bool = flag(False, "Print JSON instead of text.")


@dataclass
class BatchFlags:
    """The batch to plan."""

    batch: int = flag(0, "Number of the batch, from 0 (default: 0).", INDEX)


@dataclass
class BatchesFlags:
    """The batches to compare on."""

    batches: int = flag(1, "Number of batches (default: 1).", ("N", whole_number(1, 100_000)))
    first_batch: int = flag(0, "Number of the first batch (default: 0).", INDEX)


@dataclass
class PlanFlags:
    """Options of ``plan``: the kind of plan, and the output."""

    forward_only: bool = flag(False, "Make a forward-only plan, for evaluation.")
    output: str | None = flag(
        None, "Write the plan to this file instead of stdout.", ("PLAN", file_to_write), short="-o"
    )


@dataclass
class SimulateFlags:
    """Options of ``simulate``: the output."""

    output: str | None = flag(
        None, "Write timed records for draw to this file.", ("RECORDS", file_to_write), short="-o"
    )


@dataclass
class DrawFlags:
    """Options of ``draw``: format and contents of the picture."""

    output: str | None = flag(
        None,
        "Output file: x.svg, x.png, x.html, x.txt or x.json (Chrome trace, for ui.perfetto.dev). "
        "Default: text on stdout.",
        ("FILE", file_to_write),
        short="-o",
    )
    records: str | None = flag(
        None,
        "Timed records of a run of this plan. With a model, they are drawn below the prediction.",
        FILE,
    )
    title: str | None = flag(
        None, "Title of the picture (default: the file's name).", ("TEXT", str)
    )
    width: int | None = flag(
        None,
        "Width in columns of text (default: that of the terminal), or in pixels of a picture "
        "(default: at most 2400). Wider pictures and x.html show the numbers of short ops.",
        ("N", whole_number(40, 100_000)),
    )


@dataclass
class WhereFlags:
    """Options of ``where``: the recorded step, the chunk, and the corpus."""

    step: str = flag(
        None, "File written by --epp-record; - for stdin.", ("STEP", str), positional=True
    )
    chunk: int | None = flag(None, "Number of the chunk (default: all).", NUMBER)
    data_path: tuple[str, ...] | None = flag(
        None,
        "Corpora as in training, if they have moved: PREFIX, or WEIGHT PREFIX for each corpus of "
        "a blend (default: as recorded).",
        ("PREFIX", str),
        nargs="+",
    )
    tokenizer: str | None = flag(
        None, "tokenizer.json, or its folder, to print words instead of token ids.", FILE
    )


@dataclass
class TunedBatchesFlags:
    """The batches of ``tune``."""

    batches: int = flag(
        2,
        "Batches for which the best layouts are planned (default: 2).",
        ("N", whole_number(1, 1000)),
    )


@dataclass
class TunedDocumentFlags(DocumentFlags):
    """The corpus of ``tune``, which is optional."""

    OMIT: ClassVar = ("share_from",)

    lengths: str = flag(
        None,
        f"{LENGTHS_HELP} Without it, tune prints the model, or with --gpus the layouts that fit.",
        ("FILE|NAME", str),
    )


@dataclass
class TunedMachineFlags:
    """The machine whose layout ``tune`` searches."""

    TITLE: ClassVar = "model and machine"

    model: str = flag(None, MODEL_HELP, NAMED, required=True)
    like: str | None = LIKE
    device: str | None = flag(None, f"Device: {', '.join(DEVICES)}, or a JSON file.", NAMED)
    gpus: tuple[int, ...] | None = flag(
        None,
        "Number of devices: full nodes, or a part of one node. Without --lengths, several numbers "
        "such as 16,32,64 print what fits on each.",
        ("N", numbers),
    )
    nodes: int | None = flag(None, "Number of nodes, instead of --gpus.", NODES)
    ep: int | None = flag(
        None,
        "Expert-parallel degree; above tp x cp, replicas share experts and run in lockstep "
        "(default: searched).",
        COUNT,
    )
    devices_per_node: int | None = flag(
        None, "Number of devices per node, i.e. NVLink domain (default: as for the device).", NODES
    )
    memory_budget_gib: tuple[float, ...] | None = shared_setting(
        "memory_budget_gib", " Several numbers fix --pp. Default: the budget of the device."
    )
    tp: int | None = flag(None, "Search only this tensor-parallel degree (default: any).", COUNT)
    cp: int | None = flag(
        None, "Search only this context-parallel (Ulysses) degree (default: any).", COUNT
    )
    pp: int | None = flag(None, "Search only this number of pipeline stages (default: any).", COUNT)
    dp: int | None = flag(
        None, "Search only this number of data-parallel replicas (default: any).", COUNT
    )
    placement: str = flag(
        "auto",
        "Stages of each pipeline rank: even (one), or auto (default), which also tries several for "
        "the best layouts and uses them if they save at least 1%% of the time.",
        ("HOW", one_of("even", "auto")),
    )
    vocab_parallel: str = shared_setting("vocab_parallel")


@dataclass
class TunePlannerFlags:
    """The planner's options in ``tune``, and the number of table rows."""

    TITLE: ClassVar = "planner"

    levers: str = shared_setting("levers")
    host_memory_gib: float | None = shared_setting(
        "host_memory_gib", " Without it, nothing is offloaded."
    )
    effort: int | None = shared_setting("effort", default=None)
    top: int = flag(10, "Number of rows to print (default: 10).", ("N", whole_number(1, 1000)))


@dataclass
class TuneFlags:
    """Options of ``tune``: the chosen row of the table, and files to write for this row."""

    row: int | None = flag(
        None,
        "Row to write, draw and simulate. Default: the first row that is not tight, if it is at "
        "most 5%% slower than row 1; otherwise row 1.",
        COUNT,
    )
    parts: bool = flag(False, "Print the memory of every row by category.")
    script: str | None = flag(None, "Write the launch script of the chosen row.", FILE)
    hostfile: str | None = flag(
        None,
        "Write the hosts of the chosen row in the order of node ranks, in the format of "
        "SLURM_HOSTFILE. This needs a --topology with a grid of nodes.",
        FILE,
    )


# Schemas of every command, in the order of its usage line.
FLAGS: dict[str, tuple[type, ...]] = {
    "plan": (
        DocumentFlags,
        BatchFlags,
        MachineFlags,
        AssumptionFlags,
        PlannerFlags,
        PlanFlags,
        JsonFlags,
    ),
    "compare": (
        DocumentFlags,
        BatchesFlags,
        MachineFlags,
        AssumptionFlags,
        PlannersFlags,
        JsonFlags,
    ),
    "tune": (
        TunedDocumentFlags,
        TunedBatchesFlags,
        TunedMachineFlags,
        AssumptionFlags,
        TunePlannerFlags,
        TuneFlags,
        JsonFlags,
    ),
    "simulate": (
        PlanFileFlags,
        PlansMachineFlags,
        AssumptionFlags,
        SimulateFlags,
        ReplicaFlags,
        JsonFlags,
    ),
    "draw": (PlanFileFlags, DrawFlags, ReplicaFlags, DrawnMachineFlags, AssumptionFlags),
    "check": (PlanFileFlags, CheckedMachineFlags, AssumptionFlags, JsonFlags),
    "where": (WhereFlags, ReplicaFlags, JsonFlags),
}


def add_command_flags(command: argparse.ArgumentParser, schemas: Sequence[type]) -> None:
    """Add a flag for each field of ``schemas``; with planner flags, the help lists the levers."""
    for schema in schemas:
        add_flags(command, schema)
        if issubclass(schema, PlannerFlags):
            width = max(map(len, LEVERS))
            lines = (
                textwrap.fill(f"  {name:<{width}}  {text}", 79, subsequent_indent=" " * (width + 4))
                for name, text in LEVERS.items()
            )
            command.epilog = "\n".join(["levers of the epp planner:", *lines])
