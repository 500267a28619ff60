"""The live page, served by the command and driven as a person does."""

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
import zipfile
from contextlib import closing, contextmanager
from importlib.util import find_spec

import pytest
from helpers.browser import faults_for_people, start_browser, wait_for  # noqa: F401
from helpers.tiers import tiered
from PIL import Image

# It is imported by the app's own process; to import it takes seconds.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("gradio") is None, reason="pip install 'sdattn[app]'"),
]


# The command, which says of each call of a UNet that there was one, and how many hooks it has. No
# word arrives where a prompt has "moon".
COUNTED = """
import sys
from dataclasses import replace
from diffusers import UNet2DConditionModel
from torch.nn.modules.module import register_module_forward_pre_hook
from sdattn import ImageRun, cli
from sdattn.maps.arrival import calibration_of

found, never = ImageRun.missing, replace(calibration_of("demo"), lead=1e9)

def missing(run, words=None):
    lost = "moon" in run.settings.prompt
    return run.heatmaps.missing(words, calibration=never) if lost else found(run, words)

def count(model, _):
    if isinstance(model, UNet2DConditionModel):
        print("pass", len(model._forward_pre_hooks), flush=True)

register_module_forward_pre_hook(count)
ImageRun.missing = missing
sys.argv = ["sdattn", "app", "--port", sys.argv[1], "--device", "cpu"]
cli.main()
"""


@pytest.fixture(scope="module")
def served_folder(tmp_path_factory):
    """Where the app has its temporary files, and ``stdout`` and ``stderr``."""
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def address(served_folder):
    """Where the command says that it is. A process for all tests here: gradio leaves sockets
    behind, and takes seconds to be imported."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "TMPDIR": str(served_folder)}
    with (
        (served_folder / "stdout").open("w") as output,
        (served_folder / "stderr").open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-c", COUNTED, str(port)],
            stdout=output, stderr=errors, text=True, env=environment,
        ) as process,
    ):  # fmt: skip
        try:
            end = time.monotonic() + 120
            while not (opened := [line for line in lines_of(served_folder) if "Open" in line]):
                assert process.poll() is None and time.monotonic() < end, trouble(served_folder)
                time.sleep(0.1)
            assert f":{port}/" in opened[0] and listens(port)
            yield f"http://127.0.0.1:{port}/"
        finally:
            process.terminate()
    left = [path for path in served_folder.iterdir() if path.name.startswith("sdattn-app-")]
    assert left == []


def lines_of(folder):
    """What the app has printed."""
    return (folder / "stdout").read_text().splitlines()


def trouble(folder):
    return (folder / "stderr").read_text()


def listens(port):
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def open_app(browser, address):
    """Open the app in a browser that knows nothing of it, as wide as said."""
    contexts = []

    def opened(width, **options):
        context = browser.new_context(viewport={"width": width, "height": 844}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.asked = []
        page.on("request", lambda one: page.asked.append(one.url))
        page.goto(address)
        wait_until_alive(page)
        return page

    yield opened
    for one in contexts:
        one.close()


def wait_until_alive(page):
    """Wait until gradio, which says that it is loading, has begun."""
    page.get_by_role("button", name="Draw").wait_for()
    page.get_by_text("Loading...").wait_for(state="hidden")


def say(page, prompt, **settings):
    """Type a prompt, and settings by their labels, no faster than a person does: what is put into
    a field of gradio's before it is alive is seen there, but not taken over."""
    if settings:
        page.get_by_role("button", name="Settings").click()
    for name, value in settings.items():
        field = page.get_by_label(name, exact=True)
        field.click(delay=100)
        field.press("ControlOrMeta+a")
        field.press_sequentially(value, delay=100)
        field.press("Tab")  # taken over when it is left
    page.get_by_label("Prompt", exact=True).fill(prompt)


def shown(page, prompt):
    """The frame, once it shows the run of a prompt."""
    frame = page.frame_locator("iframe[title=sdattn]")
    ready = frame.locator("html[data-ready]").filter(has_text=prompt)
    ready.wait_for()
    return frame


