"""``python -m megatron_epp COMMAND``: plan simulate compare draw check serve profile certify.

Bad input is one line on stderr and exit status 2, never a traceback.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

if sys.version_info < (3, 12):  # noqa: UP036  (whoever runs an older one is told)
    print(
        f"megatron_epp: error: this is Python {sys.version.split()[0]}; expected 3.12 or newer "
        "(in a checkout, scripts/setup_env.sh makes .venv/bin/python)",
        file=sys.stderr,
    )
    sys.exit(2)

from megatron_epp.cli.options import DOING, PROGRAM, parse
from megatron_epp.ir.errors import for_terminal

# What brings a missing package, where the package alone does not (pyproject.toml).
_EXTRAS = {"matplotlib": "[plots]", "torch": "[train]", "megatron": "[train]", "psutil": "[train]",
           "tokenizers": "[lengths]", "pyarrow": "[lengths]"}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        chosen = parse(arguments)
        if chosen.command in DOING:
            return _doing(chosen.command, chosen.rest)
        with warnings.catch_warnings():
            # numpy's words on an overflow: they would say nothing to whoever named the numbers.
            warnings.filterwarnings("error", ".* encountered in ", RuntimeWarning)
            # Here, not above: solver and compiler take seconds to load, and check needs neither.
            return import_module(f"megatron_epp.cli.{chosen.command}").run(chosen)
    except RuntimeWarning as error:
        print(
            f"{PROGRAM}: error: the numbers of the model, device, cost model or lengths are too "
            f"large or too small together to be computed with ({error})",
            file=sys.stderr,
        )
        return 2
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # The reader (a pager, head) has seen enough. stdout must not be flushed once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        text = str(error).split("\n")[0] or type(error).__name__
        print(f"{PROGRAM}: error: {for_terminal(text)}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").split(".")[0], "")
        print(
            f"{PROGRAM}: error: this needs {error.name}, which is not installed: pip install "
            f"'.{extra}' in a checkout (or the wheel's file in the place of the dot), or bash "
            "scripts/setup_env.sh there",
            file=sys.stderr,
        )
        return 2
    except MemoryError as error:
        print(f"{PROGRAM}: error: out of memory ({error})", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _doing(command: str, rest: Sequence[str]) -> int:
    """The commands of the doing tower, which needs torch and Megatron."""
    # Before the import: torch and Megatron take long to load, and every process loads them.
    import_module("megatron_epp.cli.megatron_flags").require_known(command, rest)
    for name, extra in _EXTRAS.items():
        if extra == "[train]" and find_spec(name) is None:
            raise ModuleNotFoundError(name=name)
    entry = import_module(f"megatron_epp.mcore.{DOING[command]}").main
    return entry(list(rest)) or 0


if __name__ == "__main__":
    sys.exit(main())
