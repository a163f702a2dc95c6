"""Every example runs to its end in its quick form."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Path -> exit code and folder, of those examples that are to be tested; two at a time.

    One torch thread, as is best for nets of these sizes, most of all beside another example.
    """
    wanted = [item.callspec.params["path"] for item in request.session.items if item.name.startswith("test_example[")]
    folder = tmp_path_factory.mktemp("examples")
    for path in wanted:
        (folder / path.stem).mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.preloaded", "2"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        input="\n".join(json.dumps([[str(path), "--quick"], str(folder / path.stem)]) for path in wanted),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    ends = dict(map(json.loads, done.stdout.splitlines()))
    return {path: (ends[str(path)], folder / path.stem) for path in wanted}


def test_there_are_examples():
    assert "train_cartpole.py" in [path.name for path in EXAMPLES]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(runs, path):
    code, folder = runs[path]
    assert code == 0, (folder / "err.txt").read_text()
    assert (folder / "out.txt").read_text().strip(), "an example shows something"