def facts(frame):
    """The settings of the run that is shown, on one line."""
    return " ".join(frame.locator("dl").first.inner_text().split())


EXAMPLE = "a cat left of a pizza"


# Whether one must scroll to see all of a page, down and to the right.
OVERFLOWS = """[
  document.scrollingElement.scrollHeight > document.scrollingElement.clientHeight,
  document.scrollingElement.scrollWidth > document.scrollingElement.clientWidth]"""


def test_enter_draws_examples_draw_and_the_last_runs_come_again(open_app, address):
    page = open_app(390)
    say(page, "a <b>red</b> cat", Steps="4")
    page.get_by_label("Prompt", exact=True).press("Enter")
    frame = shown(page, "a <b>red</b> cat")
    assert "num_inference_steps 4 " in facts(frame)
    assert page.evaluate(OVERFLOWS)[1] is False
    inner = page.frame(url="about:srcdoc")
    wait_for(inner, f"() => String({OVERFLOWS}) === 'false,false'")  # the page has one
    frame.locator("#stage").hover()  # it has its place when it can be pointed at
    with page.expect_download() as saved:
        frame.get_by_role("button", name="PNG").click(delay=100)
    assert saved.value.suggested_filename.endswith(".png")

    page.locator("#examples button").first.click()
    frame = shown(page, EXAMPLE)
    page.get_by_role("button", name="Thumbnail 2 of 2").wait_for()  # all has come
    assert page.get_by_label("Prompt", exact=True).input_value() == EXAMPLE
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save the run").click()
    with zipfile.ZipFile(saved.value.path()) as archive:
        assert "a-cat-left-of-a-pizza-3/run.json" in archive.namelist()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save the page").click()
    assert EXAMPLE in saved.value.path().read_text(encoding="utf-8")

    page.get_by_role("button", name="Thumbnail 2 of 2").click()
    shown(page, "a <b>red</b> cat")
    page.reload()
    page.get_by_role("button", name="Thumbnail 1 of 2").click()
    shown(page, EXAMPLE)
    own = (address, "data:", "blob:", "about:")
    assert [url for url in page.asked if not url.startswith(own)] == []


# Of gradio: the alternative text of an image in its gallery is the caption that is below it.
OF_GRADIO = "image-redundant-alt: <img src="


def own_faults(page):
    return [fault for fault in faults_for_people(page) if not fault.startswith(OF_GRADIO)]


@pytest.mark.parametrize(
    ("width", "scheme"),
    tiered([(390, "dark"), (1280, "light"), (768, "dark")], quick=0),
)
def test_nothing_keeps_people_from_using_it(open_app, width, scheme):
    page = open_app(width, color_scheme=scheme, has_touch=width < 1000)
    press = "tap" if width < 1000 else "click"
    page.get_by_role("button", name="Draw").wait_for()
    found = faults_for_people(page)
    say(page, "a red cat", Steps="1")
    getattr(page.get_by_role("button", name="Draw"), press)()
    frame = shown(page, "a red cat")
    page.get_by_role("button", name="Thumbnail 1 of 1").wait_for()
    found += faults_for_people(page)
    assert [fault for fault in found if not fault.startswith(OF_GRADIO)] == []
    assert len([fault for fault in found if "/runs/" in fault]) == 1
    dark = frame.locator("body").evaluate(
        "(b) => getComputedStyle(b).backgroundColor.match(/\\d+/g)[0] < 99"
    )
    assert dark is (scheme == "dark")
    image = frame.locator("#heated").bounding_box()
    assert image["width"] >= 178 and image["height"] >= 178  # one half of two
    for tab in ("Photo", "Edit"):
        page.get_by_role("tab", name=tab).click()
        page.get_by_role("button", name="Explain" if tab == "Photo" else tab).wait_for()
        assert own_faults(page) == []
    assert frame.locator("#prompt").bounding_box()["height"] > 20
    word = frame.locator(".word").filter(has_text="red")
    before = word.get_attribute("aria-pressed")  # strong words are pinned when it opens
    wanted = "false" if before == "true" else "true"
    word.click()
    frame.locator(f".word[aria-pressed={wanted}]").filter(has_text="red").wait_for()


