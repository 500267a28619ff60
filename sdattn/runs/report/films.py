"""The film of a page: its frames as pictures, and when each is shown."""

from typing import Any

from ...files.films import Film
from ...maps.heatmap import latent_frames
from .images import film_uris


def film_data(film: Film, latent: int) -> tuple[dict[str, Any], str]:
    """What the page's script is to know of a film, and the data URI of its middle frame, which the
    page opens with.

    Args:
        film: its frames.
        latent: how many frames the maps have.

    Returns:
        ``frames``, a data URI each, "" in the place of the middle one; ``latent``, which frame of
        the maps belongs to each; ``rate``, frames a second; ``middle``, the number of that frame.
    """
    uris = film_uris(film)
    middle, uris[film.middle] = uris[film.middle], ""
    shown = latent_frames(latent, len(film))
    data = {"frames": uris, "latent": shown, "rate": film.rate, "middle": film.middle}
    return data, middle
