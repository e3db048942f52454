"""Calls of torch.distributed's key-value store with a limit on the time until it answers."""

import threading
from collections.abc import Callable


def answer_within[T](seconds: float, ask: Callable[[], T], otherwise: T) -> T:
    """Return ``ask()``, or ``otherwise`` if it takes longer than ``seconds``.

    A client of the store waits without limit for a server that is stopped or cut off from the
    network: the store's timeout limits only how long a server waits for a key. After the limit, the
    call remains in a daemon thread.

    Args:
        seconds: limit, in seconds.
        ask: function that calls the store.
        otherwise: result if the store does not answer.

    Raises:
        Exception: the error that ``ask`` raised.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            answers.append(ask())
        except Exception as error:  # raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=call, name="megatron_epp-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return answers[0] if answers else otherwise
