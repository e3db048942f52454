"""--epp-blend: what weights of corpora count, from the command line and in a run that resumes."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_epp.mcore.choose.choices import choose_blend
from megatron_epp.mcore.choose.kept import BLEND_KEY, CHOICES_FILE
from tests.mcore.resumes import OPTIMIZER
from tests.mcore.runs import flags, trained, write_corpus

BEGAN = "--epp-blend auto: weights of corpora count documents, as the run that resumes began"


def resuming(folder: Path, asked: str = "auto", **changes: object) -> Namespace:
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    data = {"data_path": ["1", "a", "2", "b"], "data_args_path": None, "train_data_path": None}
    others = {"valid_data_path": None, "test_data_path": None, "per_split_data_args_path": None}
    how = {"epp": True, "epp_blend": asked, "load": str(folder), "finetune": False}
    return Namespace(**{**data, **others, **how, **changes})


@pytest.mark.parametrize(
    ("kept", "asked", "blend", "said"),
    [
        # Nothing beside the checkpoint: Megatron's own run, whose samples are tokens.
        (None, "auto", "tokens", None),
        ({BLEND_KEY: "documents"}, "auto", "documents", BEGAN),
        ({BLEND_KEY: "tokens"}, "auto", "tokens", None),
        ({BLEND_KEY: "documents"}, "tokens", "tokens", "the run that resumes counted documents: "),
        ({BLEND_KEY: "tokens"}, "documents", "documents", "the run that resumes counted tokens: "),
    ],
)
def test_a_run_that_resumes_counts_what_it_counted(tmp_path: Path, kept, asked, blend, said):
    if kept is not None:
        (tmp_path / CHOICES_FILE).write_text(json.dumps(kept))
    args = resuming(tmp_path, asked)
    line = choose_blend(args)
    assert args.epp_blend == blend
    assert line is None if said is None else said in line


def test_what_weights_counted_is_said_where_there_are_some(tmp_path: Path) -> None:
    (tmp_path / CHOICES_FILE).write_text('{"epp_blend": "documents"}')
    args = resuming(tmp_path, data_path=["a", "b", "c"])
    assert choose_blend(args) is None and args.epp_blend == "documents"
    args = resuming(tmp_path, finetune=True)
    assert choose_blend(args) is None and args.epp_blend == "tokens"
    for text in ('{"epp_blend": "bytes"}', "{}"):
        (tmp_path / CHOICES_FILE).write_text(text)
        with pytest.raises(ValueError, match=r'epp-choices\.json: expected "tokens" or "documents'):
            choose_blend(resuming(tmp_path))


@pytest.mark.everything
def test_training_draws_as_the_flag_says_and_goes_on_so(tmp_path: Path) -> None:
    short = write_corpus(tmp_path / "short", [21] * 60)
    long = write_corpus(tmp_path / "long", [121] * 60)
    how = {**OPTIMIZER, "pipeline_model_parallel_size": 1, "train_iters": 7}

    how |= {"global_batch_size": 8, "epp": True}

    def run(**changes: object) -> tuple[str, dict]:
        words = flags("BLEND", **how, **changes)
        at = words.index("BLEND")
        words[at : at + 1] = ["0.5", str(short), "0.5", str(long)]
        done = trained(words, processes=1)
        return done.output, json.loads((tmp_path / "saved" / CHOICES_FILE).read_text())

    place = {"save": tmp_path / "saved", "save_interval": 2}
    output, kept = run(exit_interval=2, epp_blend="documents", **place)
    assert kept[BLEND_KEY] == "documents" and "epp iteration 2: 560 tokens" in output
    assert f"documents and 14.3% of the tokens from {short}" in output
    output, kept = run(exit_interval=3, load=place["save"], **place)
    assert BEGAN in output and "epp iteration 3: 560 tokens" in output
    assert kept[BLEND_KEY] == "documents"
    # A run that begins counts tokens, also where it evaluates.
    output, kept = run(eval_iters=1, split="50,50,0", **place)
    assert kept[BLEND_KEY] == "tokens"
    shares = "training draws 85.7% of the documents and 50.0% of the tokens"
    assert f"> --epp-blend tokens: {shares} from {short}" in output
