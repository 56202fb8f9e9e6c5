"""yuanrong.json and the variables that fill it."""

from __future__ import annotations

import json

import pytest

from kvpool.options import OptionError
from kvpool.options.yuanrong_json import read_yuanrong

ADDRESS = {"worker_addr": "1.2.3.4:31501"}


def read(raw=(), env=None, **kwargs):
    """With the link type that goes with the transport."""
    raw = dict(raw)
    link = "ROCE" if raw.get("remote_h2d_transport_backend") == "P2P_TRANSFER" else "HCCS"
    env = {"DS_RH2D_LINK_TYPE": link, **(env or {})}
    return read_yuanrong(json.dumps({**ADDRESS, **raw}), "yuanrong.json", env, **kwargs)


def refused(raw, env=None, **kwargs):
    with pytest.raises(OptionError) as caught:
        read(raw, env, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("value", [9000, "9000", None])
def test_bc_008_connect_timeout(value):
    assert read({"connect_timeout_ms": value}).options.connect_timeout_ms == 9000
    assert read({"connect_timeout_ms": 500}).options.connect_timeout_ms == 500


def test_bc_008_bad_timeouts():
    assert "connect_timeout_ms=499: expected an integer of at least 500" in refused({"connect_timeout_ms": 499})
    assert "request_timeout_ms=-1" in refused({"request_timeout_ms": -1})
    assert "get_sub_timeout_ms" in refused({"get_sub_timeout_ms": 1.5})


def test_bc_008_zero_means_connect_timeout_and_fifty_means_fifty():
    assert read().options.request_deadline_ms == 9000
    options = read({"request_timeout_ms": 50, "get_sub_timeout_ms": 200}).options
    assert (options.request_timeout_ms, options.request_deadline_ms, options.get_sub_timeout_ms) == (50, 50, 200)


@pytest.mark.parametrize("value", [None, "1.2.3.4", "1.2.3.4:", ":31501", 31501])
def test_bc_008_worker_address(value):
    message = refused({"worker_addr": value})
    assert "worker_addr" in message
    assert "<host>:<port>" in message


def test_the_file_wins_and_variables_fill():
    reading = read(
        {"worker_addr": None}, {"DS_WORKER_ADDR": "h:1", "DS_ENABLE_REMOTE_H2D": "1", "DS_ENABLE_EXCLUSIVE_CONNECTION": "0"}
    )
    assert reading.options.worker_addr == "h:1"
    assert reading.options.enable_remote_h2d is True
    assert reading.sources["enable_remote_h2d"] == "environment DS_ENABLE_REMOTE_H2D"
    assert reading.warnings == []
    both = read({"enable_remote_h2d": False}, {"DS_WORKER_ADDR": "h:1", "DS_ENABLE_REMOTE_H2D": "1"})
    assert both.options.worker_addr == "1.2.3.4:31501"
    assert both.warnings == [
        "worker_addr: the file wins (1.2.3.4:31501) over DS_WORKER_ADDR (h:1)",
        "enable_remote_h2d: the file wins (False) over DS_ENABLE_REMOTE_H2D (1)",
    ]
    assert read({"enable_remote_h2d": True}, {"DS_ENABLE_REMOTE_H2D": "true"}).warnings == []
    assert len(read({"enable_remote_h2d": True}, {"DS_ENABLE_REMOTE_H2D": "maybe"}).warnings) == 1


def test_bad_values_from_the_environment_name_the_variable():
    assert refused({}, {"DS_ENABLE_REMOTE_H2D": "maybe"}).startswith("environment DS_ENABLE_REMOTE_H2D: ")


def test_bc_172_layerwise_must_agree_with_the_connector():
    assert "differs from use_layerwise=false of the connector" in refused({"use_layerwise": True}, use_layerwise=False)
    assert read({"use_layerwise": True}, use_layerwise=True).options.use_layerwise
    assert read({"use_layerwise": True}).options.use_layerwise


@pytest.mark.parametrize(
    ("raw", "registers"),
    [
        ({}, False),
        ({"enable_remote_h2d": True}, False),
        ({"enable_dev_mem_pregister": True, "enable_remote_h2d": True}, True),
        ({"enable_dev_mem_pregister": True, "enable_remote_h2d": True, "enable_fabric_mem": True}, False),
        ({"enable_dev_mem_pregister": True, "enable_remote_h2d": True, "remote_h2d_transport_backend": "P2P_TRANSFER"}, False),
        ({"enable_dev_mem_pregister": True}, False),
    ],
)
def test_device_memory_is_registered_only_if_all_conditions_hold(raw, registers):
    reading = read(raw)
    assert reading.options.registers_device_memory is registers
    assert len(reading.warnings) == (1 if raw.get("enable_dev_mem_pregister") and not registers else 0)


def test_fabric_memory_needs_its_transport():
    assert len(read({"enable_fabric_mem": True, "remote_h2d_transport_backend": "P2P_TRANSFER"}).warnings) == 1
    assert '"HIXL", "P2P_TRANSFER"' in refused({"remote_h2d_transport_backend": "HCCS"})


@pytest.mark.parametrize("text", ["[]", "3", '"x"'])
def test_not_an_object(text):
    with pytest.raises(OptionError, match="expected an object"):
        read_yuanrong(text, "yuanrong.json", {})
