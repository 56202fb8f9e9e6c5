"""An OpenAI server of vLLM as the checks see it: answers as token ids, its caches, its counters. Every call has a deadline."""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.parse
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from kvpool.ops.demo.chat import counted

ANSWER_S, METRICS_S, EMPTY_S, SETTLE_S = 60.0, 10.0, 40.0, 5.0
MAX_TOKENS = 16
NUDGE = list(range(100, 108))
HIT_TOKENS = "kvpool:hit_tokens_total"
_BLOCK_SIZE = re.compile(r'^vllm:cache_config_info\{.*?\bblock_size="(\d+)"', re.MULTILINE)


class Silent(OSError):
    """No answer in time."""


@dataclass(frozen=True, slots=True)
class Answer:
    """``cached``: tokens of the prompt that were not computed, as far as the server says."""

    token_ids: tuple[int, ...]
    cached: int | None
    seconds: float


class Client:
    """``url``: where the engine is now; it moves when the engine is started again. ``left(most)`` cuts every deadline to the time
    that the whole run has left. ``answer_s``: for one answer."""

    def __init__(self, model: str, left: Callable[[float], float], url: str = "", answer_s: float = ANSWER_S) -> None:
        self._model, self._left, self.url, self.answer_s = model, left, url, answer_s

    def ask(self, prompt: Sequence[int], salt: str | None = None, max_tokens: int = MAX_TOKENS) -> Answer:
        """The most likely answer. OSError where the server refuses or breaks off, ``Silent`` after ``answer_s``."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if salt is not None:
            body["cache_salt"] = salt
        began = time.monotonic()
        said = self._call("POST", "/v1/completions", self.answer_s, body)
        choice, details = said["choices"][0], said["usage"].get("prompt_tokens_details") or {}
        if not choice.get("token_ids"):
            raise OSError(f"an answer without tokens (finish reason {choice.get('finish_reason')})")
        return Answer(tuple(choice["token_ids"]), details.get("cached_tokens"), time.monotonic() - began)

    def empty_cache(self) -> None:
        """Empty the engine's own prefix cache, not the pool. vLLM refuses while a block is in use: so saves are over afterwards."""
        end = time.monotonic() + self._left(EMPTY_S)
        while not self._call("POST", "/reset_prefix_cache", METRICS_S)["success"]:
            if time.monotonic() > end:
                raise Silent(f"blocks were still in use after {EMPTY_S:g} s")
            self.nudge()
            time.sleep(0.1)

    def nudge(self) -> None:
        """A request of less than a block: an idle engine makes no step, and hears only in a step of what has ended late."""
        self.ask(NUDGE, max_tokens=1)

    def count(self, name: str, **labels: str) -> int:
        """The sum of a counter's samples that carry all of ``labels``."""
        return counted(self.url, name, **labels)

    def count_until(self, name: str, wanted: int, wait_s: float | None = None) -> int:
        """What it counts, once that is ``wanted`` or the time is over: the engine reports after it has answered."""
        end = time.monotonic() + self._left(SETTLE_S if wait_s is None else wait_s)
        while (seen := self.count(name)) < wanted and time.monotonic() < end:
            time.sleep(0.1)
        return seen

    def block_size(self) -> int:
        """Tokens of one block, as the engine says."""
        found = _BLOCK_SIZE.search(self._read("GET", "/metrics", METRICS_S).decode())
        if found is None:
            raise OSError("the engine does not say its block size (vllm:cache_config_info)")
        return int(found[1])

    def _call(self, method: str, path: str, most_s: float, body: dict[str, Any] | None = None) -> Any:  # noqa: ANN401 - JSON
        return json.loads(self._read(method, path, most_s, body))

    def _read(self, method: str, path: str, most_s: float, body: dict[str, Any] | None = None) -> bytes:
        parts = urllib.parse.urlsplit(self.url)
        limit = self._left(most_s)
        if limit <= 0:
            raise Silent("the time was over before this was asked")
        with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=limit)) as link:
            try:
                link.request(method, path, None if body is None else json.dumps(body), {"content-type": "application/json"})
                answer = link.getresponse()
                text = answer.read()
            except TimeoutError:
                raise Silent(f"no answer within {limit:.0f} s") from None
            except http.client.HTTPException as error:
                raise OSError(f"the answer broke off ({type(error).__name__})") from None
        if answer.status != 200:
            raise OSError(f"{path} answered {answer.status}")
        return text
