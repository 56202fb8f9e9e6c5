"""Prefill here, decode there, a pool beside both: one conversation of two turns, and the same with one plain engine.

The last line is for scripts: ``RESULT identical=true prefill_tokens_on_decode=1 second_turn_pool_hit_tokens=64``. Of a prompt
decode computes the last token, from which it samples. In the second turn prefill finds in the pool what decode has generated in the
first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from kvpool.ops.demo import document
from kvpool.ops.demo.chat import Said, ask, counted
from kvpool.ops.demo.smollm import model_folder
from kvpool.ops.launch import LaunchOptions, Place, Plan, launched, make_plan, plain_plan

MODEL = "smollm2"
DAYS, BLOCK, MAX_TOKENS = 16, 32, 96
READY_S, STORED_S = 600.0, 20.0
WARM_UP = "Say hello to the harbour, to the sea and to everybody on the quay."
QUESTIONS = (document.QUESTION + " Describe the tower and the work of the keeper.", "Thank you. How far is the light seen?")
ENGINE = f"--dtype float32 --enforce-eager --max-model-len 4096 --max-num-batched-tokens 4096 --max-num-seqs 4 --block-size {BLOCK}"
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
SAVED = "kvpool:saved_tokens_total"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Turn:
    """``sources``: by engine, how many tokens of the prompt it computed, had itself, and got from elsewhere."""

    said: Said
    sources: Mapping[str, tuple[int, ...]]
    pool_hit_tokens: int  # of prefill's lookups


def run(say: Say) -> int:
    """0 where both say the same, decode computed no prompt, and prefill had a hit; else 1. OSError where something cannot start."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", VLLM_NO_USAGE_STATS="1")
    folder = str(model_folder())
    options = LaunchOptions("pd", folder, dram=1 << 30, kv_cache=1 << 30, served_name=MODEL, engine_args=tuple(ENGINE.split()))
    say("a pair of engines, a pool and a proxy")
    with _engines(options, say, make_plan) as plan:
        pair = _converse(plan, say)
    say("one plain engine, with as many CPUs as prefill had")
    with _engines(options, say, plain_plan) as plan:
        alone = _converse(plan, say)
    _show(pair, alone)
    line, code = verdict(pair, alone)
    print(line, flush=True)
    return code


def verdict(pair: list[Turn], alone: list[Turn]) -> tuple[str, int]:
    """The last line, and the exit status."""
    identical = [turn.said.text for turn in pair] == [turn.said.text for turn in alone]
    on_decode = max(turn.sources["decode"][0] for turn in pair)
    hit = pair[1].pool_hit_tokens
    figures = f"prefill_tokens_on_decode={on_decode} second_turn_pool_hit_tokens={hit}"
    return f"RESULT identical={str(identical).lower()} {figures}", 0 if identical and on_decode <= 1 and hit > 0 else 1


@contextmanager
def _engines(options: LaunchOptions, say: Say, plan: Callable[[LaunchOptions, Place], Plan]) -> Iterator[Plan]:
    with launched(options, say, READY_S, plan=plan) as (made, _):
        yield made


def _converse(plan: Plan, say: Say) -> list[Turn]:
    """Two turns; the second has the first, with its answer, before it. Nothing is asked before the pool has what decode stored."""
    engines = {process.name: process.ready.removesuffix("/health") for process in plan.processes if process.name != "proxy"}
    ask(plan.url, plan.model, [{"role": "user", "content": WARM_UP}], 8)  # the first request of an engine compiles small kernels
    messages = [{"role": "user", "content": f"{document.text(DAYS)}\n\nQuestion: {QUESTIONS[0]}"}]
    turns: list[Turn] = []
    for number, following in enumerate((*QUESTIONS[1:], None), 1):
        before = _counts(engines)
        said = ask(plan.url, plan.model, messages, MAX_TOKENS)
        say(f"turn {number}: first token after {said.ttft_s:.2f} s, {said.answer_tokens} tokens")
        if "decode" in engines:
            _until_stored(engines["decode"], said, before["decode"]["saved"])
        after = _counts(engines)
        sources = {name: tuple(after[name][s] - before[name][s] for s in SOURCES) for name in engines}
        hits = sum(after[name]["hits"] - before[name]["hits"] for name in engines if name == "prefill")
        turns.append(Turn(said, sources, hits))
        if following is not None:
            messages += [{"role": "assistant", "content": said.text}, {"role": "user", "content": following}]
    return turns


def _counts(engines: Mapping[str, str]) -> dict[str, dict[str, int]]:
    found = {}
    for name, url in engines.items():
        found[name] = {source: counted(url, "vllm:prompt_tokens_by_source_total", source=source) for source in SOURCES}
        found[name]["hits"] = counted(url, "kvpool:hit_tokens_total")
        found[name]["saved"] = counted(url, SAVED)
    return found


def _until_stored(decode: str, said: Said, before: int) -> None:
    """Saves end after the answer: until decode has stored the blocks that it filled. Not for ever: it may drop some."""
    filled = (said.prompt_tokens + said.answer_tokens - 1) // BLOCK - said.prompt_tokens // BLOCK
    end = time.monotonic() + STORED_S
    while counted(decode, SAVED) - before < filled * BLOCK and time.monotonic() < end:
        time.sleep(0.2)


def _show(pair: list[Turn], alone: list[Turn]) -> None:
    table = Table(title="SmolLM2-135M-Instruct, float32, CPU: who computed the tokens of each prompt")
    for column in ("turn", "engine", "prompt", "computed", "own cache", "from elsewhere", "first token"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    places = {"prefill": "pool", "decode": "prefill", "engine": ""}
    for number, turns in enumerate(zip(pair, alone, strict=True), 1):
        for turn in turns:
            for name, (computed, own, other) in turn.sources.items():
                shown = "one plain engine" if name == "engine" else name
                got = f"{other} ({places[name]})" if other else "0"
                first = "" if name == "prefill" else f"{turn.said.ttft_s:.3f} s"
                table.add_row(str(number), shown, str(turn.said.prompt_tokens), str(computed), str(own), got, first)
    console = Console()
    console.print(table)
    for question, turn in zip(QUESTIONS, pair, strict=True):
        console.print(f"Question: {question}\nAnswer:   {turn.said.text.strip()}", markup=False, highlight=False)
