"""Plan language: data types, text form, rule table and checker of plans.

The package imports the standard library only. The project uses these terms:

    document     one sequence of the corpus; a token attends to itself and to earlier tokens
    span         tokens [start, stop) of one document
    slice        a span of a document whose tokens are divided over several chunks
    pack         several short documents in one chunk
    chunk        what a stage computes at once: a pack, a slice, or a slice and a pack (hybrid)
    tail         the last slice of a cut document
    prefix       the first tokens of a document, which one or more other documents continue
    branch       a document with a prefix
    single-rank  a single-rank document is computed by one context-parallel rank; it is not
                 sharded over all ranks (``@RANK`` in the text of a plan, ``Span.local`` in code)
    stage        a group of consecutive layers of the model
    rank         a pipeline rank, which computes one or several stages (``place`` in a plan)
    replica      one data-parallel copy of the pipeline
    op           one computation (F, B, I, W, H or G) of a stage on one chunk
    order        the ops of a stage or of a rank, in execution order
    plan         chunks, orders and recompute modes of one replica for one iteration
    step         one iteration of the job: the assignment of documents, and a plan per replica
    lockstep     a lockstep group consists of consecutive replicas that run the same ops in the
                 same order (``block`` in code)
    op template  the common part of the plans of a lockstep group: the orders of ops, and the
                 layers whose MLP each chunk recomputes
    program      the ops of a rank in order, with their sends and receives
    in flight    chunks whose forward has run on a stage and whose backward has not
    bubble       time in which a rank runs no op
"""

from megatron_epp.ir.check import backward_of, check, check_ranks, walk
from megatron_epp.ir.chunk import Chunk
from megatron_epp.ir.errors import Deadlock, PlanError
from megatron_epp.ir.needs import NeedsOf, needs_of, ops_of_chunk, rules_of
from megatron_epp.ir.op import (
    BACKWARDS,
    COMPUTE,
    KIND_CODE,
    MAKE_GRADIENTS,
    OF_HEAD,
    OF_LAYERS,
    HandOver,
    Kind,
    Message,
    Op,
    Payload,
    Post,
    StageOp,
    Transfer,
)
from megatron_epp.ir.plan import Plan, Prediction, Prefixes, offsets_of
from megatron_epp.ir.program.lower import Program, lower, lower_rank
from megatron_epp.ir.program.op_template import check_op_template, check_op_templates
from megatron_epp.ir.recompute import FULL, IN_FLIGHT, KEEP, OFFLOAD, SELECTIVE
from megatron_epp.ir.rules import (
    DOCUMENT_ITEMS,
    Effect,
    Item,
    Need,
    Relation,
    Rule,
    Rules,
    SlicePosition,
    StagePosition,
    rules_for,
)
from megatron_epp.ir.slices import CachedDocument, Slices, slices_in, slices_of
from megatron_epp.ir.span import ALL_RANKS, Span
from megatron_epp.ir.step import Step, StepPart
from megatron_epp.ir.table import Table
from megatron_epp.ir.timed import Timed, format_records, parse_records
