"""How the process that reads workbooks is started."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

READ = """
import sys
sys.path.append(sys.argv[2])
import envs.workbook
assert sys.path.pop() == sys.argv[2] not in sys.path
print(envs.workbook.read_workbook(sys.argv[1]).sheets[0].used())
"""


def test_an_installation_that_only_a_finder_knows(tmp_path: Path) -> None:
    """As `pip install -e` leaves it: the package is imported, its folder isn't on the path."""
    file = tmp_path / "a.csv"
    file.write_text("a,b\n1,2\n")
    python = [sys.executable, "-S", "-P", "-c", READ]
    done = subprocess.run(
        [*python, str(file), str(ROOT)], cwd=tmp_path, env={}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "A1:B2\n"), done.stderr
