"""How a prefill and a decode engine serve one unit of a request. What all flows share: another try while the client has nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AsyncExitStack

from kvpool.proxy.addresses import Address
from kvpool.proxy.answers import Answer
from kvpool.proxy.asks import Ask, Unit, new_id
from kvpool.proxy.failures import FailureError
from kvpool.proxy.legs import Legs, Try

TRIES = 2  # a request that was sent is sent once more at most: it may be what breaks engines


class Flow(ABC):
    def __init__(self, legs: Legs) -> None:
        self.legs = legs

    @abstractmethod
    async def once(self, attempt: Try) -> Answer:
        """One try. FailureError says whether another instance may do better."""

    async def serve(self, ask: Ask, unit: Unit, stack: AsyncExitStack) -> Answer:
        """The answer, with its first frame where it streams; ``stack`` gives back what it holds. FailureError for the client.

        The second try starts from the beginning, under new ids: who has failed may have taken the KV, or still write it.
        """
        without: set[Address] = set()
        for number in range(1, TRIES + 1):
            first = number == 1 and unit.index == 0
            inner = AsyncExitStack()
            try:
                answer = await self.once(Try(ask, unit, inner, without, ask.request_id if first else new_id(), new_id()))
            except FailureError as failure:
                await inner.aclose()
                if failure.again is None or number == TRIES:
                    raise
                side, address = failure.again
                without.add(address)
                if not self.legs.table.ready(side, without):
                    raise
                ask.trail["again"] = str(failure)
            except BaseException:
                await inner.aclose()
                raise
            else:
                stack.push_async_callback(inner.aclose)
                return answer
        raise AssertionError("unreachable")
