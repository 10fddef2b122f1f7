"""The first example of the README: it is the file, it is short, and it runs as it is printed."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "library.py"
OUTPUT = """\
26 of 32 pages leave for the host
step at   0: so far 0 resident, 0 hot, 16 missed
step at   4: so far 0 resident, 14 hot, 18 missed
step at 400: so far 8 resident, 14 hot, 26 missed
"""


def run(source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=120)


def test_the_readme_shows_the_example_and_its_output_as_they_are() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"```python\n{EXAMPLE.read_text(encoding='utf-8')}```\n" in readme
    assert f"```\n{OUTPUT}```\n" in readme


def test_the_example_has_under_60_lines_of_code() -> None:
    lines = [line.strip() for line in EXAMPLE.read_text(encoding="utf-8").splitlines()]
    assert 0 < sum(bool(line) and not line.startswith("#") for line in lines) < 60


def test_the_example_prints_where_its_rows_were_found() -> None:
    done = run(EXAMPLE.read_text(encoding="utf-8"))
    assert (done.returncode, done.stdout, done.stderr) == (0, OUTPUT, "")


def test_the_example_would_notice_a_row_that_is_not_the_truth() -> None:
    whole = EXAMPLE.read_text(encoding="utf-8")
    broken = whole.replace("    handle.write(rows, truth[handle.layer])", "    handle.write(rows, truth[0])")
    assert broken != whole
    done = run(broken)
    assert done.returncode != 0
    assert "AssertionError" in done.stderr
