/* Cards of items. Their images and maps are parts of the shards' sheets. A page on a disk may not read
   the pixels of an image, so a map, which is the sheet's alpha, is drawn on a canvas and coloured, or
   cut at its threshold, by an SVG filter. */

const CHUNK = 60; // cards added at a time, near the end of the list
const PAUSE = 120; // milliseconds after the last key before a search
const SHEETS = 12; // kept unpacked
const SIDE = 192; // pixels of the longer side of a canvas
const FILTERS = ["failed", "missing", "truncated", "blanked", "strange"]; // names in rows, in the address and on the page
const data = JSON.parse($("data").textContent);
const [opens] = data.opens, hasFiles = data.opens.includes("image.png");
const number = new Intl.NumberFormat("en-US");
const folder = decode(location.pathname.split("/").at(-2) ?? "");
const has = (row, name) => row[name] !== undefined;

let found = []; // rows that match the search
let made = 0; // how many of them have a card on the page

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function make(tag, name, text) {
  const one = document.createElement(tag);
  if (name) one.className = name;
  if (text !== undefined) one.textContent = text;
  return one;
}

const address = (path, ...files) => `./${[...path.split("/"), ...files].map(encodeURIComponent).join("/")}`;

// Sheets

const sheets = new Map(); // promises of images by their number, the latest used last

function sheetOf(index) {
  const sheet = sheets.get(index) ?? opened(address(data.sheets[index]));
  sheets.delete(index);
  sheets.set(index, sheet);
  if (sheets.size > SHEETS) sheets.delete(sheets.keys().next().value);
  return sheet;
}

async function opened(source) {
  const image = new Image();
  image.src = source;
  await image.decode();
  return image;
}

const parts = new WeakMap(); // canvas -> [left, top, width, height] in its sheet
const places = new WeakMap(); // canvas of a map -> see placeOf()
const near = new WeakSet(); // cards that are in sight, or nearly

/* Draw what comes into sight, and free what leaves it. */
function sight(entries) {
  for (const { target, isIntersecting } of entries) {
    near[isIntersecting ? "add" : "delete"](target);
    if (isIntersecting) paint(target);
    else for (const canvas of target.querySelectorAll("canvas")) canvas.width = canvas.height = 0;
  }
}

async function paint(entry) {
  const row = data.rows[entry.dataset.row];
  let sheet;
  try {
    sheet = await sheetOf(row.sheet);
  } catch {
    for (const scale of entry.querySelectorAll(".scale")) scale.textContent = `${data.sheets[row.sheet]} is missing.`;
    return;
  }
  if (!near.has(entry)) return;
  for (const canvas of entry.querySelectorAll("canvas")) {
    const [width, height] = row.size, scale = SIDE / Math.max(width, height);
    canvas.width = Math.max(1, Math.round(width * scale));
    canvas.height = Math.max(1, Math.round(height * scale));
    const brush = canvas.getContext("2d"), { low, span } = places.get(canvas) ?? { low: 0, span: 1 };
    brush.globalAlpha = low;
    brush.fillRect(0, 0, canvas.width, canvas.height);
    brush.globalAlpha = span;
    brush.globalCompositeOperation = "lighter"; // adds alpha, which is the place on the word's scale
    brush.drawImage(sheet, ...parts.get(canvas), 0, 0, canvas.width, canvas.height);
  }
}

// Colours

/* Give the filters of heatmaps their values: a map covers the dark image in black, and adds light to it,
   as glow() in sdattn.maps.glow says. */
const { alpha, brightness, fade } = data.look;
const bytes = Uint8Array.from(atob(data.look.colormaps.inferno), (char) => char.charCodeAt(0));
function colour() {
  const table = (valueOf) => Array.from({ length: 256 }, (_, i) => valueOf(i, alpha * Math.min(1, i / 255 / fade)).toFixed(4)).join(" ");
  document.querySelector("#cover feFuncA").setAttribute("tableValues", table((i, seen) => (seen * i) / 255));
  for (const [channel, name] of ["R", "G", "B"].entries())
    document.querySelector(`#heat feFunc${name}`).setAttribute("tableValues", table((i, seen) => (seen * bytes[3 * i + channel]) / 255));
  document.documentElement.style.setProperty("--dark", brightness);
}

/* Return the places of a map's lowest value and of its range on the word's own scale, as own_scale() in
   sdattn.maps.glow. */
function placeOf([low, high], top) {
  const dimmed = high > 0 ? Math.sqrt(Math.min(1, top > 0 ? high / top : 1)) / high : 0;
  return { low: low * dimmed, span: (high - low) * dimmed };
}

