"""Run as a process of its own: tensors that a layer of experts still references after a chunk.

Prints a line of JSON: numbers of tensors by recompute mode; `undropped`: without what frees them.
"""

import gc
import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

import shapes
import single_stage
import torch

from megatron_epp.ir import FULL, KEEP
from megatron_epp.mcore.calibrate.probe import Shape, undisturbed
from megatron_epp.mcore.kinds.moe import exchange

TOKENS = 512
MOE = """--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-latent-size 32
    --moe-shared-expert-intermediate-size 64 --moe-router-load-balancing-type none
    --moe-token-dispatcher-type"""


def of_chunk() -> int:
    """Number of tensors with the rows of a chunk."""
    every = (one for one in gc.get_objects() if isinstance(one, torch.Tensor))
    return sum(TOKENS in one.shape for one in every)


def main(dispatcher: str) -> None:
    words = shapes.flags("tiny", 1, 4096, False, [*MOE.split(), dispatcher])
    alone = single_stage.start_single_process(words)
    model = single_stage.build_stage(alone, 1, False, False)
    left = {}
    with undisturbed(model):
        probe = single_stage.probe_alone(alone, model)
        probe.layers(Shape(64), KEEP)
        gc.collect()
        gc.disable()
        assert not of_chunk()
        for mode in (KEEP, FULL, "m", "e"):
            probe.layers(Shape(TOKENS), mode)
            left[mode] = of_chunk()
        with patch.object(exchange, "drop_exchanged", lambda experts: None):
            probe.layers(Shape(TOKENS), FULL)
            left["undropped"] = of_chunk()
    print(json.dumps(left))


main(sys.argv[1])
