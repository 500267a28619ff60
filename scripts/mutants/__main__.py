"""Put faults into a copy of the checkout, one at a time, and say which of them the tests find.

Exit status: 1 if more than 5 % survive, 2 if the list does not fit the code.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from . import all_faults, problems, try_fault

ROOT = Path(__file__).parents[2]
LEFT_OUT = (".git", ".venv*", "__pycache__", ".*_cache", "site", "outputs")
SURVIVING = 0.05  # share that may survive


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.mutants", description=__doc__)
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="faults, counted from 1")
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
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="sdattn-mutants-") as folder:
        root = Path(folder, "checkout")
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        (root / "outputs").symlink_to(ROOT / "outputs")
        for number, fault in faults:
            outcome = try_fault(root, fault)
            survivors += outcome.found_by is None
            how = f"found     {outcome.found_by}" if outcome.found_by else "SURVIVED "
            print(f"{number:3} {outcome.seconds:4.0f} s  {how}  {fault.file}: {fault.why}")
            sys.stdout.flush()
    print(f"{len(faults) - survivors} of {len(faults)} faults were found.")
    return int(survivors > SURVIVING * len(faults))


if __name__ == "__main__":
    sys.exit(main())
