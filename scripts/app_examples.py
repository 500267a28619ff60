"""Draw the images of the live page's examples again: sdattn/app/examples/NN.webp."""

import sdattn
from sdattn.app.forms import EXAMPLES, examples_of


def main() -> None:
    pipe = sdattn.load_pipeline("demo", device="cpu")
    EXAMPLES.mkdir(exist_ok=True)
    for number, (prompt, seed) in enumerate(examples_of(pipe).prompts, 1):
        [run] = sdattn.generate(pipe, prompt, seed=seed)
        run.image.save(EXAMPLES / f"{number:02d}.webp", quality=90, method=6)


if __name__ == "__main__":
    main()
