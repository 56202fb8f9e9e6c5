"""The demo's client against a small server, and its verdict."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kvpool.ops.demo.chat import Said, ask, counted
from kvpool.ops.demo.pd import Turn, verdict

METRICS = """# TYPE kvpool:hit_tokens_total counter
kvpool:hit_tokens_total{engine="0",model_name="a{b}"} 64.0
kvpool:hit_tokens_total{engine="1",model_name="a{b}"} 32.0
kvpool:hit_tokens_created{engine="0"} 1.7e9
plain_total 3
"""


@pytest.fixture
def server():
    """Answers with what the test puts into ``answers``."""
    answers = {"/metrics": (200, METRICS)}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, text = answers[self.path]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.do_GET()

        def log_message(self, *words):
            pass

    listening = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{listening.server_port}", answers
    listening.shutdown()
    thread.join()
    listening.server_close()


def events(*bodies):
    return "".join(f"data: {json.dumps(body)}\n\n" for body in bodies) + "data: [DONE]\n\n"


def piece(text):
    return {"choices": [{"delta": {"content": text}}], "usage": None}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}


def test_counters_are_summed_over_their_samples(server):
    url, _ = server
    assert counted(url, "kvpool:hit_tokens_total") == 96
    assert counted(url, "kvpool:hit_tokens_total", engine="1") == 32
    assert counted(url, "plain_total") == 3
    assert counted(url, "kvpool:nothing_total") == 0


def test_an_answer_is_put_together(server):
    url, answers = server
    answers["/v1/chat/completions"] = 200, events(piece(""), piece("Good "), piece("day"), USAGE)
    said = ask(url, "m", [], 8)
    assert (said.text, said.prompt_tokens, said.answer_tokens) == ("Good day", 7, 2)
    assert 0 < said.ttft_s < 60


@pytest.mark.parametrize(
    ("status", "text", "told"),
    [
        (503, "no engine", "503 no engine"),
        (200, events(piece("Good "), {"error": {"message": "gone"}}), "gone"),
        (200, events(piece("Good ")), "broke off"),
        (200, events(USAGE), "is empty"),
    ],
)
def test_an_answer_that_is_none(status, text, told, server):
    url, answers = server
    answers["/v1/chat/completions"] = status, text
    with pytest.raises(OSError, match=told):
        ask(url, "m", [], 8)


def test_an_answer_that_breaks_off_in_the_middle():
    def serve(listening):
        link, _ = listening.accept()
        with link:
            link.recv(1 << 16)
            link.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nff\r\ndata: {")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        with pytest.raises(OSError, match="the answer broke off"):
            ask(f"http://127.0.0.1:{listening.getsockname()[1]}", "m", [], 8)
        thread.join()


def turns(texts, on_decode=1, hits=64):
    said = [Said(text, 0.1, 100, 10) for text in texts]
    return [Turn(one, {"prefill": (100, 0, 0), "decode": (on_decode, 0, 99)}, hits) for one in said]


def test_the_verdict():
    alone = turns(["a", "b"])
    line = "RESULT identical=true prefill_tokens_on_decode=1 second_turn_pool_hit_tokens=64"
    assert verdict(turns(["a", "b"]), alone) == (line, 0)
    assert verdict(turns(["a", "c"]), alone)[0].startswith("RESULT identical=false")
    for pair in (turns(["a", "c"]), turns(["a", "b"], hits=0), turns(["a", "b"], on_decode=100)):
        assert verdict(pair, alone)[1] == 1
