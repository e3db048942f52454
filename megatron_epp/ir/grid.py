"""The orders of a plan as a grid: what runs at which step, and where the stages are stuck."""

from collections.abc import Mapping, Sequence

from megatron_epp.ir.needs import NeedsOf
from megatron_epp.ir.op import Op

COLUMNS, ROWS = 16, 16  # of a grid; a wide plan is shown around where it is stuck


def stuck_grid(
    orders: Sequence[Sequence[Op]],
    needs: NeedsOf,
    at: Sequence[int],
    marks: Mapping[int, str],
    centre: int,
) -> str:
    """Draw ``orders`` of stages that each ran ``at[stage]`` ops and cannot go on.

    Every op takes one step and stands as late as those that waited for it allow; the ops that the
    stages stand at share a column, behind a ``>``.

    at      by stage, how many ops ran
    marks   by stage, what to say at the end of its line
    centre  the stage around which a deep plan is shown
    """
    steps = _steps(orders, needs, at)
    stuck = max((ran[-1] for ran in steps if ran), default=-1) + 1
    cells = []
    for ran, order in zip(steps, orders, strict=True):
        row = dict(zip(ran, map(str, order), strict=False))
        for number, op in enumerate(order[len(ran) :]):
            row[stuck + number] = str(op) if number else f">{op}"
        cells.append(row)
    last = max((max(row) for row in cells if row), default=0)
    first = _window(stuck, last + 1, COLUMNS)
    columns = range(first, min(last + 1, first + COLUMNS))
    width = max([len(row.get(c, "")) for row in cells for c in columns] + [len(str(last))])
    top = _window(centre, len(orders), ROWS)
    shown = range(top, min(len(orders), top + ROWS))
    name = max(len(f"stage {stage}:") for stage in shown)
    before, after = ("... " if first else ""), (" ..." if columns.stop <= last else "")
    lines = [f"  {'step:':<{name}} {before}{' '.join(f'{c:>{width}}' for c in columns)}{after}"]
    for stage in shown:
        line = " ".join(f"{cells[stage].get(c, '.'):>{width}}" for c in columns)
        mark = f"  <- {marks[stage]}" if stage in marks else ""
        lines.append(f"  {f'stage {stage}:':<{name}} {before}{line}{after}{mark}")
    hidden = len(orders) - len(shown)
    if hidden:
        lines.append(f"  ({hidden} more stages)")
    return "\n".join(line.rstrip() for line in lines)


def _steps(orders: Sequence[Sequence[Op]], needs: NeedsOf, at: Sequence[int]) -> list[list[int]]:
    """By stage, the step of each op that ran: as late as those that waited for it allow."""
    done: set[tuple[int, Op]] = set()
    ran: list[tuple[int, Op, list[tuple[int, Op]]]] = []  # with those that it waited for
    placed = [0] * len(orders)
    before = -1
    while before < len(ran):
        before = len(ran)
        for stage, order in enumerate(orders):
            while placed[stage] < at[stage]:
                op = order[placed[stage]]
                met = [
                    [(where, other) for other in ops if (where, other) in done]
                    for _, where, ops in needs(stage, op)
                ]
                if not all(met):
                    break  # another stage's op comes first
                done.add((stage, op))
                ran.append((stage, op, [one for each in met for one in each]))
                placed[stage] += 1
    latest: dict[tuple[int, Op], int] = {}
    following = [0] * len(orders)
    steps: list[list[int]] = [[] for _ in orders]
    for stage, op, waited_for in reversed(ran):
        step = min(following[stage], latest.get((stage, op), 0)) - 1
        following[stage] = step
        steps[stage].append(step)
        for one in waited_for:
            latest[one] = min(latest.get(one, 0), step)
    first = min(following)
    return [[step - first for step in reversed(row)] for row in steps]


def _window(centre: int, length: int, most: int) -> int:
    """Where ``most`` places around ``centre`` begin, of ``length``."""
    return max(0, min(centre - most // 2, length - most))
