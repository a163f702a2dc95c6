"""Logs that somebody else wrote, or damaged on purpose: told apart, skipped by name, and without filling the memory."""

from __future__ import annotations

import base64
import json
import logging
import re
import tracemalloc
import zlib

import numpy as np
import pytest

from rlsample.offline import LogReader, LogWriter
from rlsample.offline.array_codec import encode_tree
from rlsample.offline.declared_sizes import require_page_sizes
from rlsample.offline.json_lines import decode_line, encode_line
from rlsample.offline.parquet_tables import size_of_rows, to_table
from rlsample.sample_batch import NextObs, SampleBatch
from rlsample.tree import map_tree

pytest.importorskip("pyarrow", reason="Parquet needs rlsample[offline]")

# ---------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (np.zeros((1, 2), np.float32), r"float32\[2\]"),
        (np.zeros((1, 3), np.float64), r"float64\[3\]"),
        ({"a": np.zeros((1, 3), np.float32)}, "'a'"),
        ((np.zeros((1, 3), np.float32),), r"\('float32\[3\]',\)"),
    ],
)
@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_next_observations_of_another_structure_than_obs_are_damage(tmp_path, caplog, format, extra, words):
    """Written by somebody who checks nothing; without a look, float64 would be cast and a Dict fail much later."""
    batch = SampleBatch({"obs": np.zeros((2, 3), np.float32)}, NextObs(np.array([1, -1]), extra))
    with LogWriter(tmp_path, format) as writer:
        if format == "jsonl":
            writer.write(batch)
        else:
            batch.next_obs_source = NextObs(np.array([-1, -2]), map_tree(lambda leaf: np.repeat(leaf, 2, 0), extra))
            writer.write(batch)
        writer.write(SampleBatch({"obs": np.ones((2, 3), np.float32)}))
    with caplog.at_level(logging.WARNING), LogReader(tmp_path) as reader:
        assert [found["obs"][0, 0] for found in reader] == [1.0]
    assert reader.num_skipped == 1
    (record,) = caplog.records
    assert re.search("is damaged: next_obs has observations of .*" + words, record.message)


def test_leaves_of_next_obs_have_one_length():
    obs = {"a": np.zeros((2, 1), np.float32), "b": np.zeros((2, 1), np.float32)}
    document = json.loads(encode_line(SampleBatch({"obs": obs}, NextObs(np.array([1, -1]), obs))))
    for shape in ([1, 1], [2]):  # b has fewer rows, or none at all
        document["next_obs"]["extra"]["dict"]["b"] = encode_tree(np.zeros(shape, np.float32), "b")
        with pytest.raises(ValueError, match="next_obs has observations of"):
            decode_line(json.dumps(document).encode())


# ---------------------------------------------------------------------- what is too large


def test_a_fragment_that_unpacks_to_more_than_allowed_is_skipped_by_its_line(tmp_path, caplog):
    """Two columns of 600 bytes, each small enough by itself."""
    with LogWriter(tmp_path) as writer:
        for number in (1, 2):
            writer.write(SampleBatch({"x": np.full(600, number, np.uint8)}))
            writer.write(SampleBatch({"x": np.zeros(600, np.uint8), "y": np.zeros(600, np.uint8)}))
        writer.write(SampleBatch({"t": np.arange(2)}))
    (path,) = tmp_path.iterdir()
    with caplog.at_level(logging.WARNING), LogReader(tmp_path, max_fragment_size=1199) as reader:
        assert [batch.count for batch in reader] == [600, 600, 2]
    assert reader.num_skipped == 2
    assert caplog.records[0].message == (
        f"{path}: line 2 is damaged: its arrays have more than 1199 bytes; for logs that you trust, raise "
        "max_fragment_size; skipped"
    )
    with LogReader(tmp_path, max_fragment_size=1200) as reader:
        assert [batch.count for batch in reader] == [600, 600, 600, 600, 2]


def test_a_writer_says_once_that_its_fragments_are_larger_than_readers_take(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("rlsample.offline.log_writer.MAX_FRAGMENT_SIZE", 100)
    with caplog.at_level(logging.WARNING), LogWriter(tmp_path) as writer:
        for size in (100, 101, 102):
            writer.write(SampleBatch({"x": np.zeros(size, np.uint8)}))
    (record,) = caplog.records
    assert "a batch of 101 bytes is written to" in record.message
    assert "readers skip what is above 100 unless their max_fragment_size" in record.message


def test_what_is_too_large_is_not_unpacked_first():
    """64 MiB of zeros, in 90 KB, with a shape that says so."""
    packed = zlib.compress(bytes(64 << 20), 1)
    document = {"dtype": "uint8", "shape": [64 << 20], "zlib": base64.b64encode(packed).decode()}
    line = json.dumps({"rlsample": 1, "count": 64 << 20, "columns": {"x": document}}).encode()
    assert len(line) < 1 << 19
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"more than {63 << 20} bytes"):
            decode_line(line, 63 << 20)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_an_endless_line_is_skipped_without_being_held(tmp_path, caplog):
    """20 MB without a newline in the middle, and at the end: the line numbers of those after it stay as they were."""
    good = encode_line(SampleBatch({"t": np.arange(3)}))
    path = tmp_path / "a.jsonl"
    path.write_bytes(good + b"[" * (20 << 20) + b"\n" + good + b"junk\n" + b"[" * (20 << 20))
    tracemalloc.start()
    try:
        with caplog.at_level(logging.WARNING), LogReader(tmp_path, max_fragment_size=100_000) as reader:
            assert [batch.count for batch in reader] == [3, 3]
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    found = [record.message.split(": it has")[0].split(": no JSON")[0] for record in caplog.records]
    assert found == [f"{path}: line {n}" for n in ("2 is damaged", "4 is damaged", "5, the last one, is cut")]
    assert "line 2 is damaged: it has more than 265536 bytes; see max_fragment_size" in caplog.records[0].message


