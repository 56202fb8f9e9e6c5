"""Answers to the units of one request, as one: choices numbered through, usage summed, one id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvpool.proxy import sse
from kvpool.proxy.asks import Ask, Unit
from kvpool.proxy.usage import CACHED, DETAILS, cached_tokens


def answer_id(ask: Ask) -> str:
    """As an engine would make it."""
    return f"{'chatcmpl' if ask.chat else 'cmpl'}-{ask.request_id}"


def sum_usage(units: Sequence[Unit], answers: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """A prompt counts once, whatever the number of its samples. None where no answer has usage."""
    told = [(unit, answer) for unit, answer in zip(units, answers, strict=True) if isinstance(answer.get("usage"), dict)]
    if not told:
        return None
    once = {unit.prompt: answer for unit, answer in reversed(told)}
    prompt = sum(answer["usage"].get("prompt_tokens") or 0 for answer in once.values())
    completion = sum(answer["usage"].get("completion_tokens") or 0 for _, answer in told)
    total: dict[str, Any] = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    cached = [value for answer in once.values() if (value := cached_tokens(answer)) is not None]
    first = told[0][1]["usage"]
    if cached:
        total[DETAILS] = {**(first.get(DETAILS) or {}), CACHED: sum(cached)}
    return {**first, **total}


def merge_bodies(ask: Ask, bodies: Sequence[bytes]) -> bytes:
    """ValueError for an answer that is none."""
    answers = [msgspec.json.decode(body) for body in bodies]
    if not all(isinstance(answer, dict) and isinstance(answer.get("choices"), list) for answer in answers):
        raise ValueError("no choices")
    choices = [
        {**choice, "index": unit.index} for unit, answer in zip(ask.units, answers, strict=True) for choice in answer["choices"]
    ]
    whole = {**answers[0], "id": answer_id(ask), "choices": choices}
    whole.pop("kv_transfer_params", None)
    if (usage := sum_usage(ask.units, answers)) is not None:
        whole["usage"] = usage
    return msgspec.json.encode(whole)


class StreamMerger:
    """Frames of all units, rewritten one by one; their last usage is kept back and summed."""

    def __init__(self, ask: Ask) -> None:
        self._ask, self._id = ask, answer_id(ask)
        self._last: list[dict[str, Any]] = [{} for _ in ask.units]

    def rewrite(self, number: int, frames: bytes) -> bytes:
        """Frames of unit ``number``; b"" where there is nothing for the client in them."""
        return b"".join(self._one(number, frame) for frame in sse.split(frames))

    def end(self) -> bytes:
        """What ends the whole stream: the usage of all, where the engines told it, and the end mark."""
        told = next((chunk for chunk in self._last if chunk), None)
        if told is None:
            return sse.DONE
        whole = {**told, "id": self._id, "usage": sum_usage(self._ask.units, self._last)}
        return sse.frame(msgspec.json.encode(whole)) + sse.DONE

    def _one(self, number: int, frame: bytes) -> bytes:
        payload = sse.data(frame)
        if payload is None or payload.strip() == b"[DONE]":
            return b""
        try:
            chunk = msgspec.json.decode(payload)
        except (msgspec.DecodeError, RecursionError):
            return frame
        if not isinstance(chunk, dict):
            return frame
        choices = chunk.get("choices")
        if choices == [] and isinstance(chunk.get("usage"), dict):
            self._last[number] = chunk
            return b""
        if isinstance(choices, list):
            chunk["choices"] = [{**choice, "index": self._ask.units[number].index} for choice in choices]
        return sse.frame(msgspec.json.encode({**chunk, "id": self._id}))
