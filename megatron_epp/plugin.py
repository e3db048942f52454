"""Entry point for frameworks (``verl.plugins``) that import the module and call no function."""

from megatron_epp.autoload import start

start()
