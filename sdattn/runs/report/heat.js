/* Shared by pages with maps. Maps arrive as bytes and are resized to the image here, as sdattn.render
   does: bilinear between cell centres.

   A page defines `state` (opacity, stretch, colormap, hovered, pinned, bare) and `draw()`. */

const LONG_SIDE = 512;
const NO_WORD = -1; // hovered while the images show their original colours
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

/* Return the place on the scale where the image is bare: 0, or for a refined map, which is above 0
   everywhere and would tint the whole image, its lower quarter, at most half its peak. */
function groundOf({ number, range: [low, high] }) {
  if (!page.refined) return 0;
  const [rows, cols, least, most] = page.maps[number], start = starts[number];
  const sorted = cells.slice(start, start + rows * cols).sort(), quarter = sorted[sorted.length >> 2];
  const ground = Math.min(least + (quarter / 255) * (most - least), most / 2);
  return high > low ? Math.min(0.99, Math.max(0, (ground - low) / (high - low))) : 0;
}
const above = (place, ground) => Math.max(0, (place - ground) / (1 - ground));

/* Draw one map: the colour is the value, and the further above the ground, the more opaque. */
function drawHeat(pixels, places, ground) {
  const table = colours[state.colormap], alpha = state.opacity * 255;
  for (let i = 0; i < places.length; i++) {
    const at = Math.min(255, Math.floor(places[i] * 256)) * 3;
    pixels[4 * i] = table[at]; pixels[4 * i + 1] = table[at + 1]; pixels[4 * i + 2] = table[at + 2];
    pixels[4 * i + 3] = Math.round(alpha * above(places[i], ground));
  }
}

/* Draw several words, each in its own colour, stronger for higher values. */
function drawPins(pixels, all, grounds, tints) {
  for (let i = 0; i < all[0].length; i++) {
    let red = 0, green = 0, blue = 0, sum = 0, most = 0;
    for (let k = 0; k < all.length; k++) {
      const place = above(all[k][i], grounds[k]), weight = place * place;
      red += weight * tints[k][0]; green += weight * tints[k][1]; blue += weight * tints[k][2];
      sum += weight; most = Math.max(most, place);
    }
    if (sum) { pixels[4 * i] = red / sum; pixels[4 * i + 1] = green / sum; pixels[4 * i + 2] = blue / sum; }
    pixels[4 * i + 3] = Math.round(255 * state.opacity * most ** 1.5);
  }
}

/* Draw the heat of maps, {number, range, tint}, at their places on the scale; tint is null for a
   single map. */
function drawMaps(pixels, maps, all) {
  const grounds = maps.map(groundOf);
  if (maps[0].tint) drawPins(pixels, all, grounds, maps.map((map) => map.tint));
  else drawHeat(pixels, all[0], grounds[0]);
}

/* Draw maps over an image. */
function paint(canvas, maps) {
  const context = canvas.getContext("2d");
  if (!maps.length) { context.clearRect(0, 0, canvas.width, canvas.height); return; }
  const image = context.createImageData(canvas.width, canvas.height);
  drawMaps(image.data, maps, maps.map((map) => placesOf(map, canvas)));
  context.putImageData(image, 0, 0);
}

/* Give the canvas the image's proportions. */
function fit(canvas, [width, height]) {
  const scale = LONG_SIDE / Math.max(width, height);
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
}

/* Return the words whose heat is shown; none while the images show their original colours. */
function shown() {
  if (state.hovered === NO_WORD) return [];
  return state.hovered !== null ? [state.hovered] : state.bare ? [] : state.pinned;
}
const pinColour = (word) => pinColours[state.pinned.indexOf(word)];
const linear = (shade) => (shade <= 10 ? shade / 3294 : ((shade / 255 + 0.055) / 1.055) ** 2.4);
/* Return black or white, whichever has more contrast (WCAG 2.2, relative luminance). */
function inkOn([red, green, blue]) {
  const light = 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
  return light > 0.179 ? "#000" : "#fff";
}

const told = (value) => (Math.abs(value) < 1e-9 ? "0" : Number(value.toPrecision(2)).toString());

/* Return the grey under the heat, as the filter in heat.css makes it. */
const greyOf = (pixels, i) => 66 + 0.6325 * (0.2126 * pixels[i] + 0.7152 * pixels[i + 1] + 0.0722 * pixels[i + 2]);

/* Return the mean grey of the images in the stage. */
function meanGrey() {
  const small = Object.assign(document.createElement("canvas"), { width: 16, height: 16 }), brush = small.getContext("2d");
  const greys = [...stage.querySelectorAll("img:not(.original, [hidden])")].flatMap((image) => {
    brush.drawImage(image, 0, 0, 16, 16);
    const { data } = brush.getImageData(0, 0, 16, 16);
    return Array.from({ length: 256 }, (_, i) => greyOf(data, 4 * i));
  });
  return greys.reduce((sum, grey) => sum + grey, 0) / greys.length;
}

