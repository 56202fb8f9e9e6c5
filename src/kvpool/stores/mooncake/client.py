"""The calls of ``mooncake.store.MooncakeDistributedStore`` that kvpool makes. Errors are negative numbers, nothing raises.

No call may be made after ``close``: it would end the process. All of them release the interpreter lock while they block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Numbers = list[int]
Nested = Sequence[Sequence[int]]


class Client(Protocol):
    def setup(self, *args: object, **options: object) -> int: ...

    def close(self) -> int: ...

    def health_check(self) -> int:
        """0 well, 1 not set up, 2 no answer from the master; from memory, in 0.1 ms."""
        ...

    def get_hostname(self) -> str:
        """The name of the own segment."""
        ...

    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...

    def put(self, key: str, value: bytes, config: object) -> int: ...

    def batch_is_exist(self, keys: Sequence[str]) -> Numbers:
        """1, 0 or an error; grants a lease."""
        ...

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[Any]]:
        """Nothing for a key that fails; grants a lease."""
        ...

    def get_size(self, key: str) -> int: ...

    def batch_put_from_multi_buffers(self, keys: Sequence[str], ptrs: Nested, sizes: Nested, config: object) -> Numbers:
        """0 also for a key that exists, or is half-written."""
        ...

    def batch_get_into_multi_buffers(self, keys: Sequence[str], ptrs: Nested, sizes: Nested) -> Numbers:
        """The object's length, which may be less than the room."""
        ...

    def remove(self, key: str, force: bool = False) -> int:
        """Without ``force`` an object under a lease is refused."""
        ...

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """How many were removed."""
        ...

    def batch_put_session_start(self, keys: Sequence[str], sizes: Sequence[int], config: object) -> Numbers: ...

    def batch_put_from_multi_buffer_ranges(self, keys: Sequence[str], ptrs: Nested, sizes: Nested, offsets: Nested) -> Numbers: ...

    def batch_put_session_end(self, keys: Sequence[str]) -> Numbers: ...

    def batch_put_session_revoke(self, keys: Sequence[str]) -> Numbers: ...

    def batch_get_session_start(self, keys: Sequence[str]) -> Numbers: ...

    def batch_get_into_multi_buffer_ranges(self, keys: Sequence[str], ptrs: Nested, sizes: Nested, offsets: Nested) -> Numbers: ...

    def batch_get_session_end(self, keys: Sequence[str]) -> int: ...


def name_of(key: bytes) -> str:
    """A key as Mooncake takes it: every byte is one character."""
    return key.decode("latin-1")
