/* The page of a run. */

const buttons = [...document.querySelectorAll(".word")];
const stage = $("stage"), canvas = $("heat");
const MOST_ROWS = 12;

const texts = [{ name: "prompt", words: page.words, content: page.content }, ...page.texts];
const words = texts.flatMap((text) => text.words.map((label) => ({ label, text })));
texts.reduce((first, text) => ((text.first = first), first + text.words.length), 0);

const state = {
  step: 0, group: 0, head: 0, opacity: 0.85, stretch: false, colormap: "",
  hovered: null, pinned: [...page.first], spot: null, kept: false,
};

const touch = matchMedia("(hover: none)");

/* ---- maps ---- */

/* The number of the map that a word has in the step and group of layers, or head, that are chosen. */
function mapOf(word) {
  const own = page.words.length, groups = page.groups.length + 1, looks = (page.steps.length + 1) * groups;
  if (word >= own) return (looks + page.heads.length) * own + word - own;
  return (state.head ? looks + state.head - 1 : state.step * groups + state.group) * own + word;
}
const peakOf = (word) => page.maps[mapOf(word)][3];

function valueAt(word, x, y) {
  const number = mapOf(word);
  const [rows, cols, low, high] = page.maps[number];
  const row = Math.min(rows - 1, Math.floor(y * rows)), col = Math.min(cols - 1, Math.floor(x * cols));
  return low + (cells[starts[number] + row * cols + col] / 255) * (high - low);
}

/* The highest values of the words of a text; of its content words, where it has any. */
const peaksOf = ({ first, words: labels }) => labels.map((_, i) => peakOf(first + i));
function topOf(text) {
  const peaks = peaksOf(text), content = peaks.filter((_, i) => text.content[i]);
  return Math.max(...(content.length ? content : peaks));
}

/* (lowest, highest) of the colours: one scale for all words of a text, from 0 to the peak of its
   strongest content word; or stretched over the word's own values. */
const stretched = (word) => state.stretch && words[word].text.name !== "causal";
const rangeOf = (word) => (stretched(word) ? page.maps[mapOf(word)].slice(2) : [0, topOf(words[word].text)]);

/* ---- drawing ---- */

function draw() {
  for (const tell of sliders) tell();
  if (!cells) return;
  const some = shown(), one = some.length === 1 ? some[0] : null;
  stage.classList.toggle("hot", some.length > 0);
  $("scale").hidden = one === null;
  paint(canvas, some.map((word) => ({
    number: mapOf(word), range: rangeOf(word), even: stretched(word), tint: one === null ? pinColour(word) : null,
  })));
  if (one !== null) drawScale(rangeOf(one), unitOf(one));
  drawCaption(some);
  drawLegend((word) => [words[word].label, `peak ${told(peakOf(word))}`]);
  for (const [i, button] of buttons.entries()) dress(button, i, peakOf(i), topOf(words[i].text), unitOf(i));
  drawSpot();
}

const headName = () => page.heads[state.head - 1];
const groupName = () => (state.head ? headName() : state.group ? page.groups[state.group - 1].replace("x", "×") : page.reads);
const stepName = () => (state.step && !state.head ? page.steps[state.step - 1] : page.means[state.group || state.head ? "group" : "heatmap"]);

function unitOf(word) {
  if (words[word].text.name === "causal") return page.units.causal;
  if (word >= page.words.length) return page.units.heatmap;
  return page.units[state.group || state.head ? "group" : state.step ? "step" : "heatmap"];
}

function drawCaption(some) {
  const names = some.map((word) => `“${words[word].label}” peak ${told(peakOf(word))}`).join(", ");
  const whole = some.some((word) => words[word].text.name !== "prompt");
  const look = whole ? "of the whole run" : `${groupName()} · ${stepName()}`;
  $("caption").textContent = some.length ? `${names} · ${look}` : "";
}

/* ---- a spot ---- */

/* The text whose words are told: that of the word in view, or the prompt. */
function textInView() {
  const some = shown();
  return some.length ? words[some[some.length - 1]].text : texts[0];
}

function drawSpot() {
  const cross = $("cross"), list = $("spot-words"), text = textInView();
  cross.hidden = state.spot === null;
  for (const button of buttons) button.style.setProperty("--glow", 0);
  if (state.spot === null || !cells) {
    list.replaceChildren();
    $("spot-where").textContent = touch.matches ? "Tap the picture." : "Point at the picture. Click to keep the spot.";
    $("spot-rest").textContent = "";
    return;
  }
  const { x, y } = state.spot;
  cross.style.left = `${100 * x}%`;
  cross.style.top = `${100 * y}%`;
  const most = Math.max(...peaksOf(text));
  const found = text.words.map((label, i) => {
    const word = text.first + i, value = valueAt(word, x, y);
    return { label, word, value, place: most > 0 ? value / most : 0 };
  });
  for (const one of found) buttons[one.word].style.setProperty("--glow", one.place.toFixed(3));
  found.sort((a, b) => b.value - a.value);
  list.replaceChildren(...found.slice(0, MOST_ROWS).map(spotRow));
  const [rows, cols] = page.maps[mapOf(text.first)];
  const [width, height] = page.size;
  $("spot-where").textContent = `Pixel ${Math.floor(x * width)}, ${Math.floor(y * height)} · ` +
    `row ${Math.floor(y * rows) + 1} of ${rows}, column ${Math.floor(x * cols) + 1} of ${cols}`;
  const rest = [`Bars and numbers: ${unitOf(text.first)}.`];
  if (found.length > MOST_ROWS) rest.push(`${found.length - MOST_ROWS} more words.`);
  if (page.rest && text === texts[0]) {
    const left = Math.max(0, 1 - found.reduce((sum, one) => sum + one.value, 0));
    rest.push(`All other tokens together (start, end, padding): ${told(left)}.`);
  }
  $("spot-rest").textContent = rest.join(" ");
}

