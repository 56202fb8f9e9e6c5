"""Offers: what prefill returns in ``kv_transfer_params`` and a proxy carries to decode.

A client can put anything into a request body, so decode uses only what the prefill side has signed: the transfer's random id,
which serves only its own blocks, and the address of the prefill engine that keeps it. All other fields are there for proxies, and
not read.
"""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvpool.core.signing import sign, verify
from kvpool.options.pull_rules import HOLD_MOST_S
from kvpool.transfer.messages import PROTOCOL
from kvpool.transfer.secret import Secret

_ID = re.compile(r"[0-9a-f]{32}")
_HOST = re.compile(r"[A-Za-z0-9._:-]{1,253}")


def is_transfer_id(value: object) -> bool:
    """128 bits in hexadecimal."""
    return isinstance(value, str) and _ID.fullmatch(value) is not None


class OfferError(ValueError):
    """Params that are no offer of a prefill side that we know: the reason in one line."""


@dataclass(frozen=True, slots=True)
class Offer:
    """``instance`` is the start of the prefill engine at ``host:port``; ``tokens`` is the length of the prompt; ``hold_s``: for how
    many seconds prefill keeps it. ``seen``: time.monotonic() when this process got to know of it."""

    transfer_id: str
    instance: str
    host: str
    port: int
    tokens: int
    hold_s: int
    seen: float = field(default_factory=time.monotonic, compare=False)

    @property
    def until(self) -> float:
        """time.monotonic() by which prefill has let go of it by itself."""
        return self.seen + self.hold_s

    def _signed(self) -> bytes:
        fields = (PROTOCOL, self.transfer_id, self.instance, self.host, self.port, self.tokens, self.hold_s)
        return "\n".join(map(str, ("kvpool offer", *fields))).encode()

    def to_params(self, secret: Secret, engine_id: str, request_id: str, tables: Sequence[Sequence[int]]) -> dict[str, object]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": engine_id,
            "remote_request_id": request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_block_ids": [list(table) for table in tables],
            "transfer_id": self.transfer_id,
            "transfer_instance": self.instance,
            "transfer_tokens": self.tokens,
            "transfer_hold_seconds": self.hold_s,
            "transfer_protocol": PROTOCOL,
            "transfer_auth": secret.kind,
            "transfer_signature": base64.b64encode(sign(secret.value, self._signed())).decode(),
        }


def read_offer(params: Mapping[str, object], secret: Secret) -> Offer:
    """OfferError where the params are not a whole offer, signed with our secret."""

    def read(name: str, kind: type) -> object:
        value = params.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise OfferError(f"kv_transfer_params: {name} is missing or no {kind.__name__}")
        return value

    if params.get("transfer_protocol") != PROTOCOL:
        raise OfferError(f"kv_transfer_params: transfer_protocol is {params.get('transfer_protocol')!r}, expected {PROTOCOL}")
    names = ("transfer_id", "transfer_instance", "remote_host", "transfer_signature")
    transfer_id, instance, host, signature = (str(read(name, str)) for name in names)
    port, tokens, hold_s = (int(str(read(name, int))) for name in ("remote_port", "transfer_tokens", "transfer_hold_seconds"))
    well = _ID.fullmatch(transfer_id) and _HOST.fullmatch(host) and 1 <= port <= 65535 and tokens >= 1
    if not well or not 1 <= hold_s <= HOLD_MOST_S:
        raise OfferError(
            "kv_transfer_params: transfer_id, remote_host, remote_port, transfer_tokens or transfer_hold_seconds is malformed"
        )
    offer = Offer(transfer_id, instance, host, port, tokens, hold_s)
    try:
        tag = base64.b64decode(signature, validate=True)
    except (binascii.Error, ValueError):
        tag = b""
    if not verify(secret.value, offer._signed(), tag):
        theirs = params.get("transfer_auth")
        hint = "" if theirs == secret.kind else f" (prefill signs with {theirs!r}, decode with {secret.kind!r})"
        raise OfferError(f"kv_transfer_params: the signature is wrong{hint}: set the same KVPOOL_SECRET on prefill and decode")
    return offer
