"""``sdattn show``: draw a saved run again, as images and a page, a figure, or an animation."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import ExistsError
from .checks import names_of, threshold_of
from .options import MASK_THRESHOLD, Words
from .output import Output

Kind = Literal["words", "steps", "layers", "heads", "frames", "compare", "card", "animation"]
_SHARED = {"card": (".png",), "animation": (".gif", ".webp", ".mp4")}  # not for papers
_COLUMNS = {"1col": 3.25, "2col": 6.875}  # inches, as in two-column papers of CVPR


def show(
    output: Output,
    run: Annotated[Path, typer.Argument(help="A run's folder, or a batch run's.")],
    words: Words = None,
    item: Annotated[str | None, typer.Option(help="The id of an item of a batch run.")] = None,
    figure: Annotated[
        Kind | None,
        typer.Option(
            help="Draw this figure for papers instead; or a card to share, 1200 x 630 pixels, or "
            "its animation over the steps, at most 3 MB."
        ),
    ] = None,
    words_: Annotated[
        str | None,
        typer.Option("--words", help="Comma-separated words and phrases, instead of WORDS."),
    ] = None,
    others: Annotated[
        list[Path] | None,
        typer.Option("--with", help="With --figure compare: another run; several times."),
    ] = None,
    cmap: Annotated[
        str, typer.Option("--colormap", help="Colormap of matplotlib, for --figure.")
    ] = "inferno",
    width: Annotated[
        str | None,
        typer.Option(
            help="Width of the figure: inches, or 1col or 2col, the columns of a paper, 3.25 and "
            "6.875 inches (default: what its panels need, at most 7)."
        ),
    ] = None,
    dpi: Annotated[
        int | None, typer.Option(min=20, max=2400, help="Pixels per inch (default: 300).")
    ] = None,
    show_axes: Annotated[
        bool, typer.Option("--axes/--no-axes", help="Frames, and the sides in pixels.")
    ] = True,
    own_scale: Annotated[
        bool | None,
        typer.Option(
            "--own-scale/--shared-scale",
            help="A scale for each panel, or one for all (default: own for layers).",
        ),
    ] = None,
    colorbar: Annotated[bool, typer.Option(help="Draw the colour bar.")] = True,
    animate: Annotated[
        bool, typer.Option("--animate", help="The same as --figure animation.")
    ] = False,
    frame: Annotated[
        int | None,
        typer.Option(min=1, help="Frame of a video for --figure (default: the middle)."),
    ] = None,
    masks: Annotated[
        bool,
        typer.Option(
            "--masks", help="Draw masks too: masks/NN-WORD.png, white where the map is high."
        ),
    ] = False,
    mask_threshold: Annotated[
        str | None,
        typer.Option("--threshold", help=MASK_THRESHOLD),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Folder to draw into (default: the run's); with --figure a .pdf, .svg or "
            ".png file (default for a card or an animation: RUN-card.png, RUN-animation.gif; also "
            ".webp, .mp4).",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace existing files in --out.")
    ] = False,
) -> None:
    """Draw the heatmaps of a saved run again, without the model.

    Examples:
      sdattn show outputs/a-cat-on-a-sofa-0 "cat on a sofa"
      sdattn show outputs/a-cat-on-a-sofa-0 cat --masks --threshold otsu -o masks
      sdattn show outputs/a-cat-on-a-sofa-0 --figure words --width 1col -o fig.pdf
      sdattn show outputs/a-cat-0 --figure compare --with outputs/a-cat-1 -o seeds.pdf
      sdattn show outputs/a-cat-on-a-sofa-0 --figure card
      sdattn show outputs/a-cat-on-a-sofa-0 cat --figure animation -o cat.gif
      sdattn show outputs/a-cat-walking-0 cat --figure frames -o frames.pdf
    """
    if words_ is not None:
        words = [*(words or ()), *names_of(words_)]
    style: dict[str, Any] = {
        "cmap": cmap,
        "show_axes": show_axes,
        "own_scale": own_scale,
        "colorbar": colorbar,
        "width": _width(width),
    }
    is_styled = bool(dpi) or style != _USUAL
    is_of_two = animate and figure not in (None, "animation")
    figure = "animation" if animate else figure
    for is_wrong, text in (
        (is_of_two, "Pass --figure or --animate, each has a file of its own."),
        (
            frame is not None and figure in (None, "frames"),
            "--frame needs a --figure of one frame.",
        ),
        (masks and figure, "--masks are drawn without --figure."),
        (mask_threshold is not None and not masks, "--threshold needs --masks."),
        (
            is_styled and (figure is None or figure in _SHARED),
            "How a figure looks is for a --figure for papers. Pass one, or leave it out.",
        ),
        (
            (figure == "compare") != bool(others),
            "--figure compare takes the other runs by --with, and only it does.",
        ),
    ):
        if is_wrong:
            raise typer.BadParameter(text)
    if figure is None:
        _drawings(output, run, item, words, out, force, masks, mask_threshold)
        return
    from .. import figures
    from ..figures.choosing import save_file
    from ..files.images import png

    if figure in _SHARED and out is None:
        out = Path(f"{run.name}-{figure}{_SHARED[figure][0]}")
    path = _free_file(out, _SHARED.get(figure, figures.FORMATS), force)
    loaded = _load(run, item, frame)
    if figure == "card":
        save_file(path, png(figures.card(loaded, words)))
    elif figure == "animation":
        figures.save_animation(figures.animate(loaded, words), path)
    else:
        further = [_load(other, None, frame) for other in others or ()]
        drawn = figures.figure(loaded, figure, words, others=further, **style)
        figures.save_figure(drawn, path, dpi=dpi or 300)
    output.print(str(path), len(str(path)))
    output.answer({"open": str(path)})


def _free_file(out: Path | None, formats: Collection[str], force: bool) -> Path:
    """Return the file that --out names, in one of ``formats``; refuse one that is there."""
    if out is None or out.suffix.lower() not in formats:
        found = "" if out is None else f", not {out.name}"
        text = f"Name a file that ends in {' or '.join(formats)}{found}."
        raise typer.BadParameter(text, param_hint="--out")
    _check_no_run(out)
    if out.exists() and not force:
        raise ExistsError(f"{out} exists already. Choose another --out, or pass --force.")
    return out


_USUAL = {
    "cmap": "inferno",
    "show_axes": True,
    "own_scale": None,
    "colorbar": True,
    "width": None,
}


def _width(text: str | None) -> float | None:
    """Read --width: inches, or columns of a paper."""
    if text is None or text in _COLUMNS:
        return _COLUMNS.get(text or "")
    try:
        return float(text.removesuffix("in"))
    except ValueError:
        why = f"{text!r} is no number of inches, and none of {', '.join(_COLUMNS)}."
        raise typer.BadParameter(why, param_hint="--width") from None


def _drawings(
    output: Output,
    run: Path,
    item: str | None,
    words: list[str] | None,
    out: Path | None,
    force: bool,
    masks: bool,
    threshold: str | None,
) -> None:
    from ..files.addresses import is_address
    from ..files.paths import check_apart
    from ..files.writing import write_files
    from ..maps.masks import MaskSettings
    from ..runs.drawings import drawings
    from ..runs.folder import add_files
    from ..runs.report import report
    from .output import print_folder, print_words

    if out is None and is_address(run):
        raise typer.BadParameter("A run in a storage is not changed. Pass --out FOLDER.")
    cut = MaskSettings(threshold=threshold_of(threshold))  # type: ignore[arg-type]  # it checks it
    saved = _load(run, item)
    if item is not None and out is None:
        raise typer.BadParameter(f"Say where to draw item {item}: --out FOLDER.")
    at_home = out is None or (item is None and out.resolve() == run.resolve())
    if at_home and saved.settings.fingerprint is not None:  # they stay as their checksums say
        raise typer.BadParameter(f"{run} is an item of a batch run. Say where: --out FOLDER.")
    folder = run if at_home or out is None else out
    if not at_home:
        _check_no_run(folder)
        check_apart(folder, run)
    all_words = saved.heatmaps.occurrences()
    maps = _found(saved.heatmaps, words) if words else all_words
    # The page has all words anyway, so that only phrases come on top of them.
    known = [heatmap.columns for heatmap in all_words]
    phrases = [heatmap for heatmap in maps if heatmap.columns not in known]
    page = report(saved, phrases)
    parts: tuple[str, ...] = ("overlays",) if at_home and words else ("overlays", "grid")
    if masks:
        parts = (*parts, "masks")
    numbers = None
    if at_home:  # a word has its number in the run, so that it has one file
        known += [heatmap.columns for heatmap in phrases]
        numbers = [1 + known.index(heatmap.columns) for heatmap in maps]
    made = drawings(saved, maps, saved.heatmaps.prompt.text, parts, masks=cut, numbers=numbers)
    made["report.html"] = page
    own = saved.info["files"] if at_home else ()
    _check_free(folder, made.keys() - own, force)
    # The run's own files stay, but for masks of another threshold and a page with new phrases.
    for name in [name for name in made if name in own and not force]:
        is_new = name.startswith("masks/") or (name == "report.html" and phrases)
        if not is_new and (folder / name).is_file():
            del made[name]
    (add_files if at_home else write_files)(folder, made)
    print_words(output, {"prompt": maps})
    output.answer(print_folder(output, folder))


def _found(heatmaps: Any, words: list[str]) -> list[Any]:
    maps = []
    for word in words:
        maps += heatmaps.find(word)
    return maps


def _check_no_run(out: Path) -> None:
    """Refuse to draw into another run's folder, whose run.json would then be wrong."""
    from ..runs.targets import run_around

    if (around := run_around(out)) is not None:
        raise ExistsError(
            f"{out} is or lies in {around}, the folder of a run. Choose another --out."
        )


