"""Options of a planner: its levers and its effort."""

from dataclasses import dataclass, field, replace
from types import MappingProxyType

from megatron_epp.cost.catalogue.named import unknown_name

# Levers of `epp`, and what each lever does when it is on. Other planners have no levers.
LEVERS = MappingProxyType(
    {
        "wsplit": "split the backward into I and W if this saves time; W fills bubbles",
        "offload": "copy saved activations to the host instead of recomputing them",
        "local": "compute short documents on one context-parallel rank, without all-to-all",
    }
)
# Former levers: what they did is always done now, or never.
ALWAYS_ON = frozenset(
    ("bins", "chunks", "exact", "lean", "persist", "search", "selective", "trim", "window")
)
GONE = MappingProxyType(
    {
        "hedge": "plans are made for the assumed host",
        "uneven": "--placement auto moves layers between stages",
    }
)
MOST_EFFORT = 1_000_000
# Default effort: EFFORT; above FEW documents per replica it rises in proportion, up to MANY_EFFORT.
# It is also limited to the time of an iteration, at SECONDS_OF_EFFORT of a core per unit. An
# iteration of 8,192 documents of 8B on 4 stages took 3.2% less with an effort of 16 than with 4,
# for 0.7 s more planning; with 4,096 or fewer documents it took as long.
EFFORT, MANY_EFFORT = 4, 16
FEW = 2048
SECONDS_OF_EFFORT = 0.2
ALL = frozenset(LEVERS)
# Levers that the executor supports. `offload` is added for GPUs whose host memory is known
# (default_levers): it frees nothing on a CPU-only host.
TRAINING_LEVERS = ALL - {"offload"}


@dataclass(frozen=True, slots=True)
class Options:
    """Arguments of a planner besides lengths and cost.

    Attributes:
        context: maximum number of tokens of a document, and pack size of planner `packing`; 0:
            length of the longest document.
        levers: names of the LEVERS that planner `epp` may use.
        effort: amount of search; 0: take the first plan found, unless memory is tight; None:
            depends on the batch (:func:`with_effort`).
        lockstep: number of replicas of a lockstep group, which share experts and an op template
            (ir.program.op_template); 1: every replica is planned individually.

    Raises:
        ValueError: if ``context`` or ``effort`` is negative, ``lockstep`` is less than 1, or a
            lever is unknown.
    """

    context: int = 0
    levers: frozenset[str] = field(default=TRAINING_LEVERS)
    effort: int | None = None
    lockstep: int = 1

    @property
    def search_effort(self) -> int:
        """Effort of a search; EFFORT if ``effort`` is None."""
        return EFFORT if self.effort is None else self.effort

    def __post_init__(self):
        for name in ("context", "effort"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} {getattr(self, name)}: expected at least 0")
        if self.lockstep < 1:
            raise ValueError(f"lockstep {self.lockstep}: expected at least 1")
        for lever in sorted(self.levers - ALL):
            raise ValueError(_unknown(lever))


def with_effort(options: Options, documents: int, seconds: float) -> Options:
    """Return ``options`` with an effort that depends on the batch, unless ``effort`` is set.

    Args:
        options: planner options.
        documents: number of documents of a replica.
        seconds: seconds of a replica's work on an average rank.
    """
    if options.effort is not None:
        return options
    wanted = min(EFFORT * max(1.0, documents / FEW), MANY_EFFORT)
    return replace(options, effort=int(min(wanted, seconds / SECONDS_OF_EFFORT)))


def default_levers(device: str, host_memory: bool = False) -> frozenset[str]:
    """Return the levers that training uses by default on the named ``device``.

    ``host_memory`` is whether the host memory for offloading is known.
    """
    on_cpu = device.partition(":")[0] == "cpu"  # "cpu", or "cpu: its processor"
    return TRAINING_LEVERS | ({"offload"} if host_memory and not on_cpu else frozenset())


def parse_levers(text: str, default: frozenset[str] = TRAINING_LEVERS) -> frozenset[str]:
    """Return the levers that ``text`` lists: default, all, none or names, separated by commas.

    ``-name`` removes a lever: ``all,-wsplit`` means all levers except `wsplit`. If ``text`` begins
    with ``-``, levers are removed from ``default``.

    Raises:
        ValueError: if ``text`` lists nothing, or a name is unknown.
    """
    sets = {"default": default, "all": ALL, "none": frozenset[str]()}
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ValueError("no lever named; expected default, all, none or names joined by commas")
    chosen: set[str] = set()
    if words[0].startswith("-"):
        chosen |= default
    for word in words:
        name = word.removeprefix("-")
        named = sets.get(name, frozenset({name}))
        if not named <= ALL:
            raise ValueError(_unknown(name))
        chosen = chosen - named if word.startswith("-") else chosen | named
    return frozenset(chosen)


def _unknown(name: str) -> str:
    if name in ALWAYS_ON:
        return f"lever {name}: always on now; leave it out"
    if name in GONE:
        return f"lever {name}: removed; {GONE[name]}"
    return unknown_name("lever", name, LEVERS, "all", "default", "none")
