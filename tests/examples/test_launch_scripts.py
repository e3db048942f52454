"""The launch scripts of examples/ train, save and resume with every flag that stands in them."""

import re
from pathlib import Path

import pytest

from tests.mcore.runs import ROOT, Run, train, trained
from tests.programs import BASH, run, stand_in

pytestmark = pytest.mark.everything

# What two cores can train; later flags win over the script's.
SMALL = """
    --num-layers 4 --hidden-size 32 --ffn-hidden-size 88 --num-attention-heads 4
    --num-query-groups 2 --ddp-bucket-size 20000 --eval-interval 10 --eval-iters 1
"""


def words_of(script: str, folder: Path, **variables: object) -> list[str]:
    """What the script hands to the trainer, instead of starting it."""
    noted = folder / "words"
    trainer = stand_in(folder / "python", f'printf "%s\\0" "$@" > "{noted}"')
    environment = {name: str(value) for name, value in variables.items()}
    done = run(BASH, ROOT / "examples" / script, PYTHON=str(trainer), **environment)
    assert done.returncode == 0, done.stderr
    words = noted.read_text().split("\0")[:-1]
    return words[words.index("megatron_epp.pretrain_gpt") + 1 :]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """The text of a part of this package, a file a document."""
    prefix = tmp_path_factory.mktemp("text") / "text"
    words = ("--glob", "*.py", "--vocab-size", "512", "--workers", "1", "--quiet")
    script = str(ROOT / "scripts" / "prepare_corpus.py")
    files = (str(ROOT / "megatron_epp" / "mcore"), *words, "-o", str(prefix))
    trained(list(files), processes=0, program=(script,))
    return prefix


def iterations(run: Run) -> list[int]:
    return [int(number) for number in re.findall(r"\] iteration +(\d+)/", run.output)]


def test_twenty_iterations_with_a_save_and_a_resume(corpus, tmp_path) -> None:
    """Two stages of two tensor-parallel ranks with every overlap, in bf16, on text, with the cost
    model that is measured at start."""
    words = words_of(
        "pretrain_gpt_epp.sh",
        tmp_path,
        DATA=corpus,
        TOKENIZER=f"{corpus}.model",
        GPUS=4,
        PP=2,
        TP=2,
        CONTEXT=256,
        BATCH=12,
        ITERS=20,
        SAVE=tmp_path / "saved",
        SIZE="tiny",
    )
    for flag in ("--bf16", "--sequence-parallel", "--overlap-param-gather", "--epp"):
        assert flag in words
    words += SMALL.split()
    first = train([*words, "--exit-interval", "10", "--save-interval", "10"], processes=4)
    assert first.status == 0, first.output[-3000:]
    assert iterations(first) == list(range(1, 11))
    assert (tmp_path / "saved" / "epp-cost-model.json").exists()
    second = train([*words, "--save-interval", "10"], processes=4)
    assert second.status == 0, second.output[-3000:]
    assert iterations(second) == list(range(11, 21))
    assert (tmp_path / "saved" / "iter_0000020").is_dir()
    losses = first.losses[:10] + second.losses[-10:]
    assert max(second.losses) < min(losses[:2])
