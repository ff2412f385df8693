"""Packaging: what mtrl needs, and the extras that bring the rest."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "mtrl" / "__init__.py").read_text(encoding="utf-8"))[1]

# Kept light: what a run on the embedded defaults imports, and nothing else.
REQUIRES = [
    "torch>=2.9,<3",  # 2.9 brought torch.optim.Muon, which the warm start uses
    "transformers>=5,<6",
    "tokenizers>=0.22,<1",
    "renderers>=0.1.12,<0.2",
    "httpx>=0.27,<1",  # renderers imports it too, without requiring it
    "pydantic>=2.9,<3",
    "hydra-core>=1.3.2,<1.4",
    "omegaconf>=2.3,<2.4",
    "PyYAML>=6,<7",
    "safetensors>=0.6,<1",
    "huggingface-hub>=1,<2",  # transformers brings it
    "numpy>=2,<3",
    "rich>=13.7,<16",
    "matplotlib>=3.9,<4",
    "sqlglot>=27,<31",
    "bm25s>=0.3,<1",
    "fastapi>=0.115,<1",  # the viewer
    "uvicorn>=0.30,<1",
]

DATA = ["datasets>=4,<6", "pyarrow>=18,<27"]

# Frameworks whose environments run through mtrl/environments/adapters. Light ones come with the tests.
GYMNASIUM = ["gymnasium>=1,<2"]
SKYRL_GYM = ["skyrl-gym>=0.4,<0.5"]
SEARCH = ["faiss-cpu>=1.8,<2"]  # dense retrieval
AWS = ["boto3>=1.40,<2", "botocore>=1.40,<2"]
SWE = ["mini-swe-agent>=2.4,<3"]  # Docker and Podman containers; the sandbox of its own needs no extra

LORA = ["peft>=0.21,<1"]

MLFLOW = ["mlflow>=3.10,<4"]
WANDB = ["wandb>=0.20,<1"]
TENSORBOARD = ["tensorboard>=2.18,<3"]

EXTRAS = {
    "data": DATA,  # parquet files and the Hugging Face Hub
    "vllm": ["vllm>=0.32,<0.34"],
    "sglang": ["sglang>=0.5.23,<0.6"],
    "lora": LORA,
    "wandb": WANDB,
    "mlflow": MLFLOW,
    "tensorboard": TENSORBOARD,
    "search": SEARCH,
    "swe": SWE,
    "sagemaker": ["sagemaker>=3,<4", *AWS],
    "gymnasium": GYMNASIUM,
    "skyrl-gym": SKYRL_GYM,
    "openenv": ["openenv>=0.10,<0.11"],
    "tinker": ["tinker-cookbook>=0.5,<0.7"],
    "verifiers": ["verifiers>=0.2,<0.4"],  # 0.4 has no MultiTurnEnv any more
    "dev": [
        *DATA,
        *GYMNASIUM,
        *SKYRL_GYM,
        *SEARCH,
        *SWE,
        *AWS,
        *LORA,
        *MLFLOW,
        *WANDB,
        *TENSORBOARD,
        "playwright>=1.50,<2",  # drives the browser that scripts/install_browser.sh installs
        "pytest>=9,<10",
        "pytest-xdist>=3.6,<4",
        "hypothesis>=6.100,<7",
        "ruff>=0.17,<0.18",  # the formatter's style changes between minor versions
        "mypy>=2,<3",
        "pre-commit>=4,<5",
        "jsonschema>=4,<5",  # what engines are asked, against their own schemas
        "setuptools>=77",  # a test builds the wheel
    ],
}

# What engines find by themselves in their own environments; inert elsewhere.
ENTRY_POINTS = {
    "vllm.general_plugins": ["mtrl = mtrl.generator.engines.vllm.plugin:register"],
    "sglang.srt.platforms": ["mtrl_cpu = mtrl.generator.engines.sglang.platform:activate"],
}

setup(
    name="mtrl",
    version=VERSION,
    description="Reinforcement learning for language-model agents that act over many turns",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["mtrl", "mtrl.*", "envs", "envs.*", "conf"]),
    package_data={"conf": ["**/*.yaml"], "mtrl": ["view/static/*"], "envs": ["**/*.md", "**/*.json"]},
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    entry_points=ENTRY_POINTS,
)