def test_it_opens_with_an_example_and_all_can_be_done_with_the_keyboard(open_app):
    page = open_app(1280)
    shown(page, EXAMPLE)
    assert page.get_by_text(f"An example, drawn by the demo: {EXAMPLE}").is_visible()
    assert page.locator("#last-runs button").count() == 0  # nobody's run
    assert page.get_by_label("Prompt", exact=True).input_value() == EXAMPLE
    reached = []
    for _ in range(12):
        label = "(a.innerText || a.ariaLabel || a.tagName).trim().split('\\n')[0]"
        reached.append(
            page.evaluate(f"(() => {{ const a = document.activeElement; return {label} }})()")
        )
        page.keyboard.press("Tab")
    for name in ("Draw", "Random seed", "Settings"):
        assert name in reached, (name, reached)
    page.locator("#examples").get_by_label("Thumbnail 1 of 8").press("Enter")
    frame = shown(page, EXAMPLE)
    page.get_by_role("button", name="Thumbnail 1 of 1").wait_for()
    frame.locator(".word").first.press("Enter")
    assert frame.locator(".word").first.get_attribute("aria-pressed") == "true"
    with page.expect_download():
        page.get_by_role("button", name="Save the page").press("Enter")


def test_the_result_is_beside_the_prompt_and_says_how_far_it_is(open_app):
    page = open_app(1280)
    prompt, stop = page.get_by_label("Prompt", exact=True), page.get_by_role("button", name="Stop")
    assert stop.is_disabled()  # nothing runs
    assert not page.get_by_label("Steps", exact=True).is_visible()
    say(page, "a red cat left of a tree", Steps="60")
    page.get_by_role("button", name="Draw").click()
    page.get_by_text("Drawing: step").wait_for()
    page.get_by_text("An example").wait_for(state="hidden")  # the progress is in its place
    page.locator("img.preview").wait_for()
    assert not stop.is_disabled()
    shown(page, "a red cat left of a tree")
    page.get_by_role("button", name="Thumbnail 1 of 1").wait_for()
    assert page.locator("img.preview").count() == 0
    page.locator("button[disabled]", has_text="Stop").wait_for()  # by an event of its own
    wait_for(page, f"() => String({OVERFLOWS}) === 'true,false'")  # it grows with what it shows
    left, right = prompt.bounding_box(), page.locator("iframe[title=sdattn]").bounding_box()
    assert left["x"] + left["width"] < right["x"] and right["width"] > 2 * left["width"]


def test_on_a_phone_the_result_comes_into_sight_and_its_image_stays(open_app):
    page = open_app(390, has_touch=True)
    page.set_viewport_size({"width": 390, "height": 640})
    say(page, "a red cat", Steps="1")  # the settings are open: the result is far below
    page.get_by_role("button", name="Draw").tap()
    frame = shown(page, "a red cat")
    assert -1 < page.locator("#status").bounding_box()["y"] < 320  # within a pixel
    page.evaluate("scrollBy(0, 700)")
    stays = "document.querySelector('#stage').getBoundingClientRect().top"
    above = "-document.querySelector('iframe[title=sdattn]').getBoundingClientRect().top"
    inner = page.frame(url="about:srcdoc")
    assert page.evaluate(above) > 300
    wait_for(inner, f"() => Math.abs({stays} - {page.evaluate(above)}) < 10")
    assert frame.locator("#stage").bounding_box()["y"] >= 0


HOSTILE = "<img src=x onerror=alert(1)>"


