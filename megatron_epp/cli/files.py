"""Plans, steps and records, read from files and written to them."""

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_epp.ir import Op, Plan, PlanError, Step, Timed, check, parse_records

# A plan of a million chunks is longer than this by nobody's hand.
_MOST_BYTES = 1 << 30


def read_text(path: str, what: str) -> str:
    """The text of the file at ``path``, or of stdin for ``-``; a ValueError in one line."""
    try:
        if path == "-":
            data = sys.stdin.buffer.read()
        else:
            data = Path(path).read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{what} {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{what} {path}: is no text ({error.reason} at byte {error.start})"
        ) from error


def read_plans(path: str) -> tuple[Plan, ...]:
    """The plans of all replicas that the file holds; one on its own may be of any replica."""
    text = read_text(path, "plan")
    try:
        if text.count("plan v1") == 1 and "step v1" not in text:
            return (Plan.parse(text),)
        return Step.parse(text).plans
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def read_plan(path: str, replica: int) -> Plan:
    """One replica's plan of the file at ``path``; it can run."""
    plans = read_plans(path)
    if len(plans) == 1 and replica in (0, plans[0].replica):
        plan = plans[0]
    elif replica >= len(plans):
        raise ValueError(
            f"--replica {replica}: {path} holds {len(plans)} of {plans[0].replicas} replicas, "
            f"from {plans[0].replica}"
        )
    else:
        plan = plans[replica]
    try:
        check(plan)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    return plan


def require_run_of(plan: Plan, records: Sequence[Timed], path: str) -> None:
    """Raise a ValueError unless ``records`` are of a whole run of ``plan``, op after op."""
    for stage, planned in enumerate(plan.orders):
        mine = [r for r in records if r.stage == stage and isinstance(r.op, Op)]
        ran = [record.op for record in sorted(mine, key=lambda r: (r.start, r.stop))]
        for number, op in enumerate(planned):
            found = ran[number] if number < len(ran) else "nothing"
            if found != op:
                raise ValueError(
                    f"records {path}: stage {stage} ran {found} as op {number + 1}, the plan has "
                    f"{op} there; expected the records of a run of this plan"
                )


def read_records(path: str) -> tuple[Timed, ...]:
    try:
        records = parse_records(read_text(path, "records"))
    except PlanError as error:
        raise ValueError(f"records {path}: {error}") from error
    if not records:
        raise ValueError(f"records {path}: holds no record; expected the records of a run")
    return records


def write(path: str, data: str | bytes) -> None:
    """Through a file beside it, so that what stands at ``path`` is always whole; into what is no
    plain file (a device, a pipe) as it is."""
    target = Path(path)
    if target.is_dir():
        raise ValueError(f"{path}: is a folder; expected a file name")
    content = data.encode() if isinstance(data, str) else data
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)
            return
        target = target.resolve()  # a link stays one
        partial = target.with_name(f".{target.name}.partial")
        partial.write_bytes(content)
        partial.replace(target)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error
