"""Prompts that are hard to split: scripts, emoji, signs, weights, spaces, long words."""

import random

PARTS = (
    *("a", "the", "cat", "Cat's", "girls'", "don't", "we're", "I'VE", "o'clock", "rock'n'roll"),
    *(
        "red-haired",
        "well-known",
        "semi-",
        "-like",
        "co\u2010op",
        "cat\u2019s",
        "\u201cquoted\u201d",
    ),
    *("8k", "4K", "1990s", "3.14", "f/1.4", "50mm", "1,000,000", "№5", "½", "²", "x²", "Ⅻ", "١٢٣"),
    *("(cat:1.2)", "((masterpiece))", "[dog|cat]", "<lora:style:0.8>", "{a|b}", "BREAK", "::2"),
    *(
        ",",
        ".",
        "!!!",
        "?!",
        "...",
        "…",
        "—",
        "--",
        "/",
        "\\",
        "#tag",
        "@me",
        "a_b",
        "100%",
        "$5",
        "&",
    ),
    *("café", "cafe\u0301", "naïve", "Ångström", "straße", "Œuvre", "İstanbul", "ǅ", "ﬁsh", "ﷺ"),
    *(
        "😀",
        "👍🏽",
        "👨\u200d👩\u200d👧",
        "🇩🇪",
        "❤\ufe0f",
        "1\ufe0f\u20e3",
        "♥",
        "★",
        "→",
        "∑",
        "\u00a9",
    ),
    *("红色", "的猫", "猫", "東京タワー", "ひらがな", "カタカナ", "ﾊﾝｶｸ", "한국어", "고양이", "㍿"),
    *("𠮷", "𠀋野", "\u3400", "\u9fff", "\U0002a6d6", "\U0002b740", "\U00030000", "\U00031350"),
    *(
        "кошка",
        "Красный",
        "γάτα",
        "ΟΔΟΣ",
        "גדול",
        "חתול",
        "قطة",
        "حمراء",
        "बिल्ली",
        "แมว",
        "ქართული",
    ),
    *(
        "k\u0131rm\u0131z\u0131",
        "żółw",
        "ñandú",
        "\u1e9e",
        "Zürich",
        "\u01c6",
        "ÿ",
        "e\u0301\u0323",
    ),
    *("antidisestablishmentarianism", "Donaudampfschifffahrtsgesellschaft", "aaaaaaaaaaaaaaaa"),
    *("xqzj", "HTTPServer", "camelCase", "http://a.b/c?d=e", "user@mail.com", "C++", "c#", ":-)"),
)
SPACES = (" ", " ", " ", " ", "  ", ", ", "\u00a0", "\t", "\n", "\u3000", "")


def odd_prompts(count: int, seed: int = 0) -> list[str]:
    """So many prompts of two to nine parts each; every part is in some of them."""
    rng, made = random.Random(seed), []
    order = list(PARTS)
    while len(made) < count:
        rng.shuffle(order)
        start = 0
        while start < len(order):
            chosen = order[start : start + rng.randint(2, 9)]
            start += len(chosen)
            text = "".join(part + rng.choice(SPACES) for part in chosen)
            made.append(text if rng.random() < 0.1 else text.strip())
    return made[:count]
