"""make where something is missing, and two at once. The system's tools are stand-ins."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOSTS = ROOT / "tests" / "hosts" / "requirements"
TOOLS = (
    *("awk", "bash", "cat", "dirname", "echo", "env", "find", "flock", "grep", "ls", "make"),
    *("mkdir", "mv", "rm", "sed", "sh", "sleep", "touch", "tr", "true", "xargs"),
)
FOLDERS = ("csrc", "cmake", "python", "kernels", "tests/cpp", "bench/cpp", "examples/c")
REASON = "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 1 (apt-get)"

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, TOOLS)), reason="make, flock or another tool of Linux is missing"
)


class Machine:
    """A clone whose PATH holds the tools that are put there, and an environment that was made."""

    def __init__(self, folder: Path, user: int = 0) -> None:
        self.clone = folder / "clone"
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in TOOLS:
            (self.bin / name).symlink_to(str(shutil.which(name)))
        for name in ("constraints", "tools", *FOLDERS, "examples/cpp", "tests/hosts"):
            (self.clone / name).mkdir(parents=True)
        for name in ("Makefile", "tests/hosts/hosts.mk", "tools/build.txt", "constraints/main.txt"):
            shutil.copy(ROOT / name, self.clone / name)
        (self.clone / "tools" / "uv.py").touch()
        (self.clone / ".venv" / "bin").mkdir(parents=True)
        (self.clone / ".venv" / ".python").touch()
        self.log = folder / "log"
        self.log.touch()
        self.tool("id", f"echo {user}")
        self.tool("uname", "echo Linux")
        self.tool("python3", "exit 0")
        self.tool("apt-get", f'echo "$@" >> {self.log}')

    def tool(self, name: str, program: str) -> None:
        file = self.bin / name
        file.unlink(missing_ok=True)
        file.write_text(f"#!/bin/sh\n{program}\n")
        file.chmod(0o755)

    def start(self, *goals: str, **variables: str) -> subprocess.Popen[str]:
        environment = {"PATH": str(self.bin), "HOME": os.environ.get("HOME", "/"), **variables}
        return subprocess.Popen(
            ["make", *goals],
            cwd=self.clone,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run_ci(self, program: str) -> tuple[int, str]:
        """Runs .ci/run where make is `program`: returns its status, and what it printed."""
        for name in (".ci", "tests/hosts/requirements"):
            shutil.copytree(ROOT / name, self.clone / name)
        self.tool("make", f"for step; do :; done\n{program}")
        environment = {"PATH": str(self.bin), "HOME": os.environ.get("HOME", "/")}
        done = subprocess.run(
            [self.clone / ".ci" / "run"],
            cwd=self.clone,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    def make(self, *goals: str, **variables: str) -> tuple[bool, str]:
        """Returns whether it worked, and what it printed."""
        process = self.start(*goals, **variables)
        printed, _ = process.communicate()
        return process.returncode == 0, printed

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


MISSING = [
    ("gtest", "libgtest-dev", "GoogleTest for the C++ tests"),
    ("browser", "chromium", "a browser for the tests of pages"),
    (".venv/.tools", "g++", "a compiler for the C++ core"),
]


@pytest.mark.parametrize(("goal", "package", "purpose"), MISSING)
def test_a_failed_installation_is_no_success(
    tmp_path: Path, goal: str, package: str, purpose: str
) -> None:
    """The reason is shown, and the next make tries again."""
    machine = Machine(tmp_path)
    machine.tool("apt-get", f'echo "{REASON}" >&2; exit 100')
    worked, printed = machine.make(goal)
    assert not worked
    announced = printed.index(f"Installing {package} with apt-get: {purpose}\n")
    assert announced < printed.index(REASON)
    machine.tool("apt-get", f'echo "$@" >> {machine.log}')
    machine.tool("python", "exit 0")
    worked, _ = machine.make(goal)
    assert worked
    assert [call.split()[-1] for call in machine.calls] == ["update", package]


@pytest.mark.parametrize(("goal", "package", "purpose"), MISSING)
def test_who_may_not_install_reads_what_to_install(
    tmp_path: Path, goal: str, package: str, purpose: str
) -> None:
    machine = Machine(tmp_path, user=1000)
    worked, printed = machine.make(goal)
    assert not machine.calls
    if goal == ".venv/.tools":
        assert not worked
        assert f"Install what Debian and Ubuntu keep in {package}" in printed and purpose in printed
    else:  # CMake downloads GoogleTest; tests in a browser are skipped
        assert worked
        assert {"gtest": package, "browser": "tests of pages"}[goal] in printed


def test_nothing_is_installed_where_a_compiler_is(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.tool("c++", "exit 0")
    machine.tool("python", f'echo "$@, $PIP_CONSTRAINT" >> {machine.log}')
    worked, printed = machine.make(".venv/.tools")
    assert worked, printed
    uv, constraints = machine.clone / "tools" / "uv.py", machine.clone / "constraints" / "main.txt"
    assert machine.calls == [f"{uv} pip install -q -r tools/build.txt, {constraints}"]
    assert (machine.clone / ".venv" / ".tools").exists()


def test_a_failed_installation_leaves_no_stamp(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.tool("c++", "exit 0")
    machine.tool("python", "echo 'ERROR: No space left on device' >&2; exit 1")
    worked, printed = machine.make(".venv/.tools")
    assert not worked and "No space left on device" in printed
    assert not (machine.clone / ".venv" / ".tools").exists()


def test_pytorch_for_gpus_is_never_taken_on_a_machine_without_one(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.tool("python", f'echo "$@" >> {machine.log}; exit 1')
    worked, _ = machine.make(".venv/.torch")
    assert not worked
    looked, *installed = machine.calls
    assert "import torch" in looked and len(installed) == 2
    assert all(call.endswith("+cpu") for call in installed)
    assert not (machine.clone / ".venv" / ".torch").exists()


def test_packages_come_from_where_pip_is_configured_to_look(tmp_path: Path) -> None:
    """A variable wins, as with pip."""
    name, about = "fastdraft_none", "fastdraft_none-1.0.dist-info"
    (tmp_path / "found").mkdir()
    with zipfile.ZipFile(tmp_path / "found" / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    file = tmp_path / "pip.conf"
    links = f"{ROOT}/docs {tmp_path}/found"
    file.write_text(f"[global]\nfind-links = {links}\n[install]\nno-index = true\n")
    others = {key: value for key, value in os.environ.items() if key[:3] not in {"PIP", "UV_"}}
    for variables in ({"PIP_FIND_LINKS": f"{ROOT}/docs"}, {}):
        target = tmp_path / "target"
        done = subprocess.run(
            [sys.executable, ROOT / "tools" / "uv.py", "pip", "install", "--target", target, name],
            env=others | variables | {"PIP_CONFIG_FILE": str(file)},
            capture_output=True,
            check=False,
        )
        found = (target / f"{name}.py").exists()
        assert (done.returncode == 0) == found == (not variables), done.stderr


def test_the_second_make_waits_for_the_first(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    go_on = tmp_path / "go on"
    machine.tool(
        "apt-get",
        f"echo begin >> {machine.log}; until [ -e '{go_on}' ]; do sleep 0.01; done;"
        f"echo end >> {machine.log}",
    )
    first = machine.start("browser")
    while not machine.calls:
        time.sleep(0.01)
    second = machine.start("browser")
    assert second.stdout is not None
    assert "Another make works in this folder" in second.stdout.readline()
    assert machine.calls == ["begin"]
    go_on.touch()
    for process in (first, second):
        process.communicate()
        assert process.returncode == 0
    assert machine.calls == ["begin", "end"] * 4


def test_a_make_inside_another_does_not_wait(tmp_path: Path) -> None:
    """One that a step of .ci/run starts, say."""
    machine = Machine(tmp_path)
    machine.tool("chromium", "exit 0")
    folder = os.open(machine.clone, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        worked, printed = machine.make("browser", FASTDRAFT_LOCKED=str(machine.clone))
        assert worked, printed
        # A clone elsewhere is another one.
        process = machine.start("browser", FASTDRAFT_LOCKED=str(tmp_path))
        assert process.stdout is not None
        assert "waiting" in process.stdout.readline()
        fcntl.flock(folder, fcntl.LOCK_UN)
        process.communicate()
        assert process.returncode == 0
    finally:
        os.close(folder)


RECORD = """
for word; do case $word in -*) ;; *) goals="$goals $word" ;; esac; done
set -- $goals
case $1 in rest) echo test-slow test-vllm test-trl; exit ;; esac
echo "begin $*" >> {log}
echo "output of $1"
echo "end $1" >> {log}
"""


def test_ci_begins_with_the_commands_of_the_front_page(tmp_path: Path) -> None:
    """As they stand there, in the environment that it was started in."""
    machine = Machine(tmp_path)
    variables = "${JOBS:-}${OMP_NUM_THREADS:-}${DEMO:-}${FASTDRAFT_LOCKED:-}"
    program = f'echo "$@ with [{variables}]" >> {machine.log}\n' + RECORD.format(log=machine.log)
    code, printed = machine.run_ci(program)
    assert code == 0, printed
    front = (ROOT / "README.md").read_text("utf-8")
    for command, call in zip(("demo", "test"), (0, 3), strict=True):
        assert f"\nmake {command} " in front
        assert machine.calls[call] == f"{command} with []"
    begun = [call.removeprefix("begin ") for call in machine.calls if call.startswith("begin")]
    assert begun[2].startswith("setup")
    assert {*begun[3:]} == {"test-slow", "test-vllm", "test-trl", "lint", "package", "docs"}
    # Its tests' summary closes the output.
    assert printed.splitlines()[1:].index("output of test-slow") > len(printed.splitlines()) - 6


def test_what_the_quick_tests_leave_out_runs_every_host(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for folder in ("tests/hosts/requirements", "constraints"):
        shutil.copytree(ROOT / folder, machine.clone / folder, dirs_exist_ok=True)
    worked, printed = machine.make("--silent", "rest")
    assert worked, printed
    hosts = {f"test-{file.stem}" for file in HOSTS.glob("*.txt")}
    assert hosts | {"test-slow", "test-tsan", "test-compiled"} <= set(printed.split())
    assert len(printed.split()) == len(set(printed.split()))


@pytest.mark.parametrize("failing", ["demo", "test", "setup", "docs"])
def test_ci_ends_with_the_first_step_that_fails(tmp_path: Path, failing: str) -> None:
    machine = Machine(tmp_path)
    fail = f'for word; do [ "$word" != {failing} ] || {{ echo "no $word"; exit 1; }}; done\n'
    code, printed = machine.run_ci(fail + RECORD.format(log=machine.log))
    assert code != 0
    assert f"no {failing}" in printed
    begun = [call for call in machine.calls if call.startswith("begin")]
    if failing == "docs":
        assert printed.partition("::: A step failed:")[2].strip().startswith("::: make docs")
    else:
        assert len(begun) == ["demo", "test", "setup"].index(failing)
