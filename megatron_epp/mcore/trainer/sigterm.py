"""Report of the current op when this rank is terminated by SIGTERM."""

import signal
import socket
import sys
import threading

from megatron_epp.mcore.job.emergency_exit import leave
from megatron_epp.runtime.executor import CurrentOp

_SIGTERM_STATUS = 128 + signal.SIGTERM


def report_when_terminated(current_op: CurrentOp, rank: int) -> None:
    """Install a SIGTERM handler that prints ``current_op`` and ends the process and its children.

    If a checkpoint is being written, the handler first waits for it (emergency_exit.py).

    A rank that waits in a collective or for a message does not run Python signal handlers.
    Therefore the C-level handler writes to the wake-up descriptor, and a new thread reads it. The
    function does nothing if SIGTERM already has a handler (Megatron's --exit-signal-handler), or if
    it is not called in the main thread.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    if threading.current_thread() is not threading.main_thread():
        return
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)

    def listen(_wake: socket.socket) -> None:
        # This thread references both sockets, so they stay open as long as the process.
        while signal.SIGTERM not in woken.recv(1):
            pass
        print(f"megatron_epp: rank {rank} terminated: {current_op}", file=sys.stderr, flush=True)
        leave(_SIGTERM_STATUS)

    name = "megatron_epp-watch"
    threading.Thread(target=listen, args=(wake,), name=name, daemon=True).start()
