/* The page of a run. Maps come as bytes; they are brought to the picture's size here, as
   sdattn.render does it: bilinear between the centres of cells. */

const page = JSON.parse($("data").textContent);
const buttons = [...document.querySelectorAll(".word")];
const stage = $("stage"), canvas = $("heat"), context = canvas.getContext("2d");
const LONG_SIDE = 512;
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

const bytesOf = (text) => Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
const colours = Object.fromEntries(Object.entries(page.colormaps).map(([name, text]) => [name, bytesOf(text)]));
const pinColours = page.pins.map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
let cells = null;
const starts = [];

async function unpack() {
  const stream = new Blob([bytesOf(page.data)]).stream().pipeThrough(new DecompressionStream("deflate"));
  cells = new Uint8Array(await new Response(stream).arrayBuffer());
  let at = 0;
  for (const [rows, cols] of page.maps) {
    starts.push(at);
    for (let row = 0; row < rows; row++, at += cols)
      for (let col = 1; col < cols; col++) cells[at + col] = (cells[at + col] + cells[at + col - 1]) & 255;
  }
}

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

/* A map as shades of 0 to 255 at every pixel of the canvas. */
function upsampled(number) {
  const [rows, cols] = page.maps[number], start = starts[number];
  const { width, height } = canvas, out = new Float32Array(width * height);
  const along = (size, many) => Array.from({ length: size }, (_, i) => {
    const at = Math.min(many - 1, Math.max(0, ((i + 0.5) * many) / size - 0.5)), low = Math.floor(at);
    return [low, Math.min(many - 1, low + 1), at - low];
  });
  const across = along(width, cols);
  along(height, rows).forEach(([top, bottom, down], y) => {
    const above = start + top * cols, below = start + bottom * cols;
    for (let x = 0; x < width; x++) {
      const [left, right, part] = across[x];
      const upper = cells[above + left] * (1 - part) + cells[above + right] * part;
      const lower = cells[below + left] * (1 - part) + cells[below + right] * part;
      out[y * width + x] = upper * (1 - down) + lower * down;
    }
  });
  return out;
}

/* ---- drawing ---- */

const shown = () => (state.hovered === null ? state.pinned : [state.hovered]);

/* Each pixel's place between the ends of the scale, in [0, 1]. */
function placesOf(word) {
  const number = mapOf(word), [low, high] = rangeOf(word), [, , least, most] = page.maps[number];
  const places = upsampled(number), scale = high > low ? 1 / (high - low) : 0;
  for (let i = 0; i < places.length; i++)
    places[i] = Math.min(1, Math.max(0, (least + (places[i] / 255) * (most - least) - low) * scale));
  return places;
}

/* The higher a value, the more opaque: where there is nothing, the picture is bare. */
function drawHeat(pixels, places, even) {
  const table = colours[state.colormap], alpha = state.opacity * 255;
  for (let i = 0; i < places.length; i++) {
    const at = Math.min(255, Math.floor(places[i] * 256)) * 3;
    pixels[4 * i] = table[at]; pixels[4 * i + 1] = table[at + 1]; pixels[4 * i + 2] = table[at + 2];
    pixels[4 * i + 3] = Math.round(even ? alpha : alpha * places[i]);
  }
}

/* Several words: each in a colour of its own, the stronger the higher its value. */
function drawPins(pixels, all, tints) {
  for (let i = 0; i < all[0].length; i++) {
    let red = 0, green = 0, blue = 0, sum = 0, most = 0;
    for (let k = 0; k < all.length; k++) {
      const place = all[k][i], weight = place * place;
      red += weight * tints[k][0]; green += weight * tints[k][1]; blue += weight * tints[k][2];
      sum += weight; most = Math.max(most, place);
    }
    if (sum) { pixels[4 * i] = red / sum; pixels[4 * i + 1] = green / sum; pixels[4 * i + 2] = blue / sum; }
    pixels[4 * i + 3] = Math.round(255 * state.opacity * most ** 1.5);
  }
}

function draw() {
  for (const tell of sliders) tell();
  if (!cells) return;
  const some = shown(), one = some.length === 1 ? some[0] : null;
  stage.classList.toggle("hot", some.length > 0);
  $("scale").hidden = one === null;
  if (some.length) {
    const image = context.createImageData(canvas.width, canvas.height);
    if (one !== null) drawHeat(image.data, placesOf(one), stretched(one));
    else drawPins(image.data, some.map(placesOf), some.map(pinColour));
    context.putImageData(image, 0, 0);
  } else context.clearRect(0, 0, canvas.width, canvas.height);
  if (one !== null) drawScale(one);
  drawCaption(some);
  drawLegend();
  for (const [i, button] of buttons.entries()) {
    const at = state.pinned.indexOf(i), several = state.pinned.length > 1;
    button.setAttribute("aria-pressed", String(at >= 0));
    button.classList.toggle("shown", i === state.hovered);
    const top = topOf(words[i].text);
    button.style.setProperty("--peak", top > 0 ? Math.min(1, peakOf(i) / top).toFixed(3) : 0);
    button.title = `peak ${told(peakOf(i))} ${unitOf(i)}`;
    const tint = at >= 0 && several ? pinColour(i) : null;
    button.style.setProperty("--pin", tint ? `rgb(${tint})` : "");
    button.style.setProperty("--on-pin", tint ? inkOn(tint) : "");
  }
  drawSpot();
}

