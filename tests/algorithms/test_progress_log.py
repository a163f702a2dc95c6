"""CSV and TensorBoard: every number at its step, and a resumed run leaves no row twice."""

import math
import struct

import pytest

from rlsample.algorithms.learning_curve import draw_learning_curve
from rlsample.algorithms.progress_log import CsvLog, TensorBoardLog, read_csv


def row(iteration, **more):
    return {"time/iterations": iteration, "time/total_timesteps": iteration * 256, **more}


def test_rows_come_back_exactly(tmp_path):
    path = tmp_path / "progress.csv"
    log = CsvLog(path)
    log.write(row(1, loss=0.1, rew=None))
    log.write(row(2, loss=1e-30, rew=7.25))
    log.close()
    assert read_csv(path) == [
        {"time/iterations": 1, "time/total_timesteps": 256, "loss": 0.1, "rew": None},
        {"time/iterations": 2, "time/total_timesteps": 512, "loss": 1e-30, "rew": 7.25},
    ]


def test_a_late_tag_widens_the_table(tmp_path):
    path = tmp_path / "progress.csv"
    log = CsvLog(path)
    log.write(row(1, loss=0.5))
    log.write(row(2, loss=0.25, kl=3.0))
    log.write(row(3, kl=4.0))
    log.close()
    rows = read_csv(path)
    assert [r["kl"] for r in rows] == [None, 3.0, 4.0]
    assert [r["loss"] for r in rows] == [0.5, 0.25, None]
    assert path.read_text().count("time/iterations") == 1


def test_resume_drops_later_rows_and_a_cut_line(tmp_path):
    path = tmp_path / "progress.csv"
    log = CsvLog(path)
    for i in (1, 2, 3):
        log.write(row(i, loss=i / 8))
    log.close()
    path.write_text(path.read_text() + "4,10")
    log = CsvLog(path, resume_after=2)
    log.write(row(3, loss=9.0))
    log.close()
    assert [(r["time/iterations"], r["loss"]) for r in read_csv(path)] == [(1, 0.125), (2, 0.25), (3, 9.0)]
    assert path.read_text().splitlines()[1] == "1,256,0.125"
    assert [p.name for p in tmp_path.iterdir()] == ["progress.csv"]


def test_a_new_run_starts_anew_and_none_writes_nothing(tmp_path):
    path = tmp_path / "progress.csv"
    path.write_text("old,table\n1,2\n")
    CsvLog(path).close()
    assert read_csv(path) == []
    nothing = CsvLog(None)
    nothing.write(row(1))
    nothing.close()


def events(folder):
    """(step, {tag: value}, starts a session) of each event, in the order of the files."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    found = []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        while content:  # TFRecord: length u64, its crc u32, the record, its crc u32
            (length,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            values = {value.tag: value.simple_value for value in event.summary.value}
            found.append((event.step, values, event.session_log.status == SessionLog.START))
    return found


def test_tensorboard_events(tmp_path):
    log = TensorBoardLog(tmp_path)
    log.write(row(1, loss=0.5, rew=None))
    log.close()
    log.close()
    log = TensorBoardLog(tmp_path, resume_steps=256)
    log.write(row(2, loss=math.inf))
    log.close()
    found = events(tmp_path)
    assert (256, {"time/iterations": 1.0, "loss": 0.5}, False) in found
    assert (257, {}, True) in found
    assert (512, {"time/iterations": 2.0, "loss": math.inf}, False) in found


@pytest.mark.parametrize(("returns", "drawn"), [([None, 2.5, 9.0], True), ([None, None], False), ([], False)])
def test_learning_curve(tmp_path, returns, drawn):
    path = tmp_path / "curve.png"
    rows = [{"time/total_timesteps": 256.0 * i, "rollout/ep_rew_mean": r} for i, r in enumerate(returns)]
    assert draw_learning_curve(rows, path, "ppo on CartPole-v1", stop_return=475) is drawn
    assert path.exists() is drawn
    if drawn:
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
