"""What a client asks for, cut into units of one prompt and one answer, and the bodies of the two requests that serve a unit."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvpool.proxy import estimate
from kvpool.proxy.failures import FailureError

MAX_UNITS = 256
GREEDY = 1e-5  # below, vLLM takes the most likely token
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Never taken from a client: where KV is read and written is between the engines and the proxy, and so are the ids of requests.
INTERNAL = ("kv_transfer_params", "ec_transfer_params", "request_id")
FORWARDED = ("authorization", "traceparent", "tracestate", "x-vllm-priority")


@dataclass(slots=True)
class Unit:
    """One prompt, one answer. ``index``: of its choice in the answer. ``direct``: it goes to decode alone, as it came, as
    prefill cannot help (beam search, log probabilities of the prompt, options that an engine will refuse), with all its
    ``answers``."""

    body: dict[str, Any]
    index: int
    prompt: int
    direct: bool
    tokens: int
    prefix: bytes | None
    answers: int = 1


@dataclass(slots=True)
class Ask:
    """One request of a client. ``headers``: those that the engines get too."""

    path: str
    stream: bool
    headers: dict[str, str]
    units: list[Unit]
    request_id: str = field(default_factory=lambda: new_id())
    trail: dict[str, Any] = field(default_factory=dict)  # for the log: who served it

    @property
    def chat(self) -> bool:
        return self.path == CHAT

    @property
    def answers(self) -> int:
        return sum(unit.answers for unit in self.units)


def new_id() -> str:
    """128 random bits in hexadecimal."""
    return secrets.token_hex(16)


def read(path: str, raw: bytes, headers: Mapping[str, str], affinity: bool = False) -> Ask:
    """FailureError 400 for what is no JSON object."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FailureError(400, f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise FailureError(400, "the body is no JSON object")
    body = cleaned(body)
    forwarded = {name: headers[name] for name in FORWARDED if name in headers}
    return Ask(path, body.get("stream") is True, forwarded, units(path, body, affinity))


def cleaned(body: dict[str, Any]) -> dict[str, Any]:
    """Without the fields that are not a client's business, wherever an engine would find them."""
    clean = {name: value for name, value in body.items() if name not in INTERNAL}
    extra = clean.get("vllm_xargs")
    if isinstance(extra, dict):
        clean["vllm_xargs"] = {name: value for name, value in extra.items() if name not in INTERNAL}
    return clean


def units(path: str, body: dict[str, Any], affinity: bool = False) -> list[Unit]:
    """Prompts times samples, in the order of their choices. FailureError 400 for more than ``MAX_UNITS``."""
    prefix = estimate.prefix(body) if affinity else None
    samples, prompts = _samples(body), _prompts(path, body)
    if samples * len(prompts) > MAX_UNITS:
        raise FailureError(400, f"{len(prompts)} prompts with n={samples}: at most {MAX_UNITS} answers in one request")
    if is_direct(body):
        return [Unit(body, 0, 0, True, estimate.tokens(body), prefix, samples * len(prompts))]
    if samples * len(prompts) == 1:
        return [Unit(body, 0, 0, False, estimate.tokens(body), prefix)]
    cut = []
    for number, prompt in enumerate(prompts):
        for sample in range(samples):
            one = {**body, **({} if path == CHAT else {"prompt": prompt})}
            one.pop("n", None)
            if isinstance(seed := body.get("seed"), int) and sample:
                one["seed"] = seed + sample  # as vLLM seeds the samples of one request
            begin = estimate.prefix(one) if affinity else None
            cut.append(Unit(one, number * samples + sample, number, False, estimate.tokens(one), begin))
    return cut


def _samples(body: Mapping[str, Any]) -> int:
    """As many as an engine would make of ``n``, also where it is no integer; 1 where it will refuse."""
    try:
        return max(1, int(body.get("n") or 1))
    except (TypeError, ValueError, OverflowError):
        return 1


def _prompts(path: str, body: Mapping[str, Any]) -> list[Any]:
    prompt = body.get("prompt")
    many = path == COMPLETIONS and isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return list(prompt) if many and isinstance(prompt, list) else [prompt]


def is_direct(body: Mapping[str, Any]) -> bool:
    """Whether decode must see the request whole. What an engine refuses is refused by decode, before prefill has held KV for it."""
    prompt = body.get("prompt")
    unusual = bool(body.get("use_beam_search")) or body.get("prompt_logprobs") is not None or body.get("prompt_embeds") is not None
    scored = bool(body.get("echo")) and body.get("logprobs") is not None
    empty = (isinstance(prompt, list) and (not prompt or len({type(one) for one in prompt}) > 1)) or body.get("messages") == []
    return unusual or scored or empty or _is_greedy_many(body) or not _lengths_are_right(body)


def _is_greedy_many(body: Mapping[str, Any]) -> bool:
    """Several samples without a temperature: one engine refuses that, which it cannot when they come one by one."""
    temperature = body.get("temperature")
    return body.get("n") not in (None, 1) and isinstance(temperature, int | float) and temperature < GREEDY


def _lengths_are_right(body: Mapping[str, Any]) -> bool:
    """The options that the prefill request replaces, and which prefill can therefore not refuse."""
    names = ("max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of")
    numbers = {name: body[name] for name in names if body.get(name) is not None}
    if any(not isinstance(value, int) or isinstance(value, bool) or value < 0 for value in numbers.values()):
        return False
    longest = numbers.get("max_completion_tokens", numbers.get("max_tokens"))
    if longest is not None and (longest < numbers.get("min_tokens", 0) or longest == 0):
        return False
    options, stream = body.get("stream_options"), body.get("stream")
    if options is not None and not (isinstance(options, dict) and stream is True):
        return False
    return isinstance(stream, bool | None) and numbers.get("n", 1) >= 1 and "best_of" not in numbers


def prefill_body(unit: Unit, path: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the prompt and one token, which nobody sees: at least one, so that the engine stops for length and keeps the KV."""
    body = {**unit.body, "stream": False, "max_tokens": 1, "min_tokens": 1, "kv_transfer_params": dict(params)}
    for name in ("stream_options", "n", "max_completion_tokens"):
        body.pop(name, None)
    if path == CHAT:
        body["max_completion_tokens"] = 1
    return body


def decode_body(unit: Unit, params: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the client asked for, and where the KV is."""
    return unit.body if params is None else {**unit.body, "kv_transfer_params": dict(params)}