function rampOf({ low, span }) {
  const stops = Array.from({ length: 16 }, (_, i) => 3 * Math.round(255 * (low + (span * i) / 15)));
  return `linear-gradient(90deg, ${stops.map((at) => `rgb(${bytes.slice(at, at + 3)})`)})`;
}

/* Return the filter that darkens what is outside a mask, which begins at a share of the map's range. */
function cutAt(share) {
  const first = share === null ? 256 : Math.ceil(share * 255), id = `mask-${first}`;
  if (!$(id)) {
    const filter = $("heat").cloneNode(), cut = document.createElementNS(filter.namespaceURI, "feComponentTransfer");
    const alpha = document.createElementNS(filter.namespaceURI, "feFuncA");
    filter.id = id;
    alpha.setAttribute("type", "discrete");
    alpha.setAttribute("tableValues", Array.from({ length: 256 }, (_, i) => (i < first ? 0.82 : 0)).join(" "));
    cut.append(alpha);
    filter.append(cut);
    $("filters").append(filter);
  }
  return `url(#${id})`;
}

// Cards

const plain = (text) => text.normalize("NFKC").toLowerCase();
const terms = () => plain($("search").value).split(/\s+/).filter(Boolean);
const view = () => document.querySelector("input[name=view]:checked").value;
const told = (value) => Number(value.toPrecision(2)).toString();

/* Return the number of the map to show: the last searched word's, else the one that stands out most. */
function mapOf(row) {
  if (!row.thumb?.maps) return -1;
  const own = row.words.map(plain), asked = terms().reverse().find((term) => own.includes(term));
  const at = asked === undefined ? row.words.indexOf(row.best) : own.indexOf(asked);
  return at < row.thumb.ranges.length ? at : -1;
}

/* Return a box with a part of the item's sheet, and the image's file over it if there is one. */
function pane(row, name, part) {
  const box = make("div", `pane ${name}`), [width, height] = row.size;
  box.style.setProperty("--shape", `${width} / ${height}`);
  box.style.setProperty("--fit", `${Math.min(1, width / height / shape) * 100}%`);
  if (part) layer(box, part);
  if (hasFiles) {
    const image = make("img");
    Object.assign(image, { loading: "lazy", decoding: "async", alt: "", width, height });
    image.addEventListener("error", () => image.remove());
    image.src = address(row.place, name === "source" ? "source.png" : "image.png");
    box.append(image);
  }
  return box;
}

function layer(box, part) {
  const canvas = make("canvas");
  parts.set(canvas, part);
  box.append(canvas);
  return canvas;
}

/* Return the image with a word's map over it, or with its mask cut out, and the scale below. */
function heat(row, at) {
  const [left, top, all, height] = row.thumb.maps, width = all / row.thumb.ranges.length, [low, high, share] = row.thumb.ranges[at], word = row.words[at];
  const box = pane(row, view(), row.thumb.image), part = [left + at * width + 1, top + 1, width - 2, height - 2]; // in a border
  const masked = view() === "mask", place = placeOf(row.thumb.ranges[at], row.top), cover = masked ? null : layer(box, part), canvas = layer(box, part), from = share === null ? "empty" : `from ${told(low + share * (high - low))}`;
  canvas.className = "map";
  if (cover) {
    cover.className = "cover";
    places.set(cover, place);
    places.set(canvas, place);
  }
  box.classList.toggle("bare", !row.thumb.image && !hasFiles);
  if (masked) canvas.style.filter = cutAt(share);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", masked ? `Mask of “${word}”, ${from}` : `Heatmap of “${word}”, ${told(low)} to ${told(high)}`);
  const scale = make("p", "scale"), range = make("span", "range");
  if (!masked) range.style.setProperty("--ramp", rampOf(place));
  const label = make("bdi", "", row.strange?.includes(word) ? `${word}, never learnt` : word);
  scale.title = data.unit;
  range.append(...(masked ? [from] : [told(low), " ", make("i"), " ", told(high)]));
  scale.append(label, " ", range);
  return [box, scale];
}

function pictures(row) {
  const { thumb = {} } = row, box = make("div", "panes"), at = view() === "image" ? -1 : mapOf(row);
  if (has(row, "source_prompt") && (thumb.source || hasFiles)) box.append(pane(row, "source", thumb.source));
  if (thumb.image || hasFiles) box.append(pane(row, "image", thumb.image));
  if (at < 0 && view() !== "image" && row.thumb?.maps) box.append(make("p", "pane without", "No heatmap: the model learnt none of these words"));
  if (at < 0) return [box];
  const [mapped, scale] = heat(row, at);
  box.append(mapped);
  return [box, scale];
}

function badge(text, title) {
  const one = make("span", "badge", text);
  one.title = title;
  return one;
}

