"""Fifty prompts: short and long ones, weights, embeddings, several scripts, and what tokenizers
change."""

SYSTEM = (
    "You are an assistant designed to generate superior images with the superior degree of "
    "image-text alignment based on textual prompts or user prompts. <Prompt Start> ",
    "You are an assistant designed to generate high-quality images with the highest degree of "
    "image-text alignment based on textual prompts. <Prompt Start> ",
)
COLOURS = ("red", "blue", "green", "golden", "silver", "purple", "orange", "black", "white", "pink")
THINGS = ("cat", "lighthouse", "umbrella", "violin", "dragonfly", "bicycle", "teapot")
WHERE = ("beside", "under", "above", "behind", "near")
PLACES = ("harbour", "cathedral", "waterfall", "marketplace", "observatory", "greenhouse")
LONG = ", ".join(
    f"a {COLOURS[i % 10]} {THINGS[i % 7]} {WHERE[i % 5]} the {PLACES[i % 6]}" for i in range(30)
)
PROMPTS = (
    "a cat",
    "a cat left of a pizza",
    "a (cat:1.3) left of a pizza",
    "a ((fluffy)) cat, [masterpiece], (best quality:1.2)",
    "(a red cat:0.8) and a (blue (dog:1.5):0.7) in the park",
    "portrait of a woman \\(painting\\), oil on canvas",
    "a cat BREAK a dog BREAK a zebra",
    "embedding:glow a cat, embedding:twofold, sunset",
    "a photo of (embedding:glow:1.2) and a cat",
    "embedding:glow",
    "a embedding:glow, embedding:twofold painting",
    "embedding:nowhere a lighthouse on a cliff",
    "A Photograph Of An ASTRONAUT riding a Horse",
    "8k uhd, dslr, 35mm, f/1.8, iso100",
    "the girl's red-haired brother's dog isn't here",
    "caf\u00e9 na\u00efve jalape\u00f1o \u00c9COLE",
    "\u65e5\u672c\u8a9e\u306e\u732b",
    "\u4e00\u53ea\u732b\u5750\u5728\u6c99\u53d1\u4e0a",
    "\u043a\u043e\u0442 \u043d\u0430 \u043a\u0440\u044b\u0448\u0435",
    "\uace0\uc591\uc774 \u0440\u044f\u0434\u043e\u043c",
    "a \U0001f431 and a \U0001f355 on a table",
    "\u00bd cup of coffee\u2026 \u201cquoted\u201d text",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "a  cat   with    many     spaces",
    "line one\nline two\n\nline four",
    "tabs\tbetween\twords",
    "image of an image describing an image",
    "assistant user system describe",
    "Describe the image by detailing the color",
    'a sign that says "OPEN 24/7" in neon',
    "cat, cat, cat, dog, cat",
    "x",
    "1girl, solo, long_hair, looking_at_viewer, blue_eyes",
    "score_9, score_8_up, score_7_up, rating_safe",
    "a cat <lora:detail:0.8> on a mat",
    "http://example.org/a?b=c&d=e",
    "#ffcc00 background, @artist style, 100% wool, $5 bill",
    "an owl; a fox: a bear - a wolf",
    "(((triple))) (nested (weights (here:1.4):1.1):0.9) end",
    "cyberpunk cityscape at night, neon-lit, rain-soaked streets, reflections",
    "macro shot of a dewdrop on a leaf",
    "the quick brown fox jumps over the lazy dog",
    "isometric low-poly island with a windmill",
    "a (red:1.3)(steam:0.7) engine, (blue)((sketch))",
    "watercolour of Venice, gondolas",
    "a man and a woman\n---\na dog, a bird",
    "Z\u00fcrich Stra\u00dfe \u0130stanbul",
    LONG,
    f"(masterpiece:1.2), {LONG}, (sharp focus:1.1)",
    f"{LONG}, embedding:glow, {LONG}",
)
assert len(PROMPTS) == 50
