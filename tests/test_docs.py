"""What the documents say is so: files, tests, commands and options exist, Python examples run."""

from __future__ import annotations

import doctest
import importlib
import re
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
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
DOCUMENTS = [*sorted(ROOT.glob("docs/*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
DOCUMENTS += [ROOT / "results" / "README.md", PACKAGE / "demo" / "README.md"]
#: Where commands stand: in documents, help texts and scripts.
COMMANDS = [*DOCUMENTS, ROOT / "Makefile", *sorted(ROOT.glob("recipes/*.sh"))]
COMMANDS += sorted(ROOT.glob("tests/golden/help-*.txt"))
COMMAND: Any = typer.main.get_command(app)
VERBS: dict[str, set[str]] = {
    name: {option for parameter in verb.params for option in [*parameter.opts, *parameter.secondary_opts]} | {"--help"}
    for name, verb in COMMAND.commands.items()
}
#: Options of other programs that documents name: vLLM, uvx, pytest, `make torture`, lm-evaluation-harness, and
#: benchmarks/peers.
VLLM = set("--port --dtype --max-num-seqs --max-model-len --api-key --enforce-eager --served-model-name".split())
VLLM |= set("--enable-per-request-metrics --additional-config --kv-sharing-fast-prefill --hf-overrides".split())
VLLM |= set("--reasoning-parser --tool-call-parser".split())
VLLM |= set("--disable-hybrid-kv-cache-manager --kv-offloading-size --enable-return-routed-experts".split())
VLLM |= set("--api-server-count --headless --grpc --shutdown-timeout --compilation-config --data-parallel-size".split())
OTHERS = set(
    "--from --update-golden --seconds --include --tasks --model --together --precision --work --environments".split()
)
OTHERS |= set(
    "--rounds --ways --smoke --forms --serving --servers --kv-gib --from --engine".split()
)  # benchmarks/serving
OTHERS |= VLLM | set("--gguf --pruned --family --width --vocab --count".split())  # frontier.py and faster.py
OTHERS |= set("--questions --posts --summaries".split())  # recipes/prompts.py


def name_of(path: Path) -> str:
    """The path from the repository's root, as a test's id."""
    return str(path.relative_to(ROOT))


def test_every_test_that_reliability_names_is_there() -> None:
    """docs/reliability.md names tests as ``file::name``; each exists."""
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)::(\w+)`", text))
    assert len(named) > 30
    for file, name in named:
        source = (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8")
        assert re.search(rf"^(?:def |class )?{name}\b", source, re.MULTILINE), f"{file}::{name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_files_that_documents_name_are_there(document: Path) -> None:
    """Paths from the root, paths within the package, and links to other documents."""
    text = document.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:src|tests|tools|recipes)/[\w./-]*\w)", text):
        assert path.endswith("NAME.py") or (ROOT / path).exists(), path
    for path in re.findall(
        r"`((?:core|planning|weights|data|generation|methods|serving|clock|training|evaluation|cli)/[\w/]+\.py)`", text
    ):
        assert path.endswith("NAME.py") or (PACKAGE / path).exists(), path
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert link.startswith("https://") or (document.parent / link).exists(), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_headings_that_links_point_to_are_there(document: Path) -> None:
    """``other.md#heading``, in the form that forges give it."""
    for link, heading in re.findall(r"\]\(([^)#]*\.md)?#([^)]+)\)", document.read_text(encoding="utf-8")):
        target = document.parent / link if link else document
        headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        assert heading in {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in headings}, (link, heading)


@pytest.mark.parametrize("document", COMMANDS, ids=name_of)
def test_commands_have_their_verbs_and_options(document: Path) -> None:
    """Of every ``skipdecode VERB …``; and every option that a document names alone is some verb's."""
    text = document.read_text(encoding="utf-8").replace("\\\n", " ").replace('"$skipdecode"', "skipdecode")
    for verb, rest in re.findall(r"(?:^|[\s`/])skipdecode ([a-z]+)\b([^\n`|;>]*)", text, re.MULTILINE):
        if verb not in VERBS:  # prose
            assert "--" not in rest, f"skipdecode {verb}{rest}"
            continue
        words = takewhile(lambda word: word != "#", rest.split())
        options = {word.partition("=")[0] for word in words if re.match("--[a-z]", word)}
        assert options <= VERBS[verb] | (VLLM if verb == "serve" else set()), f"skipdecode {verb}{rest}"
    if document.suffix == ".md":
        known = OTHERS.union(*VERBS.values())
        code = " ".join(re.findall(r"`([^`\n]+)`", text))
        named = {name for name in re.findall(r"(?<!\S)--[a-z][\w-]+", code) if "_" not in name}  # lm_eval's have one
        assert named <= known


def for_this_release(code: str) -> str:
    """Documents call the argument of a cache as the newest transformers does."""
    return re.sub(r"\bcache=", f"{CACHE}=", code)


@pytest.mark.slow
@pytest.mark.parametrize(
    "document",
    [path for path in DOCUMENTS if "```python" in path.read_text(encoding="utf-8") and path.name != "training.md"],
    ids=name_of,
)
def test_python_in_documents_runs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one document in their order; ``e2e`` has few rows, short texts. (training.md: test_train_refusals.)"""
    rows = (ROOT / "tests" / "data" / "e2e_32.csv").read_text(encoding="utf-8").splitlines(keepends=True)[:8]
    (tmp_path / "e2e").mkdir()
    for name in ("trainset.csv", "devset.csv", "testset_w_refs.csv"):
        (tmp_path / "e2e" / name).write_text("".join(rows), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(TASKS, "e2e", replace(TASKS["e2e"], max_new_tokens=8))
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        exec(compile(for_this_release(block), str(document), "exec"), names)


class Checker(doctest.OutputChecker):
    """An example that shows no output may return anything."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        """Whether it wrote what it should."""
        return not want or super().check_output(want, got, optionflags)


@pytest.mark.parametrize(
    "module", [path for path in sorted(PACKAGE.rglob("*.py")) if ">>>" in path.read_text(encoding="utf-8")], ids=name_of
)
def test_examples_in_docstrings_run(module: Path) -> None:
    """With the embedded model, its tokenizer and a prompt at hand."""
    name = ".".join(module.relative_to(PACKAGE.parent).with_suffix("").parts)
    model, tokenizer = skipdecode.load("demo")
    prompts = ["name Aromi, food English ->"]
    names: dict[str, Any] = {"model": model, "tokenizer": tokenizer, "prompts": prompts}
    names |= {"inputs": tokenizer(prompts, return_tensors="pt", return_token_type_ids=False)}
    names |= {"skipdecode": skipdecode, "pipeline": transformers.pipeline}
    names |= {public: getattr(skipdecode, public) for public in skipdecode.__all__}
    source = importlib.import_module(name)
    tests = doctest.DocTestFinder(exclude_empty=True).find(source, extraglobs=names)
    runner, said = doctest.DocTestRunner(Checker(), verbose=False), list[str]()
    for test in tests:
        for example in test.examples:
            example.source = for_this_release(example.source)
        runner.run(test, out=said.append)
    assert runner.tries > 0
    assert not runner.failures, "".join(said)
