"""Records on the disk: the codec, the scan, and the books made of them."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.stores.local.disk.rebuild import consistent
from kvpool.stores.local.disk.record import BLANK, RECORD_BYTES, Record, pack, scan, unpack
from kvpool.stores.local.geometry import Geometry

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
RECORDS = st.builds(
    Record, U64, U64, U64, U64, U64, U32, U32, U64, st.integers(-(2**63), 2**63 - 1), st.binary(min_size=1, max_size=255)
)
GEOMETRY = Geometry(1 << 20, 64)
PER_CHUNK = GEOMETRY.units_per_chunk


def record(unit: int, generation: int = 1, key: bytes = b"k", slot: int = 1 << 16, chunk: int | None = None, **others) -> Record:
    place = unit // PER_CHUNK if chunk is None else chunk
    return Record(7, generation, unit, slot, slot, place, GEOMETRY.slab_chunks(slot), 0, generation, key)._replace(**others)


@given(RECORDS)
def test_a_record_comes_back_as_it_was(one):
    raw = pack(one)
    assert len(raw) == RECORD_BYTES
    assert unpack(raw) == one


@given(RECORDS, st.integers(0, RECORD_BYTES * 8 - 1))
def test_one_wrong_bit_makes_it_nothing(one, bit):
    raw = bytearray(pack(one))
    raw[bit // 8] ^= 1 << bit % 8
    assert unpack(bytes(raw)) is None


@given(RECORDS, RECORDS, st.integers(1, RECORD_BYTES - 1))
def test_half_of_one_and_half_of_another_is_nothing(one, other, cut):
    first, second = pack(one), pack(other)
    torn = first[:cut] + second[cut:]
    assert unpack(torn) is None or torn in (first, second)


def test_blank_and_short_ones_are_nothing():
    assert unpack(BLANK) is None
    assert unpack(pack(record(1))[:-1]) is None
    assert unpack(b"") is None


@pytest.mark.parametrize("key", [b"", b"k" * 256])
def test_keys_that_do_not_fit(key):
    with pytest.raises(ValueError, match="a key of"):
        pack(record(1, key=key))


@pytest.fixture
def file(tmp_path):
    fd = os.open(tmp_path / "records", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, GEOMETRY.units * RECORD_BYTES)
    yield fd
    os.close(fd)


def write(fd: int, *records: Record) -> None:
    for one in records:
        os.pwrite(fd, pack(one), one.unit * RECORD_BYTES)


def test_the_scan_finds_all_and_tells_the_others_apart(file):
    kept = [record(unit, unit + 1, b"key%d" % unit) for unit in (0, 1, 15, 300, 9999, GEOMETRY.units - 1)]
    write(file, *kept, record(77, identity=8))
    os.pwrite(file, pack(record(50)), 51 * RECORD_BYTES)  # in the wrong place
    os.pwrite(file, pack(record(60))[:200] + b"x" * 312, 60 * RECORD_BYTES)
    found = scan(file, 7, GEOMETRY.units)
    assert found.records == kept
    assert (found.torn, found.foreign) == (2, 1)


def test_the_scan_of_a_short_or_empty_file(tmp_path, file):
    assert scan(file, 7, GEOMETRY.units).records == []
    write(file, record(3))
    os.ftruncate(file, 3 * RECORD_BYTES + 100)
    assert scan(file, 7, GEOMETRY.units).records == []
    os.ftruncate(file, 0)
    assert scan(file, 7, GEOMETRY.units) == ([], 0, 0)


@given(st.lists(st.integers(0, GEOMETRY.units - 1), unique=True, max_size=40))
def test_the_scan_reads_any_pattern(units):
    import tempfile

    with tempfile.TemporaryFile() as handle:
        os.ftruncate(handle.fileno(), GEOMETRY.units * RECORD_BYTES)
        write(handle.fileno(), *(record(unit) for unit in units))
        assert [one.unit for one in scan(handle.fileno(), 7, GEOMETRY.units).records] == sorted(units)


def units_of(found: list[Record]) -> list[int]:
    return [one.unit for records in consistent(found, GEOMETRY).values() for one in records]


def test_the_newer_of_two_objects_under_one_key():
    assert units_of([record(0, 5, b"a"), record(1, 9, b"a"), record(2, 1, b"b")]) == [1, 2]


def test_the_newer_of_two_slabs_in_one_place():
    """The chunk was cut anew, and a power loss brought an old record back."""
    old, new = record(3, 5, b"old", slot=1 << 15), record(1, 6, b"new", slot=1 << 16)
    assert units_of([old, new]) == [1]
    assert units_of([new, old]) == [1]


@pytest.mark.parametrize(
    "changes",
    [
        {"slot_bytes": 0},
        {"slot_bytes": 5000},
        {"chunks": 9},
        {"chunk": 64},
        {"nbytes": 0},
        {"nbytes": (1 << 16) + 1},
        {"unit": 16},
        {"chunk": 5},
        {"slot_bytes": 1 << 40},
    ],
)
def test_what_does_not_fit_is_dropped(changes):
    assert units_of([record(2, key=b"x")._replace(**changes), record(PER_CHUNK, key=b"y")]) == [PER_CHUNK]


@given(st.lists(RECORDS, max_size=20))
def test_nonsense_never_raises_and_never_overlaps(found):
    slabs = list(consistent(found, GEOMETRY))
    owned = [place for slab in slabs for place in range(slab.chunk, slab.chunk + slab.chunks)]
    assert len(owned) == len(set(owned))
