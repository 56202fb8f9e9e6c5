"""Everything that can go wrong between prefill and decode, through the real proxy and vLLM's own servers.

After every fault: no hang, no wrong token, prefill keeps nothing, and what fails does so by kv_load_failure_policy. Offers are held
for vLLM's default of 480 s, longer than any test: what is free has been freed by a message.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from kvpool.transfer.release import ANSWER_S
from tests.engine.channel_faults import VARIABLE, ChannelFaults
from tests.engine.front import Answered, Front, Request, front
from tests.engine.pairs import PairSpec, StartEngine, cold
from tests.engine.runner import Engine, Prompt, metric, tokens
from tests.stopped import stopped
from tests.waiting import eventually

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
KEEP_BEGIN: dict[str, dict[str, float]] = {"begin": {"keep_answers": 1}}  # decode is reading, until the plan is another
UNHEARD_S = 2 * ANSWER_S + 1.0  # two questions without an answer
SOON_S = 15.0  # an answer or a release; the busiest machine needs far less, and the time of an offer is 480 s
STORE_FAULTS = {
    "unreachable": {"exists": {"error": "gone"}, "lease": {"error": "gone"}, "get": {"error": "gone"}, "put": {"error": "gone"}},
    "silent": {"exists": {"hang": True}, "lease": {"hang": True}, "get": {"hang": True}, "put": {"hang": True}},
}
FAST_POOL = {"lookup_timeout_ms": 200, "load_timeout_ms": 1000, "save_timeout_ms": 1000, "breaker_cooldown_ms": 300}


@dataclass
class Scene:
    """Two engines, the proxy before them, and the faults."""

    spec: PairSpec
    prefill: Engine
    decode: Engine
    proxy: Front
    channel: ChannelFaults
    store_plan: Path
    policy: str
    decode_port: int
    start_engine: StartEngine
    prompts: int = 0

    def start_decode(self) -> Engine:
        """Another one in the place of one that died."""
        engine = self.start_engine(self.spec.spec("kv_consumer"))
        engine.do("serve", port=self.decode_port)
        return engine

    def prompt(self, length: int = 300) -> Prompt:
        """One that no engine has seen."""
        self.prompts += 1
        return tokens((9000 + self.prompts, length))

    def expected(self, prompt: Prompt, max_tokens: int = 12) -> list[int]:
        self.prompts += 1
        return cold(self.decode, prompt, f"alone-{self.prompts}", max_tokens)

    def pulls(self, reason: str) -> float:
        return metric(self.decode.metrics(), "kvpool:pulls_total", reason=reason)

    def asserts_right(self, answered: Answered, expected: list[int], what: str) -> None:
        assert (answered.status, answered.error) == (200, ""), what
        assert answered.tokens == expected, what

    def asserts_by_policy(self, answered: Answered, expected: list[int], what: str) -> None:
        """The pull has failed."""
        if self.policy == "recompute":
            self.asserts_right(answered, expected, what)
        else:
            assert answered.status == 500 or answered.error, what
            assert not answered.tokens, what

    def is_well(self, what: str) -> None:
        """Nothing is left of any request on either side, and the next one is served, by a transfer."""
        eventually(lambda: not self.held(), f"after {what}: prefill keeps nothing", SOON_S)
        self.decode.do("wait_idle")
        assert metric(self.decode.metrics(), "vllm:kv_cache_usage_perc") == 0, what
        before, prompt = self.pulls("ok"), self.prompt()
        self.asserts_right(self.proxy.ask(prompt), self.expected(prompt), f"after {what}")
        eventually(lambda: self.pulls("ok") == before + 1, f"after {what}: KV is pulled")

    def computing(self) -> bool:
        """Whether prefill is at a prompt."""
        return metric(self.prefill.metrics(), "vllm:num_requests_running") > 0

    def held(self) -> float:
        """What prefill keeps. An idle engine lets go when it next does something."""
        self.prefill.generate([self.prompt(20)], max_tokens=1)
        self.prefill.do("wait_idle")
        samples = self.prefill.metrics()
        names = ("kvpool:open_offers", "kvpool:offer_pinned_blocks", "vllm:kv_cache_usage_perc", "vllm:num_requests_running")
        return sum(metric(samples, name) for name in names)


@contextmanager
def scene(policy: str, root: Path, folder: Path, start_engine: StartEngine) -> Iterator[Scene]:
    """A pair beside a pool, behind a proxy. Prompts are computed in small steps, so that there is a middle."""
    channel, store_plan = ChannelFaults(folder / "channel"), folder / "store.json"
    restricted = YAMA.exists() and YAMA.read_text().strip() != "0"
    spec = PairSpec(
        "qwen3",
        root,
        prefill={"max_num_batched_tokens": 128},
        engine="local_host" if restricted else "process_vm",
        policy=policy,
        beside="last",
        pool={"fault_plan_path": str(store_plan), **FAST_POOL},
        env={VARIABLE: str(channel.folder)},
    )
    prefill, decode = spec.start(start_engine)
    ports = prefill.do("serve"), decode.do("serve")
    with front(*ports, folder / "proxy.log") as proxy:
        yield Scene(spec, prefill, decode, proxy, channel, store_plan, policy, ports[1], start_engine)


@pytest.mark.timeout(600)  # on a machine that others keep busy
@pytest.mark.parametrize("policy", ["recompute", pytest.param("fail", marks=pytest.mark.slow)])
def test_faults_between_prefill_and_decode(policy: str, pool_root: Path, tmp_path: Path, start_engine: StartEngine) -> None:
    """One pair that survives most of them, one more decode engine; what kills prefill comes last."""
    with scene(policy, pool_root, tmp_path, start_engine) as stage:
        stage.is_well("the start")
        assert stage.channel.sent("begin"), "no faults can be injected into this engine"
        for fault in (
            clients_that_leave,
            clients_that_leave_a_prefill_that_stands_still,
            lost_messages,
            repeated_and_late_messages,
            ids_that_are_used_again,
            a_store_that_is_unavailable,
            decode_is_killed_and_started_again,
        ):
            fault(stage)
            stage.channel.set({})
            stage.is_well(fault.__name__)
        prefill_is_killed(stage)


def clients_that_leave(stage: Scene) -> None:
    """On either side of the hand-over, and in it."""
    for after_s in (0.0, 0.05, 0.15, 0.3, 0.6):
        request = stage.proxy.start(stage.prompt(1500))
        time.sleep(after_s)
        request.leave()
    stage.channel.set(KEEP_BEGIN)
    begun = len(stage.channel.sent("begin"))
    pulling = [stage.proxy.start(stage.prompt()) for _ in range(2)]
    eventually(lambda: len(stage.channel.sent("begin")) >= begun + 2, "decode is reading")
    for request in pulling:
        request.leave()
    stage.channel.set({})
    answering = stage.proxy.start(stage.prompt(), max_tokens=2000)
    eventually(lambda: len(answering.tokens) > 5, "decode is answering")
    answering.leave()


def clients_that_leave_a_prefill_that_stands_still(stage: Scene) -> None:
    """It hears of none of them in time. It is told again until it does, and lets go of what decode still reads."""
    stage.channel.set(KEEP_BEGIN)
    begun = len(stage.channel.sent("begin"))
    pulling = [stage.proxy.start(stage.prompt()) for _ in range(2)]
    eventually(lambda: len(stage.channel.sent("begin")) >= begun + 2, "decode is reading")
    with stopped(stage.prefill.processes().values()):
        for request in pulling:
            request.leave()
        time.sleep(UNHEARD_S)
    eventually(lambda: not stage.held(), "prefill is told again", SOON_S)


def lost_messages(stage: Scene) -> None:
    """Questions and answers of each kind, among them the acknowledgement that decode has read: asked again, never pulled twice."""
    failed = stage.pulls("failed")
    for kind, fault in (("begin", "lose_answers"), ("end", "lose_questions"), ("end", "lose_answers")):
        prompt = stage.prompt()
        expected = stage.expected(prompt)
        stage.channel.set({kind: {fault: 1}})
        stage.asserts_right(stage.proxy.ask(prompt), expected, f"{fault} of {kind}")
    assert stage.pulls("failed") == failed
    prompt = stage.prompt()
    expected = stage.expected(prompt)
    stage.channel.set({"end": {"lose_answers": 2}})
    stage.asserts_by_policy(stage.proxy.ask(prompt), expected, "an acknowledgement that never comes")
    assert stage.pulls("failed") == failed + 1
    time.sleep(2.5)  # decode asks a prefill engine that did not answer again after 2 s


def repeated_and_late_messages(stage: Scene) -> None:
    """Every message that decode has ever sent, once more, bit by bit: between requests and while a pull is under way."""
    answers = replay(stage, stage.channel.sent())
    assert answers > 20
    stage.channel.set(KEEP_BEGIN)
    prompts = [stage.prompt() for _ in range(2)]
    expected = [stage.expected(prompt) for prompt in prompts]
    begun = len(stage.channel.sent("begin"))
    requests = [stage.proxy.start(prompt) for prompt in prompts]
    eventually(lambda: len(stage.channel.sent("begin")) >= begun + 2, "decode is reading")
    replay(stage, stage.channel.sent())
    stage.channel.set({})
    for request, right in zip(requests, expected, strict=True):
        stage.asserts_right(request.result(), right, "messages that were repeated during the pull")


def replay(stage: Scene, messages: list[list[bytes]]) -> int:
    """Send them as they were; how many were answered, which is all of them."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.DEALER) as line:
        line.setsockopt(zmq.LINGER, 0)
        line.connect(f"tcp://127.0.0.1:{stage.spec.port}")
        for frames in messages:
            line.send_multipart(frames)
        for _ in messages:
            assert line.poll(int(SOON_S * 1000)), "prefill answers no more"
            assert len(line.recv_multipart()) == 3
    context.term()
    return len(messages)


