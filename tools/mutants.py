"""Which small faults in core, planning and generation would the tests not notice? Writes results/mutants.json.

A mutant is a file with one operator, constant, condition, return value or statement changed (strings, annotations,
decorators and messages are not). It is imported in a forked child, after torch and transformers are, and meets only
fast tests that reach the changed line, until one fails. Each survivor needs a reason in results/mutants.json.

    python tools/mutants.py [core/schedule.py …] [--jobs 2] [--minutes 60] [--again]

A run goes on where the last one stopped; a file whose code has changed since starts anew. ``--jobs`` tries so many at
once, ``--minutes`` ends the run after that time, ``--again`` tries only what survived, with more tests.
"""

from __future__ import annotations

import argparse
import ast
import gc
import hashlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest import mock

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "skipdecode"
RESULTS = ROOT / "results" / "mutants.json"
ENOUGH = 0.9  # of all mutants
# One family of each form; a third of the schedules; nothing that compiles, counts a million lengths or waits.
FORMS = "opt- or -opt or [opt or gpt-neo- or gpt-neo] or gemma3 or qwen3.5 or gemma4-shared"
FEW = f"({FORMS}) and not (post-norm or bottom or even or list or constant or top-to-1)"
FAST = f"(not (test_invariants or a_plain_generate) or {FEW}) and not (compiled or long_texts or nothing_is_kept)"
ROOMS = ("core", "planning", "generation")
#: Test files that the mutants meet.
TESTS = "definitions schedule fitting resolve planning checkpoint clock plan attach cache held stack refusals habits "
TESTS += "invariants jobs ways_in inputs generation finished_rows chat calibration cli"
MOST = 6.0  # seconds, as traced, of the tests that one mutant meets
AGAIN = 5  # times as many does one meet that has survived those
CALLS = 200  # of a function, in one test, by which is known what the test reaches
LIMIT = 5  # times as long as without it a mutant may take over its tests, and 20 seconds

_PAIRS = "Lt LtE, Gt GtE, Eq NotEq, In NotIn, Is IsNot, Add Sub, Mult Div, BitAnd BitOr, And Or".split(", ")
SWAPS: dict[str, str] = {a: b for pair in _PAIRS for a, b in (pair.split(), pair.split()[::-1])}
SWAPS |= {"FloorDiv": "Mult", "Mod": "Mult", "min": "max", "max": "min", "any": "all", "all": "any"}
_OPPOSITES = (ast.Eq, ast.NotEq, ast.In, ast.NotIn, ast.Is, ast.IsNot)
REMOVABLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Raise, ast.Delete, ast.Break, ast.Continue)


class Mutant(NamedTuple):
    """One change: ``after`` in the place of what stands in a field (at a place, if that is a list) of ``parent``."""

    file: str
    function: str
    line: int
    lines: frozenset[int]  # whose tests it meets; none: those of the whole file
    change: str
    parent: ast.AST
    field: str
    place: int | None
    after: ast.AST

    def swap(self, node: ast.AST) -> ast.AST:
        """Put ``node`` in the place, and return what stood there."""
        if self.place is None:
            before = getattr(self.parent, self.field)
            setattr(self.parent, self.field, node)
            return before
        before = getattr(self.parent, self.field)[self.place]
        getattr(self.parent, self.field)[self.place] = node
        return before


def variants(node: ast.AST, field: str) -> Iterator[ast.AST]:
    """What may stand in the place of ``node``."""
    if type(node).__name__ in SWAPS:
        yield getattr(ast, SWAPS[type(node).__name__])()
    elif isinstance(node, ast.Name) and node.id in SWAPS:
        yield ast.Name(SWAPS[node.id], ast.Load())
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield from (ast.Constant(node.value + 1), ast.Constant(node.value - 1))
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.BoolOp):
        for i in range(len(node.values)):
            rest = node.values[:i] + node.values[i + 1 :]
            yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
    elif isinstance(node, ast.Return) and not isinstance(node.value, (ast.Constant, type(None))):
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, REMOVABLE) and not getattr(node, "simple", False):
        yield ast.Pass()
    swapped = isinstance(node, ast.UnaryOp) or (isinstance(node, ast.Compare) and isinstance(node.ops[0], _OPPOSITES))
    if field in ("test", "ifs") and not swapped:
        yield ast.UnaryOp(ast.Not(), cast(ast.expr, node))