def test_a_photo_with_a_caption_is_explained(open_app, tmp_path):
    page = open_app(1280)
    page.on("dialog", lambda one: pytest.fail(one.message))
    page.get_by_role("tab", name="Photo").click()
    page.get_by_role("button", name="Words that the demo knows").click()
    page.get_by_text("cat, dog").wait_for()
    explain, caption = page.get_by_role("button", name="Explain"), page.get_by_label("Caption")
    explain.click()
    page.get_by_role("alert").filter(has_text="The caption is empty.").wait_for()
    page.get_by_text("An example").wait_for()  # it is still shown
    caption.fill(f"a cat {HOSTILE}")
    explain.click()
    page.get_by_role("alert").filter(has_text="The photo is empty.").wait_for()
    photo = tmp_path / f"{HOSTILE}.png"
    Image.new("RGB", (200, 200), "green").save(photo)
    page.locator("input[type=file]").set_input_files(photo)
    page.get_by_role("button", name="Remove").or_(page.get_by_label("Remove Image")).wait_for()
    explain.click()
    frame = shown(page, HOSTILE)
    assert "size 200x200 pixels num_inference_steps 3 " in facts(frame)
    page.get_by_role("button", name="Thumbnail 1 of 1").wait_for()
    assert HOSTILE in page.locator("#status").inner_text()
    assert page.locator("img[src=x]").count() + frame.locator("img[src=x]").count() == 0


def test_words_that_the_demo_never_learnt_are_told_next_to_the_image_each_time(open_app):
    page = open_app(1280)
    page.get_by_label("Prompt", exact=True).fill("a zebra")
    warning = page.get_by_role("alert").filter(has_text="never learnt 'zebra'")
    for _ in range(2):
        page.get_by_role("button", name="Draw", exact=True).click()
        warning.wait_for(state="hidden")  # what the run before said is gone
        warning.wait_for()
        red, green, _ = warning.evaluate("(p) => getComputedStyle(p).color.match(/\\d+/g)")
        assert int(green) > int(red) / 2  # it is no error, which is red
    shown(page, "a zebra")
    page.get_by_label("Prompt", exact=True).fill("a cat")
    page.get_by_role("button", name="Draw", exact=True).click()
    shown(page, "a cat")
    assert page.get_by_role("alert").count() == 0


def test_words_are_swapped_and_every_page_of_an_edit_is_shown(open_app):
    page = open_app(1280)
    page.get_by_role("tab", name="Edit").click()
    target = page.get_by_label("Target prompt")
    assert target.input_value() == "a dog left of a pizza"
    other = page.get_by_label("for", exact=True)
    other.click()
    other.press("ControlOrMeta+a")
    page.keyboard.insert_text("bus")  # no key is pressed, as with a paste or a phone
    wait_for(page, "() => [...document.querySelectorAll('textarea')].some("
                   "(one) => one.value === 'a bus left of a pizza')")  # fmt: skip
    page.get_by_role("button", name="Edit").click()
    frame = shown(page, "a bus left of a pizza")
    assert EXAMPLE in frame.locator("body").inner_text()
    page.get_by_label("Target", exact=True).check()
    frame.get_by_text("where each word went").wait_for()
    assert "a bus left of a pizza" in " ".join(frame.locator("#prompt").inner_text().split())
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save the page").click()
    assert "target" in saved.value.suggested_filename
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save the run").click()
    with zipfile.ZipFile(saved.value.path()) as archive:
        ends = {name.partition("/")[2] for name in archive.namelist()}
    assert {"edit.html", "run.json", "source/report.html", "target/image.png"} <= ends
    page.get_by_label("Target prompt").fill(EXAMPLE)
    page.get_by_role("button", name="Edit").click()
    page.get_by_role("alert").filter(has_text="nothing to edit").wait_for()