def ids_that_are_used_again(stage: Scene) -> None:
    """A client's ids at the same time and one after another, and fields that only proxies may set."""
    prompts = [stage.prompt(200 + 60 * number) for number in range(4)]
    expected = [stage.expected(prompt) for prompt in prompts]
    same = {"headers": {"X-Request-Id": "the-same"}, "request_id": "the-same"}
    before = stage.pulls("ok")
    forged = {"kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": True, "transfer_id": "0" * 32}}
    for _ in range(2):
        requests = [stage.proxy.start(prompt, **same, **forged) for prompt in prompts]
        for request, right in zip(requests, expected, strict=True):
            stage.asserts_right(request.result(), right, "ids that are used again")
    assert stage.pulls("ok") >= before + len(prompts), "decode has computed what it should have pulled"


def a_store_that_is_unavailable(stage: Scene) -> None:
    """The pool beside the transfer."""
    for name, calls in STORE_FAULTS.items():
        prompt, before = stage.prompt(), stage.pulls("ok")
        expected = stage.expected(prompt)
        write(stage.store_plan, {"calls": calls})
        stage.asserts_right(stage.proxy.ask(prompt), expected, f"a store that is {name}")
        assert stage.pulls("ok") == before + 1, "the transfer does not need the pool"
        write(stage.store_plan, {"calls": {}})


