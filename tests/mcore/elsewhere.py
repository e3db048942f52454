"""Training in which every rank has a working folder of its own: ``plans`` is another on each."""

import os

from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

from megatron_epp.mcore.trainer import entry  # noqa: E402

if __name__ == "__main__":
    os.chdir(os.path.join(os.environ["EPP_TEST_FOLDER"], os.environ["RANK"]))
    entry.main()
