"""Shared prefixes that plan and compare find in tokens are those of training."""

import dataclasses
import json
from pathlib import Path
from random import Random

import numpy
import pytest

from megatron_epp.cli.documents import Batches, open_batches
from megatron_epp.cli.layout import named_layout_cost
from megatron_epp.cli.machine import with_padding
from megatron_epp.cli.options import parse
from megatron_epp.cli.plan import options_of
from megatron_epp.corpus import text_lengths
from megatron_epp.corpus.shared_prefixes import Batch, PrefixForest
from megatron_epp.cost.catalogue.models import MODELS
from megatron_epp.cost.cost import Cost
from megatron_epp.ir import Step
from megatron_epp.planner.choose import FIRST_BATCHES
from megatron_epp.planner.choose.choice import RunChoice, Way
from megatron_epp.planner.replicas import plan_step
from tests.cli.commands import GPT, Commands

pytest.importorskip("megatron_epp.mcore.data.documents")

from megatron_epp.mcore.data.global_batches import GlobalBatches
from megatron_epp.mcore.data.shared_tokens import SharedTokens
from tests.cli.training import END, SEED, documents_of
from tests.mcore.runs import write_documents

COUNT, SIZE, CONTEXT, LEAST = 60, 16, 24, 3
ROLES = ("system", "user", "assistant", "tool")
JOB = f"{GPT} --pp 2 --effort 0 --placement even --vocab-parallel off"


def trees(random: Random, most: int = 9) -> list[list[int]]:
    """Texts of which most begin as an earlier one does."""
    texts: list[list[int]] = []
    for _ in range(COUNT):
        begin = random.choice(texts) if texts and random.random() < 0.8 else []
        begin = begin[: random.randrange(1 + len(begin))]
        texts.append(begin + [random.randint(2, 5) for _ in range(random.randint(2, most))])
    return texts


def trained(prefix: Path, depths: int = 0, least: int = LEAST, **how: object) -> list[PrefixForest]:
    """Forests of training's batches 0 to 5: the last ones are of a later epoch."""
    documents = documents_of([prefix], None, CONTEXT, **how)
    batches = GlobalBatches(documents, SIZE, 0)
    shared = SharedTokens(least, depths)
    return [shared.forest(documents, next(batches)) for _ in range(6)]


def batches_of(words: str, depths: int = 0) -> Batches:
    line = f"plan {JOB} --context {CONTEXT} --global-batch-size {SIZE} --seed {SEED} {words}"
    return open_batches(parse(line.split()), [0], depths)


def require_equal(batches: Batches, expected: list[PrefixForest]) -> None:
    assert sum(forest.shares for forest in expected) > len(expected) // 2
    found = [batches.forest(number) for number in range(len(expected))]
    assert found == expected
    assert [forest.lengths for forest in found] == [batches[n] for n in range(len(expected))]


@pytest.mark.parametrize("depths", [0, 1])
@pytest.mark.parametrize("overlong", ["truncate", "drop", "split"])
@pytest.mark.parametrize("masked", [False, True])
def test_an_index(folder: Path, overlong: str, depths: int, masked: bool) -> None:
    random = Random(overlong)
    texts = [[5], *trees(random, 20)]
    corpus = write_documents(folder / "corpus", texts, dtype=numpy.uint16)
    if masked:
        masks = [[random.randrange(2) for _ in text] for text in texts]
        write_documents(folder / "corpus_mask", masks, dtype=numpy.uint8)
    batches = batches_of(f"--lengths corpus.idx --share-from {LEAST} --overlong {overlong}", depths)
    require_equal(batches, trained(corpus, depths, overlong=overlong))


@pytest.fixture
def tokenizer(folder: Path) -> Path:
    """One token a word: w7 is 7."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(6)}, "w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save("tokenizer.json")
    return folder


def said(text: list[int]) -> str:
    return " ".join(f"w{token}" for token in text)


def write_texts(name: str, texts: list[list[int]]) -> None:
    Path(name).write_text("\n".join(json.dumps({"text": said(text)}) for text in texts))


WORDS = f"--tokenizer tokenizer.json --share-from {LEAST}"


@pytest.mark.parametrize("depths", [0, 2])
@pytest.mark.parametrize("overlong", ["truncate", "split"])
def test_texts(tokenizer: Path, overlong: str, depths: int) -> None:
    texts = trees(Random(depths), 20)
    write_texts("texts.jsonl", [[], *texts])
    corpus = write_documents(tokenizer / "corpus", [[*text, END] for text in texts])
    batches = batches_of(f"--lengths texts.jsonl {WORDS} --overlong {overlong}", depths)
    require_equal(batches, trained(corpus, depths, overlong=overlong))


def chats(random: Random) -> list[list[tuple[str, list[int]]]]:
    """Chats of which most begin with an earlier one's messages, or a part of the last of these."""
    made: list[list[tuple[str, list[int]]]] = []
    for _ in range(COUNT):
        begin = random.choice(made) if made and random.random() < 0.8 else []
        chat = begin[: random.randrange(1 + len(begin))]
        if chat and random.random() < 0.5:
            role, text = chat[-1]
            chat = [*chat[:-1], (role, text[: random.randrange(1 + len(text))])]
        for _ in range(random.randint(1, 3)):
            text = [random.randint(2, 5) for _ in range(random.randint(1, 5))]
            chat = [*chat, (random.choice(ROLES), text)]
        made.append(chat)
    return made