def mutants(file: str, tree: ast.Module) -> Iterator[Mutant]:
    """All mutants of a file."""

    def walk(parent: ast.AST, function: str, lines: frozenset[int]) -> Iterator[Mutant]:
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list", "exc"):
                continue
            for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
                text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                if not isinstance(node, ast.AST) or isinstance(node, ast.JoinedStr) or text:
                    continue
                name, here = function, lines
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    name = f"{function}.{node.name}".lstrip(".")
                    here = frozenset(range(node.lineno, (node.end_lineno or 0) + 1))
                    here = here if isinstance(node, ast.FunctionDef) else frozenset()
                elif isinstance(node, ast.stmt) and function and lines:
                    inner = getattr(node, "body", None)
                    here = frozenset(range(node.lineno, (inner[0].lineno if inner else (node.end_lineno or 0) + 1)))
                shown = node if isinstance(node, (ast.expr, ast.stmt)) and not isinstance(parent, ast.expr) else parent
                line = getattr(shown, "lineno", getattr(parent, "lineno", 0))
                for after in variants(node, field):
                    mutant = Mutant(file, name, line, here, "", parent, field, index, after)
                    before = ast.unparse(shown)
                    mutant.swap(after)
                    becomes = ast.unparse(shown if shown is parent else after)
                    mutant.swap(node)
                    yield mutant._replace(change=f"{before}  →  {becomes}")
                yield from walk(node, name, here)

    yield from walk(tree, "", frozenset())


