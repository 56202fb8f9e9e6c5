"""What the codes of the library mean for one key."""

from __future__ import annotations

from kvpool.stores.base import Result, Status

FAILED = -1
DUPLICATE = -3006
CLOSED = -3019
BEING_WRITTEN = -3101
NO_SUCH_KEY = -3102

_MISSING = {-3007: "no such key", -3012: "the object has another size", NO_SUCH_KEY: "no such key"}
_NO_SPACE = {FAILED: "no room", -3013: "no room", -3016: "no room"}
_TEXTS = {
    FAILED: "the library's general error",
    -3000: "refused, or the meta service does not answer",
    -3004: "the meta service did not answer in time",
    -3014: "the meta service does not answer",
    -3017: "the meta service is not connected",
    CLOSED: "the client is closed, or can only look up",
    BEING_WRITTEN: "it is being written, or its writer died",
    -3104: "it is leased",
    -3106: "the lease ended before the copy did",
}


def text_of(code: int) -> str:
    return _TEXTS.get(code) or _MISSING.get(code) or f"code {code} of the library"


def put_result(code: int, nbytes: int) -> Result:
    """``nbytes`` is the length of the object. 0 is success, but only a lookup tells whether the object can be read."""
    if code == 0:
        return Result(Status.OK, nbytes)
    if code == DUPLICATE:
        return Result(Status.EXISTS, code=code)
    if code == BEING_WRITTEN:
        return Result(Status.BUSY, code=code, text=text_of(code))
    if code in _NO_SPACE:
        return Result(Status.NO_SPACE, code=code, text=_NO_SPACE[code])
    return failed(code)


def get_result(code: int, nbytes: int) -> Result:
    if code == 0:
        return Result(Status.OK, nbytes)
    if code in _MISSING or code == BEING_WRITTEN:
        return Result(Status.MISSING, code=code, text=text_of(code))
    return failed(code)


def remove_result(code: int) -> Result:
    if code == 0:
        return Result(Status.OK)
    if code in _MISSING:
        return Result(Status.MISSING, code=code)
    if code in (BEING_WRITTEN, -3104):
        return Result(Status.BUSY, code=code, text=text_of(code))
    return failed(code)


def failed(code: int) -> Result:
    """A call that did not do what it should."""
    return Result(Status.FATAL if code == CLOSED else Status.TRANSIENT, code=code, text=text_of(code))