def test_a_word_of_the_result_is_swapped_there_or_put_into_a_box(open_app):
    page = open_app(1280)
    frame = shown(page, EXAMPLE)
    assert not page.get_by_label("Other word").is_visible()
    frame.locator("#prompt .word").nth(1).click()
    other = page.get_by_label("Other word")
    other.fill("dog")
    assert page.get_by_label("Word", exact=True).input_value() == "cat"
    assert own_faults(page) == []
    page.get_by_role("button", name="Swap").click()
    edited = shown(page, "a dog left of a pizza")
    assert "seed 3" in page.locator("#status").inner_text()
    assert EXAMPLE in edited.locator("body").inner_text()
    page.get_by_label("Word", exact=True).fill("owl")
    page.get_by_role("button", name="Swap").click()
    page.get_by_role("alert").filter(has_text="choose a word of").wait_for()
    page.get_by_role("button", name="Close").click()
    assert not other.is_visible()

    say(page, "a cat", Steps="3")
    page.get_by_role("button", name="Draw", exact=True).click()
    frame = shown(page, "a cat")
    frame.locator("#prompt .word").nth(1).click()
    image = frame.locator("#original").bounding_box()
    for x, y, act in ((0.02, 0.02, "down"), (0.3, 0.3, None), (0.52, 0.52, "up")):
        page.mouse.move(image["x"] + x * image["width"], image["y"] + y * image["height"])
        if act:
            getattr(page.mouse, act)()
    field = "document.querySelector('#place-box :is(input, textarea)')"
    wait_for(page, f"() => {field}.value === '0.02 0.02 0.52 0.52'")
    frame.locator("dl").filter(has_text="num_inference_steps").first.wait_for()
    page.get_by_role("button", name="Thumbnail 3 of 3").wait_for()


@pytest.mark.parametrize("width", [1280, 390])
def test_a_prompt_whose_words_did_not_arrive_is_drawn_again_from_several_seeds(
    open_app, served_folder, width
):
    page = open_app(width, has_touch=width < 1000)
    best = page.get_by_role("button", name="Best of 4 seeds")
    shown(page, EXAMPLE)
    assert not best.is_visible()
    say(page, "an owl and a moon", Steps="4", Seed="5")
    page.get_by_role("button", name="Draw", exact=True).click()
    frame = shown(page, "an owl and a moon")
    best.wait_for()
    assert "“owl” probably did not arrive" in frame.locator("#missing").inner_text()
    assert page.evaluate(OVERFLOWS)[1] is False
    if width > 1000:
        assert own_faults(page) == []
    page.get_by_role("button", name="Thumbnail 1 of 1").wait_for()
    before = len(lines_of(served_folder))
    for seeds in ((5, 6, 7, 8), (9, 10, 11, 12)):
        best.click()
        told = frame.get_by_text("Best of 4 seeds").filter(has_text=f"seed {seeds[-1]} ")
        told.wait_for()
        scores = [float(one) for one in re.findall(r"seed \d+ (-?\d+\.\d+)", told.inner_text())]
        assert scores == sorted(scores, reverse=True) and len(scores) == 4
        assert all(f"seed {seed} " in told.inner_text() for seed in seeds)
    page.get_by_role("button", name="Thumbnail 3 of 3").wait_for()
    assert len(lines_of(served_folder)) - before < 2 * 4 * 4  # not all were drawn whole
    page.get_by_role("button", name="More attention").click()
    page.get_by_role("button", name="Thumbnail 4 of 4").wait_for()
    assert frame.get_by_text("Best of 4 seeds").count() == 0

    say(page, "a cat")
    page.get_by_role("button", name="Draw", exact=True).click()
    shown(page, "a cat")
    best.wait_for(state="hidden")


def test_on_a_phone_the_image_is_on_the_first_screen(open_app):
    page = open_app(390, has_touch=True)
    image = shown(page, EXAMPLE).locator("#heated").bounding_box()
    assert image["y"] + image["height"] < 844


def test_further_texts_are_mapped_as_by_the_command(open_app):
    page = open_app(1280)
    page.get_by_role("button", name="Random seed").click()
    say(page, "a red cat", **{"Negative prompt": "blue", "Ask about another text": "wheel, hat"})
    for name in ("Map the negative prompt", "Refine", "Causal"):
        page.get_by_label(name).check()
    page.get_by_label("Steps", exact=True).fill("2")
    page.get_by_role("button", name="Draw").click()
    frame = shown(page, "a red cat")
    seed = page.get_by_label("Seed", exact=True).input_value()
    assert seed != "0" and f"seed {seed} " in facts(frame)
    assert "negative_prompt blue " in facts(frame)
    titles = {"Negative prompt", "Asked about", "What changes without"}
    assert titles <= {*frame.locator(".further h3").all_inner_texts()}


