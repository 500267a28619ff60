"""Video files: MP4 (H.264, by PyAV), or animated WebP if PyAV is not installed."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

from ..errors import InvalidValueError, MissingPackageError, refuse

if TYPE_CHECKING:
    from PIL import Image

Format = Literal["mp4", "webp"]
FORMATS: tuple[Format, ...] = get_args(Format)
_CODEC = "libx264"
_OPTIONS = {"crf": "18", "threads": "1"}  # 18: visually lossless
# Frames per second. An animated WebP, the format of masks and previews, counts whole milliseconds:
# faster videos play at 1000.
RATES = (0.01, 1000.0)
PREVIEW = 320  # maximum pixels of a side of a gallery's preview
_PREVIEW_FRAMES = 8
_WEBP = {"quality": 90, "method": 2}


class Video(Sequence["Image.Image"]):
    """The frames of a video, PIL images of one size, in order; ``rate`` is in frames per second."""

    def __init__(
        self,
        frames: Sequence[Image.Image] | Callable[[], Sequence[Image.Image]],
        rate: float,
        number: int | None = None,
    ):
        """``frames`` may be a function that reads them on first use; it needs their ``number``."""
        self._read = frames if callable(frames) else lambda: frames
        self.rate = rate
        self._number = number if callable(frames) else len(frames)

    @cached_property
    def frames(self) -> tuple[Image.Image, ...]:
        return tuple(self._read())

    @property
    def middle(self) -> int:
        """Number of the frame that represents the video as one image."""
        return len(self) // 2

    def key_frames(self, most: int = 6) -> list[int]:
        return key_frames(len(self), most)

    def __len__(self) -> int:
        return len(self.frames) if self._number is None else self._number

    @overload
    def __getitem__(self, number: int) -> Image.Image: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Image.Image]: ...
    def __getitem__(self, number: int | slice) -> Image.Image | Sequence[Image.Image]:
        return self.frames[number]

    def __repr__(self) -> str:
        return f"Video({len(self)} frames, {self.rate:g} a second)"


def key_frames(frames: int, most: int = 6) -> list[int]:
    """Return the numbers of at most ``most`` frames of a video, evenly from first to last."""
    number = min(most, frames)
    return [round(i * (frames - 1) / max(1, number - 1)) for i in range(number)]


def is_rate(value: Any) -> bool:
    """Check that a value is a frame rate that every format can hold."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and RATES[0] <= value <= RATES[1]


def _played(rate: Any) -> Any:
    is_fast = isinstance(rate, Real) and RATES[1] < float(rate) < float("inf")
    return RATES[1] if is_fast else rate


def best_format() -> Format:
    """Return ``"mp4"`` if PyAV is installed and can encode H.264, else ``"webp"``."""
    try:
        return "mp4" if _CODEC in pyav("A video as MP4").codecs_available else "webp"
    except MissingPackageError:
        return "webp"


def write_video(
    frames: Iterable[Image.Image], rate: float, kind: Format, *, lossless: bool = False
) -> bytes:
    """Return a video file's bytes; the same frames give the same bytes.

    Args:
        frames: RGB or grey, all of one size; read one by one. In MP4 an odd last row or column is
            repeated.
        rate: frames per second, at least 0.01; above 1000 the file plays at 1000. A WebP's frames
            begin at the nearest millisecond.
        kind: ``"mp4"`` (H.264) or ``"webp"``, which browsers play in a loop.
        lossless: keep every value, in WebP.

    Raises:
        ValueError: no frames; a rate that the format cannot hold.
    """
    rate = _played(rate)
    if not is_rate(rate):
        text = f"frames a second from {RATES[0]:g} to {RATES[1]:g}, which every format can hold"
        raise refuse("rate", rate, text)
    frames = iter(frames)
    first = next(frames, None)
    if first is None:
        raise InvalidValueError("A video needs at least one frame, and got 0.")
    if kind == "mp4":
        return _write_mp4(first, frames, rate)
    held = io.BytesIO()
    options = {"lossless": True} if lossless else _WEBP
    timing = {"duration": 1000 / rate, "loop": 0}  # Pillow rounds the start of each frame
    first.save(held, "WEBP", save_all=True, append_images=frames, **timing, **options)
    return held.getvalue()


def smaller(frame: Image.Image) -> Image.Image:
    small = frame.convert("RGB")
    small.thumbnail((PREVIEW, PREVIEW))
    return small


def preview(video: Video) -> bytes:
    """Return a small animated WebP of a few frames, evenly spaced, with the video's duration."""
    numbers = video.key_frames(_PREVIEW_FRAMES)
    frames = (smaller(video[i]) for i in numbers)
    return write_video(frames, max(RATES[0], len(numbers) * video.rate / len(video)), "webp")


def read_video(
    data: bytes, kind: Format, where: str, number: int | None = None, rate: float = 1.0
) -> list[Image.Image]:
    """Return the frames of :func:`write_video`'s file, RGB; raise ValueError if it is no such
    video.

    A WebP stores equal frames once; with the ``number`` written they are read one by one. ``where``
    is the origin of the file, for errors.
    """
    from PIL import Image

    held = io.BytesIO(data)
    try:
        if kind == "mp4":
            with pyav(where).open(held, format="mp4") as file:
                return [frame.to_image() for frame in file.decode(video=0)]
        # Only WebP is opened: other readers of Pillow start external programs.
        with Image.open(held, formats=["WEBP"]) as video:
            return _of_webp(video, number, _played(rate))
    except MissingPackageError:
        raise
    except Exception as error:  # from either library
        raise InvalidValueError(
            f"{where} is not a readable video: {error}. Restore it or generate the run again."
        ) from error


def pyav(what: str) -> Any:
    """Import PyAV; the ImportError says that ``what`` needs it and how to install it."""
    try:
        import av
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{what} needs PyAV, which is not installed. Install it: pip install 'sdattn[video]'"
        ) from error
    return av


def _write_mp4(first: Image.Image, frames: Iterator[Image.Image], rate: float) -> bytes:
    from fractions import Fraction

    av = pyav("A video as MP4")
    held = io.BytesIO()
    with av.open(held, "w", format="mp4") as file:
        per_second = Fraction(rate).limit_denominator(10_000)
        stream = file.add_stream(_CODEC, rate=per_second, options=_OPTIONS)
        stream.width, stream.height = _even(first).size
        stream.pix_fmt = "yuv420p"
        for frame in chain([first], frames):
            file.mux(stream.encode(av.VideoFrame.from_image(_even(frame))))
        file.mux(stream.encode(None))
    return held.getvalue()


def _even(frame: Image.Image) -> Image.Image:
    """Return RGB with an even number of rows and columns, the last repeated if it is odd."""
    import numpy as np
    from PIL import Image

    width, height = frame.size
    if width % 2 == height % 2 == 0:
        return frame.convert("RGB")
    pixels = np.asarray(frame.convert("RGB"))
    return Image.fromarray(np.pad(pixels, ((0, height % 2), (0, width % 2), (0, 0)), "edge"))


def _of_webp(video: Any, number: int | None, rate: float) -> list[Image.Image]:
    frames = list[Any]()
    end = 0
    for i in range(getattr(video, "n_frames", 1)):
        video.seek(i)
        frame = video.convert("RGB")  # this also reads its duration
        end += video.info.get("duration", 0)
        until = len(frames) + 1 if number is None else round(end * rate / 1000)
        frames += [frame] * max(1, until - len(frames))
    return frames[:number] + frames[-1:] * ((number or 0) - len(frames))
