"""Documents end at their last target: what is planned is what is trained on, masks included."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_epp.__main__ import main
from megatron_epp.corpus import loss_mask
from megatron_epp.corpus.idx_file import read_index
from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.corpus.loss_mask import LossMasks, examine_masks
from megatron_epp.corpus.overlong import OVERLONG, apply_context
from tests.corpus.test_idx_file import write_pair


def write_masks(prefix: Path, masks: list[list[int]]) -> Path:
    """The masks beside ``prefix``, a list of 0 and 1 for every sequence; their .idx."""
    name = prefix.with_name(f"{prefix.name}_mask")
    index = write_pair(name, [len(mask) for mask in masks], code=1)
    name.with_suffix(".bin").write_bytes(bytes(value for mask in masks for value in mask))
    return index


def masked_corpus(prefix: Path, masks: list[list[int]]) -> str:
    path = write_pair(prefix, [len(mask) for mask in masks])
    write_masks(prefix, masks)
    return str(path)


MASKS = [
    [0, 0, 1, 1, 0, 0, 0],  # needs 3 inputs
    [0, 0, 0],  # nothing to predict
    [1, 0, 0],  # its one target has nothing in front of it
    [0, 1],
    [1],  # too short
    [0, 0, 0, 0, 0, 0, 0, 1],  # 7 inputs for one target
    [0, 1, 0, 0, 0, 1, 0],  # 5 inputs
]


@pytest.mark.parametrize(
    ("context", "overlong", "counted"),
    [
        (0, "drop", {"untargeted": 2, "untargeted_tail": 8}),
        (4, "truncate", {"truncated": 1, "untargeted": 3, "lost_tokens": 11}),
        (4, "drop", {"dropped": 2, "untargeted": 2, "lost_tokens": 12}),
        (4, "split", {"split": 2, "untargeted": 3, "lost_tokens": 0}),
    ],
)
def test_counts_by_policy(tmp_path: Path, context: int, overlong: str, counted: dict) -> None:
    masks = read_masks(tmp_path, MASKS)
    index = masks.index(context, overlong)
    assert index.masks == masks.prefix
    assert (index.counts.sequences, index.counts.skipped) == (7, 1)
    assert {name: getattr(index.counts, name) for name in counted} == counted


def read_masks(folder: Path, masks: list[list[int]]) -> LossMasks:
    found = examine_masks(read_index(Path(masked_corpus(folder / "corpus", masks))))
    assert found is not None
    return found


def slow_documents(mask: list[int], context: int, overlong: str) -> list[tuple[int, int]]:
    """(start, inputs) of a sequence's documents, token by token."""
    targets = [token for token in range(1, len(mask)) if mask[token]]
    needed = max(targets, default=0)
    if overlong == "drop":
        return [(0, needed)] if 0 < needed <= context else []
    found = []
    for start in range(0, len(mask) - 1, context):
        inside = [token for token in targets if start < token <= start + context]
        if inside:
            found.append((start, max(inside) - start))
        if overlong == "truncate":
            break
    return found


@settings(deadline=None)
@given(
    masks=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=12),
    context=st.integers(1, 8),
    overlong=st.sampled_from(OVERLONG),
    block=st.integers(1, 7),
    share=st.tuples(st.integers(0, 12), st.integers(0, 12)),
)
def test_every_policy_is_what_token_by_token_gives(
    tmp_path_factory, masks, context, overlong, block, share
) -> None:
    first, stop = min(*share, len(masks)), min(max(share), len(masks))
    expected = [
        (number, *document)
        for number in range(first, stop)
        for document in slow_documents(masks[number], context, overlong)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_mask, "_BLOCK_BYTES", block)
        found = read_masks(tmp_path_factory.mktemp("masks"), masks)
        index = found.index(context, overlong, first, stop - first)
    documents = zip(
        index.sequences.tolist(), index.starts.tolist(), index.inputs.tolist(), strict=True
    )
    assert list(documents) == expected
    counts = index.counts
    assert counts.documents == len(expected)
    assert counts.tokens == sum(inputs for _, _, inputs in expected)
    all_inputs = sum(len(mask) - 1 for mask in masks[first:stop])
    assert counts.tokens + counts.lost_tokens + counts.untargeted_tail == all_inputs


def test_masks_of_ones_change_nothing(tmp_path: Path) -> None:
    lengths = [9, 1, 2, 30, 17]
    masks = read_masks(tmp_path, [[1] * length for length in lengths])
    for overlong in OVERLONG:
        plain = apply_context(np.array(lengths, np.int32) - 1, 8, overlong)
        found = masks.index(8, overlong)
        for name in ("sequences", "starts", "inputs"):
            assert getattr(found, name).tolist() == getattr(plain, name).tolist(), name
            assert getattr(found, name).dtype == getattr(plain, name).dtype, name
        assert found.counts == plain.counts


# --- what can be wrong


def refused(path: str) -> str:
    with pytest.raises(ValueError) as refusal:
        open_corpus(path)
    line = str(refusal.value)
    assert "\n" not in line
    return line


def test_masks_of_other_lengths(tmp_path: Path) -> None:
    path = masked_corpus(tmp_path / "a", MASKS)
    write_masks(tmp_path / "a", [*MASKS[:-1], [0, 1]])
    assert "the mask of sequence 6 has 2 entries, the sequence in " in refused(path)
    assert "a.idx 7 tokens; prepare the masks again" in refused(path)
    write_masks(tmp_path / "a", MASKS[:-1])
    assert "6 sequences of masks; " in refused(path)
    write_pair(tmp_path / "a_mask", [len(mask) for mask in MASKS], code=4)
    assert "a_mask.idx: holds int32; loss masks are bytes (uint8)" in refused(path)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_half_of_the_masks(tmp_path: Path, suffix: str) -> None:
    path = masked_corpus(tmp_path / "a", MASKS)
    (tmp_path / f"a_mask.{suffix}").unlink()
    assert f"a_mask.{suffix}: no such file, but a_mask." in refused(path)


def test_damaged_masks(tmp_path: Path) -> None:
    path = masked_corpus(tmp_path / "a", MASKS)
    data = tmp_path / "a_mask.bin"
    whole = bytearray(data.read_bytes())
    data.write_bytes(whole[:-1])
    assert "a_mask.bin: truncated" in refused(path)
    whole[9] = 7
    data.write_bytes(whole)
    assert "a_mask.bin: byte 9 is 7; expected 1 for a token that is a target" in refused(path)


def test_no_target_at_all(tmp_path: Path) -> None:
    path = masked_corpus(tmp_path / "a", [[1, 0, 0], [0, 0]])
    assert "no target in any of the 2 documents" in refused(path)


def test_the_command_line_plans_what_targets_need(tmp_path: Path, capsys) -> None:
    path = masked_corpus(tmp_path / "chat", [[0] * 40 + [1] + [0] * 60, [0] * 101, [1] * 31])
    words = "plan --model gpt-7b --device a100-80g --pp 4 --context 64 --global-batch-size 2"
    assert main([*words.split(), "--lengths", path, "-o", str(tmp_path / "plan")]) == 0
    assert "1 without a target dropped" in capsys.readouterr().out
    (documents,) = re.findall(r"^documents (.*)$", (tmp_path / "plan").read_text(), re.M)
    assert sorted(map(int, documents.split())) == [30, 40]