# Measured at once: the page scrolls to what it says.
BELOW = """(field) => document.getElementById("error").getBoundingClientRect().top
  - field.getBoundingClientRect().bottom"""


def test_what_cannot_be_drawn_is_said_and_not_on_the_server(open_app, served_folder):
    page, before = open_app(1280), len(trouble(served_folder))
    page.evaluate("localStorage.setItem('sdattn-runs', 'of another server')")
    page.reload()
    wait_until_alive(page)
    say(page, "a cat", Width="64", Height="64")
    draw = page.get_by_role("button", name="Draw")
    wrong = [("Prompt", " ", "is empty"), ("Width", "250", "multiple of")]
    wrong += [(name, value, f"{name.lower()} {value}: pass")
              for name, value in (("Steps", "1001"), ("Seed", "-1"))]  # fmt: skip
    for name, value, text in wrong:
        field = page.get_by_label(name, exact=True)
        field.fill(value)
        draw.click()
        page.get_by_role("alert").filter(has_text=text).wait_for()
        assert field.get_attribute("aria-describedby") == "error"  # it stands below its field
        assert field.get_attribute("aria-invalid") == "true"
        assert 0 <= field.evaluate(BELOW) < 40
        for button in ("Draw", "Stop"):
            page.get_by_role("button", name=button).click(trial=True, force=button == "Stop")
        field.fill("64" if name == "Width" else "a cat" if name == "Prompt" else "1")
    assert own_faults(page) == []
    draw.click()
    shown(page, "a cat")
    assert page.locator("#error").count() == 0
    assert "Traceback" not in trouble(served_folder)[before:]


def test_stop_ends_a_drawing_and_those_who_wait_see_their_place(open_app):
    page, other = open_app(1280), open_app(390)
    say(page, "a cat", Steps="1000")
    page.get_by_role("button", name="Draw").click()
    page.get_by_text("of 1000").wait_for()
    say(other, "a red dog", Steps="1")
    other.get_by_role("button", name="Draw").click()
    other.get_by_text("queue: 1/1").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped. No image").wait_for()
    shown(other, "a red dog")
    page.get_by_text("of 1000").wait_for(state="hidden")
    page.get_by_label("Steps", exact=True).fill("1")
    page.get_by_role("button", name="Draw").click()
    shown(page, "a cat")
    page.get_by_text("Stopped").wait_for(state="detached")


