"""Settings of the project's own certificates: those of ``certify``, and the ones below."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from megatron_epp.certify.trial import FLOAT64, Trial, read_as
from megatron_epp.flag_fields import flag

SUBCLASS, ENCODER = LOOP_MODELS = ("subclass", "encoder")


@dataclass(frozen=True, slots=True)
class CheckedTrial(Trial):
    """Settings of a certificate that also checks messages and collectives.

    Attributes:
        documents: number of documents of every batch; None for a few more documents than replicas.
        trees: whether documents continue other documents.
        planner: name of the planner that makes the plans; None for random plans.
        loop: whether an external training loop runs, in slices; otherwise Megatron's trainer.
        packed: whether the loop packs the samples of a micro-batch.
        loop_model: class of the external loop's model.
    """

    documents: int | None = flag(
        None,
        "documents of every batch, each on any replica, so that some have none (default: more than "
        "there are replicas, at least one on each)",
    )
    trees: bool = flag(
        False,
        "let documents continue others, which are computed once; the reference model has a copy of "
        "them before each",
    )
    planner: str | None = flag(
        None,
        "plans of this planner, 1f1b, zb-v, adaptis, slimpipe, ..., instead of random ones",
        metavar="NAME",
    )
    loop: bool = flag(
        False,
        "certify external training loops, in slices of their documents (default: Megatron's "
        "trainer)",
    )
    packed: bool = flag(False, "loops pack the samples of a micro-batch into one row, with --loop")
    loop_model: str | None = flag(
        None,
        "a model of another class around the layers: subclass, which turns rows by their "
        "positions itself, or encoder, which has one before its language model (default: "
        "Megatron's own)",
        metavar="CLASS",
    )

    def __post_init__(self) -> None:
        Trial.__post_init__(self)
        if self.documents is not None and self.documents < 1:
            raise ValueError(f"--documents {self.documents}: expected at least 1")
        if self.loop_model is not None and not self.loop:
            raise ValueError(f"--loop-model {self.loop_model}: of slices; give --loop")
        if self.packed and (not self.loop or self.loop_model == ENCODER):
            raise ValueError("--packed: of slices, without an encoder; give --loop")
        if self.trees and self.loop_model == ENCODER:
            raise ValueError(
                "--trees: an encoder sees documents whole, so they share nothing; leave out "
                f"--loop-model {ENCODER}"
            )
        if self.documents is not None and self.loop:
            raise ValueError(
                f"--documents {self.documents}: of Megatron's trainer, as loops give every replica "
                "micro-batches of their own; leave --loop out"
            )
        if self.planner is not None and (self.trees or self.loop):
            raise ValueError(
                f"--planner {self.planner}: plans of Megatron's trainer without --trees; leave "
                "--loop and --trees out"
            )
        if self.loop:
            self._require_loop()

    def _require_loop(self) -> None:
        if self.device != "cpu" and self.dtype == FLOAT64:
            raise ValueError("--loop: on GPUs in bf16; give --dtype bf16, or no --device")
        if self.loop_model is not None and self.loop_model not in LOOP_MODELS:
            raise ValueError(f"--loop-model {self.loop_model}: expected {' or '.join(LOOP_MODELS)}")
        if any("--epp-placement" in words for words in self.models):
            raise ValueError("--placement: slices of loops run one stage a rank; leave it out")

    @property
    def title(self) -> str:
        """Degrees, loop and dtype as text, for the table's title."""
        words = [str(self.degrees), "loop" * self.loop, self.dtype if self.dtype != FLOAT64 else ""]
        return ", ".join(word for word in words if word)

    @property
    def turns(self) -> int:
        """Number of jobs that run the batches in turn: one per model.

        An external loop has at least two: one averages losses over micro-batches, one over tokens.
        """
        return max(2, len(self.models)) if self.loop else len(self.models)


def read_checked(arguments: Sequence[str] | None = None) -> CheckedTrial:
    """Parse the command line of ``python -m tests.certify``.

    Raises:
        ValueError: if flags are invalid or contradict each other.
    """
    return read_as(CheckedTrial, arguments)


def checked(trial: Trial) -> CheckedTrial:
    """Return ``trial`` with the further settings at their defaults."""
    if isinstance(trial, CheckedTrial):
        return trial
    return CheckedTrial(**{one.name: getattr(trial, one.name) for one in fields(Trial)})
