"""The collectives that a call of a loop may issue: those of a schedule, over a replica."""

from megatron_epp.certify.allowed_collectives import SCHEDULE, Listed
from megatron_epp.mcore.loops.replica_groups import CONTROL

_OURS = (
    Listed(
        "call",
        CONTROL,
        r"megatron_epp\.mcore\.loops\.rank_status\.gather_statuses",
        "what every rank of the replica has read, before the ops; what became of it, behind them",
    ),
    Listed(
        "plan text",
        CONTROL,
        r"megatron_epp\.runtime\.consensus\.broadcast_text",
        "one rank plans, where no plan for such micro-batches is known",
    ),
    Listed(
        "loop's own context",
        "CONTEXT_PARALLEL_GROUP",
        r"megatron_epp\.mcore\.certify\.loops\.context\..*",
        "the loop's attention and losses over ranks that share its documents",
    ),
)
_NOT_OURS = ("plan text", "plan digest", "report", "records", "memory limit")
LOOP = (*_OURS, *(entry for entry in SCHEDULE if entry.name not in _NOT_OURS))
