"""Settings that training (``--epp-NAME``) and the commands that plan (``--NAME``) share."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_epp.corpus.overlong import OVERLONG
from megatron_epp.flag_fields import JoinedWords, flag, one_of, positive, whole_number
from megatron_epp.planner.options import MOST_EFFORT, Options

SHARDED = ("auto", "on", "off")  # vocabulary parallelism


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """Defaults, units and help, stated once; :func:`shared_setting` makes a field of each."""

    planner: str = flag(
        "epp", "planner: epp (default), infinipipe, seq1f1b, packing, ...", ("NAME", str)
    )
    levers: str = flag(
        "default",
        "what the epp planner may use: default (what training runs by default), all, none, or "
        "names joined by commas; default,-NAME takes one away",
        ("LIST", str),
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
    effort: int = flag(
        Options().effort,
        "how much work the planner's search may do, in proportion; 0 takes the first good plan "
        f"(default: {Options().effort})",
        ("N", whole_number(0, MOST_EFFORT)),
    )
    overlong: str = flag(
        "truncate",
        "documents longer than the context: truncate (default), drop, or split into documents of "
        "their own",
        ("HOW", one_of(*OVERLONG)),
    )
    partition: str = flag(
        "even", "layers of the stages; auto: by time on the corpus's expected lengths"
    )
    placement: str = flag(
        "even",
        "stages of every pipeline rank: even (default): one, stage i on rank i; interleaved N: N, "
        "dealt in turn; v: two, there and back, the model's ends on the last rank; auto: what "
        "takes least by plans for the corpus's first batches, with layers by time; 'place 1 0 0 "
        "1': the rank of every stage; or a file with such a line, or a line 'rank 0: 1 2' for each "
        "rank, and 'layers ...' if wanted",
        nargs="+",
        metavar="PLACEMENT",
        action=JoinedWords,
    )
    vocab_parallel: str = flag(
        "auto",
        "vocabulary parallelism, the LM head sharded over the stages: on, off, or auto "
        "(default): on where training runs it and plans for the corpus's first batches take at "
        "least 1%% less time",
        ("HOW", one_of(*SHARDED)),
    )


_FIELDS = {each.name: each for each in fields(SharedSettings)}


def shared_setting(
    name: str, more: str = "", word: tuple[str, Callable[[str], Any]] | None = None, **changes: Any
) -> Any:
    """Return a field like ``name`` of :class:`SharedSettings`.

    Args:
        name: Of the setting.
        more: What only this command says, after the shared help.
        word: Metavar and type in the place of the shared ones.
        changes: Another ``default``, or other arguments of ``add_argument``.
    """
    setting = _FIELDS[name]
    default = changes.pop("default", setting.default)
    how = {**setting.metadata, **changes}
    if word is not None:
        how["metavar"], how["type"] = word
    return field(default=default, metadata={**how, "help": how["help"] + more})