function spotRow({ label, value, place }) {
  const item = document.createElement("li"), name = document.createElement("bdi");
  const track = document.createElement("span"), fill = document.createElement("span"), number = document.createElement("span");
  name.className = "label"; name.textContent = label; name.title = label;
  track.className = "track"; fill.className = "fill"; fill.style.width = `${100 * place}%`; track.append(fill);
  number.className = "number"; number.textContent = told(value);
  item.append(name, track, number);
  return item;
}

function sayMore() {
  const first = [...$("spot-words").children].slice(0, 5);
  const said = first.map((one) => `${one.firstChild.textContent} ${one.lastChild.textContent}`);
  $("spot-told").textContent = `${$("spot-where").textContent}. ${said.join(", ")}`;
}

/* ---- what people do ---- */

for (const [i, button] of buttons.entries()) listen(button, () => i);

function spotOf(event) {
  const box = $("picture").getBoundingClientRect();
  const inside = (value) => Math.min(0.999999, Math.max(0, value));
  return { x: inside((event.clientX - box.left) / box.width), y: inside((event.clientY - box.top) / box.height) };
}
stage.addEventListener("pointermove", (event) => { if (!state.kept && event.pointerType !== "touch") { state.spot = spotOf(event); drawSpot(); } });
stage.addEventListener("pointerleave", () => { if (!state.kept && document.activeElement !== stage) { state.spot = null; drawSpot(); } });
stage.addEventListener("click", (event) => {
  const spot = spotOf(event), old = state.spot;
  const near = state.kept && old && Math.hypot(spot.x - old.x, spot.y - old.y) < 0.02;
  state.kept = !near;
  state.spot = near && event.pointerType === "touch" ? null : spot;
  drawSpot();
});
stage.addEventListener("keydown", (event) => {
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  if (event.key in moves) {
    const [rows, cols] = page.maps[mapOf(textInView().first)] ?? [1, 1];
    const move = (at, by, many) => (Math.min(many - 1, Math.max(0, Math.floor(at * many) + by)) + 0.5) / many;
    const { x, y } = state.spot ?? { x: 0.5, y: 0.5 }, [right, down] = state.spot ? moves[event.key] : [0, 0];
    state.spot = { x: move(x, right, cols), y: move(y, down, rows) };
    state.kept = true;
  } else if (event.key === "Enter" || event.key === " ") state.kept = !state.kept && state.spot !== null;
  else if (event.key === "Escape") { state.spot = null; state.kept = false; }
  else return;
  event.preventDefault();
  drawSpot();
  sayMore();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && event.target !== stage && !event.target.matches?.("select, input")) { state.pinned = []; state.spot = null; state.kept = false; draw(); }
});

slider("group", groupName, (value) => (state.group = value));
slider("step", stepName, (value) => (state.step = value));
$("head")?.addEventListener("change", () => {
  state.head = Number($("head").value);
  for (const id of ["group", "step"]) if ($(id)) $(id).disabled = state.head > 0;
  draw();
});
touch.addEventListener("change", drawSpot);

/* The picture as it is shown, with the heat on it, in the canvas's size. */
function viewOf() {
  const view = document.createElement("canvas"), brush = view.getContext("2d");
  view.width = canvas.width;
  view.height = canvas.height;
  brush.drawImage($("picture"), 0, 0, view.width, view.height);
  if (shown().length) {
    const image = brush.getImageData(0, 0, view.width, view.height), pixels = image.data;
    for (let i = 0; i < pixels.length; i += 4) // the weights of CSS's grayscale()
      pixels[i] = pixels[i + 1] = pixels[i + 2] = 0.2126 * pixels[i] + 0.7152 * pixels[i + 1] + 0.0722 * pixels[i + 2];
    brush.putImageData(image, 0, 0);
    brush.drawImage(canvas, 0, 0);
  }
  return view;
}
$("save").addEventListener("click", () => viewOf().toBlob((blob) => {
  const link = document.createElement("a"), names = shown().map((word) => words[word].label);
  link.href = URL.createObjectURL(blob);
  link.download = `${["heatmap", ...names].join("-").replace(/[^\p{L}\p{N}-]+/gu, "_").slice(0, 80)}.png`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}));

$("copy")?.addEventListener("click", async () => {
  const text = $("command").textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    getSelection().selectAllChildren($("command")); // at least there to be copied by hand
    if (!document.execCommand("copy")) { $("copied").textContent = "selected: press Ctrl+C"; return; }
  }
  $("copied").textContent = "copied";
});

fit(canvas, page.size);
stage.style.setProperty("--ratio", page.size[0] / page.size[1]);
begin();
