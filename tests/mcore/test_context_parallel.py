"""Context parallelism: chunks spread over ranks compute what one rank computes."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_epp.__main__ import main
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import LLAMA, Trial
from megatron_epp.mcore.capabilities.refusals import refuse
from megatron_epp.mcore.certify.model_flags import parsed
from megatron_epp.mcore.choose.choices import choose_row_multiple
from megatron_epp.mcore.data.row_shard import chunk_multiple, row_block
from megatron_epp.mcore.patching import cpu_host
from megatron_epp.planner.padding import gpu_row_multiple
from tests.mcore.certified import certified
from tests.mcore.runs import flags, train, write_corpus
from tests.mcore.test_refusals import wanted

pytestmark = pytest.mark.everything


def test_rows_are_padded_to_what_gpus_like(monkeypatch) -> None:
    def rows(**others) -> int:
        return row_block(SimpleNamespace(**{"transformer_impl": "transformer_engine", **others}))

    assert rows() == 1
    monkeypatch.setattr(cpu_host, "has_gpu_kernels", lambda: True)
    assert (rows(), rows(transformer_impl="local")) == (16, 1)
    assert (rows(epp_row_multiple=1), rows(epp_row_multiple=4)) == (1, 4)
    mxfp8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}
    assert (rows(epp_row_multiple=24, **mxfp8), rows(epp_row_multiple=1, **mxfp8)) == (96, 32)
    # 16 chunks of four stages, half a multiple each: 128 rows, of a rank.
    assert gpu_row_multiple([[12_800]], 4, 1, 1) == 16
    assert gpu_row_multiple([[12_700]], 4, 1, 1) == 4
    assert gpu_row_multiple([[12_800], [0, 12_800]], 4, 1, 1) == 16
    assert gpu_row_multiple([[12_800]], 4, 2, 1) == gpu_row_multiple([[12_800]], 4, 1, 2) == 4


@pytest.mark.parametrize("documents", [8, 40], ids=["few", "many"])
def test_training_and_plan_pad_the_same_corpus_alike(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path, documents: int
) -> None:
    """Padding to 16 takes 128 tokens; 1% of twice 8 documents are 100, of twice 40 about 500."""
    prefix = write_corpus(tmp_path / "corpus", [481, 961, 33, 1441] * documents)
    words = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 1024"
    words += " --max-position-embeddings 1024 --tensor-model-parallel-size 2 --sequence-parallel"
    words += f" --global-batch-size {2 * documents} --data-path {prefix}"
    args = parsed(words.split(), 2)
    args.data_parallel_size = 1
    args.transformer_impl = "transformer_engine"  # also where this process parses as a CPU host
    monkeypatch.setattr(cpu_host, "has_gpu_kernels", lambda: True)
    line = choose_row_multiple(args)
    of_rank = {8: 4, 40: 16}[documents]
    assert args.epp_row_multiple == of_rank and (line is None) == (of_rank == 16)
    asked = f"plan --lengths {prefix}.idx --global-batch-size {2 * documents} --context 1024"
    asked += " --model llama3-8b --device h100-80g --pp 2 --tp 2 --effort 0 --json"
    assert main(asked.split()) == 0
    assert json.loads(capsys.readouterr().out)["multiple"] == chunk_multiple(args) == 2 * of_rank


def test_heads_that_do_not_divide_are_refused_by_flag() -> None:
    shape = {"num_attention_heads": 12, "num_query_groups": 6, "group_query_attention": True}
    refuse(wanted(context_parallel_size=3, tensor_model_parallel_size=2, **shape))
    with pytest.raises(ValueError, match=r"--context-parallel-size 4: 6 attention heads"):
        refuse(wanted(context_parallel_size=4, tensor_model_parallel_size=2, **shape))
    with pytest.raises(ValueError, match=r"--context-parallel-size 2: 3 key/value heads"):
        refuse(wanted(context_parallel_size=2, tensor_model_parallel_size=2, **shape))


@pytest.mark.parametrize(
    ("degrees", "extra", "batches"),
    [(Degrees(1, 1, 1, cp=4), "", 6), (Degrees(1, 2, 1, cp=2), "--sequence-parallel", 3)],
)
def test_documents_local_to_one_of_several_ranks(degrees, extra, batches) -> None:
    """Every recompute choice, backwards in halves; a rank may have none of a chunk's."""
    flags = f"{LLAMA} --num-layers 2 --num-attention-heads 8 --num-query-groups 2 {extra}".split()
    _, judged = certified(Trial(degrees, (tuple(flags),), batches))
    coverage = [batch.coverage for batch in judged]
    assert min(sum(c.mixed for c in coverage), sum(c.hybrid for c in coverage)) > 0
    assert min(sum(c.selective for c in coverage), sum(c.halved for c in coverage)) > 0
    # Whoever computes all of its chunks' documents alone exchanges nothing.
    judged_local = [batch for batch in judged if batch.coverage.local]
    assert len(judged_local) == batches - -(-batches // 3)


# ------------------------------------------------------------------ trained


def test_training_is_the_same_over_two_ranks(tmp_path) -> None:
    """The trainer's own way: groups, data, optimizer, evaluation, the loss in its log."""
    corpus = write_corpus(tmp_path / "documents", [5, 17, 33, 120, 64, 90, 8, 77] * 4)
    alone, spread = (
        train(
            flags(
                corpus,
                pipeline_model_parallel_size=1,
                context_parallel_size=ranks,
                train_iters=3,
                eval_iters=1,
                eval_interval=3,
                split="80,20,0",
                epp=True,
                epp_plan_ahead=True,
            ),
            processes=ranks,
        )
        for ranks in (1, 2)
    )
    assert alone.status == spread.status == 0, alone.output + spread.output
    assert len(alone.losses) == 3
    assert spread.losses == pytest.approx(alone.losses, rel=1e-5)
    assert spread.grad_norms == pytest.approx(alone.grad_norms, abs=2e-3)
    evaluated = [re.findall(r"lm loss value: ([0-9.E+-]+)", run.output) for run in (alone, spread)]
    assert evaluated[0] and [float(x) for x in evaluated[1]] == pytest.approx(
        [float(x) for x in evaluated[0]], rel=1e-5
    )
