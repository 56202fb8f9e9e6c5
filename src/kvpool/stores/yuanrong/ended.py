"""Writers and readers that could not begin: the reason for every key, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.stores.base import Addresses, Reader, Result, Writer


class EndedWriter(Writer):
    def __init__(self, results: list[Result]) -> None:
        self.results = results

    def write(self, rows: Sequence[int], offset: int, addresses: Addresses, sizes: Addresses) -> list[Result]:
        return [self.results[row] for row in rows]

    def commit(self, rows: Sequence[int] | None = None) -> list[Result]:
        return list(self.results)

    def abort(self) -> None:
        return


class EndedReader(Reader):
    def __init__(self, results: list[Result]) -> None:
        self.results = results

    def read(self, rows: Sequence[int], offset: int, addresses: Addresses, sizes: Addresses) -> list[Result]:
        return [self.results[row] for row in rows]

    def end(self) -> None:
        return
