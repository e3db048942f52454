#!/usr/bin/env python3
"""Megatron's own trainer and schedule, measured: torchrun scripts/bench/stock.py <Megatron flags>.

After every iteration, each rank of replica 0 prints one line of JSON: its stage, the seconds of its
schedule, the seconds inside forwards and backwards, and the peak bytes that autograd saved. The
training itself does not change. The script is for CPU-only hosts.
"""

import json
import sys
import time
from functools import wraps
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402

from megatron_epp.mcore.patching import patch_points  # noqa: E402
from megatron_epp.mcore.trainer import entry  # noqa: E402
from megatron_epp.runtime.kv_store import Store  # noqa: E402
from megatron_epp.runtime.memory_meter import SavedBytesMeter  # noqa: E402


class Watch:
    """Wrapper of Megatron's schedule, and of the forward and backward steps that it calls."""

    def __init__(self):
        self.busy = 0.0
        self.iteration = 0
        self.meter: SavedBytesMeter | None = None
        for name in ("forward_step", "backward_step"):
            setattr(schedules, name, self._timed(getattr(schedules, name)))

    def _timed(self, step: Any) -> Any:
        @wraps(step)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return step(*args, **kwargs)
            finally:
                self.busy += time.perf_counter() - began
                if self.meter is not None:
                    self.meter.op_peak()

        return timed

    def choose(self, original: Any) -> Any:
        """Return a measured schedule, in place of Megatron's ``get_forward_backward_func``."""

        @wraps(original)
        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
            return self._watched(original(*args, **kwargs))

        return get_forward_backward_func

    def _watched(self, schedule: Any) -> Any:
        @wraps(schedule)
        def watched(*, model: Any, forward_only: bool = False, **others: Any) -> Any:
            if forward_only:
                return schedule(model=model, forward_only=True, **others)
            if self.meter is None:
                models = model if isinstance(model, list) else [model]
                self.meter = SavedBytesMeter(p for m in models for p in m.parameters())
            self.busy = 0.0
            began = time.perf_counter()
            with self.meter.watch(Store({})):
                reports = schedule(model=model, **others)
            self.meter.op_peak()
            self._tell(time.perf_counter() - began)
            return reports

        return watched

    def _tell(self, seconds: float):
        self.iteration += 1
        if mpu.get_data_parallel_rank() == 0 and mpu.get_tensor_model_parallel_rank() == 0:
            line = {
                "iteration": self.iteration,
                "stage": mpu.get_pipeline_model_parallel_rank(),
                "seconds": seconds,
                "busy": self.busy,
                "peak_bytes": self.meter.peak_bytes,
            }
            print(f"stock {json.dumps(line)}", flush=True)


if __name__ == "__main__":
    patch_points.apply_schedule_patch(Watch().choose)
    entry.main()