/* Return an item's score, and in its title the seeds that it was chosen from. */
function scored({ score, candidates = [] }) {
  const one = make("span", "", `score ${score.toFixed(2)}${candidates.length ? `, best of ${candidates.length} seeds` : ""}`);
  one.title = candidates.map((each) => `seed ${each.seed}: ${each.score.toFixed(2)}`).join("\n") || "Higher if more of the words arrived; compare it between seeds of one prompt";
  return one;
}

function card(index) {
  const row = data.rows[index], entry = make("li"), failed = has(row, "failed");
  const item = make(opens && !failed ? "a" : "div", "card item"), text = make("div", "text");
  entry.dataset.row = index;
  if (item.href !== undefined) item.href = address(row.place, has(row, "source_prompt") && opens === "report.html" ? "edit.html" : opens);
  item.classList.toggle("failed", failed);
  if (has(row, "thumb") || (hasFiles && !failed)) item.append(...pictures(row));
  const said = make("p", "prompt", has(row, "source_prompt") ? `${row.source_prompt} \u2192 ${row.prompt}` : row.prompt);
  said.dir = "auto";
  said.title = said.textContent;
  text.append(said);
  if (failed) text.append(make("p", "reason", `Failed: ${row.failed}`));
  const meta = make("p", "meta");
  meta.append(make("span", "mono", row.id), make("span", "", row.source_file ?? `seed ${row.seed}`));
  if (has(row, "score")) meta.append(scored(row));
  if (has(row, "missing")) meta.append(badge(`missing? ${row.missing.join(", ")}`, "These words probably did not arrive in the image"));
  if (has(row, "truncated")) meta.append(badge("cut off", `Too long for the model, cut off: ${row.truncated.join(" ")}`));
  if (has(row, "blanked")) meta.append(badge("blanked", "Blanked by the model's safety checker"));
  if (has(row, "strange")) meta.append(badge(`never learnt: ${row.strange.join(", ")}`, "What the model draws for these words, and their heatmaps, mean nothing"));
  if ($("command") && !failed) meta.append(copier(row.id));
  text.append(meta);
  item.append(text);
  entry.append(item);
  const still = item.querySelector(".image img");
  if (data.opens.some((name) => name.startsWith("video.")) && still && !has(row, "source_prompt")) playing(entry, item, still, row);
  if (has(row, "sheet")) eye.observe(entry);
  return entry;
}

// A command for items in shards, which a browser cannot open

const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`);
const command = (id) => `sdattn show ${quoted(folder || "RUN")} --item ${quoted(id)} --out ${quoted(id)}`;

function copier(id) {
  const button = make("button", "button", "Copy command");
  button.type = "button";
  button.title = command(id);
  button.setAttribute("aria-label", `Copy the command that draws ${id}`);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command(id));
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy command"), 1500);
      $("said").textContent = `Copied: ${command(id)}`;
    } catch {
      const shown = make("code", "mono", command(id)); // so that it can be copied by hand
      button.replaceWith(shown);
      getSelection().selectAllChildren(shown);
    }
  });
  return button;
}

// A video's preview plays while the pointer or keyboard focus is on its card, unless the user prefers
// reduced motion; its button (also for touch) starts it until it is pressed again.
const calm = matchMedia("(prefers-reduced-motion: reduce)");
function playing(entry, item, still, { place, id }) {
  const rest = still.getAttribute("src"), video = address(place, "preview.webp");
  const button = make("button", "play");
  let kept = false, over = false;
  button.type = "button";
  button.setAttribute("aria-label", `Play the video of ${id}`);
  const show = () => {
    const wanted = kept || (over && !calm.matches) ? video : rest;
    button.setAttribute("aria-pressed", String(kept));
    if (still.getAttribute("src") !== wanted) still.src = wanted;
  };
  const come = (value) => () => {
    over = value;
    show();
  };
  entry.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && come(true)());
  entry.addEventListener("pointerleave", come(false));
  item.addEventListener("focus", come(true));
  item.addEventListener("blur", come(false));
  button.addEventListener("click", () => {
    kept = !kept;
    if (!kept) over = false;
    show();
  });
  show();
  entry.className = "video";
  entry.append(button);
}

// Search

const pressed = (id) => $(id).getAttribute("aria-pressed") === "true";

function append(count) {
  const more = found.slice(made, made + count).map(card);
  $("cards").append(...more);
  made += more.length;
}

function search(count = CHUNK) {
  const wanted = terms(), kinds = FILTERS.filter(pressed);
  found = [...data.rows.keys()].filter((index) => {
    const row = data.rows[index];
    return (!kinds.length || kinds.some((kind) => has(row, kind))) && wanted.every((one) => texts[index].includes(one));
  });
  made = 0;
  eye.disconnect();
  $("cards").replaceChildren();
  $("cards").dataset.view = view();
  append(count);
  const all = `${number.format(data.rows.length)} ${data.rows.length === 1 ? "item" : "items"}`;
  const where = document.querySelector("nav") ? " on this page" : "";
  const some = found.length < data.rows.length || wanted.length > 0;
  $("status").textContent = (some ? `${number.format(found.length)} of ${all}` : all) + where;
  $("none").hidden = found.length > 0;
  watch();
}

function reached(sightings) {
  if (!sightings.at(-1).isIntersecting) return; // use the latest entry
  append(CHUNK);
  watch();
}

function watch() {
  end.unobserve($("more")); // observing again reports at once
  if (made < found.length) end.observe($("more"));
}

// The search is kept in the address, so that Back, other pages and copied links keep it; the number of
// cards is kept in the history, so that Back finds its place.

function remember() {
  const kept = new URLSearchParams();
  if ($("search").value) kept.set("q", $("search").value);
  if (view() !== "heat") kept.set("view", view());
  for (const one of FILTERS) if (pressed(one)) kept.set(one, "1");
  const hash = kept.toString() && `#${kept}`;
  for (const link of document.querySelectorAll("nav a")) link.hash = hash;
  try {
    history.replaceState({ made }, "", hash || location.pathname + location.search);
  } catch {
    // the browser limits how often this may be called
  }
}

