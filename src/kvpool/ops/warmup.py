"""Warming up an engine or a proxy: long prompts that nobody has asked before, one answered token each."""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvpool.options.errors import OptionError

TOKEN_IDS = range(100, 900)  # ordinary tokens in every vocabulary


@dataclass(frozen=True, slots=True)
class WarmedUp:
    """``failures``: one line each. ``words``: what was asked."""

    sent: int
    answered: int
    seconds: float
    words: str
    failures: list[str]


class Warmup:
    """``url``: with or without the ``/v1`` of its API. ``timeout_s``: for one request. ``api_key``: sent as bearer token."""

    def __init__(self, url: str, timeout_s: float, api_key: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise OptionError("URL", url, "accepted: http://host:port or https://host:port, with or without /v1")
        self._url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self._timeout_s, self._api_key = timeout_s, api_key

    def run(self, model: str | None, prompts: Sequence[str] | None, requests: int, tokens: int, concurrency: int) -> WarmedUp:
        """``prompts`` one after another, or ``requests`` prompts of ``tokens`` random tokens.

        OSError where nobody answers, ValueError where no such model is served."""
        name, longest = self._model(model)
        if prompts is not None:
            asked: list[str | list[int]] = list(prompts)
            words = "your prompts"
        else:
            length = tokens if longest is None else max(1, min(tokens, longest - 1))
            asked = [random.choices(TOKEN_IDS, k=length) for _ in range(requests)]
            words = f"{length} tokens"
        began = time.monotonic()
        with ThreadPoolExecutor(concurrency) as threads:
            results = list(threads.map(lambda prompt: self._complete(name, prompt), asked))
        failures = [result for result in results if result is not None]
        return WarmedUp(len(asked), len(asked) - len(failures), time.monotonic() - began, words, failures)

    def _model(self, wanted: str | None) -> tuple[str, int | None]:
        """Name and longest sequence."""
        asked = f"{self._url}/v1/models"
        try:
            listed = self._ask("/v1/models", None)["data"]
            chosen = next((one for one in listed if wanted in (None, one["id"])), None)
        except urllib.error.HTTPError as error:
            hint = " (the key is that of OPENAI_API_KEY)" if error.code in (401, 403) else ""
            raise OSError(f"{asked} answers {error.code} {error.reason}{hint}") from None
        except (OSError, http.client.HTTPException) as error:
            raise OSError(f"{asked} does not answer: {getattr(error, 'reason', None) or error}") from None
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{asked} does not list models") from None
        if chosen is None:
            names = ", ".join(str(one["id"]) for one in listed)
            raise OptionError("--model", wanted, f"is not served (accepted: {names or 'none'})")
        longest = chosen.get("max_model_len")
        return str(chosen["id"]), longest if isinstance(longest, int) else None

    def _complete(self, model: str, prompt: str | list[int]) -> str | None:
        """None, or why it failed."""
        try:
            self._ask("/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0})
        except urllib.error.HTTPError as error:
            return f"{error.code} {error.read(300).decode(errors='replace')}"
        except (OSError, ValueError, http.client.HTTPException) as error:
            return str(error) or type(error).__name__
        return None

    def _ask(self, path: str, body: dict[str, Any] | None) -> Any:  # noqa: ANN401 - JSON
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {self._api_key}"} if self._api_key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)
        with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
            return json.loads(answer.read())
