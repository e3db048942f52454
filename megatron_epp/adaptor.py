"""Module whose import on the first line of a script turns scheduling mode on.

The import turns the mode on for any value of MEGATRON_EPP, as adaptors of other frameworks do.
"""

from megatron_epp.autoload import switch_on

switch_on()
