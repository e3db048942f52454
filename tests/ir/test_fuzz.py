"""Damaged texts are refused in one line, or parse to something that prints as itself."""

from random import Random

from megatron_epp.ir import Plan, PlanError, Step, check
from tests.plans import EXAMPLE

MUTATIONS = 10_000
STEP = (
    "step v1\ndeal 0: 2 0\ndeal 1: 1\n"
    "plan v1\nreplica 0 of 2\ndocuments 900 30\nlayers 1 1\nchunk 0: 0[0:500]\n"
    "chunk 1: 0[500:900] 1[0:30]\nstage 0: F0 F1 B1 B0\nstage 1: F0 F1 I1 I0 W1 W0\n"
    "plan v1\nreplica 1 of 2\ndocuments 70\nlayers 1 1\nchunk 0: 0[0:70]\nstage 0: F0 B0\n"
    "stage 1: F0 B0\n"
)
ALPHABET = "0123456789FBIWkfcmnabo[]:# \n\t-.eé\x00\x85\u2028plandocumentsstage"


def mutated(text: str, random: Random) -> str:
    """``text`` with one to four pieces changed, moved, doubled or lost."""
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(text) + 1)
        to = min(len(text), at + random.choice((1, 1, 1, 2, 8, 30)))
        words, lines = text.split(" "), text.split("\n")
        match random.randrange(9):
            case 0:
                text = text[:at] + text[to:]
            case 1:
                text = text[:at] + random.choice(ALPHABET) + text[to:]
            case 2:
                text = text[:at] + random.choice(ALPHABET) + text[at:]
            case 3:
                text = text[:at] + text[at:to] * 2 + text[to:]
            case 4:
                text = text[:at] + str(random.choice((0, 1, 2, 10**6, 10**15, 10**40))) + text[to:]
            case 5:
                words[random.randrange(len(words))] = random.choice(words)
                text = " ".join(words)
            case 6:
                one, two = random.randrange(len(lines)), random.randrange(len(lines))
                lines[one], lines[two] = lines[two], lines[one]
                text = "\n".join(lines)
            case 7:
                del lines[random.randrange(len(lines))]
                text = "\n".join(lines)
            case 8:
                text = text[:at]
        if not text:
            break
    return text


def test_damaged_plans() -> None:
    random = Random(0)
    accepted = runnable = 0
    for _ in range(MUTATIONS):
        text = mutated(EXAMPLE, random)
        try:
            plan = Plan.parse(text)
        except PlanError as error:
            assert str(error) and "\n" not in str(error), text
            continue
        accepted += 1
        assert Plan.parse(str(plan)) == plan, text
        try:
            check(plan)
        except PlanError as error:
            assert str(error).splitlines()[0], text
        else:
            runnable += 1
    # The test would prove nothing if every mutation were refused, or none.
    assert MUTATIONS / 100 < runnable <= accepted < MUTATIONS / 2


def test_damaged_steps() -> None:
    random = Random(1)
    accepted = 0
    for _ in range(MUTATIONS // 4):
        text = mutated(STEP, random)
        try:
            step = Step.parse(text)
        except PlanError as error:
            assert str(error) and "\n" not in str(error), text
            continue
        accepted += 1
        assert Step.parse(str(step)) == step, text
    assert MUTATIONS / 400 < accepted < MUTATIONS / 8
