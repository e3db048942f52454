"""Links as on a device with one queue that holds everything in the order of issue, sends included.

Nothing is issued before what was issued last is done, and a send is done when its receive has been
posted (gloo hands a tensor over only then). An order of issue that gets through this gets through
whatever a GPU may make of it.
"""

from torch import Tensor

from megatron_epp.ir import Message
from megatron_epp.runtime.link import Links


class Done:
    """In place of work that has been waited for: asked again, gloo waits for the next message."""

    def wait(self) -> None:
        """It is done."""


class StrictLinks(Links):
    def post(self, message: Message):
        super().post(message)
        posted = self._posted[message.link][-1]
        posted.work.wait()
        posted.work = Done()

    def send(self, message: Message, tensor: Tensor):
        super().send(message, tensor)
        while self._sending:
            _, _, work = self._sending.popleft()
            work.wait()
