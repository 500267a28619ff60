"""Commands as people type them."""

PROMPT = "a red cat and a dog"


def generate(invoke, model, *more, prompt=PROMPT):
    return invoke("generate", prompt, "--model", model, "--steps", "2", "--device", "cpu", *more)
