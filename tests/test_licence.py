"""The licence is Apache's own text, and NOTICE names all that is quoted of Megatron-LM."""

import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_licence_is_apaches_own_text() -> None:
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


def test_the_notice_names_the_files_that_patches_quote() -> None:
    quoted = {
        name
        for patch in (ROOT / "patches").glob("*.patch")
        for name in re.findall(r"^--- a/(\S+)$", patch.read_text(), re.MULTILINE)
    }
    named = re.findall(r"^    (megatron/\S+)$", (ROOT / "NOTICE").read_text(), re.MULTILINE)
    assert quoted and sorted(quoted) == named
