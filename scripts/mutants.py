"""Draw faults at random, weighted by lines, and report which ones CI's tests find.

    python -m scripts.mutants --sample 40 --date 2026-11-29

cosmic-ray makes the faults; none is in an annotation, a text or a ``raise``. One run of CI's tests
notes which of the chosen lines each test enters. A fault is then tried with the tests that enter its
line, then with its room's; one at import with its room's tests, then with all.
Exit status: 1 if fewer than 85 % are killed, or fewer than 70 % in a room.
"""

import argparse
import ast
import datetime
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from queue import Queue
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LEFT_OUT = (".git", ".venv*", "__pycache__", ".*_cache", "site")
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")
# Plausible ones; most of cosmic-ray's others (+ to <<) crash at once.
KINDS = re.compile(
    "AddNot|(Exception|Number)Replacer|RemoveDecorator|ZeroIteration|Replace([A-Z][a-z]+With|Unary)"
    "|Comparison.*(_(Eq|NotEq|Lt|LtE|Gt|GtE)){2}$|Comparison.*_Is(_IsNot|Not_Is)$"
    "|Binary.*_(Add_Sub|Sub_Add|Mul_(Floor)?Div|Div_(Mul|FloorDiv)|FloorDiv_(Mul|Div|Mod)"
    "|Mod_FloorDiv|Pow_Mul|Bit(And|Or|Xor)_Bit(And|Or))$"
)
MOST_SECONDS, A_TEST = 240, 90  # of a fault's tests, and of one before it counts as endless
NOTE = """import os
seen = set()
def enter(number):
    line = f"{number}\\t{os.environ.get('PYTEST_CURRENT_TEST', '')}\\n"
    if line not in seen:
        seen.add(line)
        with open(os.path.dirname(__file__) + "/entered.tsv", "a") as file:
            file.write(line)
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
def places(path: Path) -> dict[int, list[tuple[str, int]]]:
    """Return by line the operators that change something there, and which of their places it is."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    source = path.read_text("utf-8")
    spans = []
    for node in ast.walk(ast.parse(source)):
        skipped = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        skipped += [node] if isinstance(node, (ast.Raise, ast.JoinedStr)) else []
        for one in filter(None, skipped):
            spans.append(((one.lineno, one.col_offset), (one.end_lineno, one.end_col_offset)))
    nodes = list(ast_nodes(get_ast(source)))
    found = defaultdict(list)
    for name in filter(KINDS.search, operator_names()):
        starts = [at for node in nodes for at, _ in get_operator(name)().mutation_positions(node)]
        for occurrence, at in enumerate(starts):
            if not any(begin <= at < end for begin, end in spans):
                found[at[0]].append((name, occurrence))
    return found


def draw(date: str, n: int) -> list[Mutant]:
    """Draw n faults on different lines, every line of the package as likely as any other."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    rng = random.Random(date)
    files = {path: path.read_text("utf-8") for path in sorted(ROOT.glob("sdattn/**/*.py"))}
    drawn: dict[tuple[Path, int], Mutant] = {}
    while len(drawn) < n:
        [path] = rng.choices(list(files), [text.count("\n") for text in files.values()])
        line = rng.randint(1, files[path].count("\n"))
        if (path, line) in drawn or not (found := places(path).get(line)):
            continue
        kind = rng.choice(sorted({name.split("_")[0] for name, _ in found}))
        name, occurrence = rng.choice([one for one in found if one[0].split("_")[0] == kind])
        code = mutate_code(files[path], get_operator(name)(), occurrence)
        lines = [text.splitlines()[line - 1].strip() for text in (files[path], code)]
        with suppress(SyntaxError):
            if ast.dump(ast.parse(code)) != ast.dump(ast.parse(files[path])):
                name = path.relative_to(ROOT).as_posix()
                change = f"{name}: {lines[0]} -> {' '.join(lines[1].split())}"
                drawn[path, line] = Mutant(name, line, code, change)
    return list(drawn.values())


def is_noted(tree: ast.Module, number: int, line: int) -> bool:
    """Note in the tree who enters a line's statement; False if that runs at import."""
    at = None
    in_function = False
    for node in ast.walk(tree):  # outer statements before inner ones
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            for each in block if isinstance(block, list) else ():
                if each.lineno <= line <= each.end_lineno:
                    at = block, each
                    in_function |= isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    if at and in_function:
        note = ast.parse(f"__import__('note_of_mutants').enter({number})").body
        at[0][at[0].index(at[1]) : at[0].index(at[1])] = note
    return in_function


def copy_to(folder: str, name: str) -> Path:
    skipped = shutil.ignore_patterns(*LEFT_OUT)
    return Path(shutil.copytree(ROOT, Path(folder, name), ignore=skipped, symlinks=True))