function recall() {
  const kept = new URLSearchParams(location.hash.slice(1));
  $("search").value = kept.get("q") ?? "";
  for (const one of document.querySelectorAll("input[name=view]")) one.checked = one.value === (kept.get("view") ?? "heat");
  if (!document.querySelector("input[name=view]:checked")) document.querySelector("input[name=view]").checked = true;
  for (const one of FILTERS) $(one).setAttribute("aria-pressed", String(kept.has(one)));
  search(Math.max(CHUNK, history.state?.made ?? 0));
  remember();
}

function ask() {
  search();
  remember();
  if (scrollY > $("cards").offsetTop) scrollTo({ top: $("cards").offsetTop - $("find").offsetHeight - 8 });
}

function listen() {
  let waiting;
  $("search").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(ask, PAUSE);
  });
  $("find").addEventListener("submit", (event) => event.preventDefault());
  $("views").addEventListener("change", ask);
  for (const one of FILTERS) {
    const count = data.rows.filter((row) => has(row, one)).length;
    $(one).hidden = count === 0;
    $(one).append(" ", make("span", "soft", number.format(count)));
    $(one).addEventListener("click", () => {
      $(one).setAttribute("aria-pressed", String(!pressed(one)));
      ask();
    });
  }
  $("clear").addEventListener("click", () => {
    $("search").value = "";
    for (const one of FILTERS) $(one).setAttribute("aria-pressed", "false");
    ask();
    $("search").focus();
  });
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches?.("input[type=search], textarea, select");
    if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    $("search").select();
  });
  addEventListener("hashchange", recall);
  addEventListener("pagehide", remember);
}

// Start

const texts = data.rows.map(({ id, prompt, seed, words = [], source_prompt = "", source_file = "", failed = "" }) =>
  plain([prompt, id, seed, ...words, source_prompt, source_file, failed].join("\n")));
const shapes = new Set(data.rows.filter((row) => has(row, "size")).map(({ size: [width, height] }) => width / height));
const shape = shapes.size === 1 ? [...shapes][0] : 1; // of every box: the images', or a square
const eye = new IntersectionObserver(sight, { rootMargin: "600px" });
const end = new IntersectionObserver(reached, { rootMargin: "1200px" });

if (folder) {
  $("name").textContent = folder;
  document.title = `${folder} · sdattn`;
}
if ($("command")) $("command").textContent = `sdattn show ${quoted(folder || "RUN")} --item ID --out ID`;
if (data.rows.length) {
  colour();
  const some = (name) => data.rows.some((row) => row.thumb?.[name]);
  $("find").hidden = false;
  $("views").hidden = !some("maps");
  document.querySelector("input[value=image]").parentElement.hidden = !some("image") && !hasFiles;
  if (some("maps")) $("search").placeholder = "Search; a word shows its heatmaps";
  if ($("learnt")) $("learnt").hidden = !data.rows.some((row) => has(row, "strange"));
  $("cards").style.setProperty("--ratio", shape);
  $("cards").classList.toggle("mapped", some("maps") && (some("image") || hasFiles));
  $("cards").classList.toggle("edits", data.rows.some((row) => has(row, "source_prompt")));
  $("cards").classList.toggle("texts", !some("image") && !some("maps") && !hasFiles);
  listen();
  recall();
}
