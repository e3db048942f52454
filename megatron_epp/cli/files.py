"""Files of plans, steps and records."""

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_epp.cli import recorded_settings
from megatron_epp.ir import (
    Op,
    Plan,
    PlanError,
    Step,
    Timed,
    check,
    check_op_templates,
    parse_records,
)
from megatron_epp.safe_files import read_at_most, read_bounded, replace_file

# Larger files are not plans: 100,000 chunks on 64 stages take about 120 MiB.
_MOST_BYTES = 256 << 20

_MAKE = {
    "plan": "`python -m megatron_epp plan ... -o FILE` writes one, --epp-record one an iteration",
    "step": "training with --epp-record DIR writes one for every iteration",
    "records": "`simulate PLAN -o FILE` writes them, and training with --epp-record",
}


def read_text(path: str, what: str) -> str:
    """Return the text of the file at ``path``, or of stdin for ``-``.

    Raises:
        ValueError: the text cannot be read; the message contains ``what``, the kind of file.
    """
    try:
        if path == "-":
            data = read_at_most(sys.stdin.buffer, _MOST_BYTES, f"a {what} file")
        else:
            data = read_bounded(path, _MOST_BYTES, f"a {what} file")
        return data.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ValueError(f"{what} {path}: No such file; {_MAKE[what]}") from error
    except OSError as error:
        raise ValueError(f"{what} {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{what} {path}: is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from error
    except ValueError as error:
        raise ValueError(f"{what} {path}: {error}") from error


def read_plans(path: str) -> tuple[tuple[Plan, ...], Step | None]:
    """Return the plans of all replicas in the file at ``path`` (``-``: stdin), and the step.

    The step is None if the file contains a single plan instead of a step.

    Raises:
        ValueError: if the file cannot be read.
        PlanError: if it contains no valid plan or step.
    """
    return _plans(read_text(path, "plan"), path)


def _plans(text: str, path: str) -> tuple[tuple[Plan, ...], Step | None]:
    try:
        if text.count("plan v1") == 1 and "step v1" not in text:
            return (Plan.parse(text),), None
        step = Step.parse(text)
        return step.plans, step
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def read_plan(path: str, replica: int) -> tuple[Plan, str | None, tuple[Plan, ...]]:
    """Read the plan of ``replica`` from the file at ``path``, and check that it can run.

    Returns:
        The plan, the machine options with which the plan was made (None if unknown), and all plans
        of its lockstep group, this plan first.

    Raises:
        ValueError: if the file cannot be read, or has no plan for ``replica``.
        PlanError: if a plan is invalid or cannot run.
    """
    text = read_text(path, "plan")
    plans, step = _plans(text, path)
    if len(plans) == 1 and replica in (0, plans[0].replica):
        plan = plans[0]
    elif replica >= len(plans):
        raise ValueError(
            f"--replica {replica}: {path} holds {len(plans)} of {plans[0].replicas} replicas, "
            f"from {plans[0].replica}"
        )
    else:
        plan = plans[replica]
    block = (plan,) if step is None else step.block(plan.replica)
    require_runnable(block, step, path)
    others = (one for one in block if one is not plan)
    return plan, recorded_settings.comment_in(text), (plan, *others)


def require_runnable(plans: Sequence[Plan], step: Step | None, path: str) -> None:
    """Raise a PlanError if one of ``plans`` cannot run, or if ``step`` is not in lockstep."""
    where = f"{path}: "
    try:
        for plan in plans:
            where = f"{path}: " + (f"replica {plan.replica}: " if len(plans) > 1 else "")
            check(plan)
        where = f"{path}: "
        if step is not None:
            check_op_templates(step)
    except PlanError as error:
        raise PlanError(f"{where}{error}") from error


def require_run_of(plan: Plan, records: Sequence[Timed], path: str) -> None:
    """Raise a ValueError unless ``records`` are a complete run of ``plan``, op by op."""
    for stage, planned in enumerate(plan.orders):
        stage_records = [r for r in records if r.stage == stage and isinstance(r.op, Op)]
        ran = [record.op for record in sorted(stage_records, key=lambda r: (r.start, r.stop))]
        for number, op in enumerate(planned):
            executed = ran[number] if number < len(ran) else "nothing"
            if executed != op:
                raise ValueError(
                    f"records {path}: stage {stage} ran {executed} as op {number + 1}, the plan "
                    f"has {op} there; expected the records of a run of this plan"
                )


def read_records(path: str) -> tuple[Timed, ...]:
    """Return the timed records in the file; raise a ValueError if it has none."""
    try:
        records = parse_records(read_text(path, "records"))
    except PlanError as error:
        raise ValueError(f"records {path}: {error}") from error
    if not records:
        raise ValueError(f"records {path}: holds no record; expected the records of a run")
    return records


def write_file(path: str, data: str | bytes) -> None:
    """Write ``data`` atomically, except to devices and pipes.

    Raises:
        ValueError: if ``path`` is a folder or cannot be written.
    """
    target = Path(path)
    if target.is_dir():
        raise ValueError(f"{path}: is a folder; expected a file name")
    content = data.encode() if isinstance(data, str) else data
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)
            return
        replace_file(target.resolve(), content)  # a link that the user names stays a link
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error
