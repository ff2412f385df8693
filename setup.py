"""Packaging: what mtrl needs, and the extras that bring the rest."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "mtrl" / "__init__.py").read_text(encoding="utf-8"))[1]

# Kept light: what a run on the embedded defaults imports, and nothing else.
REQUIRES = [
    "torch>=2.11,<3",  # the oldest of both: requirements/lower-bounds.txt
    "transformers>=5.17,<6",
    "tokenizers>=0.22,<1",
    "renderers>=0.1.12,<0.2",
    "openai>=2,<4",  # renderers brings it
    "httpx>=0.27,<1",  # renderers imports it too, without requiring it
    "pydantic>=2.9,<3",
    "hydra-core>=1.3.2,<1.4",
    "omegaconf>=2.3,<2.4",
    "PyYAML>=6,<7",
    "packaging>=24,<27",  # the doctor; transformers brings it
    "safetensors>=0.6,<1",
    "huggingface-hub>=1,<2",  # transformers brings it
    "numpy>=2,<3",
    "rich>=13.7,<16",
    "matplotlib>=3.9,<4",
    "pillow>=10,<14",  # images in messages; matplotlib brings it
    "sqlglot>=27,<31",
    "bm25s>=0.3,<1",
    "fastapi>=0.115,<1",  # the viewer
    "uvicorn>=0.30,<1",
    "h11>=0.14,<1",  # uvicorn brings it
]

DATA = ["datasets>=4,<6", "pyarrow>=18,<27"]

# Frameworks whose environments run through mtrl/environments/adapters. Light ones come with the tests.
GYMNASIUM = ["gymnasium>=1,<2"]
SKYRL_GYM = ["skyrl-gym>=0.4,<0.5"]
SEARCH = ["faiss-cpu>=1.8,<2"]  # dense retrieval
AWS = ["boto3>=1.40,<2", "botocore>=1.40,<2"]
SWE = ["mini-swe-agent>=2.4,<3"]  # Docker and Podman containers; the sandbox of its own needs no extra

RAY = ["ray>=2.60,<2.61"]
LORA = ["peft>=0.21,<1"]
GGUF = ["gguf>=0.17,<1", "accelerate>=1.1,<2"]  # Transformers reads GGUF files with them
# Launchers that run the jobs of a sweep side by side, and what proposes them.
SWEEP = ["hydra-joblib-launcher>=1.2,<2", "hydra-submitit-launcher>=1.2,<2", "optuna>=5,<6"]

# What the examples of agents are written with (examples/agents).
LITELLM = ["litellm[mcp]>=1.80,<2"]  # it imports mcp as soon as a request has tools
MCP = ["mcp>=2.3,<3", "anyio>=4,<5"]  # mcp brings anyio
LANGCHAIN = ["langchain>=1,<2", "langchain-openai>=1,<2"]
PYDANTIC_AI = ["pydantic-ai-slim[openai]>=2.68,<3"]
SMOLAGENTS = ["smolagents[openai]>=1.26,<2"]

NOTEBOOKS = ["nbclient>=0.10,<1", "nbformat>=5.10,<6", "ipykernel>=6.29,<8"]
DOCS = ["mkdocs-material>=9.6,<10"]  # python scripts/build_docs.py

MLFLOW = ["mlflow>=3.10,<4"]
WANDB = ["wandb>=0.20,<1"]
TENSORBOARD = ["tensorboard>=2.18,<3"]

EXTRAS = {
    "data": DATA,  # parquet files and the Hugging Face Hub
    "vllm": ["vllm>=0.32,<0.34"],
    "sglang": ["sglang>=0.5.23,<0.6"],
    "ray": RAY,  # rollout workers
    "lora": LORA,
    "gguf": GGUF,
    "wandb": WANDB,
    "mlflow": MLFLOW,
    "tensorboard": TENSORBOARD,
    "search": SEARCH,
    "swe": SWE,
    "sweep": SWEEP,
    "litellm": LITELLM,
    "mcp": MCP,
    "langchain": LANGCHAIN,
    "pydantic-ai": PYDANTIC_AI,
    "smolagents": SMOLAGENTS,
    "strands": ["strands-agents[openai]>=1.60,<2"],
    "notebooks": NOTEBOOKS,
    "docs": DOCS,
    "sagemaker": ["sagemaker>=3,<4", *AWS],
    "gymnasium": GYMNASIUM,
    "skyrl-gym": SKYRL_GYM,
    "openenv": ["openenv>=0.10,<0.11"],
    "tinker": ["tinker-cookbook>=0.5,<0.7"],
    "verifiers": ["verifiers>=0.2,<0.4"],  # 0.4 has no MultiTurnEnv any more
    "dev": [  # and what is in requirements/dev.bare
        *DATA,
        *GYMNASIUM,
        *SKYRL_GYM,
        *SEARCH,
        *SWE,
        *AWS,
        *RAY,
        *LORA,
        *GGUF,
        *SWEEP,
        *LITELLM,
        *MCP,
        *LANGCHAIN,
        *PYDANTIC_AI,
        *SMOLAGENTS,
        *NOTEBOOKS,
        *DOCS,
        "anthropic>=2,<3",  # a client of the gateway
        "moto>=5,<6",  # what SageMaker would receive
        *MLFLOW,
        *WANDB,
        *TENSORBOARD,
        "playwright>=1.50,<2",  # drives the browser that scripts/install_browser.sh installs
        "pytest>=9,<9.2",  # under 9.2 pytest-xdist 3.8 cannot keep the tests of a group together
        "pytest-xdist>=3.6,<4",
        "hypothesis>=6.100,<7",
        "ruff>=0.17,<0.18",  # the formatter's style changes between minor versions
        "mypy>=2,<3",
        "pre-commit>=4,<5",
        "jsonschema>=4,<5",  # what engines are asked, against their own schemas
        "setuptools>=77",  # a test builds the wheel
    ],
}

# The command, and what engines find by themselves in their own environments, inert elsewhere.
ENTRY_POINTS = {
    "console_scripts": ["mtrl = mtrl.cli.command:main"],
    "vllm.general_plugins": ["mtrl = mtrl.engines.vllm.plugin:register"],
    "sglang.srt.platforms": ["mtrl_cpu = mtrl.engines.sglang.platform:activate"],
}

setup(
    name="mtrl-agents",  # `mtrl` on the package index is another project; the import name stays
    version=VERSION,
    description="Reinforcement learning for language-model agents that act over many turns",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["mtrl", "mtrl.*", "envs", "envs.*", "conf"]),
        *find_namespace_packages(include=["hydra_plugins"]),  # which Hydra's own plugins share
    ],
    package_data={
        "conf": ["**/*.yaml"],
        "mtrl": ["view/static/*", "doctor/*.yaml"],
        "envs": ["**/*.md", "**/*.json", "terminal/tasks/**"],
    },
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    entry_points=ENTRY_POINTS,
)
