"""A conversation with an OpenAI server, and what the server counts."""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

ANSWER_S = 300.0
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Said:
    """An answer; ``ttft_s``: seconds until its first words came."""

    text: str
    ttft_s: float
    prompt_tokens: int
    answer_tokens: int


def ask(url: str, model: str, messages: Sequence[dict[str, str]], max_tokens: int) -> Said:
    """The most likely answer. OSError where the server refuses, breaks off or is silent for too long."""
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first = time.monotonic(), 0.0
    pieces: list[str] = []
    usage: dict[str, int] = {}
    try:
        for event in _events(url, body):
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                if piece := choice["delta"].get("content"):
                    first = first or time.monotonic()
                    pieces.append(piece)
    except http.client.HTTPException as error:
        raise OSError(f"{url}: the answer broke off: {error!r}") from None
    if not usage or not first:
        raise OSError(f"{url}: the answer broke off, or is empty")
    return Said("".join(pieces), first - began, usage["prompt_tokens"], usage["completion_tokens"])


def _events(url: str, body: dict[str, object]) -> Iterator[dict[str, Any]]:
    parts = urllib.parse.urlsplit(url)
    with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ANSWER_S)) as link:
        link.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = link.getresponse()
        if answer.status != 200:
            raise OSError(f"{url}: {answer.status} {answer.read(500).decode(errors='replace')}")
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise OSError(f"{url}: {event['error']}")
                yield event


def counted(url: str, name: str, **labels: str) -> int:
    """The sum of a counter's samples that carry all of ``labels``; 0 where there are none yet."""
    parts = urllib.parse.urlsplit(url)
    with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10.0)) as link:
        link.request("GET", "/metrics")
        text = link.getresponse().read().decode()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    samples = [match for match in _SAMPLE.finditer(text) if match[1] == name]
    return int(sum(float(match[3]) for match in samples if all(pair in (match[2] or "") for pair in wanted)))