const pinColour = (word) => pinColours[state.pinned.indexOf(word)];
const linear = (shade) => (shade <= 10 ? shade / 3294 : ((shade / 255 + 0.055) / 1.055) ** 2.4);
/* Black or white, whichever has the higher contrast (WCAG 2.2, relative luminance). */
function inkOn([red, green, blue]) {
  const light = 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
  return light > 0.179 ? "#000" : "#fff";
}

const told = (value) => (value === 0 ? "0" : Number(value.toPrecision(2)).toString());

function drawScale(word) {
  const [low, high] = rangeOf(word), ramp = $("ramp").getContext("2d"), image = ramp.createImageData(256, 1);
  const table = colours[state.colormap];
  for (let i = 0; i < 256; i++) image.data.set([table[3 * i], table[3 * i + 1], table[3 * i + 2], 255], 4 * i);
  ramp.putImageData(image, 0, 0);
  $("low").textContent = told(low);
  $("high").textContent = `${told(high)} ${unitOf(word)}`;
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

function drawLegend() {
  const several = state.pinned.length > 1;
  $("legend").hidden = !state.pinned.length;
  $("pins").replaceChildren(...state.pinned.map((word) => {
    const item = document.createElement("li"), tint = document.createElement("i");
    const label = document.createElement("bdi"), number = document.createElement("span");
    if (several) { tint.style.setProperty("--pin", `rgb(${pinColour(word)})`); item.append(tint); }
    label.textContent = words[word].label;
    number.className = "number";
    number.textContent = `peak ${told(peakOf(word))}`;
    item.append(label, number);
    return item;
  }));
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

function pin(word) {
  const at = state.pinned.indexOf(word);
  $("full").textContent = "";
  if (at >= 0) state.pinned.splice(at, 1);
  else if (state.pinned.length < pinColours.length) state.pinned.push(word);
  else $("full").textContent = `${pinColours.length} words can be told apart by colour; unpin one first.`;
  state.hovered = null;
  draw();
}

for (const [i, button] of buttons.entries()) {
  const show = () => { state.hovered = i; draw(); };
  const leave = () => { if (state.hovered === i) { state.hovered = null; draw(); } };
  button.addEventListener("pointerenter", (event) => { if (event.pointerType !== "touch") show(); });
  button.addEventListener("pointerleave", leave);
  button.addEventListener("focus", () => { if (button.matches(":focus-visible")) show(); });
  button.addEventListener("blur", leave);
  button.addEventListener("click", () => pin(i));
}
$("unpin").addEventListener("click", () => { state.pinned = []; $("full").textContent = ""; draw(); buttons[0]?.focus(); });

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

const sliders = []; // each tells where it stands, which may hang on the others
function slider(id, name, change) {
  const input = $(id);
  if (!input) return;
  sliders.push(() => {
    $(`${id}-name`).textContent = name();
    input.setAttribute("aria-valuetext", name());
  });
  input.addEventListener("input", () => { change(Number(input.value)); draw(); });
  change(Number(input.value));
}
slider("group", groupName, (value) => (state.group = value));
slider("step", stepName, (value) => (state.step = value));
slider("opacity", () => `${Math.round(100 * state.opacity)} %`, (value) => (state.opacity = value / 100));
$("head")?.addEventListener("change", () => {
  state.head = Number($("head").value);
  for (const id of ["group", "step"]) if ($(id)) $(id).disabled = state.head > 0;
  draw();
});
$("stretch").addEventListener("change", () => { state.stretch = $("stretch").checked; draw(); });
touch.addEventListener("change", drawSpot);
$("colormap").addEventListener("change", () => { state.colormap = $("colormap").value; draw(); });
state.colormap = $("colormap").value;
draw();

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

const [width, height] = page.size, scale = LONG_SIDE / Math.max(width, height);
canvas.width = Math.max(1, Math.round(width * scale));
canvas.height = Math.max(1, Math.round(height * scale));
stage.style.setProperty("--ratio", width / height);
unpack().then(() => { document.documentElement.dataset.ready = ""; draw(); }, (error) => {
  $("caption").textContent = `This browser cannot unpack the maps (${error.message}).`;
});
