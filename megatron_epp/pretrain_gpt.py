"""Entry to train a GPT: ``torchrun -m megatron_epp.pretrain_gpt <flags> [--epp --epp-*]``."""

import time

_STARTED = time.time()


def run() -> None:
    """Train the GPT that Megatron's flags describe.

    Imports are inside the function, because the processes with which Megatron writes
    checkpoints import this file again.
    """
    from megatron_epp.mcore.trainer.launcher import end_with_launcher

    end_with_launcher()  # before the imports, which take long

    from megatron_epp.mcore.trainer.entry import main

    main(_STARTED)


if __name__ == "__main__":
    run()
