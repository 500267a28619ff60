"""``sdattn diff``: two runs side by side, or one prompt with and without a LoRA."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .checks import Checks
from .output import Output
from .show import load_item

if TYPE_CHECKING:
    from ..runs.diff.comparison import Comparison

_CALL = {
    "num_inference_steps": options.CALL["num_inference_steps"],
    "guidance_scale": options.CALL["guidance_scale"],
    "set_": options.SET,
}
_DRAWN = {
    "model": options.option(str, help="With --lora: the model, as for generate (default: demo)."),
    "seed": options.option(int, help="With --lora: seed of the noise (default: 0)."),
    **_CALL,
    "device": options.DEVICE,
    "dtype": options.DTYPE,
    **options.LOADING,
}


def diff(
    output: Output,
    run_a: Annotated[
        str,
        typer.Argument(
            help="A run's folder, or a batch run's with --item; with --lora a prompt to draw."
        ),
    ],
    run_b: Annotated[
        str | None, typer.Argument(help="The other run; with --lora the first word.")
    ] = None,
    words: options.Words = None,
    *,
    item: Annotated[
        list[str] | None,
        typer.Option(help="An item's id in both batch runs; given twice, in A and in B."),
    ] = None,
    asked: Annotated[options.Given, options.Group(_DRAWN)],
    folder: Annotated[Path | None, options.folder_named("A-vs-B")] = None,
    force: options.Force = False,
) -> None:
    """Compare two runs: each word's heatmaps side by side, and B - A. The runs differ in prompt,
    seed or model; with --lora, one prompt is drawn without the LoRA (A) and with it (B).

    Examples:
      sdattn diff outputs/a-cat-0 outputs/a-cat-1
      sdattn diff outputs/a-cat-0 outputs/a-dog-0 cat dog --out cat-or-dog
      sdattn diff RUN-1 RUN-2 --item 000001
      sdattn diff "a cat left of a pizza" --lora my-style.safetensors
      sdattn diff "a cat on a sofa" --model owner/name --lora style.safetensors:0.8
    """
    if "lora" in asked:
        chosen = [word for word in (run_b, *(words or ())) if word is not None]
        found, folder = _with_and_without(output, run_a, asked, chosen or None, folder, force)
    elif asked:
        text = f"`{next(iter(asked))}` is for --lora, which draws a prompt."
        raise typer.BadParameter(text)
    elif run_b is None:
        raise typer.BadParameter("Name the other run, or pass --lora.", param_hint="RUN_B")
    else:
        found, folder = _of_runs(Path(run_a), Path(run_b), words, item, folder, force)
    found.save(folder, force=force)
    _print(output, found, folder)


def _of_runs(
    run_a: Path,
    run_b: Path,
    words: list[str] | None,
    item: list[str] | None,
    out: Path | None,
    force: bool,
) -> "tuple[Comparison, Path]":
    """Return the comparison of two runs, and the folder for it."""
    from ..files.paths import check_apart, file_name
    from ..runs.diff import diff
    from ..runs.targets import check_target

    if item and len(item) > 2:
        raise typer.BadParameter("Pass it once for both runs, or twice.", param_hint="--item")
    if out is not None:
        check_apart(out, run_a, run_b)
        check_target(out, force=force, kind="diff")
    if item:
        a = load_item(run_a, item[0])
        b = load_item(run_b, item[-1])
        names = f"{run_a.resolve().name}/{item[0]}", f"{run_b.resolve().name}/{item[-1]}"
        found = diff(a, b, words=words, names=names)
    else:
        found = diff(run_a, run_b, words=words)
    if out is None:
        out = Path("outputs") / "-vs-".join(file_name(name) for name in found.names)
        check_apart(out, run_a, run_b)
    return found, out


def _with_and_without(
    output: Output,
    prompt: str,
    asked: dict[str, Any],
    words: list[str] | None,
    out: Path | None,
    force: bool,
) -> "tuple[Comparison, Path]":
    """Return the comparison of a prompt's images without a LoRA (A) and with it (B), and its
    folder."""
    from ..files.paths import file_name
    from ..runs.targets import check_target

    seed = asked.get("seed", 0)
    loaded = {"model": "demo", **{n: asked[n] for n in options.MODEL if n in asked}}
    out = out or Path("outputs") / f"{file_name(prompt)}-{seed}-with-lora"
    checks = Checks()
    checks.run(check_target, out, force=force, kind="diff")
    given = checks.call({name: asked[name] for name in _CALL if name in asked})
    checks.of_call(loaded, [prompt], seed, given)
    checks.refuse()
    without = {name: value for name, value in loaded.items() if name != "lora"}
    # The LoRA first: loading it shows whether it fits the model.
    runs = []
    for how in (loaded, without):
        pipe = options.load(how, output)
        from ..models.facts import check_makes_images
        from ..runs.diff import diff
        from ..runs.generation import generate

        check_makes_images(pipe)
        runs.append(generate(pipe, prompt, seed=seed, words=words, **given))
        del pipe  # before the next is loaded
    model = loaded["model"]
    said = ", ".join(loaded["lora"])
    names = f"{model} without LoRA", f"{model} with {said}"
    return diff(runs[1], runs[0], words=words, names=names), out


def _print(output: Output, found: "Comparison", out: Path) -> None:
    from ..runs.diff.comparison import NUMBERS
    from .output import print_folder, table

    settings = [("run", *found.names), ("prompt", *found.prompts)]
    settings += [(name, *pair) for name, pair in found.told_settings().items()]
    output.print(table(("", "A", "B"), settings))
    words = zip(found.told_words(), found.words, strict=True)
    rows = [[*told, _middle(word, found.image_a.size)] for told, word in words]
    output.print(table(("word", *NUMBERS, "at x, y"), rows))
    output.answer(print_folder(output, out))


def _middle(word: Any, size: tuple[int, int]) -> str:
    """Return the middle of the cell with the largest difference in pixels of A's image."""
    if word.largest is None:
        return "-"
    row, col = word.largest[1]
    rows, cols = word.difference.shape
    return f"{(col + 0.5) * size[0] / cols:.0f}, {(row + 0.5) * size[1] / rows:.0f}"
