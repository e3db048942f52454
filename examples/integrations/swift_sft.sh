#!/usr/bin/env bash
# ms-swift: packed supervised training of long texts over four stages, in slices (swift_slices.py).
#
#   python -m pip install <a checkout of megatron_epp>
#   bash swift_sft.sh [more flags of megatron sft]
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export NPROC_PER_NODE=${NPROC_PER_NODE:-8}
exec megatron sft \
    --model Qwen/Qwen2.5-7B \
    --dataset ZhipuAI/LongWriter-6k \
    --tensor_model_parallel_size 2 \
    --sequence_parallel true \
    --pipeline_model_parallel_size 4 \
    --micro_batch_size 1 \
    --global_batch_size 32 \
    --packing true \
    --max_length 32768 \
    --train_iters 1000 \
    --lr 1e-5 \
    --min_lr 1e-6 \
    --output_dir megatron_output/long \
    --external_plugins "$HERE/swift_slices.py" \
    --callbacks slices \
    "$@"
