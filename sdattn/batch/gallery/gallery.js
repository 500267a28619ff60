const CHUNK = 60; // cards added at a time, near the end of the list
const PAUSE = 120; // milliseconds after the last key before a search
const data = JSON.parse($("data").textContent);
const FIELDS = [["q", "search"], ["word", "word"]]; // names in the address, and their inputs
const files = new Map(Object.entries(data.files ?? {})); // file names of words, if they differ
const number = new Intl.NumberFormat("en-US");
const folder = decode(location.pathname.split("/").at(-2) ?? "");

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

// Cards

const address = (place, file) => `./${place.split("/").map(encodeURIComponent).join("/")}/${file}`;
const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`);
const command = (id) => `sdattn show ${quoted(folder || "RUN")} --item ${quoted(id)} --out ${quoted(id)}`;

function thumbnail(place, width, height, file = "image.png") {
  const image = make("img");
  Object.assign(image, { loading: "lazy", decoding: "async", width, height, alt: "" });
  image.src = address(place, file);
  return image;
}

// Return an edit's source and result, side by side.
function pair(place, width, height) {
  return side(["source.png", "image.png"].map((file) => thumbnail(place, width, height, file)));
}

// The requested word or phrase, and its positions in an item: an exact match; else its words in
// sequence; else the first occurrence of each. Empty unless the item has all of them.
const asked = () => plain($("word")?.value.trim() ?? "");
function placesOf(words) {
  if (!asked()) return [];
  const own = words.map(plain), whole = own.indexOf(asked()), parts = asked().split(/\s+/);
  if (whole >= 0) return [whole];
  const together = own.findIndex((_, at) => parts.every((part, i) => own[at + i] === part));
  const places = parts.map((part, i) => (together >= 0 ? together + i : own.indexOf(part)));
  return places.includes(-1) ? [] : places;
}

function heat(at, place, words, width, height) {
  const image = thumbnail(place, width, height);
  const name = `${String(at + 1).padStart(2, "0")}-${files.get(words[at]) ?? words[at]}.png`;
  image.className = "heat";
  image.alt = `Heatmap of “${words[at]}”`;
  image.addEventListener("error", () => image.replaceWith(...(data.has_images ? [thumbnail(place, width, height)] : [])));
  image.src = address(place, `heatmaps/${encodeURIComponent(name)}`);
  return image;
}

function heats(places, ...item) {
  return places.map((at) => heat(at, ...item));
}

function side(images) {
  if (images.length === 1) return images[0];
  const made = make("div", "heats");
  made.append(...images);
  return made;
}

function badge(text, title) {
  const one = make("span", "badge", text);
  one.title = title;
  return one;
}

function copier(id) {
  const button = make("button", "button", "Copy command");
  button.type = "button";
  button.title = command(id);
  button.setAttribute("aria-label", `Copy the command that draws ${id}`);
  button.addEventListener("click", () => copy(button, id));
  return button;
}

async function copy(button, id) {
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
}

function card([id, place, prompt, seed, words, width, height, cut, blanked, source, file, strongest]) {
  const item = make(data.opens ? "a" : "div", "card item");
  const edited = typeof source === "string", explained = file !== undefined;
  if (data.opens) item.href = address(place, edited && data.opens === "report.html" ? "edit.html" : data.opens);
  const places = placesOf(words);
  item.classList.toggle("without", asked() !== "" && !places.length);
  if (explained && !places.length && data.files && strongest >= 0) places.push(strongest);
  const originals = explained && data.has_images ? [thumbnail(place, width, height)] : [];
  for (const original of originals) original.className = "own";
  if (places.length) item.append(side([...originals, ...heats(places, place, words, width, height)]));
  else if (data.has_images) item.append((edited ? pair : thumbnail)(place, width, height));
  const text = make("div", "text");
  const said = make("p", "prompt", edited ? `${source} \u2192 ${prompt}` : prompt);
  said.dir = "auto";
  said.title = said.textContent;
  text.append(said);
  if (!data.has_images) {
    const list = make("p", "words", words.join(" · "));
    list.dir = "auto";
    text.append(list);
  }
  const meta = make("p", "meta");
  meta.append(make("span", "mono", id), make("span", "", explained ? file : `seed ${seed}`));
  if (explained && places.length) meta.append(make("span", "", `map of “${places.map((at) => words[at]).join(" ")}”`));
  if (cut.length) meta.append(badge("cut off", `Too long for the model, cut off: ${cut.join(" ")}`));
  if (blanked) meta.append(badge("blanked", "Blanked by the model's safety checker"));
  if ($("command")) meta.append(copier(id));
  text.append(meta);
  item.append(text);
  const entry = make("li");
  entry.append(item);
  const still = item.querySelector(":scope > img:not(.heat)");
  if (data.videos && still && !edited) playing(entry, item, still, place, id);
  return entry;
}

// A video's preview plays while the pointer or keyboard focus is on its card, unless the user prefers
// reduced motion; its button (also for touch) starts it until it is pressed again.
const calm = matchMedia("(prefers-reduced-motion: reduce)");
function playing(entry, item, still, place, id) {
  const rest = still.getAttribute("src"), video = address(place, "preview.webp");
  const button = make("button", "play");
  let kept = false, near = false;
  button.type = "button";
  button.setAttribute("aria-label", `Play the video of ${id}`);
  const show = () => {
    const plays = kept || (near && !calm.matches);
    button.setAttribute("aria-pressed", String(kept));
    const wanted = plays ? video : rest;
    if (still.getAttribute("src") !== wanted) still.src = wanted;
  };
  const come = (value) => () => {
    near = value;
    show();
  };
  still.addEventListener("error", () => { // the preview is missing: keep the still
    if (still.getAttribute("src") !== video) return;
    [kept, near] = [false, false];
    button.remove();
    show();
  });
  entry.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && come(true)());
  entry.addEventListener("pointerleave", come(false));
  item.addEventListener("focus", come(true));
  item.addEventListener("blur", come(false));
  button.addEventListener("click", () => {
    kept = !kept;
    if (!kept) near = false;
    show();
  });
  show();
  entry.className = "video";
  entry.append(button);
}

function append(count) {
  const more = found.slice(made, made + count).map((index) => card(data.rows[index]));
  $("cards").append(...more);
  made += more.length;
}

// Search

const plain = (text) => text.normalize("NFKC").toLowerCase();
const terms = () => plain($("search").value).split(/\s+/).filter(Boolean);
const pressed = (id) => $(id).getAttribute("aria-pressed") === "true";

function matcher() {
  const wanted = terms();
  const [cut, blanked] = [pressed("cut"), pressed("blanked")];
  return (row, index) =>
    (!cut || row[7].length > 0) && (!blanked || row[8]) && wanted.every((one) => texts[index].includes(one));
}

function search(count = CHUNK) {
  const matches = matcher();
  found = [...data.rows.keys()].filter((index) => matches(data.rows[index], index));
  made = 0;
  $("cards").replaceChildren();
  append(count);
  const all = `${number.format(data.rows.length)} ${data.rows.length === 1 ? "item" : "items"}`;
  const where = document.querySelector("nav") ? " on this page" : "";
  const some = found.length < data.rows.length || terms().length > 0;
  $("status").textContent = (some ? `${number.format(found.length)} of ${all}` : all) + where;
  $("none").hidden = found.length > 0;
  tellHeat();
  watch();
}

function tellHeat() {
  if (!$("shown")) return;
  const having = asked() ? found.filter((index) => placesOf(data.rows[index][4]).length).length : 0;
  const word = `“${$("word").value.trim()}”`;
  const some = `${word} over ${number.format(having)} of ${number.format(found.length)}`;
  $("shown").textContent = asked() && found.length ? (having ? some : `no item here has ${word}`) : "";
}

function near(sightings) {
  if (!sightings.at(-1).isIntersecting) return; // use the latest entry
  append(CHUNK);
  watch();
}

function watch() {
  observer.unobserve($("more")); // observing again reports at once
  if (made < found.length) observer.observe($("more"));
}

// The search is kept in the address, so that Back, other pages and copied links keep it; the number of
// cards is kept in the history, so that Back finds its place.

function remember() {
  const kept = new URLSearchParams();
  for (const [name, id] of FIELDS) if ($(id)?.value) kept.set(name, $(id).value);
  for (const one of ["cut", "blanked"]) if (pressed(one)) kept.set(one, "1");
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
  for (const [name, id] of FIELDS) if ($(id)) $(id).value = kept.get(name) ?? "";
  for (const one of ["cut", "blanked"]) $(one).setAttribute("aria-pressed", String(kept.has(one)));
  search(Math.max(CHUNK, history.state?.made ?? 0));
  remember();
}

function ask() {
  search();
  remember();
  if (scrollY > $("cards").offsetTop) scrollTo({ top: $("cards").offsetTop - $("find").offsetHeight - 8 });
}

function offer(id, count) {
  $(id).hidden = count === 0;
  $(id).append(" ", make("span", "soft", number.format(count)));
}

function listen() {
  let waiting;
  for (const [, id] of FIELDS)
    $(id)?.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(ask, PAUSE);
    });
  $("find").addEventListener("submit", (event) => event.preventDefault());
  for (const one of ["cut", "blanked"]) {
    $(one).addEventListener("click", () => {
      $(one).setAttribute("aria-pressed", String(!pressed(one)));
      ask();
    });
  }
  $("clear").addEventListener("click", () => {
    $("search").value = "";
    for (const one of ["cut", "blanked"]) $(one).setAttribute("aria-pressed", "false");
    ask();
    $("search").focus();
  });
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches?.("input, textarea, select");
    if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    $("search").select();
  });
  addEventListener("hashchange", recall);
  addEventListener("pagehide", remember);
}

// Start

const texts = data.rows.map(([id, , prompt, seed, words, ...rest]) => plain([prompt, id, seed, ...words, rest[4] ?? "", rest[5] ?? ""].join("\n")));
const observer = new IntersectionObserver(near, { rootMargin: "1200px" });

if (folder) {
  $("name").textContent = folder;
  document.title = `${folder} · sdattn`;
}
if ($("command")) $("command").textContent = `sdattn show ${quoted(folder || "RUN")} --item ID --out ID`;
if (data.rows.length) {
  $("find").hidden = false;
  offer("cut", data.rows.filter((row) => row[7].length).length);
  offer("blanked", data.rows.filter((row) => row[8]).length);
  const shapes = new Set(data.rows.map((row) => row[5] / row[6]));
  $("cards").classList.toggle("alike", shapes.size === 1);
  if (shapes.size === 1) $("cards").style.setProperty("--ratio", [...shapes][0]);
  listen();
  recall();
}
