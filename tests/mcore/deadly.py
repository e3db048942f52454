"""``pretrain_gpt`` whose planner process is killed while it plans iteration 2."""

import signal

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

from megatron_epp.control import planned_steps  # noqa: E402
from megatron_epp.mcore import entry  # noqa: E402


def main() -> None:
    plain = planned_steps.PlannedSteps.look_ahead

    def look_ahead(self, iteration, lengths):
        dies = iteration == 2 and self.ahead is not None
        if dies:
            self.ahead._process.send_signal(signal.SIGSTOP)  # it cannot be faster than the kill
        plain(self, iteration, lengths)
        if dies:
            self.ahead._process.kill()

    planned_steps.PlannedSteps.look_ahead = look_ahead
    entry.main()


if __name__ == "__main__":
    main()
