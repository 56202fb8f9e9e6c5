"""What Mooncake's numbers mean. A result keeps the number and its name."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.stores.base import Result, Status

MISSING = -704
LEASED = -706
EXISTS = -705
NO_SESSION = -600  # a range call without a session, or beyond the object
LEASE_EXPIRED = -707
OVERFLOW = -10
ONLY_ON_DISK = -702
UNKNOWN_TENANT = -1701

_MEANINGS: dict[int, tuple[Status, str]] = {
    -1: (Status.TRANSIENT, "INTERNAL_ERROR"),
    OVERFLOW: (
        Status.TRANSIENT,
        "BUFFER_OVERFLOW: the loads at one time do not fit into MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES",
    ),
    -101: (Status.TRANSIENT, "SEGMENT_NOT_FOUND: the master took a client for dead; see client_ttl"),
    -102: (Status.TRANSIENT, "SEGMENT_ALREADY_EXISTS"),
    -103: (Status.TRANSIENT, "CLIENT_NOT_FOUND: the master took this client for dead; see client_ttl"),
    -200: (Status.NO_SPACE, "NO_AVAILABLE_HANDLE: no room, also not by eviction"),
    -400: (Status.TRANSIENT, "INVALID_KEY"),
    -500: (Status.TRANSIENT, "WRITE_FAIL"),
    -600: (Status.TRANSIENT, "INVALID_PARAMS"),
    -601: (Status.TRANSIENT, "ILLEGAL_CLIENT: the key is another client's"),
    -702: (Status.MISSING, "INVALID_REPLICA: no whole copy of it"),
    -703: (Status.MISSING, "REPLICA_IS_NOT_READY: it is being written"),
    MISSING: (Status.MISSING, "OBJECT_NOT_FOUND"),
    EXISTS: (Status.BUSY, "OBJECT_ALREADY_EXISTS"),
    LEASED: (Status.BUSY, "OBJECT_HAS_LEASE"),
    LEASE_EXPIRED: (Status.TRANSIENT, "LEASE_EXPIRED before the transfer ended: raise default_kv_lease_ttl of the master"),
    -708: (Status.BUSY, "OBJECT_HAS_REPLICATION_TASK"),
    -710: (Status.MISSING, "REPLICA_NOT_FOUND"),
    -712: (Status.MISSING, "REPLICA_IS_GONE"),
    -714: (Status.BUSY, "OBJECT_REPLICA_BUSY"),
    -800: (Status.TRANSIENT, "TRANSFER_FAIL: the client that has the memory does not answer"),
    -801: (Status.MISSING, "CHECKSUM_MISMATCH"),
    -900: (Status.TRANSIENT, "RPC_FAIL: the master does not answer"),
    -901: (Status.TRANSIENT, "RPC_TIMEOUT: the master does not answer"),
    -1100: (Status.MISSING, "FILE_NOT_FOUND"),
    -1102: (Status.TRANSIENT, "FILE_READ_FAIL"),
    -1700: (Status.NO_SPACE, "TENANT_QUOTA_EXCEEDED"),
    UNKNOWN_TENANT: (Status.FATAL, "TENANT_NOT_REGISTERED: the master has no quota for this tenant_id"),
}


def failure(code: int) -> Result:
    """The result of a negative number."""
    status, text = _MEANINGS.get(code, (Status.TRANSIENT, "an error that kvpool does not know"))
    return Result(status, code=code, text=text)


def put_results(codes: Sequence[int], count: int, nbytes: int) -> list[Result]:
    """0 or more is success. OSError where there are not ``count`` numbers: then none of them can be trusted."""
    check_count(codes, count)
    return [Result(Status.OK, nbytes, code) if code >= 0 else failure(code) for code in codes]


def get_results(codes: Sequence[int], count: int, nbytes: int) -> list[Result]:
    """A number is the length of the object; any other than ``nbytes`` is no hit. OSError as in ``put_results``."""
    check_count(codes, count)
    return [get_result(code, nbytes) for code in codes]


def get_result(code: int, nbytes: int) -> Result:
    if code == nbytes:
        return Result(Status.OK, nbytes, code)
    if code >= 0:
        return Result(Status.MISSING, code=code, text=f"the object has {code} bytes, not {nbytes}")
    if code == NO_SESSION:
        return Result(Status.MISSING, code=code, text=f"INVALID_PARAMS: the object has more than {nbytes} bytes")
    return failure(code)


def check_count(codes: Sequence[int], count: int) -> None:
    if len(codes) != count:
        raise OSError(f"Mooncake gave {len(codes)} answers for {count} keys")