def test_chats(tokenizer: Path) -> None:
    """Training's tokens are those of a template with four tokens of markup, as ChatML has."""
    every = chats(Random(1))
    objects = [[{"role": role, "content": said(text)} for role, text in chat] for chat in every]
    lines = [json.dumps({"messages": messages}) for messages in objects]
    Path("chats.jsonl").write_text("\n".join(lines))
    starts = {role: [10, 20 + number, 11] for number, role in enumerate(ROLES)}
    texts = [
        [token for role, text in chat for token in (*starts[role], *text, 12)] for chat in every
    ]
    corpus = write_documents(tokenizer / "corpus", [[*text, END] for text in texts])
    require_equal(batches_of(f"--lengths chats.jsonl {WORDS}"), trained(corpus))


def test_of_a_long_file_the_documents_that_are_counted(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = trees(Random(2), 20)
    write_texts("texts.jsonl", texts)
    monkeypatch.setattr(text_lengths, "MOST_DRAWN", COUNT // 2)
    drawn = numpy.linspace(0, COUNT - 1, COUNT // 2).astype(int)
    corpus = write_documents(tokenizer / "corpus", [[*texts[at], END] for at in drawn])
    require_equal(batches_of(f"--lengths texts.jsonl {WORDS}"), trained(corpus))


# ------------------------------------------------------------------ what the commands print

ANSWERS = 12
AGENTS = f"{JOB} --global-batch-size 12"


@pytest.fixture
def agents(folder: Path) -> Path:
    """Answers of 200 to 300 tokens to one prompt of 4,000; one document begins otherwise."""
    random = numpy.random.RandomState(3)
    prompt = random.randint(0, 30_000, 4000)
    texts = [[*prompt, n, *random.randint(0, 30_000, 200 + 9 * n)] for n in range(ANSWERS - 1)]
    return write_documents(folder / "agents", [*texts, random.randint(0, 30_000, 700)])


def tokens_of(facts: dict) -> int:
    return sum(plan.tokens for plan in Step.parse(facts["plan"]).plans)


def test_plan_computes_prefixes_once(cli: Commands, agents: Path) -> None:
    line = f"plan --lengths agents.idx {AGENTS}"
    sharing, apart = cli.facts(f"{line} --share-from 3999"), cli.facts(line)
    assert sharing["tokens"] == apart["tokens"] == tokens_of(apart)
    # A prefix ends one token before the documents differ; with more tokens there is none.
    assert tokens_of(sharing) == apart["tokens"] - (ANSWERS - 2) * 3999
    assert tokens_of(cli.facts(f"{line} --share-from 4000")) == apart["tokens"]
    assert 2 * sharing["seconds"] < apart["seconds"]
    printed = cli.said(f"{line} --share-from 9 -o a.step")
    assert " with shared prefixes once\n" in printed
    assert "; equal beginnings of at least 9 tokens are shared;" in printed
    assert Step.parse(Path("a.step").read_text()) == Step.parse(sharing["plan"])
    assert "once" not in cli.said(f"{line} -o b.step")


def test_prefixes_end_earlier_with_mtp(cli: Commands, agents: Path) -> None:
    model = dataclasses.asdict(MODELS["gpt-7b"]) | {"layers": 33, "pattern": "32*dense mtp"}
    model["kinds"] = {"dense": {}, "mtp": {"predicts": True}}
    Path("model.json").write_text(json.dumps(model))
    line = f"plan --lengths agents.idx {AGENTS} --model model.json --share-from"
    facts = cli.facts(f"{line} 3998")
    assert tokens_of(facts) == facts["tokens"] - (ANSWERS - 2) * 3998
    assert tokens_of(cli.facts(f"{line} 3999")) == facts["tokens"]


def seconds(cli: Commands, line: str) -> dict[str, float]:
    return {each["planner"]: each["seconds"] for each in cli.facts(line)}


GROUPS = f"4000+({','.join(str(200 + 9 * n) for n in range(ANSWERS - 1))})\n700\n"


@pytest.mark.parametrize("words", ["groups.txt", "agents.idx --share-from 9"])
def test_compare_shows_epp_with_and_without(cli: Commands, agents: Path, words: str) -> None:
    Path("groups.txt").write_text(GROUPS)
    line = f"compare {AGENTS} --planner epp packing --lengths {words}"
    found = seconds(cli, line)
    assert list(found) == ["epp", "epp apart", "packing"]
    lengths = [*(4200 + 9 * n for n in range(ANSWERS - 1)), 700]
    Path("whole.txt").write_text("\n".join(map(str, lengths)))
    whole = seconds(cli, f"compare {AGENTS} --planner epp packing --lengths whole.txt")
    assert list(whole) == ["epp", "packing"]
    assert found["epp apart"] == pytest.approx(whole["epp"], rel=0.02)
    assert found["packing"] == pytest.approx(whole["packing"], rel=0.02)
    assert 2 * found["epp"] < found["epp apart"]
    joined = cli.joined(line)
    assert f"{found['epp apart'] / found['epp']:.2f} times as fast as epp apart" in joined


def test_stages_are_chosen_for_what_is_computed_once(
    cli: Commands, agents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first batches of training, with what they share; row epp apart by whole documents."""
    seen = []

    def run_choice(cost: Cost, batches: list[Batch], *_: object, **__: object) -> RunChoice:
        seen.append(batches)
        way = Way("even", cost.layout.layers)
        return RunChoice(cost, way, {way: 1.0})

    monkeypatch.setattr("megatron_epp.cli.layout.run_choice", run_choice)
    job = f"{GPT} --pp 2 --effort 0 --global-batch-size {ANSWERS} --seed {SEED}"
    cli.said(f"compare --lengths agents.idx {job} --share-from 9 --planner epp packing")
    documents = documents_of([agents], None, 8192)
    drawn, shared = GlobalBatches(documents, ANSWERS, 0), SharedTokens(9)
    forests = [shared.forest(documents, next(drawn)) for _ in range(FIRST_BATCHES)]
    assert seen == [forests, [forest.lengths for forest in forests]]


def test_replicas_that_share_experts_plan_the_forest_of_training(
    cli: Commands, agents: Path
) -> None:
    """Its first batch, planned for a lockstep group; and compare shows that plan."""
    job = "--model gpt-oss-20b --device b200-180g --pp 2 --dp 2 --ep 2 --effort 0 --placement even"
    job += f" --lengths agents.idx --share-from 9 --context 8192 --seed {SEED}"
    documents = documents_of([agents], None, 8192)
    forest = SharedTokens(9).forest(documents, next(GlobalBatches(documents, ANSWERS, 0)))
    arguments = parse(["plan", *job.split()])
    cost = named_layout_cost(arguments, "epp")
    cost = with_padding(cost, arguments, [forest.lengths], 2)
    options = options_of(arguments)
    assert options.lockstep == 2
    expected = plan_step(forest, cost, options, "epp", 2)
    assert all(any(plan.prefixes) for plan in expected.step.plans)
    facts = cli.facts(f"plan {job} --global-batch-size {ANSWERS}")
    assert facts["plan"] == str(expected.step)
    compared = seconds(cli, f"compare {job} --global-batch-size {ANSWERS} --planner epp")
    assert compared["epp"] == facts["seconds"] < compared["epp apart"]


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "plan --lengths agents.idx --share-from 0",
            "argument --share-from: '0': expected a whole",
        ),
        ("plan --lengths lengths --share-from 9", "--share-from: no tokens of lengths are known; "),
        ("compare --lengths wlb --share-from 9", "expected a Megatron .idx with its .bin, or text"),
        ("plan --lengths texts.jsonl --share-from 9", "or texts or chats with --tokenizer"),
        ("plan --lengths bare.idx --share-from 9", "bare.bin: no such file; expected the tokens"),
        ("plan --lengths agents.idx --share-from 9 --forward-only", "--share-from has no effect"),
        ("plan --lengths agents.idx --share-from 9 --planner packing", "only planner epp computes"),
        ("compare --lengths agents.idx --share-from 9 --planner packing", "has no effect: only"),
    ],
)
def test_what_cannot_be_shared_is_one_line(
    cli: Commands, agents: Path, words: str, told: str
) -> None:
    write_texts("texts.jsonl", [[2, 3, 4]])
    Path("bare.idx").write_bytes(Path("agents.idx").read_bytes())
    command, rest = words.split(" ", 1)
    assert told in cli.refused(f"{command} {AGENTS} {rest}")


def test_tune_plans_whole_documents(cli: Commands) -> None:
    line = "tune --model llama3-8b --device h100-80g --nodes 1 --lengths lengths --share-from 9"
    assert "unknown option '--share-from'" in cli.refused(line)
