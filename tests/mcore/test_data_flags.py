"""Megatron's data flags: phases and full validation as Megatron runs them, mistakes in one line."""

import json
import re
from argparse import Namespace
from pathlib import Path

import numpy
import pytest

from megatron_epp.mcore.data.data_flags import require_data_flags
from megatron_epp.mcore.data.global_batches import FullPasses
from megatron_epp.mcore.job.checkpoint_folders import require_complete
from megatron_epp.mcore.trainer.job_data import units_line
from tests.mcore.resumes import OPTIMIZER
from tests.mcore.runs import flags, trained, write_corpus
from tests.mcore.test_refusals import refused

LENGTHS = [30, 40, 50, 60] * 5
ALONE = {"pipeline_model_parallel_size": 1, "global_batch_size": 4, "epp": True}


def given(**changes: object) -> Namespace:
    names = "data_path data_args_path train_data_path valid_data_path test_data_path"
    names += " per_split_data_args_path split validation_set_names ckpt_step load"
    flags_ = dict.fromkeys(names.split()) | {"split": "99,1,0"}
    flags_ |= {"full_validation": False, "multiple_validation_sets": False}
    return Namespace(**flags_ | changes)


SPLITS = {"split": None, "train_data_path": ["a"], "valid_data_path": ["b", "c", "d"]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data_path": ["0", "a", "1", "b"]}, "--data-path: weight 0 of a; expected a positive"),
        ({"data_path": ["-1", "a", "1", "b"]}, "--data-path: weight -1 of a"),
        ({"data_path": ["nan", "a", "1", "b"]}, "--data-path: weight nan of a"),
        ({"data_path": ["x", "a", "1", "b"]}, "--data-path: some corpora have a weight and others"),
        ({"data_path": []}, "--data-path: names no corpora"),
        ({"data_path": ["a"], "split": "x"}, "--split 'x': expected fractions for training"),
        ({"data_path": ["a"], "split": "0,0,0"}, "--split '0,0,0': expected fractions"),
        ({"data_path": ["a"], "split": "1,1,1,1"}, "--split '1,1,1,1': expected fractions"),
        ({"data_args_path": "/no/file"}, "--data-args-path /no/file: cannot be read (No such"),
        ({"data_args_path": "EMPTY"}, "--data-args-path EMPTY: names no corpora"),
        ({"data_args_path": "CORPUS", "split": None}, "--split is missing with --data-args-path"),
        ({"data_path": ["a"], "data_args_path": "EMPTY"}, "both are given"),
        (SPLITS | {"split": "9,1,0"}, "--split 9,1,0: divides --data-path; with --train-data-path"),
        ({"per_split_data_args_path": "EMPTY", "split": None}, "names no corpora (JSONDecodeError"),
        (
            {"per_split_data_args_path": "ONE", "split": None},
            "names no corpora (KeyError: 'valid')",
        ),
        ({"per_split_data_args_path": "ODD", "split": None}, "names no corpora (TypeError"),
        (SPLITS | {"validation_set_names": ["b"]}, "--validation-set-names b: names the sets of"),
        (
            SPLITS | {"validation_set_names": ["b"], "multiple_validation_sets": True},
            "1 names of 3 corpora for validation",
        ),
        (
            {"data_path": ["1", "a"], "full_validation": True},
            "--full-validation: --data-path gives",
        ),
        ({"ckpt_step": 5, "load": "SAVED"}, "--ckpt-step 5: SAVED/iter_0000005 is not there"),
    ],
)
def test_mistakes_are_one_line_with_the_flag(tmp_path: Path, change: dict, said: str) -> None:
    (tmp_path / "EMPTY").write_text("")
    (tmp_path / "CORPUS").write_text("a")
    (tmp_path / "ONE").write_text('{"train": "a"}')
    (tmp_path / "ODD").write_text(json.dumps({"train": 7, "valid": 7, "test": 7}))
    (tmp_path / "SAVED").mkdir()
    places = ("EMPTY", "CORPUS", "ONE", "ODD", "SAVED")
    args = given(**{key: str(tmp_path / v) if v in places else v for key, v in change.items()})
    with pytest.raises(ValueError) as refusal:
        require_data_flags(args)
        require_complete(args)
    line = str(refusal.value).replace(f"{tmp_path}/", "")
    assert said in line and "\n" not in line


def test_what_megatron_takes_is_taken(tmp_path: Path) -> None:
    for change in ({"data_path": ["0.5", "a", "2", "b"]}, {"data_path": ["a"]}, SPLITS, {}):
        require_data_flags(given(**change))
    (tmp_path / "iter_0000005").mkdir()
    (tmp_path / "iter_0000005" / "metadata.json").touch()
    require_complete(given(ckpt_step=5, load=str(tmp_path)))
    require_complete(given(load=str(tmp_path)))


