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
        "Planner: epp (default), infinipipe, seq1f1b, chunkflow, packing, 1f1b, zb-v, adaptis or "
        "slimpipe.",
        ("NAME", str),
    )
    levers: str = flag(
        "default",
        "Levers (optimizations) of planner epp: default (those of training), all, none, or names "
        "separated by commas. default,-NAME removes one.",
        ("LIST", str),
    )
    memory_budget_gib: tuple[float, ...] | None = flag(
        None, BUDGET_HELP, ("GIB", positive("GiB")), nargs="+"
    )
    host_memory_gib: float | None = flag(
        None,
        "Host memory in GiB for the activations that one device offloads (lever offload).",
        ("GIB", positive("GiB")),
    )
    cost_model: str | None = flag(
        None,
        "Cost-model file (JSON), which `python -m megatron_epp profile` writes.",
        ("FILE", str),
    )
    effort: int | None = flag(
        None,
        "Search effort of the planner; planning time is proportional to it. 0 takes the first "
        f"plan that the search finds. Default: {EFFORT}, but up to {MANY_EFFORT} with thousands of "
        "documents, and less if iterations are short.",
        ("N", whole_number(0, MOST_EFFORT)),
    )
    overlong: str = flag(
        "truncate",
        "What to do with documents longer than the context: truncate them (default), drop them, "
        "or split them into several documents.",
        ("HOW", one_of(*OVERLONG)),
    )
    placement: str = flag(
        "auto",
        "Stages of each pipeline rank. auto: the placement and the layers that are fastest in a "
        "simulation of the first batches. even: one stage. interleaved N: N stages. v: two stages "
        "in V shape, with the embedding and the LM head on the last rank. 'place 1 0 0 1': the "
        "rank of each stage. Otherwise a file with such a line, or with a line 'rank 0: 1 2' for "
        "each rank, and optionally a line 'layers ...'.",
        nargs="+",
        metavar="PLACEMENT",
        action=JoinedArguments,
    )
    vocab_parallel: str = flag(
        "auto",
        "Vocabulary parallelism, which shards the LM head over the stages: on, off, or auto "
        "(default). auto turns it on if the job supports it and it saves at least 1%% of the "
        "predicted time of the first batches.",
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
