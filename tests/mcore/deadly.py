"""``pretrain_gpt`` of which one replica's planner is killed while it plans iteration 2."""

import os
import signal

import torch.distributed as dist

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

from megatron_epp.mcore.trainer import entry, hooks  # noqa: E402


def make_steps(place, models):
    steps = hooks.make_steps(place, models)
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
    plain_step, held = steps.step, set()

    def step(*request):
        sourced = plain_step(*request)
        held.add(" ".join(str(plan.replica) for plan in sourced.step.plans))
        if request[0] == 4:
            rank, replica = dist.get_rank(), place.groups.replica
            told = f"rank {rank} of replica {replica} holds plans of {' and '.join(sorted(held))}"
            print(told, flush=True)
        return sourced

    steps.step = step
    return steps


if __name__ == "__main__":
    entry.main(hooks=hooks.TrainerHooks(make_steps=make_steps))
