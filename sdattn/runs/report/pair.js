/* The page for two images. A row links a word in the first image with one in the other, [a, b]; null
   if there is none. */

const stage = $("stage"), halves = [$("a"), $("b")];
const buttons = [...document.querySelectorAll(".word")];
const state = { other: 1, opacity: page.alpha, shared: false, spotlight: false, colormap: "", hovered: null, pinned: [], spot: null, kept: false };

/* ---- what is linked ---- */

const sides = () => [page.sides[0], page.sides[state.other]];
const rows = () => page.links[state.other - 1];
const rowOf = ({ dataset: { side, word } }) => rows().findIndex((row) => row[Number(side > 0)] === Number(word));
const labelOf = (row, half) => (rows()[row][half] === null ? null : sides()[half].words[rows()[row][half]]);
const mapOf = (row, half) => (rows()[row][half] === null ? null : sides()[half].start + rows()[row][half]);
const peakOf = (row, half) => (mapOf(row, half) === null ? null : page.maps[mapOf(row, half)][3]);
const halfAlone = (row) => (rows()[row][0] === null ? 1 : rows()[row][1] === null ? 0 : null);

const imageOf = (figure) => figure.querySelector("img:not([hidden])");

/* Return both words, or one if they are the same. */
function nameOf(row) {
  const labels = [0, 1].map((half) => labelOf(row, half)).filter((label) => label !== null);
  return [...new Set(labels)].join(" → ");
}

/* ---- drawing ---- */

function draw() {
  for (const tell of sliders) tell();
  if (!cells) return;
  const some = shown(), alone = some.length === 1;
  stage.classList.toggle("hot", some.length > 0);
  for (const [half, figure] of halves.entries())
    paint(figure.querySelector("canvas"), mapsOf(some, half), imageOf(figure));
  drawScale([0, 1].flatMap((half) => mapsOf(some, half)), page.unit);
  $("caption").textContent = alone ? captionOf(some[0]) : some.map((row) => `${nameOf(row)}: ${peaksOf(row)}`).join("; ");
  drawLegend((row) => [nameOf(row), peaksOf(row)]);
  for (const button of buttons) drawButton(button);
  drawSpot();
}

/* Return the maps of one image for `paint`. */
function mapsOf(some, half) {
  const there = some.filter((row) => mapOf(row, half) !== null);
  return there.map((row) => ({ number: mapOf(row, half), ...scaleOfRow(row), tint: some.length > 1 ? pinColour(row) : null }));
}

/* Return the scale of a row's words, the same in both images. */
function scaleOfRow(row) {
  const there = [0, 1].filter((half) => mapOf(row, half) !== null);
  const most = (numbers) => Math.max(...numbers);
  const ground = most(there.map((half) => groundOf(mapOf(row, half))));
  return scaleOf(ground, most(there.map((half) => peakOf(row, half))), page.top, state.shared);
}

function drawButton(button) {
  const row = rowOf(button), half = Number(button.dataset.side > 0);
  if (row < 0) return; // belongs to an image that is not compared now
  dress(button, row, peakOf(row, half), page.top, page.unit);
  button.classList.toggle("alone", halfAlone(row) !== null);
  const linked = labelOf(row, 1 - half);
  button.title += linked === null ? ` · not in ${sides()[1 - half].name}` : ` · linked with “${linked}”`;
}

function peaksOf(row) {
  const half = halfAlone(row);
  if (half !== null) return `peak ${told(peakOf(row, half))}, only in ${sides()[half].name}`;
  return `peaks ${told(peakOf(row, 0))} and ${told(peakOf(row, 1))}`;
}

function captionOf(row) {
  const parts = [0, 1].map((half) => {
    const label = labelOf(row, half), { name } = sides()[half];
    return label === null ? `not in ${name}` : `“${label}” peak ${told(peakOf(row, half))} in ${name}`;
  });
  return parts.join(" · ");
}

/* ---- a spot ---- */

const isOver = () => Boolean($("over")?.checked);

function drawSpot() {
  for (const cross of stage.querySelectorAll(".cross")) drawCross(cross);
  const there = state.spot !== null && cells !== null;
  $("spot-where").textContent = there ? "" : isOver() && touch.matches ? "Put the images side by side, then tap one." : touch.matches ? "Tap an image." : "Point at an image.";
  $("spot-rest").textContent = there ? `Bars and numbers: ${page.unit}.` : "";
  const most = Math.max(...[0, 1].flatMap((half) => rows().map((_, row) => peakOf(row, half) ?? 0)));
  for (const half of [0, 1]) {
    const own = there ? [...rows().keys()].filter((row) => rows()[row][half] !== null) : [];
    const { words, start, size: [width, height] } = sides()[half], numbers = [...new Set(own.map((row) => rows()[row][half]))];
    drawWords($(`spot-${half}`), numbers.map((word) => ({ label: words[word], value: valueAt(start + word, state.spot) })), most);
    if (!there) continue;
    $("spot-where").textContent += `${half ? " · " : ""}${sides()[half].name}: pixel ${Math.floor(state.spot.x * width)}, ${Math.floor(state.spot.y * height)}`;
  }
}

