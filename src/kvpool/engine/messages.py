"""What travels between the scheduler side and the worker side."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvpool.core.jobs import JobReport, LoadJob, SaveJob
from kvpool.core.namespace import NamespaceInputs
from kvpool.options.record import StoreRecord


@dataclass(frozen=True)
class RankInfo:
    """What one worker knows that the scheduler does not: its shards and what shapes its pages."""

    rank: int
    inputs: NamespaceInputs  # without hash probe and epoch
    shards: tuple[tuple[int, str, int], ...]  # (group, shard, bytes of an object)
    host: str
    sharing: str = ""  # why this engine must not share its KV; empty when it may
    store: StoreRecord = field(default_factory=lambda: StoreRecord(""))


@dataclass
class PoolHandshake(KVConnectorHandshakeMetadata):
    """From worker to scheduler, once. MultiConnector gives the first child's handshake to all: hence entries by connector name."""

    entries: dict[str, RankInfo]


@dataclass
class PoolMetadata(KVConnectorMetadata):
    """From scheduler to workers, every step."""

    namespace: str = ""  # empty until every rank's handshake has come
    echo: int = 0  # the number of a step with synchronous loads: to be reported when it has run
    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    patience_s: float = 0.0  # nothing is computed in this step: how long it may wait for a load to end, instead of spinning
    notes: dict[bytes, str] = field(default_factory=dict)  # to be left in the pool by rank 0: a scheduler's store may only look up


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """From the workers to the scheduler, in steps that have something to say; merged over ranks."""

    jobs: dict[int, JobReport] = field(default_factory=dict)
    handshakes: list[RankInfo] = field(default_factory=list)
    store_down: bool = False  # loads are bypassed
    echoes: dict[int, int] = field(default_factory=dict)  # step -> ranks that have run it
    saves_down: bool = False  # a store may be readable all the same

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerReport)
        for job_id, report in other.jobs.items():
            self.jobs.setdefault(job_id, JobReport()).merge(report)
        self.handshakes += other.handshakes
        self.store_down |= other.store_down
        self.saves_down |= other.saves_down
        for step, ranks in other.echoes.items():
            self.echoes[step] = self.echoes.get(step, 0) + ranks
        return self
