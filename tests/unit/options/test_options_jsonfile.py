"""JSON with errors that say file, line and reason, and the cleaning of slips."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.options import OptionError
from kvpool.options.jsonfile import clean, read_json

SLIPS = """{
    "a": "1GB" (1024MB/1048576KB),
    "b": false, # why, and "quoted" {
    "c": "x # y // z", // note
    "d": [1, 2,],
    "e": {"f": null} # last
}
"""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def test_slips_are_refused_with_line_and_reason():
    with pytest.raises(OptionError, match=r"^f: line 2: the text '\(1024MB/1048576KB\)' is not JSON"):
        read_json(SLIPS, "f")
    with pytest.raises(OptionError, match=r"^f: line 3: a comment is not JSON"):
        read_json('{\n"a": 1,\n# x\n"b": 2}', "f")
    with pytest.raises(OptionError, match=r"^f: line 1: a comma before the closing bracket"):
        read_json('{"a": 1,}', "f")


def test_slips_are_cleaned_and_named():
    text, removed = clean(SLIPS, "f")
    assert json.loads(text) == {"a": "1GB", "b": False, "c": "x # y // z", "d": [1, 2], "e": {"f": None}}
    assert [line.split(":")[1] for line in removed] == [" line 2", " line 3", " line 4", " line 5", " line 6"]
    assert clean(text, "f") == (text, [])


def test_prose_and_comment_on_the_last_value():
    assert json.loads(clean('{"a": 1, "b": 2 (two) # x\n}', "f")[0]) == {"a": 1, "b": 2}
    assert json.loads(clean('{"a": [1 (one)]}', "f")[0]) == {"a": [1]}


@pytest.mark.parametrize(
    "text", ['{"a": 10 GB}', '{"a": 1G}', "{a: 1}", '{"a" 1}', '{"a": "x}', '{"a": 1', "", '{"a": 1} {', '{"a": True}']
)
def test_what_may_be_part_of_a_value_is_never_removed(text):
    for use in (clean, read_json):
        with pytest.raises(OptionError, match=r"^f.*: line 1: "):
            use(text, "f")


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": NaN}', '{"a": Infinity}', "[1]", "1", '"x"', "null", "[" * 100000])
def test_json_that_is_no_configuration(text):
    with pytest.raises(OptionError, match=r"^f: line 1: "):
        read_json(text, "f")


@given(st.dictionaries(st.text(), JSON), st.sampled_from([None, 2]))
def test_plain_json_is_left_alone(value, indent):
    text = json.dumps(value, indent=indent)
    fixed, removed = clean(text, "f")
    assert removed == []
    assert json.loads(fixed) == value == read_json(text, "f")


@given(st.dictionaries(st.text(), JSON, min_size=1))
def test_comments_at_line_ends_are_removed_and_nothing_else(value):
    text = "\n".join(f'{line} # note, with " and }}' for line in json.dumps(value, indent=1).split("\n"))
    assert json.loads(clean(text, "f")[0]) == value


@given(st.text(alphabet='{}[],:"#()/ \n0123456789aeflnrstu\\'))
def test_any_text_is_cleaned_or_refused(text):
    try:
        fixed, _ = clean(text, "f")
    except OptionError:
        return
    assert isinstance(json.loads(fixed), dict)
