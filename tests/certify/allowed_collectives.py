"""List of the collectives that an iteration may issue, with the reason for each.

A certificate compares point-to-point messages between stages with the plan. Every other collective
must be on this list. A collective that is not on the list is a bug: if one rank issues it more
often than another rank, the job hangs.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tests.certify.comm_recorder import Collective

_MCORE = "megatron.core."
_FINALIZE = _MCORE + "distributed.finalize_model_grads."
_BUCKETS = _MCORE + "distributed.param_and_grad_buffer._ParamAndGradBucketGroup."
DATA_GROUP = "DATA_PARALLEL_GROUP_WITH_CP"


@dataclass(frozen=True, slots=True)
class AllowedCollective:
    """Entry of the list of allowed collectives.

    The regular expressions ``group`` and ``callers`` must match the complete description of the
    process group and the complete dotted name of the calling function.
    """

    name: str
    group: str
    callers: str
    why: str

    def covers(self, collective: Collective) -> bool:
        """Return whether a collective matches this entry."""
        return bool(
            re.fullmatch(self.group, collective.group)
            and re.fullmatch(self.callers, collective.caller)
        )


def callers_of(*names: str) -> str:
    """Return a regular expression for the dotted names, and for all names nested in them."""
    return "(" + "|".join(re.escape(name) + r"(\..*)?" for name in names) + ")"


SCHEDULE = (
    AllowedCollective(
        "plan text",
        "epp_control|epp_block",
        callers_of("megatron_epp.runtime.consensus.broadcast_text"),
        "one rank has a replica's plan made, the others get its text; a refusal goes to all ranks",
    ),
    AllowedCollective(
        "plan digest",
        "epp_control|epp_block",
        callers_of("megatron_epp.runtime.consensus.largest"),
        "no rank runs a plan that another does not run; whether one refuses its plan",
    ),
    AllowedCollective(
        "report",
        "epp_control",
        callers_of("megatron_epp.control.report.gather_report"),
        "seconds and bytes of all stages, for the log line, and whether one ran out of memory",
    ),
    AllowedCollective(
        "memory limit",
        "TENSOR_AND_CONTEXT_PARALLEL_GROUP|EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
        callers_of("megatron_epp.runtime.stage_peers.Peers.any"),
        "after every op, with --epp-memory-limit-gib only: no rank of a stage gives up alone, nor "
        "one of several replicas in lockstep",
    ),
    AllowedCollective(
        "records",
        "epp_control",
        callers_of("megatron_epp.runtime.consensus.gathered"),
        "every timed op, with --epp-record only",
    ),
    AllowedCollective(
        "gradient reduction",
        DATA_GROUP,
        callers_of(_BUCKETS + "start_grad_sync"),
        "over the replicas, once per bucket, after the stage's last backward has begun",
    ),
    AllowedCollective(
        "parameter gather",
        DATA_GROUP,
        callers_of(_BUCKETS + "start_param_sync"),
        "what the distributed optimizer updated in parts",
    ),
    AllowedCollective(
        "embedding copies",
        "(POSITION_)?EMBEDDING_GROUP",
        callers_of(_FINALIZE + "_allreduce_embedding_grad"),
        "first and last stage hold a copy each of tied embeddings; stages with MTP layers, of any",
    ),
    AllowedCollective(
        "norm gradients",
        "TENSOR_MODEL_PARALLEL_GROUP",
        callers_of(_FINALIZE + "_allreduce_non_tensor_model_parallel_grads"),
        "with sequence parallelism every rank normalises its own rows",
    ),
    AllowedCollective(
        "token count",
        f"PIPELINE_MODEL_PARALLEL_GROUP|{DATA_GROUP}",
        callers_of(_FINALIZE + "finalize_model_grads"),
        "the divisor of loss and gradients: from the last stage, over the replicas",
    ),
    AllowedCollective(
        "rows for heads",
        "CONTEXT_PARALLEL_GROUP",
        callers_of("megatron_epp.layers.attention.ulysses"),
        "around the attention of every layer run, recomputed ones again; as often in backward",
    ),
    AllowedCollective(
        "expert exchange",
        "EXPERT_(TENSOR_AND_MODEL|MODEL|TENSOR)_PARALLEL_GROUP",
        r"megatron\.core\.(tensor_parallel|transformer\.moe)\..*"
        r"|megatron_epp\.(mcore\.patching\.gloo|layers\.moe\.async_exchange"
        r"|mcore\.kinds\.moe\.halves)\..*",
        "rows to their experts and back; once per layer run, or per half; recomputed ones again",
    ),
    AllowedCollective(
        "expert gradient reduction",
        "EXPERT_DATA_PARALLEL_GROUP.*",
        callers_of(_BUCKETS + "start_grad_sync"),
        "over the ranks that hold the same experts, as the gradient reduction",
    ),
    AllowedCollective(
        "expert parameter gather",
        "EXPERT_DATA_PARALLEL_GROUP.*",
        callers_of(_BUCKETS + "start_param_sync"),
        "what the distributed optimizer updated in parts",
    ),
    AllowedCollective(
        "tokens of documents per expert",
        "TENSOR_AND_CONTEXT_PARALLEL_GROUP",
        callers_of("megatron_epp.layers.moe.router_stats.RouterStats"),
        "for auxiliary losses, all layers at once: when a chunk's backward meets documents anew",
    ),
    AllowedCollective(
        "expert bias",
        "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
        callers_of("megatron.core.transformer.moe.moe_utils.get_updated_expert_bias"),
        "tokens per expert over the whole batch, which move the biases",
    ),
    AllowedCollective(
        "tensor parallelism",
        "TENSOR_MODEL_PARALLEL_GROUP",
        r"(megatron\.core\.tensor_parallel|megatron_epp\.layers\.wgrad"
        r"|transformer_engine\.pytorch\.distributed)\..*",
        "inside layers, embedding and loss; once per layer run, recomputed ones again",
    ),
    AllowedCollective(
        "tied words",
        f"PIPELINE_MODEL_PARALLEL_GROUP|{DATA_GROUP}",
        callers_of("megatron_epp.mcore.lm_head.tied"),
        "once per iteration: the embedding's words and their copies in the output layer's shards",
    ),
    AllowedCollective(
        "words of a stage",
        "TENSOR_MODEL_PARALLEL_GROUP",
        callers_of("megatron_epp.layers.lm_head.vocabulary"),
        "in every H statistics and rows of the ranks' words, in H and G the rows of each",
    ),
    AllowedCollective(
        "attention of all heads",
        "TENSOR_MODEL_PARALLEL_GROUP",
        callers_of("megatron_epp.layers.dsa._target"),
        "what an indexer learns from; once per block of rows, in forward and in backward",
    ),
)


def name_of(collective: Collective, listed: Iterable[AllowedCollective] = SCHEDULE) -> str | None:
    """Return the name of the entry that covers the collective; None if no entry does."""
    return next((entry.name for entry in listed if entry.covers(collective)), None)
