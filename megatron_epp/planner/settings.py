"""Settings that training (``--epp-NAME``) and the planning commands (``--NAME``) have in common."""

from dataclasses import dataclass, field, fields
from typing import Any

from megatron_epp.corpus.overlong import OVERLONG
from megatron_epp.cost.catalogue.devices import BUDGET_HELP
from megatron_epp.flag_fields import JoinedArguments, flag, one_of, positive, whole_number
from megatron_epp.planner.options import EFFORT, MANY_EFFORT, MOST_EFFORT


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """Default, unit and help of each setting; :func:`shared_setting` copies a setting's field."""

    planner: str = flag(
        "epp",
        "planner: epp (default), infinipipe, seq1f1b, chunkflow, packing, 1f1b, zb-v, adaptis or "
        "slimpipe",
        ("NAME", str),
    )
    levers: str = flag(
        "default",
        "optimizations of the epp planner: default (those of training), all, none, or names "
        "separated by commas; default,-NAME removes one",
        ("LIST", str),
    )
    memory_budget_gib: tuple[float, ...] | None = flag(
        None, BUDGET_HELP, ("GIB", positive("GiB")), nargs="+"
    )
    host_memory_gib: float | None = flag(
        None,
        "GiB of the host's memory for what one device offloads (lever offload)",
        ("GIB", positive("GiB")),
    )
    cost_model: str | None = flag(
        None,
        "cost-model file (JSON) as `python -m megatron_epp profile` writes it",
        ("FILE", str),
    )
    effort: int | None = flag(
        None,
        "search effort of the planner, proportional to its work; 0 takes the first good plan "
        f"(default: by the batch: {EFFORT}, up to {MANY_EFFORT} with thousands of documents, less "
        "if an iteration is short)",
        ("N", whole_number(0, MOST_EFFORT)),
    )
    overlong: str = flag(
        "truncate",
        "documents longer than the context: truncate (default), drop, or split into documents of "
        "their own",
        ("HOW", one_of(*OVERLONG)),
    )
    placement: str = flag(
        "auto",
        "stages of every pipeline rank: auto, the fastest on the corpus's first batches, with "
        "their layers; even, one; interleaved N; v: two, in V shape, with embedding and LM head on "
        "the last rank; 'place 1 0 0 1', the rank of every stage; or a file with such a line, or "
        "with a line 'rank 0: 1 2' for each rank, and optionally 'layers ...'",
        nargs="+",
        metavar="PLACEMENT",
        action=JoinedArguments,
    )
    vocab_parallel: str = flag(
        "auto",
        "vocabulary parallelism, the LM head sharded over the stages: on, off, or auto (default): "
        "on where training runs it and takes at least 1%% less time on the corpus's first batches",
        ("HOW", one_of("auto", "on", "off")),
    )


_FIELDS = {each.name: each for each in fields(SharedSettings)}


def shared_setting(name: str, more: str = "", **changes: Any) -> Any:
    """Return a dataclass field that is a copy of a field of :class:`SharedSettings`.

    Args:
        name: name of the setting.
        more: text to append to the setting's help.
        changes: new values of ``default`` or of arguments of ``add_argument``.
    """
    setting = _FIELDS[name]
    how = {"default": setting.default, **setting.metadata, **changes}
    default, help_ = how.pop("default"), how.pop("help")
    return field(default=default, metadata={**how, "help": help_ + more})
