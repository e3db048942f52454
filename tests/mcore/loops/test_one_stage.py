"""Loops without a pipeline: log-probabilities without logits, slices within a memory bound."""

from tests.mcore.loops.conftest import require_said

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
        assert len(answer["least"][1]) > len(some)


def test_positions_of_several_axes(answers) -> None:
    for answer in answers:
        error, chunks = answer["axes"]
        assert error < 1e-12 and chunks > 2
        assert answer["axes left out"] > 1e-6


def test_a_call_says_what_its_samples_share(answers) -> None:
    once = "repeat the beginning of another sample of the micro-batch; a replica computes them once"
    for answer in answers:
        error, *lines = answer["shared"]
        assert error < 1e-12
        assert lines == [
            f"megatron_epp: share_from=9: of {tokens} tokens in a call, {saved} {once}"
            for tokens, saved in ((134, "12 (9%)"), (16, "0 (0%)"))
        ]


def test_bad_input_is_one_line_on_every_rank(answers) -> None:
    for answer in answers:
        require_said(answer["bad"], 9)


def test_attach_says_that_slices_run(answers) -> None:
    for answer in answers:
        assert answer["attached"].startswith("megatron_epp ")
        assert ": slices, megatron-core 0." in answer["attached"]
        assert answer["attached"].endswith(", Samples on a GPTModel")
