"""Framing, usage and merging of streams, without a network."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.proxy import asks, merge, sse, usage

LINES = st.text(alphabet=st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=8)
FRAMES = st.lists(st.tuples(LINES, st.sampled_from(["\n\n", "\r\n\r\n", "\r\r"])), max_size=6)


def fed(pieces: list[bytes]) -> tuple[list[bytes], bytes]:
    framer = sse.Framer()
    return [frames for piece in pieces if (frames := framer.feed(piece))], framer.flush()


@given(FRAMES, LINES, st.lists(st.integers(0, 120), max_size=8))
def test_bytes_are_kept_and_pieces_end_where_frames_end(frames, rest, cuts) -> None:
    whole = "".join(f"data: {text}{end}" for text, end in frames).encode() + rest.encode()
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    pieces, left = fed([whole[start:end] for start, end in pairwise(places)])
    assert b"".join(pieces) + left == whole
    assert left == rest.encode()
    for piece in pieces:
        piece.decode()
        assert piece.endswith((b"\n\n", b"\r\r", b"\r\n\r\n"))


@given(FRAMES)
def test_split_is_the_inverse_of_joining(frames) -> None:
    parts = [f"data: {text}{end}".encode() for text, end in frames]
    assert list(sse.split(b"".join(parts))) == parts


def test_a_frame_without_end_is_refused() -> None:
    framer = sse.Framer()
    assert framer.feed(b"x" * sse.MAX_FRAME) == b""
    with pytest.raises(ValueError, match="a frame of more than"):
        framer.feed(b"x")


def test_data_of_frames() -> None:
    assert sse.data(b"data: a\n\n") == b"a"
    assert sse.data(b"data:a\r\ndata: b\r\n\r\n") == b"a\nb"
    assert sse.data(b": comment\n\n") is None
    assert sse.frame(b"a") == b"data: a\n\n"


def told(cached) -> dict:
    return {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": cached}}}


@pytest.mark.parametrize(
    ("answer", "found"),
    [(told(0), 0), (told(7), 7), (told(None), None), (told(True), None), ({"usage": None}, None), ([], None), (None, None)],
)
def test_nothing_cached_and_not_told_are_two_things(answer, found) -> None:
    assert usage.cached_tokens(answer) == found


def test_only_frames_with_usage_change() -> None:
    plain = b'data: {"choices": [{"text":  "\\"usage\\""}]}\n\n'
    frames = plain + sse.frame(json.dumps(told(192)).encode()) + sse.DONE
    changed = usage.correct_frames(frames, 3)
    assert changed.startswith(plain)
    assert changed.endswith(sse.DONE)
    assert usage.cached_tokens(json.loads(sse.data(list(sse.split(changed))[1]))) == 3
    assert usage.correct_frames(frames, None) is frames
    assert usage.correct_frames(frames, 192) == frames
    assert usage.correct_frames(b'data: {"usage"\n\n', 3) == b'data: {"usage"\n\n'


def test_a_whole_answer_tells_nothing_of_the_transfer() -> None:
    body = json.dumps({**told(5), "kv_transfer_params": {"remote_host": "x"}}).encode()
    assert json.loads(usage.correct_body(body, 5)) == told(5)
    kept = b'{"usage": null,  "kv_transfer_params": null}'
    assert usage.correct_body(kept, 5) == kept
    assert usage.correct_body(b"no json", 5) == b"no json"


def ask_of(**body) -> asks.Ask:
    return asks.read(asks.COMPLETIONS, json.dumps(body).encode(), {})


def test_usage_counts_a_prompt_once_and_every_answer() -> None:
    ask = ask_of(prompt=["a", "b"], n=2)
    answers = [{"usage": {"prompt_tokens": 10 + n, "completion_tokens": 1, **told(n)["usage"], "x": 1}} for n in range(4)]
    for answer, tokens in zip(answers, (10, 10, 20, 20), strict=True):
        answer["usage"]["prompt_tokens"] = tokens
    total = merge.sum_usage(ask.units, answers)
    assert total == {
        "prompt_tokens": 30,
        "completion_tokens": 4,
        "total_tokens": 34,
        "prompt_tokens_details": {"cached_tokens": 2},
        "x": 1,
    }
    assert merge.sum_usage(ask.units, [{}, {}, {}, {}]) is None


@pytest.mark.parametrize("body", [b"[]", b"{}", b'{"choices": 1}', b"x"])
def test_what_is_no_completion_cannot_be_merged(body) -> None:
    with pytest.raises(ValueError):
        merge.merge_bodies(ask_of(prompt=["a", "b"]), [b'{"choices": []}', body])


def test_errors_inside_a_stream_are_passed_on() -> None:
    merger = merge.StreamMerger(ask_of(prompt=["a", "b"], stream=True))
    assert b"no memory" in merger.rewrite(1, b'data: {"error": {"message": "no memory"}}\n\n')
    assert merger.rewrite(0, b": note\n\ndata: [DONE]\n\n") == b""
    assert merger.end() == sse.DONE
