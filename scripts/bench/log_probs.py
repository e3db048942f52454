#!/usr/bin/env python3
"""Log-probabilities and entropies of tokens, from full logits and by blocks: seconds and peaks.

    scripts/bench/log_probs.py
    scripts/bench/log_probs.py --tokens 32768 --words 150000 --threads 2 --ways blocks --bf16

Each way runs alone in a process of this host. The input is hidden states [T, H] and an output
weight [V, H] in float32 or bf16. The script runs forward and backward of a loss of
log-probabilities and entropies. The peak is the memory above that before the forward. The table
also has the predicted peak, and the prediction for 32K tokens, 150K vocabulary entries, bf16,
hidden 4096 and the larger blocks of a GPU. The exit status is 1 if a peak differs from the
prediction by more than 5%.

    plain    logits, their log-softmax, exponentials, products, and the gradients of these
    blocks   two tensors of one block's logits and the weight's gradient; or one tensor, and two
             weight gradients
"""

import argparse
import sys
import time
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

WAYS = ("plain", "blocks")
OFF = 0.05  # of a peak, that is allowed
GIB = 2**30


def held_bytes(peak: bool) -> int:
    """Return the memory of this process in bytes: now, or the peak since it was last reset."""
    name = "VmHWM" if peak else "VmRSS"
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if name in one)
    return int(line.split()[1]) * 1024


def measured(
    way: str, tokens: int, words: int, hidden: int, bf16: bool, threads: int
) -> tuple[float, int]:
    """Return (seconds of forward and backward, peak bytes above those before the forward)."""
    import torch

    from megatron_epp.layers.lm_head.log_probs import block_log_probs
    from megatron_epp.layers.lm_head.vocabulary import OutputWeightShard
    from megatron_epp.mcore.lm_head.fused_head import rows_at_once

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if bf16 else torch.float32
    hidden_TH = torch.randn(tokens, hidden, dtype=dtype).requires_grad_()
    weight_VH = (torch.randn(words, hidden, dtype=dtype) / hidden**0.5).requires_grad_()
    labels_T = torch.randint(words, (tokens,))

    def loss(rows: int) -> torch.Tensor:
        if way == "plain":
            every = (hidden_TH[:rows] @ weight_VH.t()).float().log_softmax(1)
            made = every.gather(1, labels_T[:rows, None])[:, 0]
            entropies = -(every.exp() * every).sum(1)
        else:
            shard = OutputWeightShard(weight_VH.detach(), 0, rows_at_once(words, False))
            made, entropies = block_log_probs(hidden_TH[:rows], weight_VH, labels_T[:rows], shard)
        return (made + 0.01 * entropies).sum()

    loss(64).backward()  # whatever is done for the first time
    hidden_TH.grad = weight_VH.grad = None
    Path("/proc/self/clear_refs").write_text("5")
    before, began = held_bytes(peak=False), time.perf_counter()
    loss(tokens).backward()
    return time.perf_counter() - began, held_bytes(peak=True) - before


def predicted_bytes(
    way: str, tokens: int, words: int, hidden: int, bf16: bool, on_gpu: bool
) -> float:
    """Return the predicted peak bytes of a way; statistics and softmaxes are float32."""
    element = 2 if bf16 else 4
    weight = words * hidden * 4
    hiddens = tokens * hidden * element  # their gradient
    if way == "plain":  # log-softmax, its exponentials, and the gradients of their product
        return 5 * tokens * words * 4 + hiddens + weight * element // 4
    from megatron_epp.mcore.lm_head.fused_head import rows_at_once

    block = min(tokens, rows_at_once(words, on_gpu)) * words * 4
    # The logits and their exponentials; or, behind these, a block's share of the weight's gradient,
    # and slopes that are rounded for it.
    rounded = block * element // 4 if bf16 else 0
    return max(2 * block + weight, block + rounded + weight + weight * element // 4) + hiddens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name, default in (("tokens", 4096), ("words", 32768), ("hidden", 256), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--bf16", action="store_true", help="in the place of float32")
    chosen = parser.parse_args()
    sizes = chosen.tokens, chosen.words, chosen.hidden
    if min(*sizes, chosen.threads) < 1:
        parser.error("expected sizes of at least 1")
    print(
        f"{chosen.tokens} tokens, {chosen.words} words, hidden {chosen.hidden}, "
        f"{'bf16' if chosen.bf16 else 'float32'}"
    )
    print("way     seconds  peak GiB  predicted GiB  off by  GiB predicted: 32K x 150K, bf16")
    most = 0.0
    for way in chosen.ways:
        with get_context("spawn").Pool(1) as alone:
            seconds, peak = alone.apply(measured, (way, *sizes, chosen.bf16, chosen.threads))
        here = predicted_bytes(way, *sizes, chosen.bf16, on_gpu=False)
        large = predicted_bytes(way, 32 * 1024, 150_000, 4096, True, on_gpu=True) / GIB
        most = max(most, abs(peak / here - 1))
        print(
            f"{way:<7} {seconds:7.2f} {peak / GIB:9.3f} {here / GIB:14.3f} {peak / here - 1:+7.1%} "
            f"{large:15.1f}",
            flush=True,
        )
    return int(most > OFF)


if __name__ == "__main__":
    sys.exit(main())
