"""Package metadata of megatron_rgpt. Exact versions for CI and the demo are in constraints.txt."""

from setuptools import find_packages, setup

setup(
    name="megatron_rgpt",
    version="0.1.0",
    description="Pretraining of recurrent-depth transformers (RecurrentGPT) at scale",
    packages=find_packages(include=["megatron_rgpt", "megatron_rgpt.*"]),
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.6,<2.15",
        "deepspeed>=0.19,<0.20",
        "numpy>=1.26,<3",
        "pydantic>=2,<3",
        "pyyaml>=6,<7",
        "safetensors>=0.5,<1",
        "sentencepiece>=0.2,<0.3",
        "tensorboard>=2.16,<3",
        "tiktoken>=0.9,<1",
    ],
    extras_require={
        "data": ["tokenizers>=0.20,<1", "zstandard>=0.22,<1"],
        "plots": ["matplotlib>=3.8,<4"],
        "hf": ["transformers>=4.57,<6"],
        "evaluate": ["accelerate>=1,<2", "lm-eval>=0.4.9,<0.5", "transformers>=4.57,<6"],
        "mpi": ["mpi4py>=4,<5"],
        "wandb": ["wandb>=0.17,<1"],
        "dev": ["hypothesis>=6,<7", "pytest>=8,<10", "ruff>=0.9,<1", "transformers>=4.57,<6"],
    },
)
