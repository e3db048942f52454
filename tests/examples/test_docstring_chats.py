"""The example's chats: every documented definition of a module is a question and its answer."""

from pathlib import Path

import pytest

from tests.programs import loaded

pytestmark = pytest.mark.everything

SCRIPT = Path(__file__).parents[2] / "examples" / "docstring_chats.py"


def test_a_module_is_a_conversation(tmp_path: Path) -> None:
    example = loaded(SCRIPT)
    (tmp_path / "test").mkdir()
    for name in ("a.py", "test/a.py"):
        (tmp_path / name).write_text(
            'class A:\n    "Is."\n    def f(self, x=1):\n        "Does."\ndef g(): pass\n'
        )
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "silent.py").write_text("x = 1\n")
    (conversation,) = example.conversations(tmp_path)
    assert [tuple(message.values()) for message in conversation] == [
        ("system", example.SYSTEM),
        ("user", "What is a.A?"),
        ("assistant", "Is."),
        ("user", "What does a.A.f(self, x=1) do?"),
        ("assistant", "Does."),
    ]
