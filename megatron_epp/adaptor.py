"""Import this module on a script's first line to turn scheduling mode on.

The import turns it on for any value of MEGATRON_EPP, as adaptors of other frameworks do.
"""

from megatron_epp.autoload import switch_on

switch_on()
