/* Shared by pages with maps. Maps arrive as bytes and are resized to the image here, as sdattn.render
   does: bilinear between cell centres.

   A page defines `state` (opacity, shared, spotlight, colormap, hovered, pinned) and `draw()`.
   A map to draw is { number, range, ends, tint }: its number, the values of the first and the last
   place on its scale, those at the ends of the scale that is shown, and its colour, null for a single
   map. */

const LONG_SIDE = 512;
const page = JSON.parse($("data").textContent);

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

/* Return a map's shade, 0 to 255, at every pixel of a canvas. */
function upsampled(number, { width, height }) {
  const [rows, cols] = page.maps[number], start = starts[number], out = new Float32Array(width * height);
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

/* ---- colours ---- */

/* Return each pixel's position on the scale, in [0, 1]. */
function placesOf({ number, range: [low, high] }, canvas) {
  const [, , least, most] = page.maps[number];
  const places = upsampled(number, canvas), scale = high > low ? 1 / (high - low) : 0;
  for (let i = 0; i < places.length; i++)
    places[i] = Math.min(1, Math.max(0, (least + (places[i] / 255) * (most - least) - low) * scale));
  return places;
}

/* Return the value up to which the image is bare, as sdattn.Heatmaps has it: 0, or for a refined map,
   which is above 0 everywhere, its lower quarter, at most half its peak. */
const grounds = new Map();
function groundOf(number, frames = 1) {
  if (!page.refined) return 0;
  if (!grounds.has(number)) {
    const [rows, cols, least, most] = page.maps[number], start = starts[number];
    const sorted = cells.slice(start, start + frames * rows * cols).sort(), quarter = sorted[sorted.length >> 2];
    grounds.set(number, Math.min(least + (quarter / 255) * (most - least), most / 2));
  }
  return grounds.get(number);
}

/* Return a word's scale: its own, as own_scale() in sdattn.maps.glow, or from the ground to `top`. */
function scaleOf(ground, peak, top, shared) {
  if (shared) return { range: [ground, top], ends: [ground, top] };
  const dimmed = (top > 0 && Math.sqrt(Math.min(1, peak / top))) || 1;
  return { range: [ground, ground + (peak - ground) / dimmed], ends: [ground, peak] };
}

/* Colour an image's pixels, RGBA, by the places of words on their scales, as glow() in sdattn.maps.glow
   does: one by the colormap, several by their own colours. */
function glow(pixels, maps, all) {
  const table = colours[state.colormap], { brightness, fade, luma } = page, alpha = state.opacity, { tint } = maps[0];
  for (let i = 0, at = 0; i < all[0].length; i++, at += 4) {
    const grey = brightness * (luma[0] * pixels[at] + luma[1] * pixels[at + 1] + luma[2] * pixels[at + 2]);
    let most = 0, sum = 0, red = 0, green = 0, blue = 0;
    for (let k = 0; k < all.length; k++) {
      const place = all[k][i];
      most = Math.max(most, place);
      if (!tint || state.spotlight) continue;
      const weight = place * place, light = weight * Math.sqrt(place), own = maps[k].tint;
      sum += weight; red += light * own[0]; green += light * own[1]; blue += light * own[2];
    }
    if (state.spotlight) {
      for (let part = at; part < at + 3; part++) pixels[part] = grey + alpha * most * (pixels[part] - grey);
      continue;
    }
    if (!tint) {
      const shade = 3 * Math.min(255, Math.floor(most * 256));
      [sum, red, green, blue] = [1, table[shade], table[shade + 1], table[shade + 2]];
    }
    const seen = alpha * Math.min(1, most / fade), weights = Math.max(sum, 1e-9);
    pixels[at] = grey + seen * (red / weights - most * grey);
    pixels[at + 1] = grey + seen * (green / weights - most * grey);
    pixels[at + 2] = grey + seen * (blue / weights - most * grey);
  }
}

/* Draw the inner edge of where a word is at least half its peak, the weaker the word, the fainter. */
function outline(pixels, places, tint, { width, height }) {
  const peak = places.reduce((most, place) => Math.max(most, place), 0), half = peak / 2, wide = Math.max(1, Math.round(Math.max(width, height) / page.outline));
  if (!half) return;
  const outside = (x, y) => places[Math.min(height - 1, Math.max(0, y)) * width + Math.min(width - 1, Math.max(0, x))] < half;
  for (let y = 0; y < height; y++)
    for (let x = 0; x < width; x++)
      if (!outside(x, y) && (outside(x - wide, y) || outside(x + wide, y) || outside(x, y - wide) || outside(x, y + wide)))
        for (let part = 0, at = 4 * (y * width + x); part < 3; part++) pixels[at + part] += peak * ((tint[part] + 255) / 2 - pixels[at + part]);
}

/* Draw an image with maps over it; without maps the canvas stays clear. */
function paint(canvas, maps, image) {
  const brush = canvas.getContext("2d", { willReadFrequently: true }), { width, height } = canvas;
  brush.clearRect(0, 0, width, height);
  if (!maps.length) return;
  brush.drawImage(image, 0, 0, width, height);
  const seen = brush.getImageData(0, 0, width, height), all = maps.map((map) => placesOf(map, canvas));
  glow(seen.data, maps, all);
  for (const [i, { tint }] of maps.entries()) if (tint) outline(seen.data, all[i], tint, canvas);
  brush.putImageData(seen, 0, 0);
}

/* Give the canvas the image's proportions. */
function fit(canvas, [width, height]) {
  const scale = LONG_SIDE / Math.max(width, height);
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
}

/* Return the words whose heat is shown. */
const shown = () => (state.hovered !== null ? [state.hovered] : state.pinned);
const pinColour = (word) => pinColours[state.pinned.indexOf(word)];
const linear = (shade) => (shade <= 10 ? shade / 3294 : ((shade / 255 + 0.055) / 1.055) ** 2.4);
/* Return black or white, whichever has more contrast (WCAG 2.2, relative luminance). */
function inkOn([red, green, blue]) {
  const light = 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
  return light > 0.179 ? "#000" : "#fff";
}

const told = (value) => (Math.abs(value) < 1e-9 ? "0" : Number(value.toPrecision(2)).toString());

/* Return a part of a peak in words: "half of cat’s"; "" if they are about equal. */
const PARTS = [[1, ""], [3 / 4, "three quarters"], [2 / 3, "two thirds"], [3 / 5, "three fifths"], [1 / 2, "half"], [1 / 3, "a third"], [1 / 4, "a quarter"], [1 / 5, "a fifth"],
  [1 / 6, "a sixth"], [1 / 8, "an eighth"], [1 / 10, "a tenth"], [1 / 20, "a twentieth"], [1 / 50, "a fiftieth"], [1 / 100, "a hundredth"]];
function partOf(peak, top, label) {
  if (!(peak > 0 && peak < top)) return "";
  const far = ([part]) => Math.abs(Math.log(part * top / peak)), [, text] = PARTS.reduce((best, one) => (far(one) < far(best) ? one : best));
  return text && `, ${text} of ${label}’s`;
}

/* Return the mean colour of the images in the stage. */
function meanColour() {
  const small = Object.assign(document.createElement("canvas"), { width: 16, height: 16 }), brush = small.getContext("2d", { willReadFrequently: true });
  const sums = [0, 0, 0], images = [...stage.querySelectorAll("img:not(.original, [hidden])")];
  for (const image of images) {
    brush.drawImage(image, 0, 0, 16, 16);
    brush.getImageData(0, 0, 16, 16).data.forEach((shade, i) => { if (i % 4 < 3) sums[i % 4] += shade; });
  }
  return sums.map((sum) => sum / (256 * images.length));
}

/* Draw the scale as the maps are drawn, over the images' mean colour: a row for each colour. */
function drawScale(maps, unit) {
  $("scale").hidden = !maps.length;
  if (!maps.length) return;
  const ramp = $("ramp").getContext("2d"), mean = meanColour(), tints = maps.map(({ tint }) => String(tint));
  const alike = maps.every(({ ends }) => String(ends) === String(maps[0].ends));
  const rows = maps.filter((_, i) => tints.indexOf(tints[i]) === i);
  $("ramp").height = rows.length;
  for (const [row, map] of rows.entries()) {
    const image = ramp.createImageData(256, 1), [low, high] = map.range, [first, last] = map.ends;
    for (let i = 0; i < 256; i++) image.data.set([...mean, 255], 4 * i);
    const placeOf = (i) => Math.min(1, Math.max(0, high > low ? (first + (i / 255) * (last - first) - low) / (high - low) : 0));
    glow(image.data, [map], [Float32Array.from({ length: 256 }, (_, i) => placeOf(i))]);
    ramp.putImageData(image, 0, row);
  }
  const [low, high] = maps[0].ends;
  $("low").textContent = maps.every(({ ends }) => ends[0] === low) ? told(low) : "each word’s lowest";
  $("high").textContent = alike ? `${told(high)} ${unit}` : "each word’s peak";
}

/* Style a word's button: pinned or not, its colour if several are pinned, and its peak. */
function dress(button, word, peak, top, unit) {
  const pinned = state.pinned.includes(word), tint = pinned && state.pinned.length > 1 ? pinColour(word) : null;
  button.setAttribute("aria-pressed", String(pinned));
  button.classList.toggle("shown", word === state.hovered);
  button.style.setProperty("--peak", top > 0 ? Math.min(1, peak / top).toFixed(3) : 0);
  button.title = [`peak ${told(peak)} ${unit}`, button.dataset.missing ?? []].flat().join("; ");
  button.style.setProperty("--pin", tint ? `rgb(${tint})` : "");
  button.style.setProperty("--on-pin", tint ? inkOn(tint) : "");
}

/* Draw the pinned words: label and text, with colours if there are several. */
function drawLegend(textsOf) {
  $("legend").hidden = !state.pinned.length;
  $("none").hidden = state.pinned.length > 0;
  $("pins").replaceChildren(...state.pinned.map((word) => {
    const item = document.createElement("li"), tint = document.createElement("i");
    const label = document.createElement("bdi"), number = document.createElement("span");
    if (state.pinned.length > 1) { tint.style.setProperty("--pin", `rgb(${pinColour(word)})`); item.append(tint); }
    [label.textContent, number.textContent] = textsOf(word);
    number.className = "number";
    item.append(label, number);
    return item;
  }));
}

/* ---- input ---- */

function pin(word) {
  const at = state.pinned.indexOf(word);
  $("full").textContent = "";
  if (at >= 0) state.pinned.splice(at, 1);
  else if (state.pinned.length < pinColours.length) state.pinned.push(word);
  else $("full").textContent = `Only ${pinColours.length} words can be told apart by colour: unpin one first.`;
  state.hovered = null;
  draw();
}

function listen(button, wordOf) {
  const show = () => { state.hovered = wordOf(); draw(); };
  const leave = () => { if (state.hovered === wordOf()) { state.hovered = null; draw(); } };
  button.addEventListener("pointerenter", (event) => { if (event.pointerType !== "touch") show(); });
  button.addEventListener("pointerleave", leave);
  button.addEventListener("focus", () => { if (button.matches(":focus-visible")) show(); });
  button.addEventListener("blur", leave);
  button.addEventListener("click", () => pin(wordOf()));
}
function unpin() {
  state.pinned = [];
  [state.hovered, $("full").textContent] = [null, ""];
  draw();
}
$("unpin").addEventListener("click", () => {
  unpin();
  document.querySelector(".word")?.focus();
});

/* ---- saving ---- */

/* Return the lines below a saved image: one text with the colour scale, or several words in their
   colours, and the scale. */
function linesOf(texts, tints) {
  const scale = $("scale").hidden ? "" : `${$("low").textContent} to ${$("high").textContent}`;
  if (texts.length === 1) return [{ tint: null, text: `${texts[0]} (colours: ${scale})` }];
  const lines = texts.map((text, i) => ({ tint: tints[i], text }));
  return scale && texts.length ? [...lines, { tint: null, text: scale }] : lines;
}

/* Draw the ring around the spot, as spot.css does. */
function drawRing(brush, { width, height }, { x, y }) {
  for (const [colour, line] of [["#000", 6], ["#fff", 2.5]]) {
    brush.beginPath();
    brush.arc(x * width, y * height, 11, 0, 2 * Math.PI);
    [brush.strokeStyle, brush.lineWidth] = [colour, line];
    brush.stroke();
  }
}

/* Return an image as shown, with its heat and the ring. */
function withHeat({ image, heat, size }) {
  const view = document.createElement("canvas"), brush = view.getContext("2d");
  fit(view, size);
  brush.drawImage(image, 0, 0, view.width, view.height);
  brush.drawImage(heat, 0, 0, view.width, view.height);
  if (state.spot) drawRing(brush, view, state.spot);
  return view;
}

/* Save images side by side with their names, and the words in their colours below, as a PNG. The
   file's name is made of `about`, what is shown. */
function save(parts, lines, about) {
  const gap = 12, line = 24, views = parts.map(withHeat), named = parts.some(({ name }) => name) ? line : 0;
  const sheet = document.createElement("canvas"), brush = sheet.getContext("2d");
  const high = Math.max(...views.map(({ height }) => height)) + named;
  sheet.width = Math.max(320, views.reduce((sum, { width }) => sum + width, gap * (views.length - 1)));
  sheet.height = high + (lines.length ? gap / 2 + line * lines.length : 0);
  brush.fillStyle = "#fff";
  brush.fillRect(0, 0, sheet.width, sheet.height);
  brush.font = "15px system-ui, sans-serif";
  brush.textBaseline = "middle";
  const write = (text, left, middle, most) => {
    brush.fillStyle = "#000";
    let end = text.length;
    const cut = () => (end < text.length ? `${text.slice(0, end)}…` : text);
    while (end > 1 && brush.measureText(cut()).width > most) end--;
    brush.fillText(cut(), left, middle);
  };
  let left = 0;
  for (const [i, view] of views.entries()) {
    if (named) write(parts[i].name, left + 4, line / 2, view.width - 8);
    brush.drawImage(view, left, named);
    left += view.width + gap;
  }
  for (const [i, { tint, text }] of lines.entries()) {
    const middle = high + gap / 2 + line * (i + 0.5), wide = tint ? 14 : 72;
    brush.fillStyle = tint ? `rgb(${tint})` : "#fff";
    brush.fillRect(4, middle - 7, wide, 14);
    if (!tint) { // rows of the ramp must not run into each other
      brush.imageSmoothingEnabled = false;
      brush.drawImage($("ramp"), 4, middle - 7, wide, 14);
    }
    write(text, wide + 12, middle, sheet.width - wide - 16);
  }
  download(sheet, [lines.length ? "heatmap" : "image", ...about]);
}

/* Save a canvas as a PNG whose name is made of texts. */
function download(sheet, about) {
  sheet.toBlob((blob) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    const plain = about.map((text) => text.replace(/[^\p{L}\p{N}]+/gu, "_").replace(/^_|_$/g, "")).filter(Boolean);
    link.download = `${plain.join("-").slice(0, 100)}.png`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
}

/* ---- controls ---- */

const sliders = []; // each updates its label, which may depend on the others
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

/* Set up the controls on every page with maps, draw once, and again when the maps are unpacked. */
function begin() {
  slider("opacity", () => `${Math.round(100 * state.opacity)} %`, (value) => (state.opacity = value / 100));
  for (const name of ["shared", "spotlight"]) $(name).addEventListener("change", () => { state[name] = $(name).checked; draw(); });
  $("colormap").addEventListener("change", () => { state.colormap = $("colormap").value; draw(); });
  state.colormap = $("colormap").value;
  draw();
  const images = [...stage.querySelectorAll("img")].map((image) => image.complete || new Promise((done) => image.addEventListener("load", done))); // the scale is over them
  Promise.all([unpack(), ...images]).then(() => { document.documentElement.dataset.ready = ""; draw(); }, (error) => {
    $("caption").textContent = `This browser cannot unpack the maps (${error.message}).`;
  });
}