def test_it_is_served_to_this_machine_only(port):
    """The port is bound to the loopback address alone."""
    with open("/proc/net/tcp") as file:
        bound = [line.split()[1] for line in file if line.split()[3] == "0A"]  # listening
    assert [one for one in bound if one.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


@pytest.fixture
def port(address):
    return int(address.rsplit(":", 1)[1].strip("/"))


def ask(port, path, body=None, **headers):
    """(status, body) of a request, a POST if it has a body."""
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        if body is None:
            connection.request("GET", path, headers=headers)
        else:
            headers.setdefault("Content-Type", "application/json")
            connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


# The values of the settings but the steps, in the order of the page.
FOLDED = ["", False, 2.0, 64, 64, None, "", "default", False, False, False]


def join(port, session, steps, seed=0):
    """Have an image drawn, as the page does: by way of the queue."""
    return call(port, session, "draw", ["a red cat", seed, *FOLDED[:2], steps, *FOLDED[2:]])


def call(port, session, name, data):
    known = json.loads(ask(port, "/config")[1])["dependencies"]
    number = next(one["id"] for one in known if one["api_name"] == name)
    body = {"data": data, "fn_index": number, "session_hash": session, "event_data": None}
    status, said = ask(port, "/gradio_api/queue/join", json.dumps(body))
    assert status == 200, said
    return {**body, **json.loads(said)}


@contextmanager
def listening(port, session):
    """The messages of the queue to a session, until it is left."""
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("GET", f"/gradio_api/queue/data?session_hash={session}")
        lines = connection.getresponse()
        yield (json.loads(line[5:]) for line in lines if line.startswith(b"data:"))


def until(messages, kind):
    return next(one for one in messages if one["msg"] == kind)


def completed(port, session):
    """What a session's job ended with."""
    with listening(port, session) as messages:
        return until(messages, "process_completed")


def test_nobody_passes_the_queue_by(port):
    for path in ("/gradio_api/run/draw", "/gradio_api/api/draw"):
        body = json.dumps({"data": ["a red cat", 0, *FOLDED[:2], 1, *FOLDED[2:]]})
        status, said = ask(port, path, body)
        assert status == 404 and "join the queue" in said


def test_other_sites_are_kept_out(port):
    for here in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", "192.168.0.7"):
        assert ask(port, "/config", Host=here)[0] == 200
        assert ask(port, "/config", Host=here, Origin=f"http://{here}")[0] == 200
    for foreign in ("attacker.example", f"attacker.example:{port}", "localhost.attacker", "", "["):
        status, said = ask(port, "/config", Host=foreign)
        assert status == 403 and "is not a name of this machine" in said
    for origin in ("https://attacker.example", "null", "http://localhost:1", "http://127.0.0.1"):
        status, said = ask(port, "/gradio_api/upload", "x", Origin=origin)
        assert status == 403 and "cannot use this one" in said


def upload(port, data):
    body = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    return ask(port, "/gradio_api/upload", body + data + b"\r\n--x--\r\n", **form)


def explained(port, session, path):
    photo = {"path": path, "orig_name": "a.png", "meta": {"_type": "gradio.FileData"}}
    call(port, session, "explain", [photo, "a cat", "", "default", False])
    return json.dumps(completed(port, session)["output"])


def test_only_what_was_uploaded_is_explained_and_no_address_is_fetched(port, tmp_path):
    assert upload(port, bytes(2**25 + 1))[0] == 413
    status, said = upload(port, b"no image")
    assert status == 200
    assert "a.png is not a readable image" in explained(port, "text", json.loads(said)[0])
    outside = tmp_path / "a.png"
    Image.new("RGB", (64, 64)).save(outside)
    assert '"error"' in explained(port, "outside", str(outside))
    for address in ("http://example.com/a.png", "https://example.com/a.png"):
        for data in ([{"path": address}], {"a": [{"b": {"path": address}}]}):
            status, said = ask(port, "/gradio_api/queue/join", json.dumps({"data": data}))
            assert status == 403 and "not fetched" in said
    assert ask(port, "/gradio_api/queue/join", '{"data": "http://example.com"}')[0] == 422


def test_an_image_that_was_stopped_or_whose_page_was_closed_is_given_up(port, served_folder):
    before = len(lines_of(served_folder))
    job = join(port, "stopped", steps=100)
    with listening(port, "stopped") as messages:
        until(messages, "progress")
        assert ask(port, "/gradio_api/cancel", json.dumps(job))[0] == 200
        until(messages, "process_completed")
    join(port, "closed", steps=100)
    with listening(port, "closed") as messages:
        until(messages, "progress")
    join(port, "second", steps=1)
    assert completed(port, "second")["success"]
    call(port, "second", "keep", [None, []])
    done = completed(port, "second")
    assert done["success"] and "iframe" in done["output"]["data"][3]
    call(port, "second", "keep", [None, []])  # it is held no longer
    assert "iframe" not in json.dumps(completed(port, "second")["output"]["data"])
    join(port, "third", steps=1, seed=None)  # draws nothing
    assert "seed is empty" in json.dumps(completed(port, "third")["output"]["data"])
    calls = lines_of(served_folder)[before:]
    assert 3 <= len(calls) < 100  # of 201
    assert {*calls} == {"pass 2"}  # capture's hook, and one of the progress
