"""Why does nothing hit? The most likely cause, in one sentence, from what is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvpool.core.namespace import differing_fields


@dataclass(frozen=True)
class Evidence:
    """``records`` maps the namespaces noted in the pool to their inputs (``NamespaceInputs.to_json``).

    ``own_objects``: no more than so many of the pool's objects are from this engine; None where it saves nothing at all, so that
    others must.
    """

    namespace: str
    inputs: str
    records: Mapping[str, str]
    pool_objects: int | None  # None: the store cannot count
    own_objects: int | None
    block_size: int
    store: str  # backend, why it was chosen, address, tenant
    lookups: int
    unknown: int  # of these, lookups that the store could not answer
    min_hit_tokens: int = 0

    @property
    def unanswered(self) -> bool:
        """Whether most lookups got no answer: then nothing else tells anything."""
        return self.unknown > 0 and 2 * self.unknown >= self.lookups


class Diagnosis(NamedTuple):
    """``alarming``: hits were to be expected. An engine that is alone with its pool may just never have been asked twice."""

    cause: str
    alarming: bool


def diagnose(evidence: Evidence) -> Diagnosis:
    """Alarming where others save, the store does not answer, or this engine has only others to hit from."""
    others = evidence.own_objects is None or _others_save(evidence, evidence.own_objects)
    return Diagnosis(likely_cause(evidence), others or evidence.unanswered)


def _others_save(evidence: Evidence, own_objects: int) -> bool:
    # A namespace that differs in the epoch alone may be the one that we had before a reset; then the objects decide.
    foreign = any(differing_fields(evidence.inputs, text).keys() - {"epoch"} for text in evidence.records.values())
    return foreign or (evidence.pool_objects or 0) > own_objects


def likely_cause(evidence: Evidence) -> str:
    """One sentence, most telling cause first."""
    unanswered = f"{evidence.unknown} of {evidence.lookups} lookups got no answer"
    if evidence.unanswered:
        return f"{unanswered}: is the store up? ({evidence.store})"
    return _cause(evidence) + (f"; {unanswered}" if evidence.unknown else "")


def _holding(evidence: Evidence) -> str:
    objects, own = evidence.pool_objects, evidence.own_objects
    if objects is None:
        return "is not empty as far as it can tell"
    return f"holds {objects} objects" + (f", {own} of this engine at most" if own is not None and objects > own else "")


def _cause(evidence: Evidence) -> str:
    others = {name: text for name, text in evidence.records.items() if name != evidence.namespace}
    for name, text in others.items():
        fields = differing_fields(evidence.inputs, text)
        if fields:
            told = "; ".join(f"{field}: ours {ours!r}, theirs {theirs!r}" for field, (ours, theirs) in fields.items())
            return f"the pool holds namespace {name}, which differs from ours ({evidence.namespace}) in {told[:600]}"
    if evidence.pool_objects == 0:
        return f"the pool is empty: do the instances that save use the same store and tenant? ({evidence.store})"
    floor = f", or below min_hit_tokens ({evidence.min_hit_tokens})" if evidence.min_hit_tokens else ""
    alone = "" if others or not evidence.records else "; no engine of another namespace has left its record here"
    return (
        f"the pool {_holding(evidence)}, but no prompt began like a stored one: "
        f"prompts that share no prefix, or shorter than a block ({evidence.block_size} tokens){floor}{alone}; "
        f"do the instances that save use the same store and tenant? ({evidence.store})"
    )
