"""``import megatron_epp.adaptor`` on a script's first line: level 0, whatever the variable says.

Importing it is the request: as frameworks' own adaptors are used, one line without a call.
"""

from megatron_epp.autoload import switch_on

switch_on()