/* Draw the scale as the maps are drawn, over the images' mean grey: a row for each colour. Maps with
   different scales are told as such if they are stretched, and have none otherwise. */
function drawScale(maps, unit) {
  const alike = maps.every(({ range }) => String(range) === String(maps[0].range));
  $("scale").hidden = !maps.length || !(alike || state.stretch);
  if ($("scale").hidden) return;
  const ramp = $("ramp").getContext("2d"), grey = meanGrey(), tints = maps.map(({ tint }) => String(tint));
  const rows = maps.filter((_, i) => tints.indexOf(tints[i]) === i);
  $("ramp").height = rows.length;
  for (const [row, map] of rows.entries()) {
    const image = ramp.createImageData(256, 1), pixels = image.data;
    drawMaps(pixels, [map], [Float32Array.from({ length: 256 }, (_, i) => i / 255)]);
    for (let i = 0; i < pixels.length; i += 4) {
      const alpha = pixels[i + 3] / 255;
      for (let part = i; part < i + 3; part++) pixels[part] = Math.round(alpha * pixels[part] + (1 - alpha) * grey);
      pixels[i + 3] = 255;
    }
    ramp.putImageData(image, 0, row);
  }
  const [low, high] = maps[0].range;
  $("low").textContent = alike ? told(low) : "each word’s lowest";
  $("high").textContent = alike ? `${told(high)} ${unit}` : "each word’s highest";
}

/* Return the end of the colour scale: the highest peak of the pinned words and the one that is
   pointed at, at most `top`; without pinned words, `top`. */
function scaleEnd(pinned, pointed, peakOf, top) {
  if (!pinned.length) return top;
  return Math.min(top, Math.max(...[...pinned, ...pointed].map(peakOf)));
}

/* Style a word's button: pinned or not, its colour if several are pinned, and its peak. */
function dress(button, word, peak, top, unit) {
  const pinned = state.pinned.includes(word), tint = pinned && state.pinned.length > 1 ? pinColour(word) : null;
  button.setAttribute("aria-pressed", String(pinned));
  button.classList.toggle("shown", word === state.hovered);
  button.style.setProperty("--peak", top > 0 ? Math.min(1, peak / top).toFixed(3) : 0);
  button.title = `peak ${told(peak)} ${unit}`;
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
  show(false);
}

/* Show the pinned words, or keep the images bare. */
function show(bare) {
  state.hovered = null;
  state.bare = bare;
  draw();
}

function listen(button, wordOf, click = pin) {
  const show = () => { state.hovered = wordOf(); draw(); };
  const leave = () => { if (state.hovered === wordOf()) { state.hovered = null; draw(); } };
  button.addEventListener("pointerenter", (event) => { if (event.pointerType !== "touch") show(); });
  button.addEventListener("pointerleave", leave);
  button.addEventListener("focus", () => { if (button.matches(":focus-visible")) show(); });
  button.addEventListener("blur", leave);
  button.addEventListener("click", () => click(wordOf()));
}
function unpin() {
  state.pinned = [];
  $("full").textContent = "";
  show(false);
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
  if (shown().length || state.looked != null) { // only the page of a run has that
    const seen = brush.getImageData(0, 0, view.width, view.height), pixels = seen.data;
    for (let i = 0; i < pixels.length; i += 4) pixels[i] = pixels[i + 1] = pixels[i + 2] = greyOf(pixels, i);
    brush.putImageData(seen, 0, 0);
    brush.drawImage(heat, 0, 0, view.width, view.height);
  }
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
  sheet.toBlob((blob) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    const plain = about.map((text) => text.replace(/[^\p{L}\p{N}]+/gu, "_").replace(/^_|_$/g, "")).filter(Boolean);
    link.download = `${[lines.length ? "heatmap" : "image", ...plain].join("-").slice(0, 100)}.png`;
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
  $("stretch").addEventListener("change", () => { state.stretch = $("stretch").checked; draw(); });
  $("colormap").addEventListener("change", () => { state.colormap = $("colormap").value; draw(); });
  state.colormap = $("colormap").value;
  draw();
  const images = [...stage.querySelectorAll("img")].map((image) => image.complete || new Promise((done) => image.addEventListener("load", done))); // the scale is over them
  Promise.all([unpack(), ...images]).then(() => { document.documentElement.dataset.ready = ""; draw(); }, (error) => {
    $("caption").textContent = `This browser cannot unpack the maps (${error.message}).`;
  });
}
