"""The video on a page: its frames as images, and when to show each."""

from ...files.videos import Video
from ...maps.heatmap import latent_frames
from .images import video_uris


def video_data(video: Video, latent: int) -> tuple[dict[str, object], str]:
    """Return a video's data for the script, and the data URI of its middle frame, which the page
    opens with.

    Args:
        video: frames and their rate.
        latent: number of frames that the maps have.

    Returns:
        ``frames``, a data URI each, "" for the middle frame; ``latent``, the maps' frame for each;
        ``rate``, frames per second; ``middle``, the number of the middle frame.
    """
    uris = video_uris(video)
    middle = uris[video.middle]
    uris[video.middle] = ""
    shown = latent_frames(latent, len(video))
    data = {"frames": uris, "latent": shown, "rate": video.rate, "middle": video.middle}
    return data, middle
