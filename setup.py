"""Packages of a wheel: megatron_llama, and ``megatron_llama.share`` with files from the root of the checkout.

Programs read the shared files by path (megatron_llama/system/programs.py). Their names are in pyproject.toml, with the
rest of the build configuration.
"""

from pathlib import Path

from setuptools import find_packages, setup

SHARE = "megatron_llama.share"

setup(
    script_name="setup.py",  # not a module of the package whose folder it is in
    packages=[*find_packages(str(Path(__file__).resolve().parent), include=["megatron_llama*"]), SHARE],
    package_dir={SHARE: "."},
)
