"""Files of many writers in one folder, and readers that share them, go over them again, shuffle and mix."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsample.errors import ConfigError
from rlsample.offline import LogReader, LogWriter, MixedReader
from rlsample.offline.json_lines import decode_line, encode_line
from rlsample.offline.log_files import read_json_lines
from rlsample.sample_batch import SampleBatch


def fragment(number: int, rows: int = 2) -> SampleBatch:
    return SampleBatch({"t": np.full(rows, number)})


def numbers(reader) -> list[int]:
    return [int(batch["t"][0]) for batch in reader]


def write(folder, count: int, first: int = 0, **options) -> None:
    with LogWriter(folder, **options) as writer:
        for number in range(first, first + count):
            writer.write(fragment(number))


# ---------------------------------------------------------------------- writers


def test_a_file_gets_its_name_when_it_is_finished(tmp_path):
    with LogWriter(tmp_path / "new" / "folder", worker_index=7) as writer:
        assert not (tmp_path / "new").exists()  # nothing is made for nothing
        writer.write(fragment(1))
        (unfinished,) = (tmp_path / "new" / "folder").iterdir()
        assert unfinished.name.startswith("worker-00007-")
        assert unfinished.name.endswith("-00000.jsonl.part")
        with LogReader(tmp_path / "new" / "folder") as reader:  # what is there can be read
            assert numbers(reader) == [1]
    (finished,) = (tmp_path / "new" / "folder").iterdir()
    assert finished.name + ".part" == unfinished.name
    writer.close()
    with pytest.raises(ConfigError, match="is closed"):
        writer.write(fragment(2))


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_files_roll_at_max_file_size_and_lose_nothing(tmp_path, format):
    write(tmp_path, 10, format=format, max_file_size=1)
    endings = [path.name.rpartition("-")[2] for path in sorted(tmp_path.iterdir())]
    assert endings == [f"{n:05d}.{format}" for n in range(10)]
    with LogReader(tmp_path) as reader:
        assert numbers(reader) == list(range(10))


def test_a_parquet_file_ends_where_the_columns_change(tmp_path):
    other = SampleBatch({"t": np.full(2, 5), "x": np.zeros((2, 3), np.float32)})
    with LogWriter(tmp_path, "parquet") as writer:
        for batch in (fragment(4), other, fragment(6), fragment(7)):
            writer.write(batch)
    assert len(list(tmp_path.iterdir())) == 3
    with LogReader(tmp_path) as reader:
        assert [(list(batch), int(batch["t"][0])) for batch in reader] == [
            (["t"], 4),
            (["t", "x"], 5),
            (["t"], 6),
            (["t"], 7),
        ]


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    import rlsample.offline.log_files as log_files

    write_as_ever = log_files.os.write

    def full_disk(file, data):
        write_as_ever(file, data[:10])
        raise OSError(28, "No space left on device")

    with LogWriter(tmp_path) as writer:
        writer.write(fragment(1))
        monkeypatch.setattr(log_files.os, "write", full_disk)
        with pytest.raises(OSError, match="No space left"):
            writer.write(fragment(2))
        monkeypatch.undo()
        writer.write(fragment(3))
    with LogReader(tmp_path) as reader:
        assert numbers(reader) == [1, 3]
    assert reader.num_skipped == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [({"format": "jsonll"}, "did you mean 'jsonl'"), ({"max_file_size": 0}, "at least 1 byte, not 0")],
)
def test_writers_refuse_what_cannot_work(tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        LogWriter(tmp_path, **options)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="it is a file; give a folder"):
        LogWriter(tmp_path / "file")


_WRITE_FOR_EVER = """
import sys
import numpy as np
from rlsample.offline import LogWriter
from rlsample.sample_batch import SampleBatch

noise = np.random.default_rng(0).integers(0, 256, (1, 3 << 20), np.uint8)
with LogWriter(sys.argv[1]) as writer:
    for number in range(10_000):
        writer.write(SampleBatch({"t": np.array([number]), "noise": noise}))
        print(number, flush=True)
