"""Every example runs to its end in its quick form."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def run(path, folder):
    """One torch thread, as is best for nets of these sizes, most of all beside another example."""
    folder.mkdir()
    command, environment = [sys.executable, str(path), "--quick"], {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Path -> how it ended, of those examples that are to be tested; two at a time, since each loads torch first."""
    wanted = [item.callspec.params["path"] for item in request.session.items if item.name.startswith("test_example[")]
    folder = tmp_path_factory.mktemp("examples")
    with ThreadPoolExecutor(2) as pool:
        ends = pool.map(lambda path: run(path, folder / path.stem), wanted)
        return dict(zip(wanted, ends, strict=True))


def test_there_are_examples():
    assert "train_cartpole.py" in [path.name for path in EXAMPLES]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(runs, path):
    done = runs[path]
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example shows something"