const say = () => ($("spot-told").textContent = [0, 1].map((half) => `${sides()[half].name}: ${toldOf($(`spot-${half}`))}`).join(". "));

function drawTable() {
  const cell = (text, name = "") => {
    const made = document.createElement("td"), inner = document.createElement("bdi");
    made.className = name;
    inner.textContent = text;
    made.append(inner);
    return made;
  };
  $("linked").replaceChildren(...rows().map((_, row) => {
    const line = document.createElement("tr");
    for (const half of [0, 1]) {
      const label = labelOf(row, half);
      if (label === null) line.append(cell("none", "soft"), cell("–", "soft"));
      else line.append(cell(label), cell(told(peakOf(row, half))));
    }
    return line;
  }));
}

/* ---- input ---- */

/* Choose the image on the right; the first image's words stay pinned. */
function choose(other) {
  const kept = state.pinned.map((row) => rows()[row][0]).filter((word) => word !== null);
  state.other = other;
  state.hovered = null;
  const again = kept.map((word) => rows().findIndex((row) => row[0] === word)).filter((row) => row >= 0);
  state.pinned = again.length ? again : [...page.first[other - 1]];
  for (const part of document.querySelectorAll("#b img, .side:not([data-side='0'])")) part.hidden = Number(part.dataset.side) !== other;
  for (const id of ["b-name", "linked-other", "spot-1-name"]) $(id).textContent = sides()[1].name;
  for (const [half, figure] of halves.entries()) {
    const { size: [width, height] } = sides()[half];
    fit(figure.querySelector("canvas"), [width, height]);
    figure.style.setProperty("--ratio", width / height);
  }
  stage.parentElement.style.setProperty("--ratio", sides()[0].size[0] / sides()[0].size[1]);
  if ($("wipe")) wipe(Number($("wipe").value));
  showOriginals();
  drawTable();
  draw();
}

/* Show the images in their own colours above those with heat. The file holds each image once, in the
   stage. */
function showOriginals() {
  $("originals").replaceChildren(...halves.map(imageOf).map(({ src, width, height }) => Object.assign(new Image(width, height), { src, alt: "" })));
}

/* Show the first image left of the slider, the other right of it. */
function wipe(value) {
  const share = Math.round(Math.min(100, Math.max(0, value))), [left, right] = sides();
  stage.style.setProperty("--wipe", `${share}%`);
  $("wipe").value = share;
  $("wipe").setAttribute("aria-valuetext", `${share} % ${left.name}, ${100 - share} % ${right.name}`);
}

function listenToWipe() {
  const follow = (event) => {
    const box = stage.getBoundingClientRect();
    wipe((100 * (event.clientX - box.left)) / box.width);
  };
  $("wipe").addEventListener("input", () => wipe(Number($("wipe").value)));
  $("over").addEventListener("change", () => {
    stage.classList.toggle("beside", !isOver());
    $("wiping").hidden = $("edge").hidden = !isOver();
    [state.spot, state.kept] = [null, false];
    drawSpot();
  });
  stage.addEventListener("pointerdown", (event) => {
    if (!isOver()) return;
    stage.setPointerCapture(event.pointerId);
    follow(event);
    event.preventDefault();
  });
  stage.addEventListener("pointermove", (event) => { if (stage.hasPointerCapture(event.pointerId)) follow(event); });
}

for (const button of buttons) listen(button, () => rowOf(button));
listenToSpots({
  boxOf: ({ clientX }) => $(isOver() || clientX < $("b").getBoundingClientRect().left ? "a" : "b"),
  gridOf: () => page.maps[0] ?? [1, 1],
  keeps: () => !isOver(),
  say,
});
$("save").addEventListener("click", () => {
  const some = shown(), parts = halves.map((figure, half) => ({
    image: imageOf(figure), heat: figure.querySelector("canvas"), ...sides()[half],
  }));
  const where = state.spot ? [`at ${Math.floor(state.spot.x * sides()[0].size[0])} ${Math.floor(state.spot.y * sides()[0].size[1])}`] : [];
  save(parts, linesOf(some.map((row) => `${nameOf(row)}: ${peaksOf(row)}`), some.map(pinColour)), [...some.map(nameOf), ...where, sides().map(({ name }) => name).join(" and ")]);
});
$("other")?.addEventListener("change", () => choose(Number($("other").value)));
choose(1);
if ($("wipe")) listenToWipe();
begin();
