"""Refusals of functions in one line."""

from collections.abc import Callable

import pytest


def refusal(error: type[ValueError], call: Callable[..., object], *arguments: object) -> str:
    """The one line with which ``call`` refuses its arguments."""
    with pytest.raises(error) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)
