"""Module for frameworks that load modules by entry point (``verl.plugins``) and call nothing."""

from megatron_epp.autoload import start

start()
