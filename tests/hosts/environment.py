"""Makes the environment that a host is tested in: `python tests/hosts/environment.py HOST FOLDER`.

The environment also sees the packages of the Python that runs this script, such as PyTorch; its own
packages come first. requirements/HOST.txt is a requirements file of pip with two special comments,
constraints/HOST.txt names the exact versions of these packages and of what they need.
"alone" installs a package without its dependencies. "without torch" leaves out PyTorch, torchvision
and the like: their wheels are built for CUDA and cannot be imported beside PyTorch for CPUs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# llama.cpp for processors of any kind, without vision models. llama_cpp.cmake says the rest.
LLAMA_CPP = (
    "-DLLAVA_BUILD=OFF -DGGML_NATIVE=OFF"
    f" -DCMAKE_PROJECT_llama_cpp_INCLUDE={Path(__file__).with_name('llama_cpp.cmake').resolve()}"
)
REQUIRED = """
from importlib.metadata import requires
for line in requires({!r}):
    if "extra ==" not in line and not line.startswith("torch"):
        print(line)
"""


def make(host: str, folder: Path) -> None:
    """Makes the environment of `host` in `folder`."""
    venv.create(folder, clear=True, with_pip=False)
    python = folder / "bin" / "python"
    [packages] = folder.glob("lib/python*/site-packages")
    own = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "shared.pth").write_text("\n".join(own))
    os.environ["CMAKE_ARGS"] = LLAMA_CPP
    os.environ["PIP_CONSTRAINT"] = str(ROOT / "constraints" / f"{host}.txt")

    def uv(*arguments: str | Path) -> str:
        command = [sys.executable, ROOT / "tools" / "uv.py", "pip", *arguments]
        return subprocess.check_output([*command, "--quiet", "--python", python], text=True)

    def install(packages: list[str], *options: str) -> None:
        if packages:
            uv("install", "--no-deps", *options, *packages)

    lines = (Path(__file__).parent / "requirements" / f"{host}.txt").read_text().splitlines()
    listed = [line.partition("#") for line in lines if line and not line.startswith("#")]
    alone = [package.strip() for package, _, remark in listed if remark]
    others = [package.strip() for package, _, remark in listed if not remark]
    if sys.platform == "linux" and not version("torch").endswith("+cpu"):
        release = version("torch").partition("+")[0]
        install([f"torch=={release}+cpu"], "--extra-index-url", TORCH_INDEX)
    install(alone)
    for package, _, remark in listed:
        if remark.strip() == "without torch":
            [name, *_] = re.split(r"[^\w.-]", package)
            source = REQUIRED.format(name)
            others += subprocess.check_output([python, "-c", source], text=True).splitlines()
    wanted, torch = folder / "wanted.txt", folder / "torch.txt"
    wanted.write_text("\n".join(others))
    torch.write_text("torch\ntorchaudio\ntorchvision\n")  # for a CPU it needs less than the others
    pins = uv("compile", wanted, "--excludes", torch, "--no-annotate", "--no-header").splitlines()
    install([pin for pin in pins if not is_shared(*pin.split("=="))])


def is_shared(name: str, release: str) -> bool:
    try:
        return version(name).partition("+")[0] == release
    except PackageNotFoundError:
        return False


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
