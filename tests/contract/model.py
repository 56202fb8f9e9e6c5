"""The model of the harness: it writes bytes that follow from the prefix, and checks every byte that a step reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tests.contract.content import POISON_TOKEN, Int64, Prefixes, expected_output, sample, values
from tests.contract.ranks import Rank
from tests.contract.spec import Spec

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

POISON_WEIGHTS = 1 << 40


class OracleError(AssertionError):
    """Wrong KV was used, stored or answered from."""


@dataclass
class Plan:
    """What one step does for one request."""

    request: Request
    start: int
    scheduled: int
    drafts: list[int]
    tables: tuple[list[int], ...]
    states: Int64
    first: bool  # the request's first step, or its first one since a preemption
    resumed: bool

    @property
    def name(self) -> str:
        return self.request.request_id


class Model:
    """The forward of an ``Harness``, which has all these."""

    spec: Spec
    ranks: list[Rank]
    prefixes: Prefixes
    requests: dict[str, Request]
    weights: int
    mixed: set[str]
    loading_old: set[str]
    local_stale: bool
    steps: int
    accept: Callable[[str], int]

    def _plans(self, output: SchedulerOutput) -> list[Plan]:
        cached = output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        plans = []
        for name, scheduled in output.num_scheduled_tokens.items():
            request, drafts = self.requests[name], output.scheduled_spec_decode_tokens.get(name, [])
            tables = self.tables_of(name)
            resumed = name in cached.resumed_req_ids
            first = resumed or all(name != n for n in cached.req_ids)
            plans.append(Plan(request, starts[name], scheduled, drafts, tables, self.prefixes.of(request, drafts), first, resumed))
        return plans

    def _forward(self, plans: list[Plan]) -> dict[str, set[int]]:
        """Write the step's KV. Requests that read wrong KV, with the blocks; what they write is poison."""
        wrong: dict[str, set[int]] = {}
        for plan in plans:
            if plan.resumed and plan.name not in self.loading_old:
                self.mixed.discard(plan.name)
            self.loading_old.discard(plan.name)
            self._write(plan, self.weights if plan.name not in self.mixed else POISON_WEIGHTS + self.steps)
        fresh = True
        while fresh:
            fresh = {p.name: bad for p in plans if p.name not in wrong and p.name not in self.mixed and (bad := self._wrong(p))}
            for plan in plans:
                if plan.name in fresh:
                    self._write(plan, POISON_WEIGHTS + self.steps)
                    if plan.first and self.local_stale:
                        self.mixed.add(plan.name)  # it builds on blocks of before a reset that could not drop them
            wrong |= {name: bad for name, bad in fresh.items() if name not in self.mixed}
        return wrong

    def _write(self, plan: Plan, weights: int) -> None:
        states = plan.states[plan.start : plan.start + plan.scheduled]
        for rank in self.ranks:
            for group, table in enumerate(plan.tables):
                rank.write(group, table, plan.start, states, weights)

    def _wrong(self, plan: Plan) -> set[int]:
        """Block ids that the step reads and that are not exactly right."""
        bad: set[int] = set()
        for group, (kind, window) in enumerate(self.spec.groups):
            first = 0
            if kind == "sliding":
                first = max(0, plan.start - window + 1)
            elif kind == "chunked":
                first = plan.start // window * window
            if first >= plan.start:
                continue
            table, states = plan.tables[group], plan.states[first : plan.start]
            for rank in self.ranks:
                bad |= {table[i] for i in rank.wrong_blocks(group, table, first, states, self.weights)}
        return bad

    def _sample(self, plans: list[Plan], wrong: dict[str, set[int]]) -> tuple[list[list[int]], dict[str, list[int]]]:
        sampled, drafts = [], {}
        for plan in plans:
            known = plan.start + plan.scheduled - len(plan.drafts)
            if known < plan.request.num_tokens:
                sampled.append([])
                continue
            tokens = [sample(int(plan.states[known - 1]))]
            for i, draft in enumerate(plan.drafts):
                if draft != tokens[-1]:
                    break
                tokens.append(sample(int(plan.states[known + i])))
            sampled.append([POISON_TOKEN] if plan.name in wrong else tokens)
            drafts[plan.name] = self._draft(plan, tokens)
        return sampled, drafts

    def _draft(self, plan: Plan, tokens: list[int]) -> list[int]:
        """``drafts`` guesses, of which the first ``accept`` are right."""
        prompt = [*plan.request.all_token_ids, *tokens]
        right = expected_output(prompt, self.spec.drafts)
        return [t if i < self.accept(plan.name) else POISON_TOKEN + 1 for i, t in enumerate(right)]

    def tables_of(self, name: str) -> tuple[list[int], ...]:
        raise NotImplementedError


def object_bytes(states: Int64, layers: list[int], heads: range, weights: int) -> bytes:
    """An object, layer-major: each page is [head, token, word]."""
    return np.ascontiguousarray(values(states, layers, heads, weights).transpose(1, 2, 0, 3)).tobytes()
