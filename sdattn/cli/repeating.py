"""A run's own ``run.json`` as the options of the command that makes it again."""

import json
from pathlib import Path
from typing import Any

from ..errors import InvalidValueError
from ..files.records import read_document
from ..maps.presets import PRESETS
from ..runs.info import RunInfo, read_info
from ..runs.settings import EDIT_FORMAT, EditInfo, Explained, RunSettings, command_for


def options_of_run(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the command that makes a run again, and its options by their names in Python, except
    the device; the pipeline's own as ``options``.

    Raises:
        ValueError: it is no run, or only Python can make it again; says why.
    """
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidValueError(f"{path} is no JSON: {error}.") from None
    settings: RunSettings
    if isinstance(document, dict) and document.get("format") == EDIT_FORMAT:
        edit = read_document(EditInfo, document, path, "Restore it or edit the image again.")
        settings = edit.of_images
        info = _info(path.parent / edit.runs[0] / "run.json")
    else:
        settings = info = _info(path)
        if info.edited:
            text = f"{path} is of one image of an edit. Take the run.json of the folder above."
            raise InvalidValueError(text)
    try:
        command = command_for(settings, info.preset)
    except InvalidValueError as error:
        raise InvalidValueError(f"{path}: {error}") from None
    loading = settings.loading.arguments() if settings.loading else {}
    asked = {
        **{name: getattr(settings, name) for name in ("prompt", "model", "dtype", "seed")},
        "preset": info.preset.name,
        "refine": None if PRESETS[info.preset.name].refine else info.preset.refine,
        "ask": settings.asked,
        **loading,
    }
    options = dict(settings.options or {})
    options.pop("num_images_per_prompt", None)  # a run is of one of the images
    if settings.edited:
        words = dict.fromkeys(word for words in settings.edited.blend or () for word in words)
        edited = {"source": settings.edited.prompt, **vars(settings.edited), "blend": [*words]}
        return command, {**asked, **edited, "options": options}
    if settings.explained:
        return command, {**asked, **_explained(settings.explained, path.parent, options)}
    return command, {**asked, **_kept(info), "options": options}


def _info(path: Path) -> RunInfo:
    return read_info({"run.json": path.read_bytes()}, str(path.parent))


def _kept(info: RunInfo) -> dict[str, Any]:
    captured = info.captured
    kept = []
    if captured:
        kept += [name for name in ("steps", "heads") if getattr(captured, name) == "all"]
        kept += ["spots"] if captured.spots else []
    if info.preset.each_head:  # it keeps the heads itself
        kept = [name for name in kept if name != "heads"]
    further = {"negative_maps": "negative" in info.more, "causal": "causal" in info.more}
    return {"keep": ",".join(kept) or None, **further}


def _explained(explained: Explained, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Return the image by the file's name that the run records, in its folder, in the folder above,
    or here; else the run's own image, the part of it that the model saw."""
    image = folder / "image.png"
    for place in (folder, folder.parent, Path()) if explained.file else ():
        if (place / Path(explained.file or "").name).is_file():
            image = place / Path(explained.file or "").name
            break
    if explained.way == "inversion":
        steps = options.get("num_inference_steps")
        return {"image": str(image), "invert": True, "options": {"num_inference_steps": steps}}
    return {"image": str(image), "timesteps": ",".join(map(str, explained.timesteps))}
