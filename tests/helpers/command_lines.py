"""Commands as people type them."""

PROMPT = "a red cat and a dog"


def generate(sdattn, model, *more, prompt=PROMPT):
    return sdattn("generate", prompt, "--model", model, "--steps", "2", "--device", "cpu", *more)
