"""Hits against a brute-force oracle: a prefix is usable only where every group has all it needs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.core.hits import GroupKind, GroupSpec, Prefix, Presence, alignment, find_prefix, needed_blocks

H, M, U = Presence.HIT, Presence.MISS, Presence.UNKNOWN
Answers = list[list[Presence]]  # by group, by block


def needs(group: GroupSpec, block: int, tokens: int) -> bool:
    """From the definition: does computing the token at position ``tokens`` read any token of this block?"""
    first, last = block * group.block_size, min((block + 1) * group.block_size, tokens) - 1
    if last < first:
        return False
    if group.kind is GroupKind.SLIDING:
        return last > tokens - group.window
    if group.kind is GroupKind.CHUNKED:
        return last >= tokens // group.window * group.window
    return True


def usable(groups: list[GroupSpec], computed: int, tokens: int, answers: Answers) -> bool:
    for group, states in zip(groups, answers, strict=True):
        for block in range(computed // group.block_size, tokens // group.block_size):
            if needs(group, block, tokens) and states[block] is not H:
                return False
    return True


def brute_force(groups: list[GroupSpec], computed: int, limit: int, answers: Answers) -> int:
    step = math.lcm(*(g.block_size for g in groups))
    good = [t for t in range(step, limit + 1, step) if t > computed and usable(groups, computed, t, answers)]
    return max(good, default=computed)


@st.composite
def scenes(draw):
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        units = draw(st.sampled_from([1, 2, 4]))
        kind = draw(st.sampled_from(list(GroupKind)))
        window = draw(st.integers(1, 24)) if kind is not GroupKind.FULL else 0
        groups.append(GroupSpec(2 * units, units, kind, window))
    step = alignment(groups)
    limit = draw(st.integers(0, 40))
    computed = draw(st.integers(0, max(0, limit // step))) * step
    states = st.sampled_from([H, H, H, H, M, U])
    answers = [draw(st.lists(states, min_size=20, max_size=20)) for _ in groups]
    return groups, computed, limit, answers


def probe_of(answers: Answers, early: bool):
    def probe(group: int, first: int, last: int) -> list[Presence]:
        states = answers[group][first:last]
        if early and any(s is not H for s in states):
            return states[: next(i for i, s in enumerate(states) if s is not H) + 1]
        return states

    return probe


@settings(max_examples=1500)
@given(scenes())
def test_bc_028_the_longest_usable_prefix_is_what_brute_force_finds(scene):
    groups, computed, limit, answers = scene
    prefix = find_prefix(groups, computed, limit, probe_of(answers, early=False))
    assert prefix.tokens == brute_force(groups, computed, limit, answers)


@given(scenes())
def test_bc_019_a_probe_that_stops_at_the_first_gap_never_gives_more(scene):
    groups, computed, limit, answers = scene
    prefix = find_prefix(groups, computed, limit, probe_of(answers, early=True))
    assert computed <= prefix.tokens <= brute_force(groups, computed, limit, answers)
    if all(g.kind is GroupKind.FULL for g in groups):
        assert prefix.tokens == brute_force(groups, computed, limit, answers)


@given(scenes())
def test_unknown_is_told_only_where_some_answer_was_unknown_and_the_prefix_could_be_longer(scene):
    groups, computed, limit, answers = scene
    prefix = find_prefix(groups, computed, limit, probe_of(answers, early=False))
    hopeful = [[H if s is U else s for s in states] for states in answers]
    if brute_force(groups, computed, limit, hopeful) == prefix.tokens and len(groups) == 1:
        assert not prefix.unknown or groups[0].kind is not GroupKind.FULL
    if not any(U in states for states in answers):
        assert not prefix.unknown


@given(scenes())
def test_needed_blocks_are_exactly_those_that_the_next_token_reads(scene):
    groups, computed, _, _ = scene
    step = alignment(groups)
    for tokens in range(computed + step, 41, step):
        for group in groups:
            every = range(computed // group.block_size, tokens // group.block_size)
            assert list(needed_blocks(group, computed, tokens)) == [b for b in every if needs(group, b, tokens)]


@given(scenes())
def test_bc_165_blocks_that_the_engine_has_are_never_asked_for(scene):
    groups, computed, limit, answers = scene
    asked = []

    def probe(group: int, first: int, last: int) -> list[Presence]:
        asked.append((group, first, last))
        return answers[group][first:last]

    find_prefix(groups, computed, limit, probe)
    for group, first, last in asked:
        assert first >= computed // groups[group].block_size
        assert last <= limit // groups[group].block_size
        assert first < last or groups[group].kind is not GroupKind.FULL, "an empty question"


def presence(total: int, present: set[int]) -> list[Presence]:
    return [H if block in present else M for block in range(total)]


STATE = GroupSpec(1024, 64, GroupKind.SLIDING, 2)  # needs exactly the block that ends at the boundary, as a state does


@pytest.mark.parametrize(
    ("full", "states", "expected"),
    [
        ({0, 1, 2}, [{3}, {3}, {3}], 0),
        (set(range(11)), [{7}, {3}, {3}], 0),
        (set(range(11)), [{3, 7}, {3}, {3}], 4096),
    ],
    ids=["a", "b", "c"],
)
def test_bc_028_a_joint_hit_is_an_intersection_of_boundaries(full, states, expected):
    groups = [GroupSpec(1024, 64), STATE, STATE, STATE]
    answers = [presence(16, full), *(presence(16, s) for s in states)]
    assert find_prefix(groups, 0, 16 * 1024, probe_of(answers, early=False)) == Prefix(expected, False)


def test_bc_029_a_longer_stored_boundary_does_not_stand_for_a_shorter_one():
    full, state = GroupSpec(32, 2), GroupSpec(16, 1, GroupKind.SLIDING, 2)
    answers = [presence(4, {0, 1}), presence(8, {1, 2})]  # full @32, @64; states @32, @48
    assert find_prefix([full, state], 0, 64, probe_of(answers, early=False)).tokens == 32


def test_bc_033_hits_are_multiples_of_every_group():
    groups = [GroupSpec(64, 2), GroupSpec(96, 3)]
    assert alignment(groups) == 192
    answers = [[H] * 10, [H] * 10]
    assert find_prefix(groups, 0, 400, probe_of(answers, early=False)).tokens == 384


def test_bc_118_a_local_cache_that_holds_more_than_the_pool_gives_no_hit():
    answers = [presence(64, set(range(32)))]
    assert find_prefix([GroupSpec(16, 1)], 704, 1000, probe_of(answers, early=False)).tokens == 704