"""


def test_a_writer_killed_in_mid_write_loses_at_most_its_last_line(tmp_path, caplog):
    """Lines of 4 MB, so that the kill that follows an answer finds the next one under way."""
    child = subprocess.Popen([sys.executable, "-c", _WRITE_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        seen = [int(child.stdout.readline()) for _ in range(3)]
        child.send_signal(signal.SIGKILL)
        seen += [int(line) for line in child.stdout]  # answers that were on their way
    finally:
        child.kill()
        child.wait(60)
        child.stdout.close()
    (left,) = tmp_path.iterdir()
    assert left.name.endswith(".jsonl.part")
    write(tmp_path, 1, first=77)  # a writer of a later run
    with caplog.at_level(logging.WARNING), LogReader(tmp_path) as reader:
        found = numbers(reader)
    found.remove(77)
    assert found == list(range(len(found)))
    assert len(seen) <= len(found) <= len(seen) + 1
    assert reader.num_skipped == len(caplog.records) <= 1


_DIE_AT_BYTE = """
import os, resource, signal, sys
import numpy as np
from rlsample.offline import LogWriter
from rlsample.sample_batch import SampleBatch

signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
for size in sys.argv[2:]:
    child = os.fork()
    if child:
        print(os.WTERMSIG(os.waitpid(child, 0)[1]))
        continue
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size),) * 2)
    with LogWriter(os.path.join(sys.argv[1], size)) as writer:
        for number in range(10):
            writer.write(SampleBatch({"t": np.full(2, number)}))