@pytest.mark.parametrize("without_epp", [False, True])
def test_the_command_line_ends_with_status_two(corpus, without_epp: bool) -> None:
    how = {**ALONE, "epp": None, "micro_batch_size": 1} if without_epp else ALONE
    step = {"ckpt_step": 5, "load": corpus.parent}
    refused(flags(corpus, **how, **step), "--ckpt-step 5: ")
    phases = flags(corpus, **how, phase_transition_iterations=2)
    refused(phases, "--phase-transition-iterations: ", "--train-samples")


# ------------------------------------------------------------------ as Megatron runs them


@pytest.mark.everything
def test_phases_begin_with_their_own_first_documents(tmp_path: Path) -> None:
    """Three phases of two iterations over corpora A, B, A; their documents differ in length."""
    corpora = [
        write_corpus(tmp_path / name, list(range(length, length + 40)), seed=length)
        for name, length in (("a", 20), ("b", 70))
    ]
    how = {**ALONE, **OPTIMIZER, "phase_transition_iterations": "2,4", "train_samples": 24}
    how |= {"train_iters": None, "save": tmp_path / "saved", "save_interval": 2}
    how |= {"load": tmp_path / "saved", "lr_decay_samples": 24}
    tokens: dict[int, str] = {}
    for phase, corpus in enumerate((corpora[0], corpora[1], corpora[0])):
        run = trained(flags(corpus, **how), processes=1)
        here = dict(re.findall(r"epp iteration (\d): (\d+) tokens", run.output))
        assert set(map(int, here)) == {2 * phase + 1, 2 * phase + 2}, run.output
        tokens |= {int(iteration): count for iteration, count in here.items()}
        said = "schedule are documents, as in --train-samples 24, --lr-decay-samples 24\n"
        assert run.output.count(said) == 1
    # The first documents of their corpus, in both phases that read it.
    assert [tokens[1], tokens[2]] == [tokens[5], tokens[6]]
    alone = trained(flags(corpora[1], **{**ALONE, "train_iters": 2}), processes=1)
    again = re.findall(r"epp iteration \d: (\d+) tokens", alone.output)
    assert again == [tokens[3], tokens[4]]


def test_the_start_says_what_a_batch_of_documents_is() -> None:
    args = Namespace(global_batch_size=16, seq_length=128, lr_warmup_samples=0, train_samples=None)
    assert units_line(args, 77.0) == (
        "--global-batch-size 16: documents of 77.0 tokens on average, a batch about 1,232 tokens "
        "or 9.62 samples of --seq-length 128; samples of the learning-rate schedule are documents"
    )


class Numbered:
    """Document i has i + 1 tokens."""

    def __init__(self, documents: int):
        self.documents = documents

    def __len__(self) -> int:
        return self.documents

    def lengths(self, samples) -> numpy.ndarray:
        return numpy.asarray(samples) + 1


@pytest.mark.parametrize(
    ("documents", "size", "sizes"),
    [(10, 4, [3, 3, 4]), (8, 4, [4, 4]), (3, 4, [3]), (7, 3, [2, 2, 3])],
)
def test_a_pass_has_every_document_once(documents, size, sizes) -> None:
    passes = FullPasses(Numbered(documents), size)
    for _ in range(2):
        batches = [next(passes) for _ in range(passes.batches)]
        assert [len(batch.samples) for batch in batches] == sizes
        assert numpy.concatenate([b.samples for b in batches]).tolist() == list(range(documents))
        assert batches[0].lengths.tolist() == list(range(1, sizes[0] + 1))


def test_full_validation_is_the_loss_over_the_whole_set(tmp_path: Path) -> None:
    """As of as many batches as hold the set, each time that it is evaluated."""
    training = write_corpus(tmp_path / "t", [40, 50, 60, 70] * 4)
    validation = write_corpus(tmp_path / "v", [20, 90, 33, 47, 81, 28, 64, 100], seed=1)
    how = {**ALONE, "data_path": None, "split": None, "train_iters": 2, "lr": 0, "min_lr": 0}
    how |= {"train_data_path": training, "valid_data_path": validation, "eval_interval": 1}
    found = {}
    for kind in ({"full_validation": True}, {"eval_iters": 2}):
        run = trained(flags(training, **how, **kind), processes=1)
        found[next(iter(kind))] = re.findall(r"validation loss at .*?value: (\S+)", run.output)
        assert run.status == 0
    assert len(set(found["full_validation"])) == 1 and len(found["full_validation"]) == 3
    full, batches = (float(losses[0]) for losses in found.values())
    assert full == pytest.approx(batches, rel=1e-6)
