"""Ports that must be free here, services that must answer, peers that must be reachable."""

from __future__ import annotations

from kvpool.ops.doctor.facts.ports import Ports, Tried
from kvpool.ops.doctor.finding import Check, Finding
from kvpool.ops.doctor.need import Need
from kvpool.options.addresses import only_here, port_of

AREA = "ports"
FREE = Check(AREA, "free", "the ports that this host's engines, and --port, listen on are free")
SERVICE = Check(AREA, "service", "the store's services accept connections", "backend mooncake, memcache, yuanrong")
PEER = Check(AREA, "peer", "other hosts accept connections at the addresses of --peer", "--peer is given")
ADDRESS = Check(AREA, "address", "services are named by addresses that other hosts reach", "several hosts")
TRANSFER_HOST = Check(
    AREA,
    "transfer host",
    "the address on which prefill listens for decode (transfer_host, else VLLM_HOST_IP, else HCCL_IF_IP) is of this host",
    "MooncakeConnectorV1, not on decode",
)
CHECKS = (FREE, SERVICE, PEER, ADDRESS, TRANSFER_HOST)


def judge_ports(facts: Ports, need: Need) -> list[Finding]:
    found = [_free(tried) for tried in facts.free]
    found += [_service(tried) for tried in facts.services]
    found += [_peer(tried) for tried in facts.peers]
    found += [_transfer_host(facts.prefill)] if facts.prefill is not None else []
    return found + [_address(tried) for tried in facts.services if need.several_hosts and only_here(tried.endpoint.address)]


def _free(tried: Tried) -> Finding:
    port, what = port_of(tried.endpoint.address), tried.endpoint.what
    if tried.good:
        return FREE.ok(f"port {port} is free", what)
    if tried.good is None:
        return FREE.unknown(f"port {port}: {tried.text}", what, f"look with `ss -ltn 'sport = :{port}'`")
    fix = f"see who has it: ss -ltnp 'sport = :{port}'; stop that, or give {what} another port"
    return FREE.failure(f"port {port}: {tried.text}", what, fix)


def _service(tried: Tried) -> Finding:
    what, address = tried.endpoint
    if tried.good:
        return SERVICE.ok(f"{address} answers ({tried.text})", what)
    where = "start it on this host" if tried.here else "start it there, and open the port in firewalls on the way"
    return SERVICE.failure(f"{address}: {tried.text}", what, where)


def _peer(tried: Tried) -> Finding:
    address = tried.endpoint.address
    if tried.good:
        return PEER.ok(f"{address} answers ({tried.text})", "reachable")
    fix = "start what listens there; then look at routes and firewalls (ip route get, nc -vz) from this very container"
    return PEER.failure(f"{address}: {tried.text}", "reachable", fix)


def _address(tried: Tried) -> Finding:
    what, address = tried.endpoint
    return ADDRESS.failure(f"{what} is {address}, which only this host reaches", "an address of this host", "see `ip -br address`")


def _transfer_host(tried: Tried) -> Finding:
    source, host = tried.endpoint
    found, needed = f"{host} ({source}): {tried.text}", "an address of this host"
    if tried.good:
        return TRANSFER_HOST.ok(found, needed)
    fix = "set transfer_host to one of `ip -br address` that decode reaches, or unset what names the other one"
    return TRANSFER_HOST.failure(found, needed, fix) if tried.good is False else TRANSFER_HOST.unknown(found, needed, fix)
