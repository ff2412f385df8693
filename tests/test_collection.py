"""Which fixtures the files of a command line find."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_folder_keeps_its_fixtures_after_a_file_of_the_folder_above(tmp_path):
    files = {
        "conftest.py": "from tests.conftest import pytest_make_collect_report\n",
        "inner/conftest.py": "import pytest\n\n@pytest.fixture\ndef three():\n    return 3\n",
        "inner/test_one.py": "def test_one(three):\n    assert three == 3\n",
        "test_two.py": "def test_two():\n    pass\n",
        "inner/test_four.py": "def test_four(three):\n    assert three == 3\n",
    }
    (tmp_path / "inner").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    words = [name for name in files if "test_" in name]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", *words]
    done = subprocess.run(
        [*command, "-o", f"pythonpath={ROOT}"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr
