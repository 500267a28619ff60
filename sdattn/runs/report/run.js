/* The page of a run. */

const buttons = [...document.querySelectorAll(".word")];
const stage = $("stage"), canvas = $("heat");

const texts = [{ name: "prompt", words: page.words, content: page.content }, ...page.texts];
const words = texts.flatMap((text) => text.words.map((label) => ({ label, text })));
texts.reduce((first, text) => ((text.first = first), first + text.words.length), 0);

const LOOKED = "Where this spot looked";
/* Each latent frame of a video has its own map, in order; an image has one. */
const depth = page.video ? Math.max(...page.video.latent) + 1 : 1;
page.maps = page.maps.flatMap((shape) => Array(depth).fill(shape));

const state = {
  step: 0, group: 0, head: 0, opacity: page.alpha, shared: false, spotlight: false, colormap: "",
  hovered: null, pinned: [...page.first], spot: null, kept: false, looked: null,
  frame: 0, when: "", // for a video: the latent frame, and the video frame's name
};

/* ---- maps ---- */

/* Return the number of a word's map for the chosen step and layers, or head, and the current frame. */
const mapOf = (word) => lookOf(word) * depth + state.frame;
function lookOf(word) {
  const own = page.words.length, groups = page.groups.length + 1, looks = (page.steps.length + 1) * groups;
  if (word >= own) return (looks + page.heads.length) * own + word - own;
  return (state.head ? looks + state.head - 1 : state.step * groups + state.group) * own + word;
}
const peakOf = (word) => page.maps[mapOf(word)][3];

/* Return a text's highest value, over its content words if it has any. */
const peaksOf = ({ first, words: labels }) => labels.map((_, i) => peakOf(first + i));
function topOf(text) {
  const peaks = peaksOf(text), content = peaks.filter((_, i) => text.content[i]);
  return Math.max(...(content.length ? content : peaks));
}

/* Return a word's scale. In maps of changes all words share one: a word that changed nothing stays bare. */
function scaleOfWord(word) {
  const { text } = words[word], isChange = text.name === "causal", isPlain = word < page.words.length && (state.group || state.head);
  const ground = isChange || isPlain ? 0 : groundOf(lookOf(word) * depth, depth);
  return scaleOf(ground, peakOf(word), topOf(text), state.shared || isChange);
}

/* Return a word's peak as a part of its text's strongest word's. */
function partOfTop(word) {
  const { text } = words[word], top = topOf(text), strongest = peaksOf(text).findIndex((peak, i) => peak === top && text.content[i]);
  return strongest < 0 ? "" : partOf(peakOf(word), top, text.words[strongest]);
}

/* Return the number of the map of where a kept spot looked, or null; a word that is pointed at comes
   first. */
function lookedFrom() {
  const looks = page.spots && cells && state.kept && state.spot && state.hovered === null && $("looks").checked;
  if (!looks) return null;
  const [rows, cols] = page.spots, { x, y } = state.spot;
  return page.maps.length - rows * cols + Math.floor(y * rows) * cols + Math.floor(x * cols);
}

/* ---- drawing ---- */

const mapsOf = (some) => some.map((word) => ({ number: mapOf(word), ...scaleOfWord(word), tint: some.length > 1 ? pinColour(word) : null }));
const paintHeat = (some) => paint(canvas, mapsOf(some), $("image"));

function draw() {
  for (const tell of sliders) tell();
  if (!cells) return;
  const from = (state.looked = lookedFrom()), some = from === null ? shown() : [];
  const maps = from === null ? mapsOf(some) : [{ number: from, range: page.maps[from].slice(2), ends: page.maps[from].slice(2), tint: null }];
  stage.classList.toggle("hot", maps.length > 0);
  paint(canvas, maps, $("image"));
  drawScale(maps, from === null ? some.length && unitOf(some[0]) : "of its attention");
  drawCaption(some);
  drawLegend((word) => [words[word].label, `peak ${told(peakOf(word))}`]);
  $("legend").hidden ||= from !== null;
  for (const [i, button] of buttons.entries()) dress(button, i, peakOf(i), topOf(words[i].text), unitOf(i));
  drawSpot();
}

const headName = () => page.heads[state.head - 1];
const groupName = () => (state.head ? headName() : state.group ? page.groups[state.group - 1].replace(/(\d)x(?=\d)/g, "$1×") : page.reads);
const stepName = () => (state.step && !state.head ? page.steps[state.step - 1] : page.means[state.group || state.head ? "group" : "heatmap"]);

function unitOf(word) {
  if (words[word].text.name === "causal") return page.units.causal;
  if (word >= page.words.length) return page.units.heatmap;
  return page.units[state.group || state.head ? "group" : state.step ? "step" : "heatmap"];
}

function drawCaption(some) {
  const names = some.map((word) => `“${words[word].label}” peak ${told(peakOf(word))}${partOfTop(word)}`).join("; ");
  const whole = some.some((word) => words[word].text.name !== "prompt");
  const look = whole ? "over the whole run" : `${groupName()} · ${stepName()}`;
  $("caption").textContent = state.looked !== null ? LOOKED : some.length ? `${names} · ${look}` : "";
}

/* ---- a spot ---- */

/* Return the text whose words are listed: the current word's, or the prompt. */
function textInView() {
  const some = shown();
  return some.length ? words[some[some.length - 1]].text : texts[0];
}

function drawSpot() {
  if (lookedFrom() !== state.looked) { draw(); return; } // which comes back here
  const list = $("spot-words"), text = textInView();
  for (const cross of stage.querySelectorAll(".cross")) drawCross(cross);
  for (const button of buttons) button.style.setProperty("--glow", 0);
  if (state.spot === null || !cells) {
    list.replaceChildren();
    $("spot-where").textContent = touch.matches ? "Tap the image." : "Point at the image. Click to keep the spot.";
    $("spot-rest").textContent = "";
    return;
  }
  const { x, y } = state.spot, most = Math.max(...peaksOf(text));
  const found = text.words.map((label, i) => ({ label, word: text.first + i, value: valueAt(mapOf(text.first + i), state.spot) }));
  for (const { word, value } of found) buttons[word].style.setProperty("--glow", most > 0 ? (value / most).toFixed(3) : 0);
  drawWords(list, found, most);
  const [rows, cols] = page.maps[mapOf(text.first)];
  const [width, height] = page.size;
  const cell = `row ${Math.floor(y * rows) + 1} of ${rows}, column ${Math.floor(x * cols) + 1} of ${cols}`;
  $("spot-where").textContent = `${state.when ? `${state.when} · ` : ""}Pixel ${Math.floor(x * width)}, ${Math.floor(y * height)} · ${cell}`;
  const rest = [`Bars and numbers: ${unitOf(text.first)}.`];
  if (found.length > MOST_ROWS) rest.push(`${found.length - MOST_ROWS} more words.`);
  if (page.rest && text === texts[0]) {
    const left = Math.max(0, 1 - found.reduce((sum, one) => sum + one.value, 0));
    rest.push(`All other tokens together (start, end, padding): ${told(left)}.`);
  }
  $("spot-rest").textContent = rest.join(" ");
}

const say = () => ($("spot-told").textContent = `${$("spot-where").textContent}. ${toldOf($("spot-words"))}`);

/* ---- input ---- */

for (const [i, button] of buttons.entries()) listen(button, () => i);

listenToSpots({
  boxOf: ({ target }) => target.closest("figure") ?? $("heated"),
  gridOf: () => page.maps[mapOf(textInView().first)] ?? [1, 1],
  keeps: () => true,
  say,
});

$("looks")?.addEventListener("change", drawSpot);
slider("group", groupName, (value) => (state.group = value));
slider("step", stepName, (value) => (state.step = value));
$("head")?.addEventListener("change", () => {
  state.head = Number($("head").value);
  for (const id of ["group", "step"]) if ($(id)) $(id).disabled = state.head > 0;
  draw();
});

for (const button of document.querySelectorAll("[data-copies]"))
  button.addEventListener("click", async () => {
    const from = $(button.dataset.copies), copied = $(`${from.id}-copied`);
    try {
      await navigator.clipboard.writeText(from.textContent);
    } catch {
      getSelection().selectAllChildren(from); // so that it can be copied by hand
      if (!document.execCommand("copy")) { copied.textContent = "selected: press Ctrl+C"; return; }
    }
    copied.textContent = "copied";
  });

fit(canvas, page.size);
$("original").src = $("image").src; // the file holds the image once
stage.parentElement.style.setProperty("--ratio", page.size[0] / page.size[1]);
begin();
