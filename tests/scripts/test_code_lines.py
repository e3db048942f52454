"""Lines by kind, as scripts/code_lines.py counts them."""

from tests.programs import ROOT, loaded, python

SOURCE = '''"""A module

of two lines."""

X = """text
# text"""


def f():
    "Doc."
    # why
    return X
'''


def test_lines_by_hand_and_of_the_package() -> None:
    kinds = loaded(ROOT / "scripts" / "code_lines.py").count(SOURCE)
    assert kinds == {"doc": 3, "blank": 4, "comment": 2, "code": 3}
    done = python("scripts/code_lines.py", "megatron_epp/ir/op.py", "tests/programs.py")
    heading, *rows = done.stdout.splitlines()
    assert heading.split() == ["folder", "code", "doc", "comment", "blank", "files"]
    assert {row.split()[0]: row.split()[-1] for row in rows} == {
        "megatron_epp": "1", "megatron_epp/ir": "1", "tests": "1"
    }  # fmt: skip
