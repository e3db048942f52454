"""``pretrain_gpt`` of a frozen model that gets low-rank adapters around its linears before --epp's
hooks see it."""

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

from megatron_epp.mcore.certify.adapters import adapt  # noqa: E402
from megatron_epp.mcore.trainer import entry  # noqa: E402
from megatron_epp.mcore.trainer.hooks import TrainerHooks  # noqa: E402

if __name__ == "__main__":
    entry.main(hooks=TrainerHooks(pre_wrap=lambda models: [adapt(one, 4) for one in models]))
