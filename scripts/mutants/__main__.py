"""Put faults into a copy of the checkout, one at a time, and say which of them the tests find.

Exit status: 1 if more than 5 % survive, 2 if the list does not fit the code or the tests.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from . import CI, NO_END, Fault, all_faults, first_failure, problems, try_fault

ROOT = Path(__file__).parents[2]
LEFT_OUT = (".git", ".venv*", "__pycache__", ".*_cache", "site", "outputs")
SURVIVING = 0.05  # share that may survive


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.mutants", description=__doc__)
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="faults, counted from 1")
    parser.add_argument("--marks", default=CI, help="which tests run, as pytest's -m takes them")
    parser.add_argument("--list", action="store_true", help="list them, and run nothing")
    chosen = parser.parse_args(arguments)
    faults = list(enumerate(all_faults(), start=1))
    if chosen.only:
        faults = [(number, fault) for number, fault in faults if number in chosen.only]
    wrong = [problem for _, fault in faults for problem in problems(ROOT, fault)]
    if wrong or not faults:
        print("\n".join(wrong) or "There are no such faults.", file=sys.stderr)
        return 2
    if chosen.list:
        for number, fault in faults:
            print(f"{number:3} {fault.file}: {fault.why}")
        return 0
    with tempfile.TemporaryDirectory(prefix="sdattn-mutants-") as folder:
        root = Path(folder, "checkout")
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        (root / "outputs").symlink_to(ROOT / "outputs")
        found = try_all(root, faults, chosen.marks)
    n_found = sum(found.values())
    print(f"{n_found} of {len(faults)} faults were found.")
    return 2 if len(found) < len(faults) else int(n_found < (1 - SURVIVING) * len(faults))


def try_all(root: Path, faults: list[tuple[int, Fault]], marks: str) -> dict[int, bool]:
    """Return for each fault, by its number, whether it was found; none of those whose tests do not
    run, or whose finder fails without a fault, too."""
    found_by: dict[int, str | None] = {}
    for number, fault in faults:
        try:
            outcome = try_fault(root, fault, marks)
        except ValueError as error:
            print(f"{number:3} {error}", file=sys.stderr)
            continue
        found_by[number] = outcome.found_by
        how = f"found     {outcome.found_by}" if outcome.found_by else "SURVIVED "
        print(f"{number:3} {outcome.seconds:4.0f} s  {how}  {fault.file}: {fault.why}", flush=True)
    finders = dict.fromkeys(one for one in found_by.values() if one and one != NO_END)
    while finders and (broken := first_failure(root, list(finders), marks)):
        print(f"{broken} fails without a fault, too.", file=sys.stderr)
        del finders[broken]
        found_by = {number: one for number, one in found_by.items() if one != broken}
    return {number: one is not None for number, one in found_by.items()}


if __name__ == "__main__":
    sys.exit(main())
