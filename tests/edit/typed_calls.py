"""What a type checker must know of ``sdattn.edit``, a module that can be called.

Nothing runs this: mypy reads it in ``scripts/check``. Where an error is expected and mypy sees
none, its ``type: ignore`` is unused, which is an error too.
"""

import sdattn
from sdattn.edit import EditRun


def every_name_has_its_type() -> None:
    run: EditRun = sdattn.edit(None, "a cat", ["a dog"], seed=1, num_inference_steps=3)
    _same: sdattn.edit.EditRun = run
    _control: sdattn.edit.AttentionReplace = sdattn.edit.AttentionReplace([], num_steps=3)
    _near: float = sdattn.edit.psnr(run.images[0], run.images[1])


def what_is_wrong_is_told() -> None:
    sdattn.edit(None, 3, "a dog")  # type: ignore[arg-type]
    sdattn.edit.nothing  # type: ignore[attr-defined]  # noqa: B018
