"""The project itself: arrows between packages, light imports, README, CI, packaging."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fastask_jax

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
CI = (ROOT / ".ci/run").read_text("utf-8")
TEST_COMMAND = (
    "python3.11 -m venv .venv && . .venv/bin/activate && pip install '.[test]' && "
    "python -m pytest -n 2 --dist loadfile"
)


def fresh(code: str) -> str:
    """What `code` prints in a new process that starts in the root of the project."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], capture_output=True, text=True, cwd=root
    )


def first_screen_commands() -> list[str]:
    return re.findall(r"```bash\n(.*?)\n```", README, re.DOTALL)[:2]


def test_the_two_commands_stand_on_the_first_screen() -> None:
    run, test = first_screen_commands()
    assert run.endswith("pip install . && python -m experiments.quickstart")
    assert test == TEST_COMMAND
    assert README.index(test) < README.index("\n## ")
    assert README[: README.index(test)].count("\n") < 30


def test_ci_calls_exactly_the_readmes_test_command_last() -> None:
    lines = [x for x in CI.splitlines() if x.strip() and not x.lstrip().startswith("#")]
    assert lines[-1] == first_screen_commands()[1]
    assert "set -euo pipefail" in CI
    extras = "'.[test,parity,aot,ray,verifiers]'"
    order = ["torch==2.13.0", extras, "ruff check", "mypy", "lint-imports"]
    order.append("'.[test]'")
    found = [CI.index(x) for x in order]
    assert found == sorted(found)
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_every_command_of_the_readme_exists() -> None:
    modules = set(re.findall(r"python -m (experiments\.\w+)", README))
    assert {"experiments.quickstart", "experiments.fast_ask", "experiments.sweep"} <= modules
    missing = [m for m in sorted(modules) if not (ROOT / f"{m.replace('.', '/')}.py").exists()]
    assert missing == []


def test_the_readmes_sweep_is_over_a_field_that_exists() -> None:
    from experiments.fast_ask import Config
    from experiments.fields import leaves_of
    from experiments.sweep import parse_sweep

    [words] = re.findall(r"`python -m experiments\.sweep ([^`]+)`", README)
    sweep = parse_sweep(words.split())
    assert set(sweep.fields) <= {leaf.name for leaf in leaves_of(Config)}
    assert len(sweep.combinations()) > 1


def test_import_arrows_hold() -> None:
    done = lint_imports(ROOT)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    kept = len(contracts["contracts"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Contracts: {kept} kept, 0 broken." in done.stdout


def test_the_arrow_check_can_fail(tmp_path) -> None:
    """The same contracts over a tree in which envs imports JAX report exactly that."""
    for package in ("experiments", "fastask_jax", "fastask_jax/report", "kernels", "envs"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    for module in ("model", "rollout", "learn"):
        (tmp_path / "fastask_jax" / f"{module}.py").write_text("")
    (tmp_path / "envs" / "bad.py").write_text("import jax\nimport fastask_jax\n")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    done = lint_imports(tmp_path)
    assert done.returncode != 0
    assert "2 broken" in done.stdout


def test_every_folder_of_code_is_a_package_that_gets_installed() -> None:
    folders = {
        path.parent
        for package in ("kernels", "envs", "fastask_jax", "experiments")
        for path in (ROOT / package).rglob("*.py")
    }
    bare = [str(f.relative_to(ROOT)) for f in sorted(folders) if not (f / "__init__.py").exists()]
    assert bare == []


def test_environments_import_without_jax_or_the_learner() -> None:
    code = """
import importlib, json, pkgutil, sys
import envs
names = [m.name for m in pkgutil.walk_packages(envs.__path__, "envs.")]
skip = {"envs.sandbox.zygote", "envs.sandbox.child"}  # run as programs, not imported
# what imports verifiers, with all that it brings
skip |= {f"envs.verifiers.{m}" for m in ("env", "exchange", "harness", "host", "taskset")}
for name in names:
    if name not in skip:
        importlib.import_module(name)
heavy = ["jax", "jaxlib", "flax", "torch", "transformers", "fastask_jax", "kernels"]
print(json.dumps([len(names), [h for h in heavy if h in sys.modules]]))
"""
    count, heavy = json.loads(fresh(code))
    assert count > 5
    assert heavy == []


@pytest.mark.parametrize("module", ["fastask_jax", "fastask_jax.cli", "fastask_jax.policies"])
def test_light_modules_import_no_jax(module) -> None:
    assert fresh(f"import sys, {module}; print('jax' in sys.modules)") == "False\n"


def test_the_command_line_of_experiments_imports_no_jax() -> None:
    code = "import sys, experiments.config, fastask_jax.report.tables; print('jax' in sys.modules)"
    assert fresh(code) == "False\n"


def test_version_stays_out_of_the_range_that_transformers_takes_for_its_kernels() -> None:
    major, minor, *_ = (int(x) for x in fastask_jax.__version__.split("."))
    assert (major, minor) not in {(0, 18), (0, 19)}
    setup = (ROOT / "setup.py").read_text()
    assert 'name="fastask-jax"' in setup and "fastask = fastask_jax.cli:main" in setup


@pytest.mark.slow
def test_transformers_loads_tokenizers_with_our_kernels_on_the_path(tmp_path) -> None:
    code = f"""
import kernels, sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.import_utils import is_kernels_available
assert kernels.__fastask__
assert not is_kernels_available()
raw = Tokenizer(models.WordLevel({{"net": 0, "revenue": 1, "?": 2}}, unk_token="?"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained({str(tmp_path)!r})
print(AutoTokenizer.from_pretrained({str(tmp_path)!r})("net revenue").input_ids)
"""
    assert fresh(code) == "[0, 1]\n"