def test_a_row_group_of_too_many_rows_is_not_read(tmp_path, caplog):
    """A column of equal numbers packs to nothing in Parquet, too: rows times their width count."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    field = pa.field("t", pa.int64(), metadata={"role": "column", "path": '["t"]', "shape": "[]"})
    schema = pa.schema([field], metadata={"rlsample": "1"})
    table = pa.Table.from_arrays([pa.array(np.zeros(1_000_000, np.int64))], schema=schema)
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=True)
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    write = pa.Table.from_arrays([pa.array(np.arange(2))], schema=schema)
    pq.write_table(write, tmp_path / "b.parquet")
    with caplog.at_level(logging.WARNING), LogReader(tmp_path, max_fragment_size=7_999_999) as reader:
        assert [batch.count for batch in reader] == [2]
    assert "a.parquet: row group 1 is damaged: its arrays have more than 7999999 bytes" in caplog.records[0].message
    with LogReader(tmp_path, max_fragment_size=8_000_000) as reader:
        assert [batch.count for batch in reader] == [1_000_000, 2]


def test_sizes_of_rows_are_those_of_the_arrays():
    obs = {"a": np.zeros((4, 3, 2), np.uint8), "b": np.zeros(4, np.float32)}
    batch = SampleBatch({"obs": obs, "terminated": np.zeros(4, bool), "t": np.arange(4)})
    assert size_of_rows(to_table(batch).schema, 4) == batch.nbytes == 4 * (6 + 4 + 1 + 8)


def zigzag(number):
    """A whole number as thrift writes it."""
    number, found = 2 * number, bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def test_pages_that_unpack_to_more_than_their_rows_have_are_not_unpacked(tmp_path, caplog):
    """The head of a page says what it unpacks to; Parquet's reader sets that much aside before it looks."""
    import pyarrow.parquet as pq

    batch = SampleBatch({"t": np.arange(1_000_000) % 7})
    options = {"use_dictionary": False, "compression": "snappy"}
    pq.write_table(to_table(batch), tmp_path / "a.parquet", **options)
    content = (tmp_path / "a.parquet").read_bytes()
    head = pq.read_metadata(tmp_path / "a.parquet").row_group(0).column(0).data_page_offset
    honest, forged = content[head + 3 : head + 6], zigzag(1_000_000)
    assert honest == zigzag(160_008)  # 20,000 rows and their levels
    with LogReader(tmp_path, max_fragment_size=8_000_000) as reader:
        assert [found.count for found in reader] == [1_000_000]
    (tmp_path / "a.parquet").write_bytes(content.replace(honest, forged))
    with caplog.at_level(logging.WARNING), LogReader(tmp_path, max_fragment_size=8_000_000) as reader:
        assert list(reader) == []
    assert "row group 1 is damaged: its pages unpack to more than 16065536 bytes" in caplog.records[0].message


KINDS_OF_PAGES = [{}, {"use_dictionary": False}, {"data_page_version": "2.0"}, {"write_statistics": False}]


@pytest.mark.parametrize("options", KINDS_OF_PAGES)
def test_heads_of_pages_say_how_many_values_there_are(tmp_path, options):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    columns = {"many": pa.array([list(range(50)), list(range(50))]), "one": pa.array(["x" * 70_000, None])}
    pq.write_table(pa.table(columns), path, compression="none", data_page_size=64, **options)
    group = pq.read_metadata(path).row_group(0)
    sizes = sum(group.column(k).total_uncompressed_size for k in range(2))
    with path.open("rb") as file:
        require_page_sizes(file, group, [50, 1], sizes)
        with pytest.raises(ValueError, match=r"'many\.list\.element' has more values than 2 rows"):
            require_page_sizes(file, group, [49, 1], sizes)
        with pytest.raises(ValueError, match="pages unpack to more than 70000 bytes"):
            require_page_sizes(file, group, [50, 1], 70_000)
        content = path.read_bytes()
    for damage in (b"\xff", b"\x00", b"\x1c"):
        at = group.column(0).data_page_offset
        path.write_bytes(content[:at] + 200 * damage + content[at + 200 :])
        with path.open("rb") as file, pytest.raises(ValueError, match="the head of"):
            require_page_sizes(file, group, [50, 1], sizes)


def test_parquet_files_of_others_are_told_apart_before_they_are_read(tmp_path, caplog):
    import pyarrow as pa
    import pyarrow.parquet as pq

    facts = {"role": "column", "path": '["t"]', "shape": "[]"}
    for name, metadata in (("a", {}), ("b", {"rlsample": "1"})):
        schema = pa.schema([pa.field("t", pa.string(), metadata=facts)], metadata=metadata)
        pq.write_table(pa.Table.from_arrays([pa.array(["x"])], schema=schema), tmp_path / f"{name}.parquet")
    with caplog.at_level(logging.WARNING), LogReader(tmp_path) as reader:
        assert list(reader) == []
    assert [record.message.partition("damaged: ")[2] for record in caplog.records] == [
        "no Parquet file of rlsample version 1; skipped",
        "column 't' is of type string, which no rlsample wrote; skipped",
    ]
