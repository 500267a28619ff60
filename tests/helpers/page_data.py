"""What a page's script is given, decoded as the documentation says."""

import base64
import json
import math
import re
import zlib

import numpy as np

from sdattn.runs.imagerun import group_heatmaps, step_groups, step_heatmaps


def data_of(page):
    found = re.search(rb'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(found[1])


def maps_of(data):
    """The values of every map, decoded as the documentation says."""
    cells, found = zlib.decompress(base64.b64decode(data["data"])), []
    frames = (max(data["video"]["latent"]) + 1,) if "video" in data else ()
    for rows, cols, low, high in data["maps"]:
        size = math.prod((*frames, rows, cols))
        part, cells = cells[:size], cells[size:]
        differences = np.frombuffer(part, np.uint8).reshape(*frames, rows, cols).astype(int)
        found.append(low + differences.cumsum(-1) % 256 / 255 * (high - low))
    assert not cells
    return found


def values_of(heatmaps):
    return [one.values.double().numpy() for one in heatmaps.occurrences()]


def expected_maps(run):
    """The values of the heatmaps, of groups of layers, and of both in each kept step, in order."""
    groups, by_step = group_heatmaps(run), step_groups(run)
    maps = values_of(run.heatmaps) + [m for group in groups.values() for m in values_of(group)]
    for i, step in enumerate(step_heatmaps(run)):
        maps += values_of(step) + [m for name in groups for m in values_of(by_step[name][i])]
    return maps


def assert_close(shown, wanted):
    """Check that maps of a page are these, to half of one of 255 shades."""
    assert len(shown) == len(wanted)
    for one, other in zip(shown, wanted, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, atol=0.51 / 255 * np.ptp(other) + 5e-5 * other.max())
