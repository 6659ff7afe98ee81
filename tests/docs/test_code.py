"""The code on the pages runs as pasted; its commands and targets exist."""

from __future__ import annotations

import ast
import json
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import fastdraft.hf  # noqa: F401  -- before the first test, or the clock of tests does not reach it
from fastdraft.cli.app import app
from pages import PAGES, ROOT, Block, blocks

# A remark before a block that is not run says why, or which test runs it.
REMARK = re.compile(r"not run(?: on this page)?: \S.*|runs in (?P<test>[\w/]+\.py): \S.*")
# fastdraft.py is a file's name.
EXTENSIONS = (".py", ".h", ".c")
MAKEFILES = [ROOT / "Makefile", ROOT / "tests" / "hosts" / "hosts.mk"]


def id_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def compile_block(block: Block) -> None:
    """Compiles it, be it lines from the middle of a file."""
    source = textwrap.dedent(block.code)
    if re.match(r'"\w+": ', source):  # an entry of a dictionary
        source = f"{{{source}}}"
    ast.parse(source)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python", "py")], ids=id_of
)
def test_python_runs_as_pasted(
    page: Path,
    short_demo_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """In the page's order and in one namespace, as in a notebook."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTDRAFT_CACHE", str(short_demo_cache))
    names: dict[str, object] = {"__name__": "__main__"}
    run, others = 0, []
    for block in blocks(page, "python", "py"):
        assert block.language == "python"
        if block.remark:
            remark = REMARK.fullmatch(block.remark)
            assert remark, f"{block}: {block.remark!r} is no reason not to run it"
            assert remark["test"] is None or (ROOT / remark["test"]).exists(), str(block)
            compile_block(block)
            others.append(f"{block} {block.remark}")
            continue
        # As many lines before it as on the page, so that a traceback names the line.
        source = "\n" * (block.line - 1) + block.code
        exec(compile(source, str(page), "exec", dont_inherit=True), names)
        run += 1
    record_property("blocks run", run)
    record_property("blocks not run", others)


def commands(page: Path) -> Iterator[tuple[Block, list[str]]]:
    """The commands in the page's shell blocks, without what stands before them or pipes them."""
    for block in blocks(page, "bash", "sh", "console"):
        if block.remark:
            assert REMARK.fullmatch(block.remark), str(block)
            continue
        command: list[str] = []
        for token in _tokens(block.code):
            if token in (";", "&&", "||", "|"):
                while command and re.match(r"\w+=", command[0]):
                    del command[0]
                if command:
                    yield block, command
                command = []
            else:
                command.append(token)


def _tokens(code: str) -> list[str]:
    """The tokens of shell code, with ; at the end of each line."""
    tokens: list[str] = []
    pending = ""
    for line in code.replace("\\\n", " ").splitlines():
        pending += line + "\n"
        lexer = shlex.shlex(pending, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        try:
            found = list(lexer)
        except ValueError:  # a quote that a later line closes
            continue
        tokens += [*found, ";"]
        pending = ""
    assert not pending, f"an open quote in {code!r}"
    return tokens


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_commands_parse(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `fastdraft ...` is parsed by the real command line, with any names for files."""
    monkeypatch.setattr(click.Path, "convert", lambda _self, value, *_: Path(value))
    parsed: list[str | None] = []
    monkeypatch.setattr(click.Command, "invoke", lambda self, _context: parsed.append(self.name))
    for block, (name, *arguments) in commands(page):
        if name == "fastdraft":
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, f"{block}: {arguments} {result.output}"
            assert parsed.pop()
        for argument in arguments:
            if argument.startswith("{"):
                json.loads(argument)


def test_vllm_is_tested_with_the_configuration_of_the_pages() -> None:
    guide = ROOT / "docs" / "guides" / "vllm.md"
    found = []
    for page in (ROOT / "README.md", guide):
        for _, command in commands(page):
            if "--speculative-config" in command:
                found.append(json.loads(command[command.index("--speculative-config") + 1]))
    tests = (ROOT / "tests" / "hosts" / "test_vllm_runners.py").read_text()
    for source in (tests, *(block.code for block in blocks(guide, "python"))):
        found += [
            ast.literal_eval(node)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Dict)
            and None not in node.keys
            and "'method': 'fastdraft'" in ast.unparse(node)
        ]
    assert all(each["method"] == "fastdraft" for each in found)
    assert found.count({"method": "fastdraft"}) == 5


def targets() -> set[str]:
    hosts = (ROOT / "tests" / "hosts" / "requirements").glob("*.txt")
    text = "".join(path.read_text() for path in MAKEFILES)
    return {*re.findall(r"^([a-z][a-z0-9-]*):", text, re.MULTILINE)} | {
        f"test-{host.stem}" for host in hosts
    }


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_make_targets_exist(page: Path) -> None:
    named = {
        argument
        for block, (name, *arguments) in commands(page)
        if name == "make"
        for argument in arguments
        if "=" not in argument
    }
    named |= set(re.findall(r"`make ([a-z0-9-]+)", page.read_text()))
    assert named <= targets()


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_names_exist(page: Path) -> None:
    """Every fastdraft.MODULE.NAME: the module is a file or a folder, in which the name occurs."""
    text = page.read_text()
    for dotted in set(re.findall(r"(?<![\w./])fastdraft(?:\.\w+)+(?![\w/])", text)):
        if dotted.endswith(EXTENSIONS):
            continue
        folder, (_, *names) = ROOT / "python" / "fastdraft", dotted.split(".")
        while names and (folder / names[0]).is_dir():
            folder /= names.pop(0)
        files = [folder / f"{names[0]}.py"] if names else []
        if files and files[0].exists():
            del names[0]
        else:
            files = [*folder.glob("*.py"), *folder.glob("*.pyi")]
        source = "".join(file.read_text() for file in files)
        assert all(re.search(rf"\b{name}\b", source) for name in names), dotted


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_extras_exist(page: Path) -> None:
    metadata = (ROOT / "pyproject.toml").read_text()
    for extras in re.findall(r"fastdraft\[([\w,]+)\]", page.read_text()):
        for extra in extras.split(","):
            assert re.search(rf"^{extra} = \[", metadata, re.MULTILINE), extra


def test_what_is_wrong_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\nA=1 fastdraft replay \\\n  --no-such-option | tail; make 'no\nthing' # x\n```\n"
        "<!-- not run: no reason -->\n```python\nx = (\n```\n"
    )
    found = [command for _, command in commands(page)]
    assert found == [
        ["fastdraft", "replay", "--no-such-option"],
        ["tail"],
        ["make", "no\nthing"],
    ]
    assert CliRunner().invoke(app, found[0][1:]).exit_code == 2
    (block,) = blocks(page, "python")
    assert (block.line, block.remark) == (8, "not run: no reason")
    with pytest.raises(SyntaxError):
        compile_block(block)
    assert not REMARK.fullmatch("not run") and "docs" in targets()