def _check_free(folder: Path, names: Collection[str], force: bool) -> None:
    taken = sorted(name for name in names if (folder / name).exists())
    if taken and not force:
        raise ExistsError(
            f"{folder} has {', '.join(taken[:3])} already. Choose another --out, or pass --force."
        )


def _load(run: Path, item: str | None, frame: int | None = None) -> Any:
    from ..files.addresses import path_of
    from ..runs.folder import load_run

    run_path = path_of(run)
    if item is None and (run_path / "batch.json").is_file():
        raise typer.BadParameter(f"{run_path} is a batch run. Name one of its items: --item ID.")
    loaded = load_run(run) if item is None else load_item(run, item)
    there = len(loaded.video or ())
    if frame is not None and frame > there:
        found = f"has {there} frames, 1 to {there}" if there else "is of an image, without frames"
        raise typer.BadParameter(f"{run_path} {found}.", param_hint="--frame")
    return loaded if frame is None else loaded.frame(frame - 1)


def load_item(run: Path, item: str) -> Any:
    """Read an item of a batch run; refuse --item for a run that has none."""
    from ..batch.reading import open_batch
    from ..files.addresses import path_of

    if (path_of(run) / "run.json").is_file():
        text = f"{run} is a single run, which has no items. Leave --item {item} out."
        raise typer.BadParameter(text)
    return open_batch(run)[item]
