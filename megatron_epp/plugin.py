"""Module for frameworks that only import the modules of entry points (``verl.plugins``)."""

from megatron_epp.autoload import start

start()
