"""Entry of ``python -m megatron_epp COMMAND``.

Bad input is reported as one line on stderr with exit status 2, never as a traceback.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

if sys.version_info < (3, 12):  # noqa: UP036  (older versions get an error line)
    print(
        f"megatron_epp: error: this is Python {sys.version.split()[0]}; expected 3.12 or newer "
        "(in a checkout, scripts/setup_env.sh makes .venv/bin/python)",
        file=sys.stderr,
    )
    sys.exit(2)

from megatron_epp.cli.options import DOING, PROGRAM, parse
from megatron_epp.ir.errors import PlanError, escape_output, for_terminal

# Extra of pyproject.toml that installs a missing package.
_EXTRAS = {"matplotlib": "[plots]", "torch": "[train]", "megatron": "[train]", "psutil": "[train]",
           "tokenizers": "[lengths]", "pyarrow": "[lengths]"}  # fmt: skip
_NOT_OF_SETUP = ("pyarrow",)  # scripts/setup_env.sh does not install it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Args:
        arguments: words of the command line without the program; default: those of ``sys.argv``.

    Example::

        status = main(["check", "p.plan"])
    """
    escape_output()
    try:
        chosen = parse(arguments)
        if chosen.command in DOING:
            return _doing(chosen.command, chosen.rest)
        status_line = import_module("megatron_epp.cli.progress").status_line
        with warnings.catch_warnings(), status_line(chosen.command):
            # numpy's overflow warning does not say which input was wrong.
            warnings.filterwarnings("error", ".* encountered in ", RuntimeWarning)
            # Imported late: solver and compiler take seconds to load, and `check` needs neither.
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
            # The reader (a pager, head) has closed the pipe; stdout must not be flushed again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        text, *grid = str(error).split("\n")
        line = for_terminal(text or type(error).__name__)
        print(f"{PROGRAM}: error: {line}", file=sys.stderr, flush=True)
        if grid and isinstance(error, PlanError) and not getattr(chosen, "json", False):
            print("\n".join(grid))  # the ops at which the plan stops
        return 2
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").split(".")[0], "")
        script = "" if error.name in _NOT_OF_SETUP else ", or bash scripts/setup_env.sh there"
        print(
            f"{PROGRAM}: error: this needs {error.name}, which is not installed: pip install "
            f"'.{extra}' in a checkout (or the wheel's file in the place of the dot){script}",
            file=sys.stderr,
        )
        return 2
    except MemoryError as error:
        print(f"{PROGRAM}: error: out of memory ({error})", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _doing(command: str, rest: Sequence[str]) -> int:
    """Run a command that needs torch and Megatron; return its exit status."""
    # Before the import: torch and Megatron take long to load, in every process.
    import_module("megatron_epp.cli.megatron_flags").require_known(command, rest)
    for name, extra in _EXTRAS.items():
        if extra == "[train]" and find_spec(name) is None:
            raise ModuleNotFoundError(name=name)
    entry = import_module(f"megatron_epp.mcore.{DOING[command]}").main
    return entry(list(rest)) or 0


if __name__ == "__main__":
    sys.exit(main())
