"""A host without a GPU; the corpus that tests of training runs read, and flags as a job reads."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()  # before the first import of Megatron


@pytest.fixture(scope="module")
def corpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of the LENGTHS of the test's module, or of those that most runs have."""
    from tests.mcore.runs import LENGTHS, write_corpus  # torch: only where it is asked for

    lengths = getattr(request.module, "LENGTHS", LENGTHS)
    return write_corpus(tmp_path_factory.mktemp("corpus") / "documents", lengths)


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Namespace]:
    """What Megatron's parser and ours make of words."""
    from megatron.training.arguments import parse_args

    from megatron_epp.mcore.job.read_flags import prepare_parser

    def read(*words: str) -> Namespace:
        monkeypatch.setattr("sys.argv", ["pretrain", *words])
        return parse_args(prepare_parser)

    return read
