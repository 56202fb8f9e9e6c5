"""What travels between the scheduler side and the worker side of MooncakeConnectorV1."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvpool.engine.messages import RankInfo
from kvpool.transfer.messages import RankLayout
from kvpool.transfer.offer import Offer
from kvpool.transfer.pull import Wanted


@dataclass(frozen=True)
class PublishJob:
    """Copy the blocks of a finished request to where decode fetches them (staged engines only)."""

    transfer_id: str
    tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PullJob:
    """Read ``wanted`` out of an offer. ``prompt`` is the digest of what the request wants the KV of; ``pull`` is random, and by it
    prefill knows the ranks that read for this job."""

    request_id: str
    offer: Offer
    pull: str
    prompt: str
    wanted: tuple[Wanted, ...]


@dataclass
class TransferMetadata(KVConnectorMetadata):
    """From scheduler to workers, every step. ``probe`` is set where there are pulls: see hash_probe.py."""

    met: bool = False  # the scheduler has heard of all ranks
    probe: str = ""
    withdraws: list[str] = field(default_factory=list)  # published transfers that nobody will fetch any more
    publishes: list[PublishJob] = field(default_factory=list)
    pulls: list[PullJob] = field(default_factory=list)


@dataclass
class Introduction:
    """What one rank of prefill knows that its scheduler does not."""

    info: RankInfo
    layout: RankLayout


@dataclass
class TransferReport(KVConnectorWorkerMetadata):
    """From the workers to the scheduler, in steps that have something to say; merged over ranks."""

    introductions: list[Introduction] = field(default_factory=list)
    published: dict[str, list[str]] = field(default_factory=dict)  # transfer id -> one entry per rank: "" or what went wrong

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, TransferReport)
        self.introductions += other.introductions
        for transfer_id, outcomes in other.published.items():
            self.published.setdefault(transfer_id, []).extend(outcomes)
        return self
