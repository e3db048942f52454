"""One rank works for all: they hear what it made, or why it could not, and wait for its beats."""

from tests.runtime.world import run


def several(rank: int) -> list[str]:
    import torch.distributed as dist

    from megatron_epp.ir import PlanError
    from megatron_epp.runtime.rank_zero_work import done_by_rank_zero

    heard = []

    def beating(beat) -> str:
        assert rank == 0
        for _ in range(7):
            beat()
        return "made\nhere"

    def silent(beat) -> str:
        return ""

    def failing(beat) -> str:
        beat()
        raise ValueError("line 3:\n no such thing")

    for work, seconds in ((beating, 0.0), (beating, 60.0), (silent, 0.0), (failing, 0.0)):
        try:
            heard.append(done_by_rank_zero(work, dist.group.WORLD, seconds))
        except PlanError as error:
            heard.append(f"PlanError: {error}")
    return heard


def test_what_every_rank_hears(tmp_path) -> None:
    heard = run(2, several, tmp_path)
    assert heard[0] == heard[1]
    assert heard[0] == ["made\nhere", "made\nhere", "", "PlanError: line 3: no such thing"]
