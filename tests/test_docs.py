"""The documents: commands and links exist, examples run, and the prose is short."""

from __future__ import annotations

import doctest
import importlib
import re
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import transformers
import typer

import skipdecode
from skipdecode.cli.main import app
from skipdecode.data.tasks import TASKS
from skipdecode.model.cache_name import CACHE

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "skipdecode"
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES += [ROOT / "results" / "reproduce.md"]
DOCUMENTS = [*PAGES, PACKAGE / "demo" / "README.md", *ROOT.glob("experiments/README.md")]
COMMANDS = [*DOCUMENTS, ROOT / "Makefile", *sorted(ROOT.glob("recipes/*.sh"))]
COMMAND: Any = typer.main.get_command(app)
VERBS: dict[str, set[str]] = {
    name: {option for parameter in verb.params for option in [*parameter.opts, *parameter.secondary_opts]} | {"--help"}
    for name, verb in COMMAND.commands.items()
}
#: Options of vLLM that documents pass to ``serve``.
VLLM = set("--port --dtype --max-num-seqs --api-key --additional-config".split())


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(path: Path) -> list[str]:
    """The sentences of a page, without code, tables and headings. Lists count as sentences of their own."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(#|\||    |>|!\[|\d+ test inputs|AMD EPYC).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "").replace("*", "")
    blocks = re.split(r"\n\s*\n|\n(?=- |\d\. )", text)
    sentences = [part for block in blocks for part in re.split(r"(?<=[.!?:;])\s+", " ".join(block.split()))]
    return [sentence for sentence in sentences if len(sentence.split()) > 1]


def test_the_documents_are_short() -> None:
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in PAGES)
    assert words <= 15_300


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_sentences_are_short(page: Path) -> None:
    lengths = {sentence: len(sentence.split()) for sentence in prose(page)}
    assert {sentence: length for sentence, length in lengths.items() if length > 25} == {}
    assert mean(lengths.values()) <= 15


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_files_and_links_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:src|tests|tools|recipes|experiments|benchmarks|docs|results)/[\w./-]*\w)", text):
        assert (ROOT / path).exists(), path
    packages = "cli|web|training|evaluation|serving|latency|generation|hub|loading|data|model"
    for path in re.findall(rf"`((?:{packages})/\w+\.py)`", text):
        assert (PACKAGE / path).exists(), path
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert link.startswith("https://") or (document.parent / link).exists(), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_headings_of_links_exist(document: Path) -> None:
    for link, heading in re.findall(r"\]\(([^)#]*\.md)?#([^)]+)\)", document.read_text(encoding="utf-8")):
        target = document.parent / link if link else document
        headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        assert heading in {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in headings}, heading


@pytest.mark.parametrize("document", COMMANDS, ids=name_of)
def test_commands_have_their_verbs_and_options(document: Path) -> None:
    text = document.read_text(encoding="utf-8").replace("\\\n", " ").replace('"$skipdecode"', "skipdecode")
    for verb, rest in re.findall(r"(?:^|[\s`/])skipdecode ([a-z]+)\b([^\n`|;>]*)", text, re.MULTILINE):
        if verb not in VERBS:  # prose
            assert "--" not in rest, f"skipdecode {verb}{rest}"
            continue
        words = takewhile(lambda word: word != "#", rest.split())
        options = {word.partition("=")[0] for word in words if re.match("--[a-z]", word)}
        assert options <= VERBS[verb] | (VLLM if verb == "serve" else set()), f"skipdecode {verb}{rest}"


def for_this_release(code: str) -> str:
    """Documents name the cache argument as the newest transformers does."""
    return re.sub(r"\bcache=", f"{CACHE}=", code)


@pytest.mark.slow
@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if "```python" in path.read_text(encoding="utf-8")], ids=name_of
)
def test_python_in_documents_runs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one document in their order, with short outputs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(TASKS, "e2e", replace(TASKS["e2e"], max_new_tokens=8))
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        exec(compile(for_this_release(block), str(document), "exec"), names)


class Checker(doctest.OutputChecker):
    """An example without output may return anything."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@pytest.mark.parametrize(
    "module", [path for path in sorted(PACKAGE.rglob("*.py")) if ">>>" in path.read_text(encoding="utf-8")], ids=name_of
)
def test_examples_in_docstrings_run(module: Path) -> None:
    """With the demo model, its tokenizer and a prompt."""
    name = ".".join(module.relative_to(PACKAGE.parent).with_suffix("").parts)
    model, tokenizer = skipdecode.load("demo")
    prompts = ["name Aromi, food English ->"]
    names: dict[str, Any] = {"model": model, "tokenizer": tokenizer, "prompts": prompts}
    names |= {"inputs": tokenizer(prompts, return_tensors="pt", return_token_type_ids=False)}
    names |= {"skipdecode": skipdecode, "pipeline": transformers.pipeline}
    names |= {public: getattr(skipdecode, public) for public in skipdecode.__all__}
    tests = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name), extraglobs=names)
    runner, printed = doctest.DocTestRunner(Checker(), verbose=False), list[str]()
    for test in tests:
        for example in test.examples:
            example.source = for_this_release(example.source)
        runner.run(test, out=printed.append)
    assert runner.tries > 0
    assert not runner.failures, "".join(printed)
