"""Draw faults at random, weighted by lines, and report which ones CI's tests find.

    python -m scripts.mutants --sample 40 --date 2026-11-29

cosmic-ray makes them, none in a ``raise`` or of the ``*`` in ``f(a, *, b)``. CI's tests run once
and note which of their files enter the function of each fault. These try it, its room's first, then
the rest of its room's; all try it if none enters it. equivalent_mutants.txt lists those that change
nothing. Exit status: 1 if less than 85 % of the others are killed, or less than 70 % in a room.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")
KINDS = re.compile(  # plausible ones: most others, + to <<, crash at once, and | is of annotations
    "AddNot|(Exception|Number)Replacer|RemoveDecorator|ZeroIteration|Replace([A-Z][a-z]+With|Unary)"
    "|Binary.*_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_(Mul|Mod)|Mod_FloorDiv|BitAnd_BitOr)$"
    "|Comparison.*((_(Eq|NotEq|Lt|LtE|Gt|GtE)){2}|_Is_IsNot|_IsNot_Is)$"
)
MOST_SECONDS = 240  # of the tests that enter a fault's function, and thrice of all
PYTEST = "-m pytest @tests.args -q --tb=no -o faulthandler_exit_on_timeout=true"
PYTEST += " -o faulthandler_timeout=180"  # a fault may take a test without end
NOTE = """with open({!r}, "a") as noted:
    print({}, __import__("os").environ.get("PYTEST_CURRENT_TEST"), file=noted)
"""


class Mutant(NamedTuple):
    path: str  # in the checkout
    line: int  # counted from 1
    code: str  # the whole file, with the fault
    change: str  # as equivalent_mutants.txt names it
    body: tuple[int, int] | None  # line and column where its function's begins

    @property
    def room(self) -> str:
        return self.path.removesuffix(".py").split("/")[1]


def draw(date: str) -> Iterator[Mutant]:
    """Yield faults without end, in a file as often as it is long."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    rng = random.Random(date)
    texts = {path: path.read_text("utf-8") for path in sorted(ROOT.glob("sdattn/**/*.py"))}
    lengths = [text.count("\n") for text in texts.values()]
    operators = [get_operator(name)() for name in operator_names() if KINDS.search(name)]
    while True:
        [(path, text)] = rng.choices(list(texts.items()), lengths)
        nodes, places = list(ast_nodes(get_ast(text))), defaultdict(list)
        for operator in operators:
            found = [(node, at) for node in nodes for at, _ in operator.mutation_positions(node)]
            for number, (node, (line, _)) in enumerate(found):
                if node.parent.type != "parameters" and not node.search_ancestor("raise_stmt"):
                    places[line].append((node, operator, number))
        with suppress(IndexError, SyntaxError):  # no place for one; the * of f(*, a) is no product
            line = rng.choice(list(places))
            node, *fault = rng.choice(places[line])
            code = mutate_code(text, *fault)
            ast.parse(code)
            old, new = (" ".join(each.splitlines()[line - 1].split()) for each in (text, code))
            function = node.search_ancestor("funcdef")
            is_long = function is not None and function.children[-1].type == "suite"
            body = function.children[-1].children[1].start_pos if is_long else None
            file = path.relative_to(ROOT).as_posix()
            yield Mutant(file, line, code, f"{file}: {old} -> {new}", body)


def failing(tests: list[str], texts: dict[str, str], *options: str, most: int | None) -> list[str]:
    """Return the tests that fail in a copy of the checkout with these texts in some files."""
    with tempfile.TemporaryDirectory() as folder:
        left_out = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "site")
        root = Path(shutil.copytree(ROOT, f"{folder}/copy", ignore=left_out, symlinks=True))
        for path, text in {**texts, "tests.args": "\n".join(tests)}.items():
            (root / path).write_text(text, "utf-8")
        variables = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        variables["PYTHONDONTWRITEBYTECODE"] = ""  # tests begin many processes
        command = [sys.executable, *PYTEST.split(), "-m", "not slow or chosen", *options]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, cwd=root, env=variables, timeout=most, **output)
            failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.M)
            return failed or ["no end, or no start"] * (done.returncode not in (0, 5))
    return []


def note_tests(mutants: list[Mutant], processes: int) -> tuple[list[set[str]], list[str]]:
    """Return the files of tests that enter each fault's function, and tests that fail anyway."""
    lines = {one.path: (ROOT / one.path).read_text("utf-8").splitlines(True) for one in mutants}
    entered = [set[str]() for _ in mutants]
    with tempfile.NamedTemporaryFile("r") as log:
        for number, one in enumerate(mutants):
            if one.body:
                row, column = one.body
                note = textwrap.indent(NOTE.format(log.name, number), " " * column)
                lines[one.path][row - 1] = note + lines[one.path][row - 1]
        noting = {path: "".join(each) for path, each in lines.items()}
        at_once = (f"-n{processes}", "--dist=worksteal")
        failed = failing(["tests", "sdattn"], noting, *at_once, most=None)
        for line in log:
            number, test = line.split(" ", 1)
            if "::" in test:
                entered[int(number)].add(test.split("::")[0])
    return entered, failed and failing(failed, {}, most=None)  # a note alone may break some


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.mutants", description=__doc__)
    parser.add_argument("--sample", type=int, default=120, help="number of faults")
    parser.add_argument("--date", default=time.strftime("%F"), help="seed of the draw")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    drawn = list(islice(draw(options.date), options.sample))
    entered, broken = note_tests(drawn, options.processes)
    print("tests that fail without a fault:", *(broken or ["none"]), flush=True)
    every = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("tests/**/test_*.py"))]
    known = EQUIVALENT.read_text("utf-8")

    def find(one: Mutant, entering: set[str]) -> str:
        if f"{one.change}  # " in known:
            return "equivalent"
        own = [file for file in every if file.startswith(f"tests/{one.room}/")]
        tests = {*entering, *own} if entering else every
        order = sorted(tests, key=lambda file: (file not in entering, file not in own, file))
        order += [f"--deselect={test}" for test in broken]
        most = MOST_SECONDS if entering else 3 * MOST_SECONDS
        return (failing(order, {one.path: one.code}, "-x", most=most) or ["SURVIVED"])[0]

    fared = Counter[tuple[str, str]]()
    with ThreadPoolExecutor(options.processes) as pool:
        for one, found in zip(drawn, pool.map(find, drawn, entered), strict=True):
            how = found.lower() if found in ("equivalent", "SURVIVED") else "killed"
            fared.update([(one.room, how), ("all", how)])
            print(found, f"line {one.line}", one.change, sep="  ", flush=True)
    is_low = False
    for room in ("all", *sorted({one.room for one in drawn})):
        killed, survived = fared[room, "killed"], fared[room, "survived"]
        print(f"{room:12} {killed=} {survived=} equivalent={fared[room, 'equivalent']}")
        is_low |= killed < (0.85 if room == "all" else 0.7) * (killed + survived)
    return int(is_low)


if __name__ == "__main__":
    sys.exit(main())