def write(path: Path, plan: object) -> None:
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(plan))
    scratch.replace(path)


def decode_is_killed_and_started_again(stage: Scene) -> None:
    """In the middle of pulls and of answers. Its successor meets prefill anew; the proxy finds it by itself."""
    stage.channel.set(KEEP_BEGIN)
    begun = len(stage.channel.sent("begin"))
    requests = [stage.proxy.start(stage.prompt()) for _ in range(3)]
    eventually(lambda: len(stage.channel.sent("begin")) >= begun + 3, "decode is reading")
    stage.decode.kill()
    for request in requests:
        answered = request.result()
        assert answered.status in (502, 503), answered
        assert answered.seconds < SOON_S, "decode is dead, and the client waits"
    eventually(lambda: not stage.held(), "prefill keeps nothing for a decode engine that died", SOON_S)
    stage.channel.set({})
    stage.decode = stage.start_decode()
    eventually(stage.proxy.is_ready, "the proxy finds the new decode engine")


def prefill_is_killed(stage: Scene) -> None:
    """While one prompt is computed and the KV of another is read."""
    read = stage.prompt()
    expected = stage.expected(read)
    stage.channel.set(KEEP_BEGIN)
    begun = len(stage.channel.sent("begin"))
    reading = stage.proxy.start(read)
    eventually(lambda: len(stage.channel.sent("begin")) > begun, "decode is reading")
    with halfway(stage) as computing:
        stage.prefill.kill()
    stage.channel.set({})
    stage.asserts_by_policy(reading.result(), expected, "prefill was killed during the pull")
    refused = computing.result()
    assert refused.status in (502, 503), refused
    assert max(reading.result().seconds, refused.seconds) < SOON_S
    eventually(lambda: stage.proxy.ask(stage.prompt()).status == 503, "the proxy has noticed", SOON_S)
    stage.decode.do("wait_idle")
    assert metric(stage.decode.metrics(), "vllm:kv_cache_usage_perc") == 0
    assert stage.decode.generate([read], max_tokens=12, cache_salt="after")[0]["token_ids"] == expected, "decode lives"


@contextmanager
def halfway(stage: Scene) -> Iterator[Request]:
    """A request whose prompt prefill has begun to compute and cannot end: its worker has been stopped in the middle."""
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
        begun = len(stage.channel.sent("begin"))
        request = stage.proxy.start(stage.prompt(3500))
        while not stage.computing() and len(stage.channel.sent("begin")) == begun:
            assert time.monotonic() < end, "prefill does not begin"
        with stopped(pid for name, pid in stage.prefill.processes().items() if name.startswith("Worker")):
            time.sleep(0.5)  # what the worker had done by then has been told
            if stage.computing():
                yield request
                return
        request.leave()
    raise AssertionError("every prompt was computed before prefill could be stopped")
