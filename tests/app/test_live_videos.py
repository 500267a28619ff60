"""The live page of a model that makes videos, in a process of its own, without a browser."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

NOBODY = SimpleNamespace(_queue=SimpleNamespace(active_jobs=[]))  # waits: no page asked


@pytest.mark.slow
def test_how_many_frames_is_asked_of_videos_alone_and_the_video_is_shown(tmp_path):
    pytest.importorskip("gradio")
    # gradio leaves event loops behind, which other tests would be blamed for
    command = [sys.executable, __file__, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), "tests"])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def look(folder):
    import gradio
    from helpers.tiny_pipelines import make_pipeline
    from helpers.unet_rows import animatediff

    from sdattn.app import forms, tasks
    from sdattn.app.live import Live
    from sdattn.app.recent_runs import RecentRuns

    video = animatediff()
    for pipe, shown in ((video, (16, True)), (make_pipeline(), (None, False))):
        with gradio.Blocks(analytics_enabled=False):
            field = forms._settings(pipe)["num_frames"]
        assert (field.value, field.visible) == shown
    with gradio.Blocks(analytics_enabled=False):
        fields = {"prompt": gradio.Textbox(), "seed": gradio.Number(), **forms._settings(video)}
    live = Live(video, RecentRuns(folder), NOBODY)
    form = forms.Form("draw", tasks.draw, fields, [])
    given = dict.fromkeys(fields) | {"prompt": "a red cat", "seed": 1, "num_inference_steps": 2}
    given |= {"width": 64, "height": 64, "num_frames": 3, "preset": "default"}
    given = {field: given[name] for name, field in fields.items()}
    *_, [run, _, error] = live.job(form)(given, lambda *_, **__: 0)
    assert error is None
    assert len(run[0].video) == 3
    [(_, held)] = live.kept.known([live.kept.keep(run)])
    assert b'"video"' in held.page.read_bytes()


if __name__ == "__main__":
    from pathlib import Path

    look(Path(sys.argv[1]))
