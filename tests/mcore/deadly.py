"""``pretrain_gpt`` whose planner process is killed while it plans iteration 2."""

import os
import signal

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

from megatron_epp.mcore.trainer import entry, hooks  # noqa: E402


def make_steps(place, model):
    steps = hooks.make_steps(place, model)
    plain = steps.look_ahead

    def look_ahead(iteration, lengths):
        dies = iteration == 2 and steps.ahead is not None
        if dies:
            os.kill(steps.ahead.pid, signal.SIGSTOP)  # it cannot be faster than the kill
        plain(iteration, lengths)
        if dies:
            os.kill(steps.ahead.pid, signal.SIGKILL)

    steps.look_ahead = look_ahead
    return steps


if __name__ == "__main__":
    entry.main(hooks=hooks.TrainerHooks(make_steps=make_steps))
