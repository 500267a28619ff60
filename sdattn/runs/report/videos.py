"""The video of a page: its frames as images, and when each is shown."""

from ...files.videos import Video
from ...maps.heatmap import latent_frames
from .images import video_uris


def video_data(video: Video, latent: int) -> tuple[dict[str, object], str]:
    """What the page's script is to know of a video, and the data URI of its middle frame, which the
    page opens with.

    Args:
        video: its frames.
        latent: how many frames the maps have.

    Returns:
        ``frames``, a data URI each, "" in the place of the middle one; ``latent``, which frame of
        the maps belongs to each; ``rate``, frames a second; ``middle``, the number of that frame.
    """
    uris = video_uris(video)
    middle, uris[video.middle] = uris[video.middle], ""
    shown = latent_frames(latent, len(video))
    data = {"frames": uris, "latent": shown, "rate": video.rate, "middle": video.middle}
    return data, middle
