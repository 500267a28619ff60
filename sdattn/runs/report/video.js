/* The video player: the frames, a slider, and a strip per pinned word whose colours are the mean of the
   word's map in each frame. Loaded last; it runs before the maps are unpacked. */

const video = page.video, many = video.frames.length, seek = $("frame");
const images = video.frames.map((uri, i) => {
  if (i === video.middle) return $("image");
  const { width, height } = $("image");
  return Object.assign(new Image(width, height), { decoding: "sync", alt: "", src: uri });
});
const original = document.createElement("canvas"); // the frame in its own colours
const playing = { on: false, at: video.middle, first: 0, since: 0 };

/* ---- frames ---- */

const timeOf = (frame) => `${(frame / video.rate).toFixed(2)} s`;

function drawOriginal() {
  const image = $("image");
  if (image.complete) original.getContext("2d").drawImage(image, 0, 0, original.width, original.height);
}

function tellFrame() {
  seek.value = playing.at;
  $("frame-name").textContent = `${state.when} of ${many} · ${timeOf(playing.at)}`;
  seek.setAttribute("aria-valuetext", $("frame-name").textContent);
  $("strips").style.setProperty("--at", (playing.at + 0.5) / many);
}

/* Show a frame, counted from 0, with its heat. */
function showFrame(frame) {
  const old = $("image"), next = images[frame];
  if (old !== next) {
    old.removeAttribute("id");
    next.id = "image";
    old.replaceWith(next);
  }
  const latent = state.frame;
  playing.at = frame;
  state.frame = video.latent[frame];
  state.when = `Frame ${frame + 1}`;
  tellFrame();
  drawOriginal();
  if (!cells) return;
  if (state.frame !== latent) paintHeat(shown());
  drawSpot();
}

/* ---- playing ---- */

function play(on) {
  if (on === playing.on) return;
  playing.on = on;
  $("play").classList.toggle("playing", on);
  $("play").setAttribute("aria-label", on ? "Pause" : "Play");
  if (!on) return;
  [playing.first, playing.since] = [playing.at, null];
  requestAnimationFrame(tick);
}

function tick(now) {
  if (!playing.on) return;
  playing.since ??= now;
  const frame = (playing.first + Math.floor(((now - playing.since) * video.rate) / 1000)) % many;
  if (frame !== playing.at) showFrame(frame);
  requestAnimationFrame(tick);
}

function goTo(frame) {
  play(false);
  showFrame(Math.min(many - 1, Math.max(0, frame)));
}

/* ---- strips ---- */

const kept = new Map(); // means, by the number of the word's first map

function meansOf(word) {
  const first = lookOf(word) * depth;
  if (!kept.has(first)) {
    kept.set(first, Array.from({ length: depth }, (_, i) => {
      const [rows, cols, low, high] = page.maps[first + i], start = starts[first + i];
      let sum = 0;
      for (let at = start; at < start + rows * cols; at++) sum += cells[at];
      return low + (sum / (rows * cols) / 255) * (high - low);
    }));
  }
  return kept.get(first);
}

/* Return the end of the strips' colours, one for all words in a text. */
const highestMean = ({ text }) => Math.max(...text.words.flatMap((_, i) => meansOf(text.first + i)));

function colourStrip(canvas, word) {
  const high = highestMean(words[word]), means = meansOf(word), brush = canvas.getContext("2d");
  const tint = state.pinned.length > 1 ? pinColour(word) : null, table = colours[state.colormap];
  canvas.width = many;
  canvas.height = 1;
  for (let i = 0; i < many; i++) {
    const place = high > 0 ? means[video.latent[i]] / high : 0, at = 3 * Math.min(255, Math.floor(256 * place));
    brush.fillStyle = tint ? `rgba(${tint}, ${place})` : `rgb(${table.slice(at, at + 3)})`;
    brush.fillRect(i, 0, 1, 1);
  }
}

function stripOf(word) {
  const item = document.createElement("li"), label = document.createElement("bdi"), number = document.createElement("span");
  const strip = document.createElement("span"), heat = document.createElement("canvas"), means = meansOf(word);
  const peak = Math.max(...means), frame = video.latent.indexOf(means.indexOf(peak));
  label.textContent = label.title = words[word].label;
  number.className = "number";
  number.textContent = told(peak);
  strip.className = "strip";
  strip.setAttribute("role", "img");
  strip.setAttribute("aria-label", `mean from ${told(Math.min(...means))} to ${told(peak)}, highest in frame ${frame + 1}`);
  colourStrip(heat, word);
  strip.append(heat);
  item.append(label, strip, number);
  return item;
}

function drawStrips() {
  if (!cells) return;
  $("strips").replaceChildren(...state.pinned.map(stripOf));
  $("strips-note").textContent = state.pinned.length ? "Each strip shows a word’s mean by frame; its highest value is on the right." : "Pin a word to see its mean by frame.";
}

/* ---- input ---- */

$("play").addEventListener("click", () => play(!playing.on));
seek.addEventListener("input", () => goTo(Number(seek.value)));
document.addEventListener("keydown", (event) => { // other controls use Space themselves
  const { key, target } = event;
  if (key !== " " || (target !== seek && target.closest?.("button, select, input, summary, a, [tabindex]"))) return;
  event.preventDefault();
  play(!playing.on);
});

const frameAt = (strip, { clientX }) => {
  const { left, width } = strip.getBoundingClientRect();
  return Math.floor(((clientX - left) / width) * many);
};
for (const kind of ["pointerdown", "pointermove"]) {
  $("strips").addEventListener(kind, (event) => {
    const strip = event.target.closest(".strip");
    if (strip && event.buttons) goTo(frameAt(strip, event));
  });
}

[original.width, original.height] = page.size;
original.className = "original";
$("original").replaceWith(original);
sliders.push(drawStrips);
showFrame(video.middle);
Promise.all(images.map((image) => image.decode())).then(drawOriginal);
