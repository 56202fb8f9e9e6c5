"""Single values: what is accepted, what it becomes, and what is refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.options.scalars import (
    choice,
    integer,
    name,
    read_address,
    read_bool,
    read_int,
    read_label,
    read_partition,
    read_size,
    split_address,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    "value", [1073741824, "1073741824", "1GB", "1 gb", "1024MB", "1048576KB", "1073741824B", " 1GB ", "1gB", "1.0GB"]
)
def test_bc_147_spellings_of_one_gigabyte(value):
    assert read_size(value) == GIB


@pytest.mark.parametrize(
    ("value", "nbytes"), [("1.5GB", 3 * GIB // 2), ("1TB", 1 << 40), ("0", 0), (0, 0), ("0GB", 0), ("0.1KB", 102)]
)
def test_bc_147_other_sizes(value, nbytes):
    assert read_size(value) == nbytes


@pytest.mark.parametrize(
    "value",
    [
        "1e9",
        "1G",
        "GB",
        "",
        "-1GB",
        -1,
        "1GiB",
        None,
        True,
        False,
        1.5,
        1.0,
        "９GB",
        "1.2.3GB",
        "1.5",
        "+1GB",
        "1_000",
        ".5GB",
        "1GB1",
        [],
        "9" * 19 + "TB",
        2**63,
    ],
)
def test_bc_147_refused_sizes(value):
    with pytest.raises(ValueError):
        read_size(value)


@given(st.integers(min_value=0, max_value=2**63 - 1))
def test_every_integer_size_survives_as_int_and_text(nbytes):
    assert read_size(nbytes) == read_size(str(nbytes)) == read_size(f"{nbytes}B") == nbytes


@given(st.text() | st.floats() | st.none() | st.lists(st.integers()) | st.booleans())
def test_readings_raise_nothing_but_value_error(value):
    for read in (
        read_size,
        read_int,
        read_bool,
        read_label,
        read_partition,
        read_address,
        integer(0, 4).read,
        name().read,
        choice("a").read,
    ):
        with contextlib.suppress(ValueError):
            read(value)


@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        (True, True),
        (False, False),
        ("true", True),
        ("False", False),
        ("0", False),
        ("1", True),
        (0, False),
        (1, True),
        ("TRUE ", True),
    ],
)
def test_bc_005_booleans(value, meaning):
    assert read_bool(value) is meaning


@pytest.mark.parametrize("value", ["maybe", [], None, "", 2, -1, 1.0, "yes", {}, "truе"])
def test_bc_005_not_booleans(value):
    with pytest.raises(ValueError):
        read_bool(value)


@pytest.mark.parametrize("value", [True, 1.0, "1.0", "", "1e3", "٣", None, "0x10", "1_0", "9" * 20])
def test_not_integers(value):
    with pytest.raises(ValueError):
        read_int(value)


def test_integers_with_bounds():
    assert integer(0, 4).read("4") == 4
    assert integer(1).accepted == "an integer of at least 1"
    for value in (-1, 5, "5"):
        with pytest.raises(ValueError):
            integer(0, 4).read(value)


def test_choice_ignores_blanks_and_case_and_spells_the_result_its_own_way():
    form = choice("HIXL", "tcp")
    assert form.read(" hixl ") == "HIXL"
    assert form.read("TCP ") == "tcp"
    assert "HIXL" in form.accepted


@pytest.mark.parametrize("value", ["", ".", "..", "a/b", "a" * 65, "ä", "a b", 7, None, "a\n"])
def test_names_are_safe_in_paths_and_keys(value):
    with pytest.raises(ValueError):
        name().read(value)


@pytest.mark.parametrize(
    ("value", "parts"),
    [("10.0.0.1:50088", ("10.0.0.1", 50088)), ("[::1]:1", ("[::1]", 1)), ("xx.xx.xx.xx:50088", ("xx.xx.xx.xx", 50088))],
)
def test_addresses(value, parts):
    assert split_address(value) == parts


@pytest.mark.parametrize("value", ["", "host", "host:", ":1", "host:0", "host:65536", "::1:1", "a b:1", "host:x", 7, None, "[]:1"])
def test_not_addresses(value):
    with pytest.raises(ValueError):
        read_address(value)


@pytest.mark.parametrize(("value", "layers"), [("30,31", (30, 31)), ([30, 31], (30, 31)), ("61", (61,)), (" 1, 2 ", (1, 2))])
def test_bc_021_partitions(value, layers):
    assert read_partition(value) == layers


@pytest.mark.parametrize("value", ["", "a,b", "30,", "30,31,0", [], 3, None, "1.5,2"])
def test_bc_021_not_partitions(value):
    with pytest.raises(ValueError):
        read_partition(value)
