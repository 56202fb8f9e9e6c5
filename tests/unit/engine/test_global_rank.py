"""The rank a store is opened with tells data-parallel engines apart."""

from types import SimpleNamespace

import pytest

from kvpool.engine import cache_layout, worker_side


class OpenedError(Exception):
    pass


@pytest.mark.parametrize(("index", "rank"), [(0, 1), (1, 5), (3, 13)])
def test_the_store_is_opened_with_a_rank_across_data_parallel_engines(monkeypatch, index, rank):
    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=index, world_size=4))
    for module in (cache_layout, worker_side):
        monkeypatch.setattr(module, "rank_name", lambda: 1)
    monkeypatch.setattr(worker_side, "local_rank", lambda: 0)
    monkeypatch.setattr(worker_side, "describe_caches", lambda *_: SimpleNamespace(device="cpu"))

    def opened(setup, role, device, device_id, rank):
        raise OpenedError(rank)

    monkeypatch.setattr(worker_side, "open_store", opened)
    setup = SimpleNamespace(options=SimpleNamespace(breaker_failures=1, breaker_cooldown_ms=1, cache_namespace=""), split=None)
    side = worker_side.WorkerSide(setup, SimpleNamespace(bind_thread=lambda: None))
    with pytest.raises(OpenedError) as raised:
        side.register(config, None, {})
    assert raised.value.args == (rank,)