def run_tests(root: Path, tests: list[str], seconds: int | None, *options: str) -> tuple[int, str]:
    """Return pytest's exit status and output; 0 if nothing had failed when the time was over."""
    (root / "tests.args").write_text("\n".join(tests), "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow or chosen", "--tb=no"]
    command += ["-p", "no:cacheprovider", f"-ofaulthandler_timeout={A_TEST}", *options]
    command += ["-ofaulthandler_exit_on_timeout=true", "@tests.args"]
    # Files that are written twice in a second would leave compiled code of the other behind.
    variables = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    variables["OMP_NUM_THREADS"] = "1"
    with (root / "said").open("w+") as said:
        running = subprocess.Popen(
            command, cwd=root, env=variables, stdout=said, stderr=said, start_new_session=True
        )
        try:
            status = running.wait(seconds)
        except subprocess.TimeoutExpired:
            status = 0
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    return status, (root / "said").read_text("utf-8", "replace")


def choose_tests(root: Path, mutants: list[Mutant], processes: int) -> list[list[str]]:
    """Return each fault's tests, quickest of its room first; none that fails without a fault."""
    whole = []
    trees = {one.path: ast.parse((root / one.path).read_text("utf-8")) for one in mutants}
    for number, one in enumerate(mutants):
        whole.append(not is_noted(trees[one.path], number, one.line))
    for path, tree in trees.items():
        (root / path).write_text(ast.unparse(tree), "utf-8")
    (root / "note_of_mutants.py").write_text(NOTE)
    (root / "entered.tsv").touch()
    options = ("-n", str(processes), "--dist", "worksteal", "--durations=0", "--durations-min=0")
    _, said = run_tests(root, ["tests", "sdattn"], None, *options)
    seconds: Counter[str] = Counter()
    for took, test in re.findall(r"^([\d.]+)s (?:call|setup) +(.*)$", said, re.M):
        seconds[test] += float(took)
    broken = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", said, re.M)
    print(f"{len(seconds)} tests; {len(broken)} of them fail without a fault", flush=True)
    entered: list[set[str]] = [set() for _ in mutants]
    for line in (root / "entered.tsv").read_text("utf-8").splitlines():
        number, test = line.split("\t")
        # What a fixture of the module enters is of every test there.
        entered[int(number)].add(
            test.split("::")[0] if "(setup)" in test else test.rpartition(" ")[0]
        )
    chosen = []
    for one, found, everything in zip(mutants, entered, whole, strict=True):
        own = f"tests/{one.room}"
        found -= {"", *broken}
        tests = sorted(found, key=lambda test: (not test.startswith(own), seconds[test], test))
        tests = [own] if everything or not found else [*tests, own]
        tests = [test for test in tests if (ROOT / test.split("::")[0]).exists()]
        chosen.append(tests + ["tests"] * everything + [f"--deselect={test}" for test in broken])
    return chosen


def try_mutant(roots: "Queue[Path]", mutant: Mutant, tests: list[str]) -> str:
    """Return what found a fault, empty if nothing did."""
    root = roots.get()
    try:
        (root / mutant.path).write_text(mutant.code, "utf-8")
        status, said = run_tests(root, tests, MOST_SECONDS, "-x")
    finally:
        shutil.copyfile(ROOT / mutant.path, root / mutant.path)
        roots.put(root)
    if status in (0, 5):
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", said, re.M)
    if not found and "not found: " in said:
        raise ValueError(f"pytest could not run the tests of {mutant.change}: {said[-500:]}")
    return found[1] if found else "no end, or no start"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.mutants", description=__doc__)
    parser.add_argument("--sample", type=int, default=120, help="number of faults")
    parser.add_argument("--date", default=str(datetime.date.today()), help="seed of the draw")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    mutants = draw(options.date, options.sample)
    reasons = dict(
        line.split("  # ") for line in EQUIVALENT.read_text("utf-8").splitlines() if "  # " in line
    )
    tried = [one for one in mutants if one.change not in reasons]
    fared = Counter((one.room, "equivalent") for one in mutants if one.change in reasons)
    with tempfile.TemporaryDirectory(prefix="sdattn-mutants-") as folder:
        tests = choose_tests(copy_to(folder, "noting"), tried, options.processes)
        roots: Queue[Path] = Queue()
        for number in range(options.processes):
            roots.put(copy_to(folder, str(number)))
        with ThreadPoolExecutor(options.processes) as pool:
            outcomes = pool.map(
                lambda pair: try_mutant(roots, *pair), zip(tried, tests, strict=True)
            )
            for one, found_by in zip(tried, outcomes, strict=True):
                fared[one.room, "killed" if found_by else "survived"] += 1
                print(found_by or "SURVIVED", f"line {one.line}", one.change, sep="  ", flush=True)
    shares = []
    for room in ["", *sorted({room for room, _ in fared})]:
        killed, survived, equivalent = (
            sum(n for (name, how), n in fared.items() if how == each and room in ("", name))
            for each in ("killed", "survived", "equivalent")
        )
        print(f"{room or 'all':12} {killed=} {survived=} {equivalent=}")
        shares.append(killed / max(killed + survived, 1) if survived else 1.0)
    return int(shares[0] < 0.85 or min(shares) < 0.7)


if __name__ == "__main__":
    sys.exit(main())
