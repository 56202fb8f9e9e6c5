"""Where a prefill engine listens for decode and for releases: one address for each data-parallel rank, known from its offers.

Forgotten are those of an engine that has been started anew, and those that turn out to be gone; all of them go with their instance.
"""

from __future__ import annotations

import threading

from kvpool.transfer.offer import Offer

MOST = 256


class PrefillListeners:
    """Of one instance. Thread-safe: that one is gone is learnt in another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[tuple[str, int], Offer] = {}
        self._starts = 0

    def note(self, offer: Offer, starts: int) -> None:
        """The engine has made this offer. ``starts``: how often the instance has become ready so far.

        Ranks are started together. So an offer of another start than the last at its address, or the first of an unknown one since
        the instance was out, tells that all the others have ended.
        """
        where = (offer.host, offer.port)
        with self._lock:
            known = self._last.get(where)
            same = known is not None and known.instance == offer.instance
            if not same and (known is not None or starts != self._starts):
                self._last.clear()
            self._starts = starts
            self._last[where] = offer
            if len(self._last) > MOST:
                del self._last[next(iter(self._last))]

    def offers(self) -> list[Offer]:
        """One of each listener."""
        with self._lock:
            return list(self._last.values())

    def forget(self, offer: Offer) -> None:
        """Who has made it is gone."""
        where = (offer.host, offer.port)
        with self._lock:
            known = self._last.get(where)
            if known is not None and known.instance == offer.instance:
                del self._last[where]
