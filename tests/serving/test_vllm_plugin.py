"""vLLM's plugin where nobody asks for fastdraft, and the options that ask for it."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fastdraft.serving.vllm
from fastdraft.errors import InvalidValueError
from fastdraft.serving.host import KEY_VARIABLE
from fastdraft.serving.ledger import FOLDER_VARIABLE
from fastdraft.serving.vllm import Settings, plugin
from fastdraft.serving.vllm.method import configure
from fastdraft.serving.vllm.plugin import Options
from programs import run_python

FOLDER = Path(fastdraft.serving.vllm.__file__).parent
PUBLIC = {"args.middleware"}  # an option of vLLM's command line

LOADED = """
import importlib.metadata, sys
before = set(sys.modules)
for each in importlib.metadata.entry_points(group="vllm.general_plugins", name="fastdraft"):
    each.load()()
print(*sorted(set(sys.modules) - before - set(sys.stdlib_module_names)))
"""

LATE_HOST = """
class Host:
    def add(self, value):
        return value + 1

def double(value):
    return 2 * value
"""

IMPORTED_LATER = """
import sys
from fastdraft.serving.vllm import plugin
sys.path.insert(0, sys.argv[1])
plugin._put({"late_host:Host.add": lambda add, self, value: 10 * add(self, value),
             "late_host:double": lambda double, value: -double(value),
             "late_host:gone": None})
assert "late_host" not in sys.modules
from late_host import Host, double
import late_host
assert (Host().add(1), double(3)) == (20, -6), (Host().add(1), double(3))
plugin._put({"late_host:double": lambda double, value: None})
assert late_host.double(3) == -6
"""


def test_loaded_and_not_asked_for_it_imports_next_to_nothing() -> None:
    """vLLM loads it in every process of everybody who has installed fastdraft."""
    modules = (name for name in run_python(LOADED).split() if not name.startswith("_sysconfig"))
    others = {name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names}
    assert others == {
        "fastdraft",
        "fastdraft.serving",
        "fastdraft.serving.vllm",
        "fastdraft.serving.vllm.interface",
        "fastdraft.serving.vllm.plugin",
    }


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def read_untyped(file: Path) -> set[str]:
    """The attributes that are read of parameters annotated as `Any`."""
    found = set()
    for function in ast.walk(ast.parse(file.read_text())):
        if isinstance(function, ast.FunctionDef):
            given = [*function.args.args, *function.args.kwonlyargs]
            untyped = {each.arg for each in given if ast.unparse(each.annotation or each) == "Any"}
            read = (node for node in ast.walk(function) if isinstance(node, ast.Attribute))
            found |= {ast.unparse(node) for node in read if ast.unparse(node.value) in untyped}
    return found


def test_all_names_of_vllm_stand_in_the_interfaces() -> None:
    """Nothing else imports vLLM, and what it passes has a type. V1 can be deleted as it stands."""
    files = [*FOLDER.rglob("*.py")]
    assert len(files) > 15
    for file in files:
        used = imports(file)
        if file.name != "interface.py":
            assert not {name for name in used if name.partition(".")[0] == "vllm"}, file
            assert read_untyped(file) <= PUBLIC, file
        if file.parent.name != "v1" and file not in (FOLDER / "hooks.py", FOLDER / "__init__.py"):
            assert not {name for name in used if ".vllm.v1" in name}, file


def test_modules_are_hooked_when_they_are_imported(tmp_path: Path) -> None:
    (tmp_path / "late_host.py").write_text(LATE_HOST)
    run_python(IMPORTED_LATER, tmp_path)


def test_options_change_no_hash_and_arrive_whole() -> None:
    """vLLM hashes its additional configuration as JSON for what it compiles."""
    given = {"memory_bytes": 1 << 20, "shared_namespaces": ["a"]}
    configs = [
        {"other": 1, "fastdraft": Options(each, chooses_lengths=bool(each))} for each in (given, {})
    ]
    assert len({json.dumps(config, sort_keys=True) for config in configs}) == 1
    for copied in (pickle.loads(pickle.dumps(configs[0])), copy.deepcopy(configs[0])):
        assert isinstance(copied["fastdraft"], Options)
        assert copied["fastdraft"].chooses_lengths
        settings = Settings.of(SimpleNamespace(additional_config=copied))
        assert (settings.memory_bytes, settings.shared_namespaces) == (1 << 20, ["a"])
    assert "memory_bytes" in repr(configs[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_bytes": 3}, "max_bytes must be enough for a request, got 3"),
        ({"token_cost": "cheap"}, "token_cost must be a finite number"),
        ({"memory_url": "/memory"}, f"needs a key in the environment's {KEY_VARIABLE}"),
    ],
)
def test_wrong_options_end_the_start_before_a_worker_begins(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "none")
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    args = SimpleNamespace(
        additional_config={},
        attention_config=None,
        spec_tokens=None,
        speculative_config={"method": "fastdraft", **options},
    )
    with pytest.raises(InvalidValueError, match=message):
        configure(args, None)


@pytest.mark.parametrize(("variable", "added"), [(None, True), ("0", True), ("1", False)])
def test_the_frontend_in_rust_gets_no_middleware(
    variable: str | None, added: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not start with any."""
    monkeypatch.delenv("VLLM_USE_RUST_FRONTEND", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", variable)
    args = SimpleNamespace(middleware=[], speculative_config={"method": "fastdraft"})
    plugin._add_front(lambda _, given: given, None, args)
    assert bool(args.middleware) == added
