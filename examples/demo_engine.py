"""One engine of the demo, in a process of its own: reads the document, answers the question, reports how long it took.

    python demo_engine.py REQUEST.json ANSWER.json

REQUEST: `{"model": folder, "document": text, "question": text, "asks": n, "connector": kv_transfer_config or null}`.
ANSWER: `{"prompt_tokens": n, "asks": [{"token_ids", "text", "cached_tokens", "pool_tokens", "ttft_s"}, ...]}`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM

MAX_TOKENS = 24
WARM_UP = "Say hello to the harbour, to the sea and to everybody on the quay."


def engine(model: str, connector: dict[str, Any] | None) -> LLM:
    """float32 and one whole prefill per prompt: the answer depends on nothing but the prompt."""
    from vllm import LLM

    return LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        max_num_seqs=4,
        block_size=128,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=True,
        disable_log_stats=False,
        kv_transfer_config=connector,
    )


def chat_tokens(llm: LLM, message: str) -> list[int]:
    ids = llm.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": message}], add_generation_prompt=True, return_dict=False
    )
    return [int(token) for token in ids]


def pool_hits(llm: LLM) -> int:
    """Tokens that the connector has supplied so far."""
    return sum(int(m.value) for m in llm.get_metrics() if m.name == "vllm:external_prefix_cache_hits")


def ask(llm: LLM, prompt: list[int]) -> dict[str, Any]:
    from vllm import SamplingParams

    before = pool_hits(llm)
    (out,) = llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS), use_tqdm=False)
    return {
        "token_ids": list(out.outputs[0].token_ids),
        "text": out.outputs[0].text,
        "cached_tokens": out.num_cached_tokens,
        "pool_tokens": pool_hits(llm) - before,
        "ttft_s": out.metrics.first_token_latency,
    }


def main(request_file: str, answer_file: str) -> None:
    request = json.loads(Path(request_file).read_text())
    llm = engine(request["model"], request["connector"])
    prompt = chat_tokens(llm, f"{request['document']}\n\nQuestion: {request['question']}")
    ask(llm, chat_tokens(llm, WARM_UP))  # the first request of an engine compiles small kernels
    asks = [ask(llm, prompt) for _ in range(request["asks"])]
    Path(answer_file).write_text(json.dumps({"prompt_tokens": len(prompt), "asks": asks}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