"""


def test_a_writer_that_dies_in_the_middle_of_a_line_leaves_the_lines_before_it(tmp_path, caplog):
    """The system kills it at a given byte, so that the cut is where the test wants it."""
    pytest.importorskip("resource")
    ends = np.cumsum([len(encode_line(fragment(number))) for number in range(5)]).tolist()
    cases = ((1, 0, True), (ends[2] + 90, 3, True), (ends[3], 4, False), (ends[4] - 1, 5, False))
    words = [sys.executable, "-c", _DIE_AT_BYTE, str(tmp_path), *(str(size) for size, _, _ in cases)]
    deaths = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout.split()
    assert deaths == [str(int(signal.SIGXFSZ))] * len(cases)
    for size, whole, warned in cases:
        folder = tmp_path / str(size)
        (left,) = folder.iterdir()
        assert left.stat().st_size == size
        caplog.clear()
        with caplog.at_level(logging.WARNING), LogReader(folder) as reader:
            assert numbers(reader) == list(range(whole))  # the fifth one lacks nothing but its newline
        assert [f"line {whole + 1}, the last one, is cut" in r.message for r in caplog.records] == [True] * warned


# ---------------------------------------------------------------------- readers


@pytest.mark.parametrize("is_mine", [True, False])
def test_a_line_that_is_completed_while_it_is_read_is_not_counted_twice(tmp_path, is_mine):
    """The numbers of lines decide who reads them: half a line and its other half must not count as two."""
    path = tmp_path / "a.jsonl"
    lines = [encode_line(fragment(number)) for number in range(4)]
    path.write_bytes(lines[0] + lines[1][:50])
    asked, told = [], []

    def go_on() -> None:
        with path.open("ab") as file:
            file.write(lines[1][50:] + lines[2] + lines[3])

    def mine(number: int) -> bool:
        asked.append(number)
        if number == 1 and not is_mine:
            go_on()
        return number != 1 or is_mine

    def damage(what: str) -> None:
        told.append(what.split(" is ")[0])
        if len(told) == 1:
            go_on()

    assert numbers(read_json_lines(path, mine, damage)) == [0]
    assert asked == [0, 1]
    assert told == ["line 2, the last one,"] * is_mine


@pytest.mark.parametrize("text", ["null", "[" * 9999, "7"])
def test_a_metadata_file_of_somebody_else_does_no_harm(tmp_path, text):
    write(tmp_path, 1)
    (tmp_path / "metadata.json").write_text(text)
    with LogReader(tmp_path) as reader:
        assert numbers(reader) == [0]


def test_a_damaged_line_in_the_middle_is_named_and_skipped(tmp_path, caplog):
    write(tmp_path, 5)
    (path,) = tmp_path.iterdir()
    lines = path.read_bytes().splitlines(keepends=True)
    at = lines[2].index(b'"zlib":"') + 12
    lines[2] = lines[2][:at] + (b"A" if lines[2][at : at + 1] != b"A" else b"B") + lines[2][at + 1 :]
    path.write_bytes(b"".join(lines[:4]) + b"\x00\xff garbage\n\n" + lines[4])
    with caplog.at_level(logging.WARNING), LogReader(tmp_path) as reader:
        assert numbers(reader) == [0, 1, 3, 4]
    assert reader.num_skipped == 3
    messages = [record.message for record in caplog.records]
    assert [message.split(" is damaged")[0] for message in messages] == [f"{path}: line {n}" for n in (3, 5, 6)]


def test_damaged_parquet_files_are_named_and_skipped(tmp_path, caplog):
    write(tmp_path / "good", 2, format="parquet")
    (good,) = (tmp_path / "good").iterdir()
    (tmp_path / "good" / "a.parquet").write_bytes(good.read_bytes()[:-9])
    (tmp_path / "good" / "b.parquet.part").write_bytes(b"PAR1")
    with caplog.at_level(logging.WARNING), LogReader(tmp_path / "good") as reader:
        assert numbers(reader) == [0, 1]
    text = "\n".join(record.message for record in caplog.records)
    assert "a.parquet: it is no Parquet file, or a damaged one" in text
    assert "b.parquet.part is unfinished" in text
    assert reader.num_skipped == 1


def test_sources_are_folders_files_patterns_and_several_of_them(tmp_path):
    for name, first in (("a", 0), ("b", 10)):
        write(tmp_path / name, 2, first=first)
    (file,) = (tmp_path / "a").iterdir()
    for source, expected in (
        (tmp_path / "a", [0, 1]),
        (str(file), [0, 1]),
        (str(tmp_path / "*" / "*.jsonl"), [0, 1, 10, 11]),
        ([tmp_path / "b", tmp_path / "a", file], [0, 1, 10, 11]),
    ):
        with LogReader(source) as reader:
            assert numbers(reader) == expected
    for nothing in (tmp_path, tmp_path / "none", str(tmp_path / "*.jsonl")):
        with pytest.raises(ConfigError, match="no logs in"):
            LogReader(nothing)


def test_a_file_that_is_finished_between_listing_and_opening_is_still_read(tmp_path):
    writer = LogWriter(tmp_path)
    writer.write(fragment(0))
    write(tmp_path / "other", 1, first=5)
    with LogReader([tmp_path / "other", tmp_path]) as reader:
        files = sorted(tmp_path.glob("*.part"))
        assert len(files) == 1
        found = []
        for batch in reader:
            found.append(int(batch["t"][0]))
            writer.close()
    assert sorted(found) == [0, 5]


def test_a_file_that_is_finished_while_the_folder_is_listed_is_still_found(tmp_path, monkeypatch):
    writer = LogWriter(tmp_path)
    writer.write(fragment(1))
    stale = list(tmp_path.iterdir())
    assert stale[0].name.endswith(".part")
    writer.close()
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(stale))
    with LogReader(tmp_path) as reader:
        assert numbers(reader) == [1]


def test_one_file_under_two_paths_comes_once(tmp_path, monkeypatch):
    write(tmp_path / "logs", 3)
    monkeypatch.chdir(tmp_path)
    with LogReader(["logs", tmp_path / "logs", "logs/../logs/*.jsonl"]) as reader:
        assert numbers(reader) == [0, 1, 2]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_file_that_is_deleted_between_listing_and_opening_is_skipped(tmp_path, caplog, format):
    write(tmp_path, 4, format=format, max_file_size=1)
    files = sorted(tmp_path.iterdir())
    found = []
    with caplog.at_level(logging.WARNING), LogReader(tmp_path) as reader:
        for batch in reader:
            found.append(int(batch["t"][0]))
            if len(found) == 2:
                files[2].unlink()
    assert found == [0, 1, 3]
    assert reader.num_skipped == 1
    assert [r.message for r in caplog.records] == [f"{files[2]}: it was deleted after the folder was listed; skipped"]


def test_a_file_that_may_not_be_opened_is_skipped_by_name(tmp_path, caplog, monkeypatch):
    write(tmp_path, 2, max_file_size=1)
    first, _ = sorted(tmp_path.iterdir())
    open_as_ever = Path.open

    def guarded(path, *args, **more):
        if path == first:
            raise PermissionError(13, "Permission denied")
        return open_as_ever(path, *args, **more)

    monkeypatch.setattr(Path, "open", guarded)
    with caplog.at_level(logging.WARNING), LogReader(tmp_path) as reader:
        assert numbers(reader) == [1]
    assert [r.message for r in caplog.records] == [f"{first}: it cannot be opened: Permission denied; skipped"]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_two_readers_share_without_overlap_or_loss(tmp_path, format):
    write(tmp_path, 20, format=format, max_file_size=2000)
    write(tmp_path, 7, first=20, format=format)
    shares = []
    for index in range(2):
        with LogReader(tmp_path, index, 2) as reader:
            shares.append(numbers(reader))
    assert sorted(shares[0] + shares[1]) == list(range(27))
    assert min(map(len, shares)) >= 8, "about half each"


@settings(max_examples=25, deadline=None)
@given(
    files=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    num_readers=st.integers(1, 4),
    window=st.integers(0, 3),
    cut=st.booleans(),
)
def test_shares_are_a_partition_whatever_there_is(files, num_readers, window, cut):
    with tempfile.TemporaryDirectory() as folder:
        first = 0
        for count in files:
            write(folder, count, first=first)
            first += count
        written = sorted(Path(folder).iterdir())
        if not written:
            return
        expected = set(range(first))
        if cut:
            lines = written[0].read_bytes().splitlines(keepends=True)
            expected.discard(int(decode_line(lines[-1])["t"][0]))
            written[0].write_bytes(b"".join(lines)[:-5])
        found: list[int] = []
        for index in range(num_readers):
            with LogReader(folder, index, num_readers, shuffle_window=window, seed=index) as reader:
                found += numbers(reader)
        assert sorted(found) == sorted(expected)


def test_several_passes_and_passes_without_end(tmp_path):
    write(tmp_path, 3)
    with LogReader(tmp_path, repeat=2) as reader:
        assert numbers(reader) == [0, 1, 2, 0, 1, 2]
    with LogReader(tmp_path, repeat=None) as reader:
        assert [int(next(reader)["t"][0]) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
        write(tmp_path, 1, first=9)  # found by the next pass
        assert {int(next(reader)["t"][0]) for _ in range(2 + 4)} == {0, 1, 2, 9}


def test_a_reader_that_would_search_for_ever_says_so(tmp_path):
    write(tmp_path, 1)
    readers = [LogReader(tmp_path, index, 3, repeat=None) for index in range(3)]
    errors = []
    for reader in readers:
        try:
            next(reader)
        except ConfigError as error:
            errors.append(str(error))
        reader.close()
    assert [f"of 3 found no readable fragment in {tmp_path}" in error for error in errors] == [True, True]


def test_shuffling_is_a_matter_of_the_seed_and_differs_from_pass_to_pass(tmp_path):
    write(tmp_path, 30, max_file_size=700)
    assert len(list(tmp_path.iterdir())) > 3

    def read(seed: int, window: int = 5) -> list[int]:
        with LogReader(tmp_path, repeat=2, shuffle_window=window, seed=seed) as reader:
            return numbers(reader)

    one = read(1)
    assert one == read(1) != read(2)
    assert sorted(one[:30]) == sorted(one[30:]) == list(range(30))
    assert one[:30] != one[30:] != list(range(30))


def test_a_fragment_stays_no_longer_ahead_than_the_window(tmp_path):
    """One file in order, window w: fragment k cannot come before place k - w."""
    write(tmp_path, 50)
    with LogReader(tmp_path, shuffle_window=4, seed=3) as reader:
        order = numbers(reader)
    assert order != sorted(order)
    assert all(number <= place + 4 for place, number in enumerate(order))


@pytest.mark.parametrize("window", [0, 3])
def test_a_reader_goes_on_where_another_one_was(tmp_path, window):
    write(tmp_path, 5)
    arguments = {"repeat": 3, "shuffle_window": window, "seed": 4}
    with LogReader(tmp_path, **arguments) as whole:
        expected = numbers(whole)
    for stop in (0, 3, 5, 12, 15):
        with LogReader(tmp_path, **arguments) as first:
            begin = [int(next(first)["t"][0]) for _ in range(stop)]
            state = first.get_state()
        with LogReader(tmp_path, **arguments) as second:
            second.set_state(state)
            assert begin + numbers(second) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"index": 2, "num_readers": 2}, "reader index 2 of 2: it counts from 0 to 1"),
        ({"repeat": 0}, "repeat 1 or more"),
        ({"shuffle_window": -1}, "shuffle_window must be 0 or more"),
        ({"max_fragment_size": 0}, "max_fragment_size must be at least 1 byte, not 0"),
    ],
)
def test_readers_refuse_what_cannot_work(tmp_path, options, words):
    write(tmp_path, 1)
    with pytest.raises(ConfigError, match=words):
        LogReader(tmp_path, **options)


# ---------------------------------------------------------------------- mixed sources


def test_mixed_sources_come_by_their_shares_and_by_the_seed(tmp_path):
    write(tmp_path / "a", 3)
    write(tmp_path / "b", 3, first=10)

    def read(seed: int) -> list[int]:
        sources = [(LogReader(tmp_path / name, repeat=None), share) for name, share in (("a", 0.8), ("b", 0.2))]
        with MixedReader(sources, seed) as mixed:
            return [int(next(mixed)["t"][0]) for _ in range(500)]

    one = read(1)
    assert one == read(1) != read(2)
    from_a = [number for number in one if number < 10]
    assert 360 <= len(from_a) <= 440, "0.8 of 500, give or take four standard deviations"
    assert from_a[:4] == [0, 1, 2, 0]


def test_a_source_that_ends_leaves_the_rest_to_the_others(tmp_path):
    write(tmp_path / "a", 3)
    write(tmp_path / "b", 4, first=10)
    with MixedReader([(LogReader(tmp_path / name), 0.5) for name in "ab"]) as mixed:
        assert sorted(numbers(mixed)) == [0, 1, 2, 10, 11, 12, 13]
        assert next(mixed, None) is None


def test_mixed_sources_go_on_where_they_were(tmp_path):
    write(tmp_path / "a", 3)
    write(tmp_path / "b", 3, first=10)

    def mixed() -> MixedReader:
        return MixedReader([(LogReader(tmp_path / name, repeat=None), 0.5) for name in "ab"], seed=5)

    with mixed() as whole:
        expected = [int(next(whole)["t"][0]) for _ in range(40)]
    with mixed() as first:
        begin = [int(next(first)["t"][0]) for _ in range(17)]
        state = first.get_state()
    with mixed() as second:
        second.set_state(state)
        assert begin + [int(next(second)["t"][0]) for _ in range(23)] == expected


@pytest.mark.parametrize("shares", [[], [0.5, 0.4], [1.5, -0.5], [1.0, 0.0]])
def test_shares_must_be_positive_and_sum_to_one(tmp_path, shares):
    write(tmp_path, 1)
    with pytest.raises(ConfigError, match="must be positive and sum to 1"):
        MixedReader([(LogReader(tmp_path), share) for share in shares])
