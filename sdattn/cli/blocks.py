"""The report's view in a live page: type a prompt, see where words go. Needs ``sdattn[app]``."""

import inspect
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from ..maps.notebook import framed
from ..maps.presets import PRESETS
from ..models.layers import find_denoiser
from ..models.loading import DEMO_SETTINGS, is_demo
from ..runs.generation import generate
from ..runs.report import report

_EXAMPLES = {
    True: ["a red circle left of a blue square", "on the left a green star, on the right a ring"],
    False: ["a cat on a sofa", "an astronaut riding a horse on the moon"],
}


def build_app(pipe: Any) -> Any:
    """A gradio app that draws with a loaded pipeline, one picture at a time.

    Raises:
        ImportError: gradio is not installed.
    """
    gradio = _gradio()
    with gradio.Blocks(title="sdattn", analytics_enabled=False, fill_width=True) as app:
        gradio.Markdown("# sdattn: where each word went")
        with gradio.Row():
            prompt = gradio.Textbox(label="Prompt", lines=2, scale=4, autofocus=True)
            button = gradio.Button("Draw", variant="primary", scale=1)
        inputs = [prompt, *_settings(gradio, pipe)]
        gradio.Examples(_EXAMPLES[is_demo(pipe)], prompt)
        view = gradio.HTML("<p>The picture and where its words went come here.</p>")
        draw = _draw_with(gradio, pipe, app)
        for event in (button.click, prompt.submit):  # the pipeline draws one picture at a time
            event(draw, inputs, view, concurrency_limit=1, concurrency_id="pipe")
    app.queue(api_open=False)  # no request passes the queue by
    return app


def _settings(gradio: Any, pipe: Any) -> list[Any]:
    """The components below the prompt, in the order of ``draw``'s arguments."""
    defaults, guided = _defaults(pipe), _is_guided(pipe)
    scale = defaults["guidance_scale"] if guided else 0
    # FLUX and Qwen-Image use it only with a further option
    has_negative = "negative_prompt" in defaults and "true_cfg_scale" not in defaults
    with gradio.Accordion("Settings", open=False):
        negative = gradio.Textbox(label="Negative prompt", visible=has_negative)
        with gradio.Row():
            return [
                negative,
                gradio.Number(0, label="Seed", precision=0, minimum=0),
                gradio.Slider(
                    1, 100, defaults.get("num_inference_steps") or 30, step=1, label="Steps"
                ),
                gradio.Slider(0, 20, scale, step=0.1, label="Guidance", visible=guided),
                gradio.Dropdown(list(PRESETS), value="default", label="Preset"),
                gradio.Checkbox(False, label="Keep each step"),
            ]


def _defaults(pipe: Any) -> dict[str, Any]:
    """Of the options of the pipeline's call."""
    options = inspect.signature(pipe.__call__).parameters
    usual = {name: option.default for name, option in options.items()}
    return usual | (DEMO_SETTINGS if is_demo(pipe) else {})


def _is_guided(pipe: Any) -> bool:
    return isinstance(_defaults(pipe).get("guidance_scale"), (int, float))


def _draw_with(gradio: Any, pipe: Any, app: Any) -> Callable[..., str]:
    """What draws a picture of the components' values, as the page of its run."""
    guided = _is_guided(pipe)
    bar = gradio.Progress()  # which gradio looks for among a function's defaults

    def draw(
        prompt: str,
        negative: str | None,
        seed: float | None,
        steps: float,
        guidance: float,
        preset: str,
        each_step: bool,
        progress: Any = bar,
    ) -> str:
        if seed is None:
            raise gradio.Error("The seed is empty. Write a whole number, 0 for one.")
        options: dict[str, Any] = {"num_inference_steps": int(steps), "preset": preset}
        options |= {"guidance_scale": guidance} if guided else {}
        options |= {"negative_prompt": negative} if negative and negative.strip() else {}
        options["capture_options"] = {"steps": "all"} if each_step else {}
        try:
            with _progress_of(pipe, progress, app):
                run = generate(pipe, prompt, seed=int(seed), **options)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise gradio.Error(str(error.args[0] if error.args else error)) from error
        return framed(report(run.image_run(0)))

    return draw


