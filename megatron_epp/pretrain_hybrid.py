"""``torchrun -m megatron_epp.pretrain_hybrid <Megatron-LM flags> [--epp --epp-*]``: train a
HybridModel, whose layers --hybrid-layer-pattern names."""

import time

_STARTED = time.time()


def run() -> None:
    """Train; the import stays in here so that Megatron's checkpoint writers, which import this file
    again, stay cheap.
    """
    from megatron_epp.mcore.trainer.launcher import end_with_launcher

    end_with_launcher()  # before the imports, which take long

    from megatron_epp.mcore.trainer.entry import main

    main(_STARTED, hybrid=True)


if __name__ == "__main__":
    run()
