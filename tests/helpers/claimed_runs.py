"""A batch run up to its first image: its folder claimed, its jobs known, nothing drawn."""

import json
from types import SimpleNamespace

from helpers.batch_draws import SMALL
from sdattn.batch import Request
from sdattn.batch.claims import claim, manifest_of
from sdattn.batch.engines.worker import Loaded, check, load
from sdattn.batch.input.items import read_items
from sdattn.batch.input.plan import fingerprint
from sdattn.batch.storage.folder import BatchFolder


def claimed(model, out, rows, **asked):
    """The request, the pipeline, the open folder, the jobs and the fingerprint of each id."""
    usual = {"options": SMALL, "device": "cpu", "save": ("image", "maps"), "progress": False}
    request = Request("in.jsonl", out, str(model), **{**usual, **asked})
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    items, bad = read_items(data, "jsonl")
    assert not bad
    pipe = load(request, "cpu")
    jobs, bad = check(pipe, items, request)
    assert not bad
    folder = BatchFolder(out)
    folder.open("job")
    manifest = manifest_of(request, Loaded.of(pipe), jobs, 0, len(jobs))
    settings = manifest.settings.fingerprint
    wanted = {job.item.id: fingerprint(job, settings) for job in jobs}
    assert claim(folder, manifest, wanted, wanted, force=False) == set()
    return SimpleNamespace(request=request, pipe=pipe, folder=folder, jobs=jobs, wanted=wanted)
