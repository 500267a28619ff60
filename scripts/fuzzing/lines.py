"""1,000 hostile lines of a batch, of a seed, as JSON lines.

python scripts/fuzzing/lines.py --seed 0 > hostile.jsonl
"""

import argparse
import json
import random
import sys

IDS = (
    "a/b", "../up", "..", ".", "%2E%2E", "a%2Fb", "a?versionId=1", "a#b", "a b", " a", "a.", "con",
    "nul.txt", "-a", "_a", "a..b", "é", "e\u0301", "\uff41", "a\0b", "\x1b[31mred", "a\nb",
    "\ud800", "*", "[a]", "s3://b/a", "C:a", "a\\b", "x" * 101, "x" * 10**5, "", None, True,
    1.5, [], {}, -1, 10**400,
)  # fmt: skip
PROMPTS = (
    "", "   ", "\0", "\t\n", None, 5, [], {}, True, "\ud800 cat", "a\0cat", "\x1b]0;owned\x07 cat",
    "\x1b[2J", "a\x08\x08cat", "\u202ecat", "e\u0301", "é", "🐈‍⬛", "<eos>", "<|startoftext|>",
    "cat " * 10_000, "x" * 100_000, "a\u2028cat", "\ufeffcat",
    "\U0001d520\U0001d51e\U0001d531", "((cat:1.5))", "\x7f",
)  # fmt: skip
OTHERS = {
    "seed": (-1, 2**63 - 1, 2**63, 10**400, 0.5, "1", True, [], float("nan"), float("inf")),
    "width": (0, -8, 8, 7, 1.5, 10**9, "64", None, [64], float("nan")),
    "height": (0, 63, 2**31, {}, False),
    "num_inference_steps": (0, -1, 10**30, 1.0, "1", float("nan")),
    "guidance_scale": (float("nan"), float("inf"), float("-inf"), "7", 10**400, -3, 1e308),
    "negative_prompt": ("", 5, [], "\ud800", "\0", "x" * 10**5),
    "words": ([], "cat", [""], ["dog"], [5], {}, ["\ud800"], ["cat"]),
    "prompt_embeds": (1,), "generator": (None, 1), "output_type": ("latent",), "__class__": (1,),
    "callback": ("print",), "latents": ([1],), "nothing": (1,), "a b": (1,), "": (1,),
}  # fmt: skip
BROKEN = (
    b"", b"   ", b"{", b"}", b"null", b"[]", b"5", b'"cat"', b"{}", b'{"prompt": "a',
    b'{"prompt": "cat", "prompt": "dog"}', b"\xff\xfe{}", b"\xed\xa0\x80", b"\0" * 40, b"[" * 9_999,
    b'{"a":' * 2_000, b'{"prompt": NaN}', b'{"prompt": "cat"} x', b'\xef\xbb\xbf{"prompt": "cat"}',
    b'{"prompt": "\xff"}', b"\x1b[31m", b'{"prompt": "cat",}', b"{'prompt': 'cat'}", b"\r", b"\x0c",
)  # fmt: skip


def hostile_lines(seed: int, number: int = 1000) -> list[bytes]:
    """Lines of which most are bad: a fault each, or two, and some without one."""
    chance = random.Random(seed)
    return [_line(chance, line) for line in range(1, number + 1)]


def _line(chance: random.Random, line: int) -> bytes:
    kind = chance.choices(("broken", "id", "prompt", "other", "twin", "good"), (3, 4, 3, 6, 1, 1))[
        0
    ]
    row = {"prompt": "a red cat"}
    if kind == "broken":
        return chance.choice(BROKEN)
    if kind == "id" or chance.random() < 0.1:
        row["id"] = chance.choice(IDS)
    if kind == "prompt":
        row["prompt"] = chance.choice(PROMPTS)
    if kind == "other":
        name = chance.choice([*OTHERS])
        row[name] = chance.choice(OTHERS[name])
    if kind == "twin":  # one id in many spellings
        row["id"] = chance.choice(("Twin", "twin", "TWIN", f"{line - 1:06d}", line, str(line)))
    return json.dumps(row, ensure_ascii=chance.random() < 0.5).encode(errors="surrogatepass")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=1000)
    options = parser.parse_args()
    lines = hostile_lines(options.seed, options.number)
    sys.stdout.buffer.write(b"".join(line + b"\n" for line in lines))


if __name__ == "__main__":
    main()