class Reach:
    """A plugin of pytest: how long each test takes, and which lines of the package it reaches."""

    def __init__(self) -> None:
        self.most = MOST
        self.seconds: dict[str, float] = {}
        self.tests: dict[tuple[str, int], set[str]] = defaultdict(set)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Traced: a second run, as threads start their own."""
        lines: set[tuple[str, int]] = set()
        calls: Counter[Any] = Counter()
        package = f"{PACKAGE}/"

        def trace(frame: Any, event: str, arg: Any) -> Any:
            code = frame.f_code
            if not code.co_filename.startswith(package):
                return None
            calls[code] += event == "call"
            if calls[code] > CALLS:
                return None
            lines.add((code.co_filename[len(package) :], frame.f_lineno))
            return trace

        start = time.perf_counter()
        threading.settrace(trace)
        sys.settrace(trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            self.seconds[item.nodeid] = time.perf_counter() - start
            for line in lines:
                self.tests[line].add(item.nodeid)

    def by_file(self, tests: set[str]) -> dict[str, list[str]]:
        """The tests of each file: a run imports all files that it takes tests from, which is slower than most tests."""
        files: dict[str, list[str]] = defaultdict(list)
        for test in self.in_order(tests):
            files[test.split("::")[0]].append(test)
        return files

    def limit(self, tests: list[str]) -> float:
        """Seconds after which they hang."""
        return 20 + LIMIT * sum(map(self.seconds.__getitem__, tests))

    def dump(self) -> str:
        """All of it as JSON."""
        return json.dumps([self.seconds, [[file, line, sorted(tests)] for (file, line), tests in self.tests.items()]])

    def load(self, text: str) -> None:
        """Read what :meth:`dump` returned."""
        self.seconds, lines = json.loads(text)
        self.tests.update({(file, line): set(tests) for file, line, tests in lines})

    def in_order(self, tests: set[str]) -> list[str]:
        """All that take no time; then the shortest case of each test, then the next one of each; up to ``most``."""
        cases: Counter[str] = Counter()
        ranks = {}
        for test in sorted(tests, key=self.seconds.__getitem__):
            name = test.split("[")[0]
            ranks[test] = cases[name], self.seconds[test]
            cases[name] += self.seconds[test] > 0.05
        chosen: list[str] = []
        total = 0.0
        for test in sorted(ranks, key=ranks.__getitem__):
            total += self.seconds[test]
            if not chosen or total < self.most:
                chosen.append(test)
        return chosen


def fate_of(mutant: Mutant, tree: ast.Module, tests: list[str], limit: float) -> str:
    """How the mutant fares in a process of its own: ``killed``, ``timeout`` or ``survived``."""
    child = os.fork()
    if child == 0:
        signal.alarm(round(limit))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        mutant.swap(mutant.after)
        code, path = SourceFileLoader.get_code, str(PACKAGE / mutant.file)
        changed = compile(ast.fix_missing_locations(tree), path, "exec")
        name = f"skipdecode.{mutant.file[:-3]}".replace("/", ".")
        with mock.patch.object(SourceFileLoader, "get_code", lambda self, m: changed if m == name else code(self, m)):
            os._exit(int(run(tests, "-x")))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        return "timeout"
    return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"


def run(tests: list[str], *options: str, plugins: tuple[Any, ...] = ()) -> int:
    """pytest, in this process, without its own time limits."""
    own = "-q -o addopts=--import-mode=importlib -p no:timeout -p no:cacheprovider --assert=plain --tb=native".split()
    own += ["--hypothesis-profile", "mutants", "-m", "not slow"]
    return pytest.main([*own, *options, *tests], plugins)


def reached() -> Reach:
    """What the tests reach, kept for the next run; the package, and what imports it, is left to be imported anew."""
    own, reach, tests = set(sys.modules), Reach(), [f"tests/test_{name}.py" for name in TESTS.split()]
    files = [Path(__file__), *sorted(PACKAGE.rglob("*.py")), *sorted((ROOT / "tests").rglob("*.py"))]
    code = [path.read_bytes() for path in files]
    known = Path(tempfile.gettempdir()) / f"skipdecode-reach-{hashlib.sha256(b''.join(code)).hexdigest()[:16]}.json"
    if run(tests, "-k", FAST, *["--collect-only"] * known.exists(), plugins=(reach,)) != 0:
        sys.exit("the tests fail without any mutant")
    if known.exists():
        reach.load(known.read_text("utf-8"))
    else:
        known.write_text(reach.dump(), "utf-8")
    for name in set(sys.modules) - own:
        if name.split(".")[0] in ("skipdecode", "helpers", "conftest", "tests") or name.startswith("test_"):
            del sys.modules[name]
    gc.collect()
    gc.freeze()  # the children collect garbage too, but not this
    return reach


def without_docstrings(tree: ast.Module) -> ast.Module:
    """A copy of the tree; texts do not decide what becomes of a mutant."""
    tree = deepcopy(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return tree


class File:
    """A file, its mutants, and its entry in results/mutants.json: what became of the first ``tried`` of them."""

    def __init__(self, name: str, last: dict[str, Any], again: bool) -> None:
        self.name, self.last = name, last
        self.tree = ast.parse((PACKAGE / name).read_text("utf-8"))
        self.mutants = list(mutants(name, self.tree))
        self.reasons = {(s["function"], s["change"]): s["reason"] for s in last.get("survivors", [])}
        code = hashlib.sha256(ast.dump(without_docstrings(self.tree)).encode()).hexdigest()[:16]
        fresh: dict[str, Any] = {"code": code, "tried": 0, "killed": 0, "timeout": 0, "survived": 0, "survivors": []}
        self.entry: dict[str, Any] = last if last.get("code") == code else fresh
        survivors = [each["place"] for each in self.entry["survivors"]]
        self.kills: Counter[str] = Counter({f"tests/test_{Path(name).stem}.py": 1})  # by test file, most first
        self.todo = survivors if again else list(range(self.entry["tried"], len(self.mutants)))

    def fate(self, place: int, reach: Reach) -> str:
        """Try the mutant at a place."""
        mutant = self.mutants[place]
        if mutant.lines:
            tests = set().union(*(reach.tests[self.name, line] for line in mutant.lines))
        else:
            tests = set().union(*(tests for (file, _), tests in reach.tests.items() if file == self.name))
        fate, start = "survived", time.perf_counter()
        files = reach.by_file(tests)
        for file in sorted(files, key=lambda file: -self.kills[file]):
            if fate == "survived":
                fate = fate_of(mutant, self.tree, files[file], reach.limit(files[file]))
                self.kills[file] += fate != "survived"
        took = time.perf_counter() - start
        print(f"{took:5.1f} s  {fate:8}  {self.name}:{mutant.line}  {mutant.change}", flush=True)
        return fate

    def note(self, place: int, fate: str) -> None:
        """Add what became of a mutant."""
        mutant = self.mutants[place]
        others = [each for each in self.entry["survivors"] if each["place"] != place]
        self.entry["tried"] = max(self.entry["tried"], place + 1)
        self.entry["survived"] = len(others)
        if fate == "survived":
            reason = self.reasons.get((mutant.function, mutant.change), "")
            others.append({"place": place, "function": mutant.function, "change": mutant.change, "reason": reason})
        self.entry["survivors"] = others
        self.entry[fate] += 1


def main() -> None:
    """Write results/mutants.json; an error if too many survive, or one without a reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="within src/skipdecode; all if none is given")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--jobs", type=int, default=1, help="so many at once")
    parser.add_argument("--again", action="store_true", help="only what survived, with more tests")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT / "src"))
    # The same examples every time, and none made smaller: the first failure is enough.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("mutants", database=None, derandomize=True, deadline=None, phases=phases)
    names = [p.relative_to(PACKAGE).as_posix() for room in ROOMS for p in sorted((PACKAGE / room).glob("*.py"))]
    if unknown := {*arguments.files} - {*names}:
        sys.exit(f"no such file in {', '.join(ROOMS)}: {', '.join(sorted(unknown))}")
    last: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    files = [File(name, last.get(name, {}), arguments.again) for name in names]
    chosen = [file for file in files if not arguments.files or file.name in arguments.files]
    reach = reached()
    reach.most *= AGAIN if arguments.again else 1
    for file in chosen:
        while file.todo and time.monotonic() < end:
            places, file.todo = file.todo[: arguments.jobs], file.todo[arguments.jobs :]
            with ThreadPoolExecutor(arguments.jobs) as pool:
                fates = pool.map(partial(file.fate, reach=reach), places)
            for place, fate in zip(places, fates, strict=True):
                file.note(place, fate)
            found = {file.name: file.entry if file.entry["tried"] else file.last for file in files}
            results = {name: entry for name, entry in found.items() if entry}
            RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", "utf-8")
    tried = sum(file.entry["tried"] for file in files)
    dead = tried - sum(file.entry["survived"] for file in files)
    left = sum(len(file.mutants) for file in files) - tried
    print(f"{dead} of {tried} mutants die: {dead / max(tried, 1):.1%}; {left} left to try")
    if dead < ENOUGH * tried or not all(s["reason"] for f in files for s in f.entry["survivors"]):
        sys.exit("too many survive, or one has no reason in results/mutants.json")


if __name__ == "__main__":
    main()
