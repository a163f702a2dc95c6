"""What is written comes back: field case 30, and any batch in each format as far as it can carry it."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsample.errors import ConfigError
from rlsample.offline import LogReader, LogWriter
from rlsample.offline.array_codec import decode_tree
from rlsample.offline.json_lines import decode_line, encode_line
from rlsample.offline.parquet_tables import from_table, to_table
from rlsample.sample_batch import NextObs, SampleBatch
from rlsample.testing.same_batch import assert_same_batch
from rlsample.tree import leaves

pytest.importorskip("pyarrow", reason="Parquet needs rlsample[offline]")


def case_30_batch(number: int) -> SampleBatch:
    rng = np.random.default_rng(number)
    return SampleBatch(
        {
            "obs": rng.integers(0, 256, (3, 4, 4), np.uint8),
            "actions": {
                "a": rng.normal(size=(3, 2, 3)).astype(np.float32),
                "b": np.array([number, -1, 1 << 62], np.int64),
            },
            "rewards": np.array([1e-8, -2.5, 3e7], np.float32),
            "terminated": np.array([False, False, True]),
            "truncated": np.array([True, False, False]),
            "eps_id": np.full(3, (1 << 53) + 1, np.int64),
            "t": np.arange(3) + 10 * number,
        },
        NextObs(np.array([1, 2, -1]), rng.integers(0, 256, (1, 4, 4), np.uint8)),
    )


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_two_writers_one_reader_each_batch_once(tmp_path, format):
    written = [case_30_batch(n) for n in range(10)]
    with LogWriter(tmp_path, format) as first, LogWriter(tmp_path, format) as second:
        for n in range(5):
            first.write(written[n])
            second.write(written[5 + n])
    with LogReader(tmp_path) as reader:
        read = {int(batch["t"][0]) // 10: batch for batch in reader}
    assert sorted(read) == list(range(10))
    for number, batch in read.items():
        assert_same_batch(batch, written[number])
        assert batch["obs"].dtype == np.uint8
        assert batch["terminated"].dtype == bool
        assert batch["eps_id"].tolist() == [9007199254740993] * 3


@pytest.mark.parametrize("cut", [1, 2, 100, -3])
def test_a_half_written_last_line_is_skipped_with_a_warning(tmp_path, caplog, cut):
    """``cut``: how many bytes are missing from the last line; negative: how many are left."""
    with LogWriter(tmp_path) as first, LogWriter(tmp_path) as second:
        for n in range(5):
            first.write(case_30_batch(n))
            second.write(case_30_batch(5 + n))
    cut_file, _ = sorted(tmp_path.iterdir())
    lines = cut_file.read_bytes().splitlines(keepends=True)
    rest = lines[-1][:-cut]
    cut_file.write_bytes(b"".join(lines[:-1]) + rest)
    with caplog.at_level(logging.WARNING), LogReader(tmp_path, repeat=2) as reader:
        found = [int(batch["t"][0]) // 10 for batch in reader]
    if cut == 1:  # nothing but the newline is missing
        assert sorted(found) == sorted([*range(10), *range(10)])
        return
    assert len(set(found)) == 9
    assert len(found) == 18
    assert [record.message for record in caplog.records] == [caplog.records[0].message], "one warning, not one per pass"
    assert "the last one, is cut" in caplog.records[0].message
    assert f"{cut_file}: line 5" in caplog.records[0].message
    assert reader.num_skipped == 2


# ---------------------------------------------------------------------- any batch

PLAIN = [
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
]
ODD = ["complex64", ">f4", ">i8", "<U3", "S2"]


def leaf(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random bits: NaN with any payload, infinities, the least and the greatest integers."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape))
    if kind.kind == "b":
        return rng.random(shape) < 0.5
    if kind.kind in "US":
        return np.array(["xyz"[: n % 4] for n in range(size)], kind).reshape(shape)
    return np.frombuffer(rng.bytes(size * kind.itemsize), kind).reshape(shape).copy()


@st.composite
def specs(draw, dtypes, depth=2):
    """A tree with (dtype, shape of a row) as leaves."""
    kind = draw(st.sampled_from(["leaf", "leaf", "dict", "tuple"])) if depth else "leaf"
    inner = specs(dtypes, depth - 1)
    if kind == "dict":
        return draw(st.dictionaries(st.text("ab.[]0é", min_size=1, max_size=3), inner, min_size=1, max_size=2))
    if kind == "tuple":
        return tuple(draw(st.lists(inner, min_size=1, max_size=2)))
    return [draw(st.sampled_from(dtypes)), draw(st.sampled_from([(), (1,), (2,), (2, 3)]))]


def grow(spec, rng, rows):
    if isinstance(spec, dict):
        return {key: grow(part, rng, rows) for key, part in spec.items()}
    if isinstance(spec, tuple):
        return tuple(grow(part, rng, rows) for part in spec)
    return leaf(rng, spec[0], (rows, *spec[1]))


@st.composite
def batches(draw, dtypes):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = draw(st.integers(0, 5))
    obs = draw(specs(dtypes))
    columns = {"obs": grow(obs, rng, rows)}
    for name in draw(st.lists(st.sampled_from(["actions", "rewards", "truncated", "my column"]), unique=True)):
        columns[name] = grow(draw(specs(dtypes)), rng, rows)
    following = draw(st.sampled_from(["none", "derived", "stored", "slice"]))
    if following == "none":
        return SampleBatch(columns)
    if following == "stored":
        return SampleBatch({**columns, "next_obs": grow(obs, rng, rows)})
    num_extra = draw(st.integers(1, 3))
    index = rng.integers(-num_extra, rows, rows) if rows else np.zeros(0, np.int64)
    straight = rng.random(max(rows - 1, 0)) < 0.7
    index[:-1][straight] = np.arange(1, max(rows, 1))[straight]
    lengths = None
    if rows and draw(st.booleans()):
        cut = draw(st.integers(1, rows))
        lengths = np.array([cut, rows - cut] if cut < rows else [rows])
    batch = SampleBatch(columns, NextObs(index, grow(obs, rng, num_extra)), lengths)
    return batch.slice(rows // 3, rows) if following == "slice" else batch


@settings(max_examples=60, deadline=None)
@given(batches(PLAIN + ODD))
def test_json_lines_carry_any_batch(batch):
    line = encode_line(batch)
    assert line.count(b"\n") == 1
    again = decode_line(line)
    assert_same_batch(again, batch)
    assert all(array.flags.writeable for _, column in again.items() for array in leaves(column))
    assert encode_line(again) == line


@settings(max_examples=60, deadline=None)
@given(batches(PLAIN))
def test_parquet_carries_any_batch_of_numbers(batch):
    assert_same_batch(from_table(to_table(batch)), batch)


@settings(max_examples=20, deadline=None)
@given(st.lists(batches(PLAIN), min_size=1, max_size=4))
def test_parquet_files_hold_a_row_group_per_fragment_and_one_schema(written):
    with tempfile.TemporaryDirectory() as folder:
        with LogWriter(folder, "parquet") as writer:
            for batch in written:
                writer.write(batch)
        with LogReader(folder) as reader:
            read = list(reader)
    assert len(read) == len(written)
    for got, expected in zip(read, written, strict=True):
        assert_same_batch(got, expected)


@settings(max_examples=60, deadline=None)
@given(batches(PLAIN), st.data())
def test_a_damaged_line_is_told_or_unchanged(batch, data):
    """A flipped bit raises ValueError and nothing else, or hits what nothing reads, or a name or number."""
    line = bytearray(encode_line(batch))
    at = data.draw(st.integers(0, len(line) - 2))
    line[at] ^= 1 << data.draw(st.integers(0, 6))
    try:
        again = decode_line(bytes(line))
    except ValueError:
        return
    for name in set(again) & set(batch):
        for got, expected in zip(leaves(again[name]), leaves(batch[name]), strict=False):
            if (got.dtype, got.shape) == (expected.dtype, expected.shape):
                assert got.tobytes() == expected.tobytes()


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("column", "words"),
    [
        (np.array([{"a": 1}], object), "dtype object|cannot hold object"),
        ({1: np.zeros(1)}, "the Dict key 1 is no str"),
    ],
)
def test_columns_that_cannot_be_held_are_refused_by_name(tmp_path, format, column, words):
    with LogWriter(tmp_path, format) as writer:
        writer.write(SampleBatch({"rewards": np.zeros(1)}))
        with pytest.raises(ConfigError, match=words) as error:
            writer.write(SampleBatch({"odd": column}))
        assert "odd" in str(error.value)
        writer.write(SampleBatch({"rewards": np.ones(1)}))
    with LogReader(tmp_path) as reader:
        assert [batch["rewards"].tolist() for batch in reader] == [[0.0], [1.0]]


def test_parquet_says_what_it_cannot_hold():
    with pytest.raises(ConfigError, match=r"'a': Parquet cannot hold complex64\[2\]; use jsonl"):
        to_table(SampleBatch({"a": np.zeros((1, 2), np.complex64)}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rlsample": 2}, "written as version 2, this rlsample reads 1"),
        ({"columns": 3}, "no columns"),
        ({"count": 4}, "1 rows, where count says 4"),
        ({"fragment_lengths": [7]}, "do not add up"),
        ({"next_obs": {}}, "do not fit each other"),
        ({"next_obs": [1]}, "do not fit each other"),
        ({"next_obs": {"index": {"dict": {}}, "extra": {"dict": {}}}}, "no int64 array"),
        (
            {
                "next_obs": {
                    "index": {"dtype": "int64", "shape": [1], "zlib": "eJxjYIAAAAAIAAE="},
                    "extra": {"dict": {}},
                }
            },
            "fit",
        ),
    ],
)
def test_lines_of_another_kind_are_told_apart(changes, words):
    document = json.loads(encode_line(SampleBatch({"t": np.arange(1)})))
    with pytest.raises(ValueError, match=words):
        decode_line(json.dumps({**document, **changes}).encode())


@pytest.mark.parametrize(
    "document",
    [
        None,
        [1],
        {"dtype": "float32"},
        {"dtype": "object", "shape": [1], "zlib": ""},
        {"dtype": "float32", "shape": [-1], "zlib": ""},
        {"dtype": "float32", "shape": [1.5], "zlib": ""},
        {"dtype": "float32", "shape": [1 << 60], "zlib": "eJwDAAAAAAE="},
        {"dtype": "float32", "shape": [1 << 63], "zlib": "eJwDAAAAAAE="},
        {"dtype": "(1,f4", "shape": [0], "zlib": "eJwDAAAAAAE="},
        {"dtype": "float32", "shape": [1], "zlib": "not base64"},
        {"dtype": "uint8", "shape": [1], "zlib": "eJwDAAAAAAE="},
        {"dtype": "pickle", "shape": [1], "zlib": ""},
        {"dict": 3},
        {"tuple": 3},
    ],
)
def test_documents_that_are_no_arrays_raise_value_error_only(document):
    with pytest.raises(ValueError):
        decode_tree(document)


@pytest.mark.parametrize(
    ("path", "shape"),
    [("[]", "[]"), ("5", "[]"), ("[[1], 2]", "[]"), ('["t"]', "[2]"), ('["t"]', "0"), ("[" * 9999, "[]")],
)
def test_parquet_metadata_that_makes_no_sense_is_skipped(tmp_path, caplog, path, shape):
    import pyarrow as pa
    import pyarrow.parquet as pq

    field = pa.field("t", pa.int64(), metadata={"role": "column", "path": path, "shape": shape})
    table = pa.Table.from_arrays([pa.array([1, 2])], schema=pa.schema([field], metadata={"rlsample": "1"}))
    pq.write_table(table, tmp_path / "a.parquet")
    with caplog.at_level(logging.WARNING), LogReader(tmp_path) as reader:
        assert list(reader) == []
    assert reader.num_skipped == 1
    assert "a.parquet: row group 1 is damaged" in caplog.records[0].message


def test_a_fragment_number_out_of_all_bounds_costs_no_memory():
    table = to_table(SampleBatch({"t": np.arange(2)}, None, np.array([2])))
    at = table.schema.get_field_index("fragment")
    huge = table.set_column(at, table.schema.field(at), [np.array([0, 1 << 40])])
    with pytest.raises(ValueError, match="fragment"):
        from_table(huge)


def test_a_line_unpacks_no_more_than_its_shape_asks_for():
    """A line of a kilobyte that would unpack to 100 MB is refused after 5 bytes."""
    import base64
    import tracemalloc
    import zlib

    bomb = base64.b64encode(zlib.compress(bytes(100 << 20))).decode()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="not the 4 bytes of float32"):
            decode_tree({"dtype": "float32", "shape": [1], "zlib": bomb})
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_line_can_be_read_by_people(tmp_path: Path):
    document = json.loads(encode_line(case_30_batch(0)))
    assert list(document)[:3] == ["rlsample", "count", "summary"]
    assert document["summary"] == {
        "reward_sum": float(np.sum(np.array([1e-8, -2.5, 3e7], np.float32), dtype=np.float64)),
        "episodes": 1,
        "terminated": 1,
        "truncated": 1,
    }
    assert document["columns"]["actions"]["dict"]["a"]["dtype"] == "float32"
    assert document["columns"]["actions"]["dict"]["a"]["shape"] == [3, 2, 3]
