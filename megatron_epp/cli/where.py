"""The ``where`` command: the documents of a recorded chunk in the corpus."""

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_epp.cli.files import read_text
from megatron_epp.cli.progress import doing
from megatron_epp.corpus.idx_file import check_vocabulary
from megatron_epp.corpus.recorded_batch import Place, RecordedBatch, locate
from megatron_epp.corpus.text_lengths import open_tokenizer
from megatron_epp.ir import PlanError, Step
from megatron_epp.ir.errors import printable
from megatron_epp.show.table import text_table

_SHOWN = 12  # tokens from the beginning of a span


def run(arguments: argparse.Namespace) -> int:
    """Run the ``where`` command and return its exit status.

    Example::

        status = run(parse(["where", "records/iteration-000001.step", "--chunk", "3"]))

    Raises:
        ValueError: the file is not a recorded step with a header, the replica or the chunk does not
            exist, or the documents of the corpora are not those of the step.
    """
    path, replica = arguments.step, arguments.replica
    text = read_text(path, "step")
    try:
        step = Step.parse(text)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    batch = RecordedBatch.parse(text)
    if batch is None:
        raise ValueError(
            f"{path}: does not begin with the lines '# batch: ...' and '# corpus: ...'; expected a "
            "step that --epp-record of this version wrote in training on --data-path"
        )
    if replica >= step.replicas:
        raise ValueError(f"--replica {replica}: {path} has replicas 0 to {step.replicas - 1}")
    last = len(step.plans[replica].chunks) - 1
    if arguments.chunk is not None and arguments.chunk > last:
        raise ValueError(f"--chunk {arguments.chunk}: replica {replica} has chunks 0 to {last}")
    with doing("reading the corpus"):
        places = locate(batch, _prefixes(arguments.data_path, batch), len(step.lengths))
    for document, (place, length) in enumerate(zip(places, step.lengths, strict=True)):
        if place.inputs != length:
            raise ValueError(
                f"{path}: document {document} of the batch has {length} inputs, but "
                f"{place.inputs} in sequence {place.sequence} of {place.corpus.prefix}; expected "
                "the corpus of training, with the same loss masks"
            )
    facts = list(_spans(arguments, step, batch.sample, places))
    if arguments.json:
        print(json.dumps(facts))
        return 0
    if step.replicas > 1:
        print(f"replica {replica} of {step.replicas}")
    rows = [[*map(_cell, one.values())] for one in facts]
    print(text_table(_HEADERS, rows), end="")
    return 0


def _cell(value: Any) -> str:
    return printable(" ".join(map(str, value)) if isinstance(value, list) else str(value))


def _prefixes(words: Sequence[str] | None, batch: RecordedBatch) -> Sequence[str]:
    """Return the prefixes in ``words``, as in Megatron's --data-path; without words, the recorded.

    Raises:
        ValueError: the number of corpora is not that of ``batch``.
    """
    recorded = [f"{corpus.weight:g} {corpus.prefix}" for corpus in batch.corpora]
    if words is None:
        return [corpus.prefix for corpus in batch.corpora]
    if len(words) == 2 * len(recorded):  # WEIGHT PREFIX for each; weights are recorded
        words = words[1::2]
    if len(words) != len(recorded):
        raise ValueError(f"--data-path {' '.join(words)}: expected {' '.join(recorded)}")
    return words


_HEADERS = ("chunk", "span", "samples", "corpus", "sequence", "tokens", "begins with")


def _spans(
    arguments: argparse.Namespace, step: Step, first_sample: int, places: Sequence[Place]
) -> Iterator[dict[str, Any]]:
    """Yield the facts on every span of the chunks, in the order of ``_HEADERS``."""
    plan = step.plans[arguments.replica]
    samples = step.part(arguments.replica).samples_of(arguments.replica)
    tokenizer = arguments.tokenizer and open_tokenizer(arguments.tokenizer)
    for chunk in range(len(plan.chunks)) if arguments.chunk is None else [arguments.chunk]:
        for span in plan.chunks[chunk].spans:
            place = places[samples[span.document][0]]
            offset = plan.offset(span.document)  # tokens of the prefix that the document continues
            start, stop = offset + span.start, offset + span.stop
            tokens = place.tokens(start, min(stop, start + _SHOWN))
            facts = {
                "chunk": chunk,
                "span": str(span),
                "samples": [first_sample + sample for sample in samples[span.document]],
                "corpus": place.corpus.prefix,
                "sequence": place.sequence,
                "tokens": f"{place.start + start}:{place.start + stop}",
                "begins_with": tokens.tolist(),
            }
            if tokenizer:
                where = f"{place.corpus.prefix}.bin with --tokenizer {arguments.tokenizer}"
                check_vocabulary(tokens, tokenizer.get_vocab_size(), where)
                facts["begins_with"] = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
            yield facts
