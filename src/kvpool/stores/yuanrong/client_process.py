"""The client process: the library, on its own. Run as ``python -m kvpool.stores.yuanrong.client_process FD``.

The library waits for its worker with the interpreter lock held. In the engine's process every thread, the scheduler's among them,
would wait along: up to the request timeout per call where a worker is slow or gone. So the library lives in this process, which
answers one request after the other and ends when its parent does.
"""

from __future__ import annotations

import os
import socket
import sys
import time

import numpy as np

from kvpool.stores.yuanrong import library
from kvpool.stores.yuanrong.client_hetero import HeteroMetadata
from kvpool.stores.yuanrong.client_kv import KvClient
from kvpool.stores.yuanrong.codes import code_of
from kvpool.stores.yuanrong.keys import PROBE
from kvpool.stores.yuanrong.messages import GREETING, Buffer, Channel, Reply, Request, Settings

_LOOK_S = 5.0
_LONGEST = 8192
EXPIRED = "not begun: the deadline passed while an earlier call waited for the worker"
Client = KvClient | HeteroMetadata


def connect(settings: Settings) -> tuple[Client, list[str]]:
    """A client that has reached its worker, and what the library lacks. Raises what the library raises."""
    module = library.load()
    client: Client = HeteroMetadata(module, settings) if settings.hetero else KvClient(module, settings)
    try:
        client.exists([PROBE])
    except RuntimeError as error:
        if code_of(str(error)) == "Invalid parameter":
            raise RuntimeError(f"{library.DISTRIBUTION} {library.version()} refuses kvpool's key names: {error}") from None
        raise
    return client, library.missing_features(module)


def answer(client: Client, request: Request) -> Reply:
    number = request.number
    if request.verb == "exists":
        return Reply(number, found=client.exists(request.names))
    if request.verb == "create":
        return Reply(number, buffers=client.create(request.names, request.nbytes))
    if request.verb == "publish":
        client.publish(request.buffers)
        return Reply(number)
    if request.verb == "open":
        return Reply(number, buffers=client.open(request.names, request.wait_ms))
    return Reply(number, names=client.delete(request.names))


def serve(channel: Channel, client: Client, parent: int) -> None:
    """Until the other end is closed, or the parent is another: it died, and a fork of it still holds the other end."""
    while os.getppid() == parent:
        try:
            request = channel.receive(Request)
        except TimeoutError:
            continue
        if request is None:
            return
        if request.verb == "drop":
            client.drop(request.buffers)
        elif time.monotonic() > request.until:
            channel.send(Reply(request.number, error=EXPIRED))
        else:
            try:
                reply = answer(client, request)
            except Exception as error:  # noqa: BLE001 - travels in the reply
                reply = Reply(request.number, error=str(error)[:_LONGEST] or type(error).__name__)
            channel.send(reply)


def main(descriptor: int, parent: int) -> None:
    end = socket.socket(fileno=descriptor)
    channel = Channel(end)
    settings = channel.receive(Settings)
    if settings is None:
        return
    try:
        client, lacking = connect(settings)
    except Exception as error:  # noqa: BLE001 - travels in the greeting
        channel.send(Reply(0, error=str(error)[:_LONGEST] or type(error).__name__))
        return
    memory = np.frombuffer(GREETING, dtype=np.uint8)
    channel.send(Reply(0, buffers=[Buffer(0, memory.ctypes.data, memory.nbytes)], names=lacking, text=library.version()))
    end.settimeout(_LOOK_S)
    serve(channel, client, parent)
    client.close()


if __name__ == "__main__":
    status = 0
    try:
        main(int(sys.argv[1]), os.getppid())
    except OSError:  # the parent is gone
        status = 1
    os._exit(status)  # the library's own threads do not always end
