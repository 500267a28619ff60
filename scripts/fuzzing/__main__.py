"""Try faults at random, of a seed, and tell how many of each kind were found.

scripts/fuzz --minutes 10 --seed 3
scripts/fuzz --seed 3 --case 17       the 17th of them alone
"""

import argparse
import contextlib
import io
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from . import KINDS, World, choose, try_case


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="try this one alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tried, missed = Counter[str](), Counter[str]()
    end = time.monotonic() + 60 * options.minutes
    number = options.case or 0
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        while True:
            name = choose(options.seed, number)[0].name
            with contextlib.redirect_stderr(io.StringIO()):  # what the commands say of the harm
                found = try_case(world, options.seed, number)
            tried[name] += 1
            if found is not None:
                missed[name] += 1
                print(found, file=sys.stderr)
            number += 1
            if options.case is not None or time.monotonic() > end:
                break
    print("| kind | cases | found |\n|---|---|---|")
    for one in KINDS:
        if tried[one.name]:
            print(f"| {one.name} | {tried[one.name]:,} | {tried[one.name] - missed[one.name]:,} |")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
