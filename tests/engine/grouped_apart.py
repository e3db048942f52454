"""``pretrain_gpt`` with Megatron's own grouped experts: a product and a hook for each expert."""

from megatron_epp.pretrain_gpt import run

if __name__ == "__main__":
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    from megatron_epp.mcore.kinds.moe.module import MoEModule

    MoEModule.install_in_wrapped = lambda kind, models, group: None
    run()
