"""Draw faults at random, weighted by lines, and report which ones CI's tests find.

    python -m scripts.mutants --sample 40 --date 2026-11-29

cosmic-ray makes the faults, none in an annotation, a text or a ``raise``. CI's tests run once and
note which functions with a fault each enters; a fault is tried with those, then with its room's,
and one at import with its room's, then with all, for ``MOST_SECONDS``. equivalent_mutants.txt says
which change nothing. Exit status: 1 if less than 85 % are killed, or less than 70 % in a room.
"""

import argparse
import ast
import datetime
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")
KINDS = re.compile(  # plausible ones; most others, + to <<, crash at once
    "AddNot|(Exception|Number)Replacer|RemoveDecorator|ZeroIteration|Replace([A-Z][a-z]+With|Unary)"
    "|Comparison.*(_(Eq|NotEq|Lt|LtE|Gt|GtE)){2}$|Comparison.*_Is(_IsNot|Not_Is)$"
    "|Binary.*_(Add_Sub|Sub_Add|Mul_(Floor)?Div|Div_(Mul|FloorDiv)|FloorDiv_(Mul|Div|Mod)"
    "|Mod_FloorDiv|Pow_Mul|Bit(And|Or|Xor)_Bit(And|Or))$"
)
MOST_SECONDS = 300
PYTEST = ["-m", "pytest", "-q", "--tb=no", "-pno:cacheprovider", "-ofaulthandler_timeout=90"]
PYTEST += ["-ofaulthandler_exit_on_timeout=true", "-m", "not slow or chosen", "@tests.args"]
NOTE = """import functools, os
@functools.cache
def note(*entered):
    with open(os.path.dirname(__file__) + "/entered.tsv", "a") as file:
        print(*entered, sep="\\t", file=file)
"""


class Mutant(NamedTuple):
    path: str  # in the checkout
    line: int  # counted from 1
    code: str  # the whole file, with the fault
    change: str  # as equivalent_mutants.txt names it

    @property
    def room(self) -> str:
        return self.path.split("/")[1]


@cache
def places(source: str) -> list[tuple[int, str, int]]:
    """Return line, operator and its number there for each fault that cosmic-ray can make."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    left_out = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise)]
    for node in ast.walk(ast.parse(source)):
        left_out += filter(None, (getattr(node, name, 0) for name in ("annotation", "returns")))
    spans = [((a.lineno, a.col_offset), (a.end_lineno, a.end_col_offset)) for a in left_out]
    nodes = list(ast_nodes(get_ast(source)))
    found = []
    for name in filter(KINDS.search, operator_names()):
        operator = get_operator(name)()
        starts = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        for number, at in enumerate(starts):
            if not any(begin <= at < end for begin, end in spans):
                found.append((at[0], name, number))
    return found


def draw(date: str, n: int) -> list[Mutant]:
    """Draw n faults on different lines, each line of the package as likely as any other."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    rng = random.Random(date)
    files = {path: path.read_text("utf-8") for path in sorted(ROOT.glob("sdattn/**/*.py"))}
    lines = [(path, i) for path, text in files.items() for i in range(1, text.count("\n") + 1)]
    drawn: list[Mutant] = []
    for path, line in rng.sample(lines, len(lines)):
        if len(drawn) == n:
            break
        source = files[path]
        kinds: dict[str, list[tuple[str, int]]] = {}
        for at, name, number in places(source):
            if at == line:
                kinds.setdefault(name.split("_")[0], []).append((name, number))
        if kinds:
            name, number = rng.choice(kinds[rng.choice(sorted(kinds))])
            code = mutate_code(source, get_operator(name)(), number)
            before, after = (text.splitlines()[line - 1].split() for text in (source, code))
            file = path.relative_to(ROOT).as_posix()
            change = f"{file}: {' '.join(before)} -> {' '.join(after)}"
            drawn.append(Mutant(file, line, code, change))
    return drawn


def run_tests(root: Path, tests: list[str], seconds: int | None, *options: str) -> tuple[int, str]:
    """Return pytest's exit status and output; 0 if nothing had failed when the time was over."""
    (root / "tests.args").write_text("\n".join(tests), "utf-8")
    variables = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *PYTEST, *options]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        done = subprocess.run(command, cwd=root, env=variables, timeout=seconds, **output)
    except subprocess.TimeoutExpired:
        return 0, ""
    return done.returncode, done.stdout


