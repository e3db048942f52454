"""Options of a planner: its levers, and how hard it may look."""

from dataclasses import dataclass, field, replace
from types import MappingProxyType

from megatron_epp.cost.catalogue.named import unknown_name

# Every lever of `epp`, with what it does where it is on. None of them belongs to another planner.
LEVERS = MappingProxyType(
    {
        "chunks": "choose the number of chunks by exact simulation, not by the proxy of eq. 13",
        "bins": "pack by longest processing time into a free number of bins, not by Alg. 1",
        "window": "one pipeline whose window shrinks with the split counts, no barriers",
        "wsplit": "split backward into I and W where that pays; the W fill bubbles",
        "trim": "give back recompute, stage by stage and chunk by chunk, where memory has slack",
        "selective": "recompute named modules of a layer, not only whole layers",
        "offload": "lay what layers saved in host memory where memory is tight (default: if known)",
        "exact": "charge K/V and their gradients only to what needs them",
        "uneven": "move layers between stages where the user left that open (simulation only)",
        "search": "a bounded local search over chunks, recompute and order",
        "persist": "in tight memory, search on while a plan is far off its bound, or not our own",
        "local": "leave short documents whole to one context-parallel rank each: no all-to-all",
        "hedge": "choose plans that lose little where hosts issue ops slower than was assumed",
        "lean": "of plans within 0.5% of the fastest take the one that needs least memory",
    }
)
MOST_EFFORT = 1_000_000
# How hard a search looks where nobody says: EFFORT, in proportion more from FEW documents of a
# replica on, up to MANY_EFFORT; but no more than its iteration leaves time for, at so many seconds
# of a core each. 8,192 documents of 8B on 4 stages took 3.2% less with 16 than with 4, for 0.7 s of
# planning more; 4,096 and fewer took as long.
EFFORT, MANY_EFFORT = 4, 16
FEW = 2048
SECONDS_OF_EFFORT = 0.2
SIMULATION_ONLY = frozenset({"uneven"})
ALL = frozenset(LEVERS)
# What the executor can run; `offload` where there are GPUs and their host's memory is known
# (default_levers): it frees nothing on a host without one. Layers that cannot split a backward do
# without `wsplit`, which training finds out from its flags (mcore.job.job_cost.unusable_levers).
TRAINING_LEVERS = ALL - SIMULATION_ONLY - {"offload"}
# Left out, unless named, where layers are Transformer Engine's, as they are on GPUs: the halves of
# their backwards are right and have not been timed.
UNTIMED_ON_GPUS = frozenset({"wsplit"})


@dataclass(frozen=True, slots=True)
class Options:
    """Arguments of a planner besides lengths and costs. No clock, no seed.

    context       the most inputs of a document; also what `packing` packs to. 0: the longest given
    levers        names of LEVERS that `epp` may use
    effort        how much work the search may do, in proportion; 0 takes the first good plan; None:
                  by numbers of the batch (:func:`with_effort`)
    open_layers   whether stages may get other numbers of layers than the cost says (lever uneven)
    lockstep      replicas of a block, which share the experts of a layer and have one skeleton
                  (ir.program.skeleton); 1: every replica is planned for itself
    whole         whether no document may be cut, as where routers compare all tokens of one
    """

    context: int = 0
    levers: frozenset[str] = field(default=TRAINING_LEVERS)
    effort: int | None = None
    open_layers: bool = False
    lockstep: int = 1
    whole: bool = False

    def __post_init__(self):
        for name in ("context", "effort"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} {getattr(self, name)}: expected at least 0")
        if self.lockstep < 1:
            raise ValueError(f"lockstep {self.lockstep}: expected at least 1")
        for lever in sorted(self.levers - ALL):
            raise ValueError(_unknown(lever))


def with_effort(options: Options, documents: int, seconds: float) -> Options:
    """Return ``options`` with an effort: the user's, or what numbers of the batch say.

    documents   of a replica
    seconds     of a replica's work on the average stage
    """
    if options.effort is not None:
        return options
    wanted = min(EFFORT * max(1.0, documents / FEW), MANY_EFFORT)
    return replace(options, effort=int(min(wanted, seconds / SECONDS_OF_EFFORT)))


def default_levers(device: str, host_memory: bool = False) -> frozenset[str]:
    """Return what training runs by default on a device of that name.

    ``host_memory``: whether it is known how much of it there is for what is offloaded.
    """
    if device.partition(":")[0] == "cpu":  # "cpu", or "cpu: its processor"
        return TRAINING_LEVERS
    return TRAINING_LEVERS - UNTIMED_ON_GPUS | ({"offload"} if host_memory else frozenset())


def parse_levers(text: str, default: frozenset[str] = TRAINING_LEVERS) -> frozenset[str]:
    """The levers that ``text`` names: default, all, none, or names; ``-name`` takes one away.

    ``all,-wsplit`` is everything but the split of the backward.
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
    return unknown_name("lever", name, LEVERS, "all", "default", "none")