def serve(
    pipe: Any, host: str = "127.0.0.1", port: int | None = None, *, browser: bool = False
) -> None:
    """Serve :func:`build_app` until it is interrupted.

    Args:
        pipe: as :func:`sdattn.load_pipeline` gives it.
        host: this machine alone by default; ``"0.0.0.0"`` lets everyone in who can reach it.
        port: the first free one from 7860 by default.
        browser: open a browser.

    Raises:
        ImportError: gradio is not installed.
        OSError: the port is taken.
    """
    app = build_app(pipe)
    settings = launch_settings(host, port)
    app.launch(**settings, inbrowser=browser, quiet=True, prevent_thread_lock=True)
    print(f"Open {app.local_url}, and stop with Ctrl+C.", flush=True)
    app.block_thread()


def launch_settings(host: str, port: int | None) -> dict[str, Any]:
    """How gradio serves the app: nothing is loaded from or sent to another machine."""
    gradio = _gradio()
    from starlette.middleware import Middleware

    sans, mono = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]
    return {
        "server_name": host,
        "server_port": port,
        "share": False,
        "ssr_mode": False,
        "enable_monitoring": False,
        "max_file_size": 1,  # in bytes: the page uploads nothing
        "app_kwargs": {"middleware": [Middleware(OwnPages, host=host)]},
        "footer_links": [],
        "theme": gradio.themes.Default(font=sans, font_mono=mono),  # its own come from a network
    }


def _gradio() -> Any:
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # it is read at the import
    try:
        import gradio
    except ImportError as error:
        raise ImportError("The live page needs gradio: pip install 'gradio>=6'.") from error
    return gradio


class OwnPages:
    """ASGI in front of gradio: a request is answered if it was sent to this machine by the page
    that it serves, or by no page.

    Otherwise a page of another site could draw and upload here, and, with a name of its own that
    leads to this machine (DNS rebinding), read what came of it.
    """

    def __init__(self, app: Any, host: str):
        name = socket.gethostname().lower()
        self.app, self.names = app, {"localhost", host.lower(), name, f"{name}.local"}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope.get("headers", ())}
        if scope["type"] == "lifespan" or not (refusal := self._refusal(headers)):
            await self.app(scope, receive, send)
            return
        plain = [(b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 403, "headers": plain})
        await send({"type": "http.response.body", "body": refusal.encode()})

    def _refusal(self, headers: dict[bytes, str]) -> str:
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if not self._is_here(host):
            return f"{host!r} is no name of this machine. Start with --host NAME to allow one."
        if origin is not None and origin.partition("://")[2] != host:
            return f"A page of {origin!r} cannot use this one."
        return ""

    def _is_here(self, host: str) -> bool:
        """An address is: another site's page has that of the other site."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self.names or bool(ip_address(name))
        except ValueError:
            return False


@contextmanager
def _progress_of(pipe: Any, progress: Any, app: Any) -> Iterator[None]:
    """Inside, each call of the model moves the bar of ``progress``, and is the last one if nobody
    waits for the picture any more."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        if _is_abandoned(app):
            raise _gradio().Error("The page was closed.", print_exception=False)
        calls += 1
        number = len(pipe.scheduler.timesteps)
        progress(min(calls / number, 1.0), desc=f"step {min(calls, number)} of {number}")

    hook = find_denoiser(pipe).model.register_forward_pre_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _is_abandoned(app: Any) -> bool:
    """Whether the page, or the client, that asked for what runs in this thread has gone."""
    from gradio.context import LocalContext

    event = LocalContext.event_id.get(None)
    jobs = [job for group in app._queue.active_jobs for job in group or () if job._id == event]
    return not all(job.alive for job in jobs)
