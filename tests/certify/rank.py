"""Rank of the project's own certificates: its communication and kernel calls are checked, too."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, override

from megatron_epp.ir import Kind, Message, Payload, Plan, Program, Step, Transfer, lower
from megatron_epp.mcore.certify.rank import Rank
from megatron_epp.mcore.data.shared_tokens import SharedTokens
from tests.certify.allowed_collectives import SCHEDULE, AllowedCollective, name_of
from tests.certify.comm_recorder import MessageRecord, Traffic
from tests.certify.frame import CheckedResult


class WatchedRank(Rank):
    """Rank whose collectives in training must be on a list."""

    LISTED: ClassVar[Sequence[AllowedCollective]] = SCHEDULE  # collectives that a rank may issue

    @override
    def train(self, drawn: Any) -> Any:
        with Traffic() as self.traffic:
            return super().train(drawn)

    @override
    def problems(self, drawn: Any) -> list[str]:
        listed = self.LISTED
        strangers = {one for one in self.traffic.collectives if name_of(one, listed) is None}
        return sorted(f"not on the list: {one}" for one in strangers)

    def traffic_counts(self) -> tuple[int, Counter[str]]:
        """Return the number of messages, and of collectives by name."""
        names = (name_of(one, self.LISTED) for one in self.traffic.collectives)
        return len(self.traffic.messages), Counter(name for name in names if name is not None)


class CheckedRank(WatchedRank):
    """Rank of Megatron's trainer with the planned messages, whose attention is called directly."""

    RESULT: ClassVar = CheckedResult

    @override
    def build(self) -> list[Any]:
        models = super().build()
        if self.frame.trees:  # every rank finds in the tokens what the drawn step shares
            self.schedule.shared = SharedTokens(1, self.frame.depths)
        return models

    @override
    def problems(self, drawn: Any) -> list[str]:
        planned = self._unplanned(drawn.step, self.traffic.messages)
        return super().problems(drawn) + planned + Rank.problems(self, drawn) + self._refused()

    @override
    def results(self, trained: Any, evaluated: Any) -> tuple[Any, ...]:
        return *super().results(trained, evaluated), *self.traffic_counts()

    def _refused(self) -> list[str]:
        """Return a line if Transformer Engine chooses a kernel anew for every call of some kind."""
        kernels = {getattr(x, "kernel", None) for x in (self.attention, self.attention.all_heads)}
        refused = sum(getattr(kernel, "refused", 0) for kernel in kernels)
        return [f"{refused} kinds of attention calls are never made directly"] if refused else []

    def _unplanned(self, step: Step, messages: list[MessageRecord]) -> list[str]:
        """Return a line for each link whose messages differ from the plan's messages."""
        plan, rank = step.plans[self.groups.replica], self.groups.pipeline_rank
        planned = self._planned(plan, lower(plan)[rank])
        problems = []
        # Sends follow the program's order; receives are posted early, in order on each link.
        links = {(message.way, message.group, message.peer) for message in (*planned, *messages)}
        for link in sorted(links):
            wanted = [m.elements for m in planned if (m.way, m.group, m.peer) == link]
            seen = [m.elements for m in messages if (m.way, m.group, m.peer) == link]
            if wanted != seen:
                way, group, peer = link
                problems.append(
                    f"{plan.rank_name(rank)}: {way} {group} with {peer}: messages of {seen} "
                    f"elements where {wanted} were planned"
                )
        return problems

    def _planned(self, plan: Plan, program: Program) -> list[MessageRecord]:
        planned = []
        for op in program:
            if not isinstance(op, Transfer):
                continue
            message = op.message
            rows = self.row_shard.message(self.row_shard.rows(plan.chunks[message.chunk]))
            numbers = self._numbers(message, plan)
            sends = op.kind is Kind.SEND
            planned.append(
                MessageRecord(
                    "send" if sends else "receive",
                    f"epp_{message.payload.name.lower()}",
                    self.groups.pipeline_ranks[message.link[1] if sends else message.link[0]],
                    rows * numbers,
                )
            )
        return planned

    def _numbers(self, message: Message, plan: Plan) -> int:
        """Return the number of elements that a message in training has for each row of its chunk.

        With vocabulary parallelism, messages can include float32 statistics: 2 bf16 elements each.
        """
        hidden, each = self.args.hidden_size, 1 + (self.args.mtp_num_layers or 0)
        place = max(1, 4 // self.args.params_dtype.itemsize)
        if not plan.vocabulary_parallel or message.payload is Payload.ACTIVATION:
            return hidden
        if message.payload is Payload.GRADIENT:
            return hidden + each * place
        if message.target == 0:
            return each * hidden
        return each * ((2 if message.target == plan.stages - 1 else 3) * hidden + 2 * place)
