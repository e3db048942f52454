"""Shapes of NeMo-RL's micro-batches: ProcessedMicrobatches, which are already padded and packed.

See ``nemo_rl/models/megatron/data.py``. ``input_ids`` contain the rows of all context-parallel
ranks.
"""

from typing import Any

from megatron_epp.frameworks.caller import Caller, Reader
from megatron_epp.frameworks.rows import lengths_between
from megatron_epp.planner.calls.microbatch import MicrobatchShape

RELIES_ON = (
    "nemo_rl.models.megatron.data.ProcessedMicrobatch",
    "nemo_rl.models.megatron.data._pack_sequences_for_megatron",
    "nemo_rl.models.megatron.data.make_processed_microbatch_iterator",
    "nemo_rl.models.megatron.data.process_microbatch",
)


def nemo_rl_reader(caller: Caller) -> Reader | None:
    """Return a function that computes the shape of NeMo-RL's micro-batches."""

    def read(micro_batch: Any) -> MicrobatchShape | None:
        samples, rows = micro_batch.input_ids.shape
        boundaries = micro_batch.cu_seqlens_padded
        if boundaries is None or samples > 1:  # for models that pack samples themselves
            return MicrobatchShape(rows, samples)
        return MicrobatchShape(rows, 1, lengths_between(boundaries))

    return read
