"""Import this module on a script's first line to turn scheduling mode on.

The import is the request, whatever MEGATRON_EPP says, as with other frameworks' adaptors.
"""

from megatron_epp.autoload import switch_on

switch_on()
