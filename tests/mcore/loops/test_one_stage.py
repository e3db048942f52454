"""Loops without a pipeline: log-probabilities without logits, slices within a memory bound."""

import pytest

RANKS = 2


def test_log_probabilities_of_whole_micro_batches(answers) -> None:
    """Under Megatron's own schedule; words and rows spread over two ranks."""
    assert all(answer["whole"] < 1e-12 for answer in answers)


def test_a_bound_cuts_what_it_must(answers) -> None:
    """And nothing else: the same gradients, from fewer tokens at once."""
    for answer in answers:
        assert max(answer[name][0] for name in ("all fits", "some fits", "least")) < 1e-12
        chunks = answer["all fits"][1]
        assert chunks == [[0, 1], [2], [3, 4, 5], [6]]
        some = answer["some fits"][1]
        assert some.count([2]) > 1 and [0, 1] in some and [3, 4, 5] in some and [6] in some
        least = answer["least"][1]
        assert len(least) > len(some)
        assert answer["nothing fits"].startswith("attach(memory_gib=")


def test_positions_of_several_axes(answers) -> None:
    for answer in answers:
        error, chunks = answer["axes"]
        assert error < 1e-12 and chunks > 2
        assert answer["axes left out"] > 1e-6


BAD = {
    "labels": "log_probs: labels are [1, 95], the model's hidden states are of 1 samples of 96",
    "no labels": "log_probs: labels=None on the last stage; expected [B, S] tokens",
    "temperature": "log_probs: temperature 0.0; expected more than 0",
    "temperatures": "log_probs: temperature is [3], labels are [1, 96]; expected one that expands",
    "two": "attach: a Strange holds several modules with a decoder of Megatron's layers",
    "none": "attach: a Linear holds no module of Megatron's with a decoder of Megatron's layers",
    "heads": "attach: 2 attention heads of a tensor-parallel rank do not divide over 4",
    "sinkhorn": "attach: slices do not compute balancing that depends on what is computed",
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_on_every_rank(answers, case) -> None:
    for answer in answers:
        assert answer[case].startswith(BAD[case]), answer[case]
        assert "\n" not in answer[case]


def test_attach_says_that_slices_run(answers) -> None:
    for answer in answers:
        assert answer["attached"].startswith("megatron_epp ")
        assert ": slices, megatron-core 0." in answer["attached"]
        assert answer["attached"].endswith(", Samples on a GPTModel")