def failures(said: str) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", said, re.M)


def choose_tests(root: Path, mutants: list[Mutant], *options: str) -> list[list[str]]:
    """Return the tests that may find each fault; none of those that fail without one."""
    entered: list[set[str]] = [set() for _ in mutants]
    trees = {one.path: ast.parse((root / one.path).read_text("utf-8")) for one in mutants}
    for number, one in enumerate(mutants):
        function = None
        for node in ast.walk(trees[one.path]):  # the innermost comes last
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inside = node.body[0].lineno <= one.line <= (node.end_lineno or 0)
                function = node if inside else function
        if function is None:  # at import
            entered[number].add("tests")
        else:
            test = "__import__('os').environ.get('PYTEST_CURRENT_TEST', '')"
            note = f"__import__('note_of_mutants').note({number}, {test})"
            after_docstring = ast.get_docstring(function) is not None
            function.body.insert(after_docstring, ast.parse(note).body[0])
    for path, tree in trees.items():
        (root / path).write_text(ast.unparse(tree), "utf-8")
    (root / "note_of_mutants.py").write_text(NOTE)
    (root / "entered.tsv").touch()
    status, said = run_tests(root, ["tests", "sdattn"], None, *options)
    if status not in (0, 1):
        raise ValueError(f"pytest could not run the tests without a fault: {said[-2000:]}")
    broken = failures(said)
    print(f"tests that fail without a fault: {len(broken)}", flush=True)
    for line in (root / "entered.tsv").read_text("utf-8").splitlines():
        number, test = line.split("\t")
        # What a fixture enters may be of every test in its module.
        entered[int(number)].add(re.sub(r"::.*\(setup\)| \(\w+\)$", "", test))
    chosen = []
    for one, tests in zip(mutants, entered, strict=True):
        own = f"tests/{one.room}"
        order = sorted(tests - {"", *broken}, key=lambda test: (not test.startswith(own), test))
        if (ROOT / own).exists():
            order.insert(0 if order == ["tests"] else len(order), own)
        chosen.append([*order, *(f"--deselect={test}" for test in broken)])
    return chosen


def found_by(mutant: Mutant, tests: list[str]) -> str:
    """Return the test that finds a fault, empty if none does."""
    with tempfile.TemporaryDirectory() as folder:
        root = copied(folder)
        (root / mutant.path).write_text(mutant.code, "utf-8")
        status, said = run_tests(root, tests, MOST_SECONDS, "-x")
    if "not found: " in said:
        raise ValueError(f"pytest could not run the tests of {mutant.change}: {said[-500:]}")
    return "" if status in (0, 5) else (*failures(said), "no end, or no start")[0]


def copied(folder: str) -> Path:
    left_out = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "site")
    return Path(shutil.copytree(ROOT, Path(folder, "copy"), ignore=left_out, symlinks=True))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.mutants", description=__doc__)
    parser.add_argument("--sample", type=int, default=120, help="number of faults")
    parser.add_argument("--date", default=str(datetime.date.today()), help="seed of the draw")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    known = EQUIVALENT.read_text("utf-8")
    drawn = draw(options.date, options.sample)
    fared = Counter((one.room, "equivalent") for one in drawn if f"{one.change}  # " in known)
    mutants = [one for one in drawn if f"{one.change}  # " not in known]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.processes) as pool:
        tests = choose_tests(copied(folder), mutants, f"-n{options.processes}", "--dist=worksteal")
        for one, finder in zip(mutants, pool.map(found_by, mutants, tests), strict=True):
            fared[one.room, "killed" if finder else "survived"] += 1
            print(finder or "SURVIVED", f"line {one.line}", one.change, sep="  ", flush=True)
    for (_, how), number in list(fared.items()):
        fared["all", how] += number
    is_low = False
    for room in ("all", *sorted({one.room for one in drawn})):
        killed, survived = fared[room, "killed"], fared[room, "survived"]
        print(f"{room:10} {killed=} {survived=} equivalent={fared[room, 'equivalent']}")
        is_low |= killed < (0.85 if room == "all" else 0.7) * (killed + survived)
    return int(is_low)


if __name__ == "__main__":
    sys.exit(main())
