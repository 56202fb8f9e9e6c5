"""Why does nothing hit? The most likely cause, in one sentence, from what is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvpool.core.namespace import differing_fields


@dataclass(frozen=True)
class Evidence:
    """``records`` maps the namespaces noted in the pool to their inputs (``NamespaceInputs.to_json``)."""

    namespace: str
    inputs: str
    records: Mapping[str, str]
    pool_objects: int | None  # None: the store cannot count
    block_size: int
    store: str  # backend, why it was chosen, address, tenant
    unknown: int  # lookups that the store could not answer
    min_hit_tokens: int = 0


def likely_cause(evidence: Evidence) -> str:
    """One sentence, most telling cause first."""
    if evidence.unknown:
        return f"{evidence.unknown} lookups got no answer: is the store up? ({evidence.store})"
    others = {name: text for name, text in evidence.records.items() if name != evidence.namespace}
    for name, text in others.items():
        fields = differing_fields(evidence.inputs, text)
        if fields:
            told = "; ".join(f"{field}: ours {ours!r}, theirs {theirs!r}" for field, (ours, theirs) in fields.items())
            return f"the pool holds namespace {name}, which differs from ours ({evidence.namespace}) in {told[:600]}"
    if evidence.pool_objects == 0:
        return f"the pool is empty: do the instances that save use the same store and tenant? ({evidence.store})"
    holds = "is not empty as far as it can tell" if evidence.pool_objects is None else f"holds {evidence.pool_objects} objects"
    floor = f", or below min_hit_tokens ({evidence.min_hit_tokens})" if evidence.min_hit_tokens else ""
    return (
        f"the pool {holds}, but no prompt began like a stored one: "
        f"prompts that share no prefix, or shorter than a block ({evidence.block_size} tokens){floor}"
    )
