"""Seconds of replicas in lockstep: every op takes as long as on the slowest replica."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_epp.ir import BACKWARDS, Table


def in_step(tables: Sequence[Table]) -> tuple[Table, ...]:
    """Return the tables of replicas in lockstep, with each op's seconds on the slowest replica.

    An op takes equally long on all replicas, because their ranks communicate in its layers. Bytes
    do not change. A single table is returned unchanged.
    """
    if len(tables) == 1:
        return tuple(tables)

    def most(each: Sequence[Any]) -> np.ndarray:
        return np.max([np.asarray(one) for one in each], axis=0)

    again = most([table.recompute_seconds for table in tables])
    seconds = {}
    for kind in tables[0].seconds:
        if kind in BACKWARDS:
            both = [
                np.asarray(table.seconds[kind]) + np.asarray(table.recompute_seconds)
                for table in tables
            ]
            seconds[kind] = most(both) - again
        else:
            seconds[kind] = most([table.seconds[kind] for table in tables])
    comm = {kind: most([table.comm_seconds[kind] for table in tables]) for kind in seconds}
    link = {
        payload: most([table.link_seconds[payload] for table in tables])
        for payload in tables[0].link_seconds
    }
    return tuple(
        dataclasses.replace(
            table,
            seconds=seconds,
            recompute_seconds=again,
            comm_seconds=comm,
            link_seconds=link,
        )
        for table in tables
    )
