"""Waking coroutines from the engine's thread: a doorbell, answered in rounds.

    engine thread    token  token  token  end      token  token ...
                       |      |      |     '----- heard at once, with all that end in the same step
    bell               '------'------'            '------'
    event loop               round: all who have news       pause       round ...

All streams that have news are woken together, and the next round begins only after a pause of a few times as long as
this one took: writing responses takes at most `SHARE` of the interpreter's time, and the more there is to write the
more tokens share a write.  Only an end does not wait for the round: its client may have the next request ready.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

SHARE = 0.2  # of the interpreter's time that rounds of writing may take
LONGEST_PAUSE = 0.25  # seconds between two rounds


class Doorbell:
    """Wakes coroutines of one loop, from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._rung: deque[Listener] = deque()
        self._ended: deque[Listener] = deque()
        self._armed = self._armed_last = False
        self._not_before = 0.0

    def ring(self, listener: Listener) -> None:
        """From any thread: there is something to read."""
        if listener.rung:
            return
        listener.rung = True
        self._rung.append(listener)
        if not self._armed:
            self._armed = True
            self._call(self._answer)

    def ring_last(self, listener: Listener) -> None:
        """From any thread: there will be nothing more.  Heard at once, with all others that end in the same step."""
        self._ended.append(listener)
        if not self._armed_last:
            self._armed_last = True
            self._call(self._answer_last)

    def _call(self, answer: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop was closed: nobody reads any more
            self._loop.call_soon_threadsafe(answer)

    def _answer(self) -> None:
        pause = self._not_before - time.perf_counter()
        if pause > 0:
            self._loop.call_later(pause, self._answer)
            return
        self._armed = False  # before taking: who rings from here on arms again
        self._wake(self._rung)

    def _answer_last(self) -> None:
        self._armed_last = False
        self._wake(self._ended)

    def _wake(self, listeners: deque[Listener]) -> None:
        while listeners:
            listeners.popleft().wake()
        self._loop.call_soon(self._rest, time.thread_time())  # runs after those just woken

    def _rest(self, begin: float) -> None:
        worked = time.thread_time() - begin  # waiting, for the interpreter or the machine, is not work
        self._not_before = time.perf_counter() + min(worked * (1 / SHARE - 1), LONGEST_PAUSE)


class Listener:
    """One coroutine that waits for a bell."""

    def __init__(self, bell: Doorbell):
        self.bell, self.rung = bell, False
        self._news = False
        self._waiter: asyncio.Future[None] | None = None  # an asyncio.Event does this for many, at twice the price

    def ring(self) -> None:
        self.bell.ring(self)

    def ring_last(self) -> None:
        self.bell.ring_last(self)

    def wake(self) -> None:
        self.rung, self._news = False, True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        if not self._news:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._news = False
