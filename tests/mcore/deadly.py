"""``pretrain_gpt`` of which one replica's planner is killed while it plans iteration 2."""

import os
import signal

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

from megatron_epp.mcore.trainer import entry, hooks  # noqa: E402


def make_steps(place, model):
    steps = hooks.make_steps(place, model)
    plain = steps.look_ahead

    def look_ahead(iteration, following):
        # Of the last replica, which is the only one where there is one.
        dies = iteration == 1 and steps.pool and place.groups.replica + 1 == place.groups.replicas
        processes = [process.pid for process in steps.pool.processes] if dies else []
        for process in processes:
            os.kill(process, signal.SIGSTOP)  # it cannot be faster than the kill
        plain(iteration, following)
        for process in processes:
            os.kill(process, signal.SIGKILL)

    steps.look_ahead = look_ahead
    return steps


if __name__ == "__main__":
    entry.main(hooks=hooks.TrainerHooks(make_steps=make_steps))
