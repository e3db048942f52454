"""Grid of a plan's orders, which shows what runs at which step and where the ranks are stuck."""

from collections.abc import Mapping, Sequence

from megatron_epp.ir.needs import NeedsOf
from megatron_epp.ir.op import Op
from megatron_epp.ir.plan import Plan

# Of a grid; of a larger plan, only the surroundings of the stuck ops are drawn.
COLUMNS, ROWS = 16, 16


def stuck_grid(
    plan: Plan,
    needs: NeedsOf,
    at: Sequence[int],
    marks: Mapping[int, str],
    centre: int,
) -> str:
    """Return a drawing, as text, of the orders of ranks that are stuck after ``at[rank]`` ops.

    Every op takes one column. An op that ran is drawn as late as the rank's next op and the ops
    that need it allow. The ops at which the ranks are stuck share a column and are marked by ``>``.
    Of more than COLUMNS columns, only those around the stuck ops are drawn.

    Args:
        plan: plan of the orders.
        needs: function that yields the needs of the plan's ops (ir.needs.needs_of).
        at: number of ops that ran, by rank.
        marks: text for the end of a rank's line, by rank.
        centre: rank in the middle of the grid if the plan has more than ROWS ranks.
    """
    orders = plan.rank_orders
    steps = _steps(orders, needs, at)
    stuck = max((ran[-1] for ran in steps if ran), default=-1) + 1
    cells = []
    for ran, order in zip(steps, orders, strict=True):
        names = [plan.op_name(*place) for place in order]
        row = dict(zip(ran, names, strict=False))
        for number, name in enumerate(names[len(ran) :]):
            row[stuck + number] = name if number else f">{name}"
        cells.append(row)
    last = max((max(row) for row in cells if row), default=0)
    first = _window(stuck, last + 1, COLUMNS)
    columns = range(first, min(last + 1, first + COLUMNS))
    width = max([len(row.get(c, "")) for row in cells for c in columns] + [len(str(last))])
    top = _window(centre, len(orders), ROWS)
    shown = range(top, min(len(orders), top + ROWS))
    widest = max(len(f"{plan.rank_name(rank)}:") for rank in shown)
    before, after = ("... " if first else ""), (" ..." if columns.stop <= last else "")
    lines = [f"  {'step:':<{widest}} {before}{' '.join(f'{c:>{width}}' for c in columns)}{after}"]
    for rank in shown:
        line = " ".join(f"{cells[rank].get(c, '.'):>{width}}" for c in columns)
        mark = f"  <- {marks[rank]}" if rank in marks else ""
        lines.append(f"  {f'{plan.rank_name(rank)}:':<{widest}} {before}{line}{after}{mark}")
    hidden = len(orders) - len(shown)
    if hidden:
        lines.append(f"  ({hidden} more {'ranks' if plan.shares_ranks else 'stages'})")
    return "\n".join(line.rstrip() for line in lines)


def _steps(
    orders: Sequence[Sequence[tuple[int, Op]]], needs: NeedsOf, at: Sequence[int]
) -> list[list[int]]:
    """Return by rank the step of each op that ran: as late as the later ops of all ranks allow."""
    done: set[tuple[int, Op]] = set()
    # (rank, (stage, op), the ops that it depends on).
    ran: list[tuple[int, tuple[int, Op], list[tuple[int, Op]]]] = []
    placed = [0] * len(orders)
    before = -1
    while before < len(ran):
        before = len(ran)
        for rank, order in enumerate(orders):
            while placed[rank] < at[rank]:
                stage, op = order[placed[rank]]
                met = [
                    [(where, other) for other in ops if (where, other) in done]
                    for _, where, ops in needs(stage, op)
                ]
                if not all(met):
                    break  # another rank's op comes first
                done.add((stage, op))
                ran.append((rank, (stage, op), [one for each in met for one in each]))
                placed[rank] += 1
    latest: dict[tuple[int, Op], int] = {}
    following = [0] * len(orders)
    steps: list[list[int]] = [[] for _ in orders]
    for rank, place, waited_for in reversed(ran):
        step = min(following[rank], latest.get(place, 0)) - 1
        following[rank] = step
        steps[rank].append(step)
        for one in waited_for:
            latest[one] = min(latest.get(one, 0), step)
    first = min(following)
    return [[step - first for step in reversed(row)] for row in steps]


def _window(centre: int, length: int, most: int) -> int:
    """Return the first of ``most`` consecutive indices around ``centre``, within ``length``."""
    return max(0, min(centre - most // 2, length - most))
