/* Shared by pages that list the words at a spot in an image. Such a page defines `stage`, `state.spot`
   ({ x, y } as fractions of the image's width and height, or null), `state.kept`, `drawSpot()`. */

const MOST_ROWS = 12;
const touch = matchMedia("(hover: none)");

/* Return a map's value at a spot. */
function valueAt(number, { x, y }) {
  const [rows, cols, low, high] = page.maps[number];
  const row = Math.min(rows - 1, Math.floor(y * rows)), col = Math.min(cols - 1, Math.floor(x * cols));
  return low + (cells[starts[number] + row * cols + col] / 255) * (high - low);
}

function drawCross(cross) {
  cross.hidden = state.spot === null;
  if (cross.hidden) return;
  cross.style.left = `${100 * state.spot.x}%`;
  cross.style.top = `${100 * state.spot.y}%`;
}

/* List words, { label, value }, highest first; the bar for `most` is full. */
function drawWords(list, found, most) {
  found.sort((a, b) => b.value - a.value);
  list.replaceChildren(...found.slice(0, MOST_ROWS).map(({ label, value }) => {
    const item = document.createElement("li"), name = document.createElement("bdi");
    const track = document.createElement("span"), fill = document.createElement("span"), number = document.createElement("span");
    name.className = "label"; name.textContent = label; name.title = label;
    track.className = "track"; fill.className = "fill"; track.append(fill);
    fill.style.width = `${most > 0 ? (100 * value) / most : 0}%`;
    number.className = "number"; number.textContent = told(value);
    item.append(name, track, number);
    return item;
  }));
}

const toldOf = (list) => [...list.children].slice(0, 5).map((one) => `${one.firstChild.textContent} ${one.lastChild.textContent}`).join(", ");

/* `boxOf` finds the image under an event, `gridOf()` the (rows, cols) for the arrow keys; `keeps()`
   decides whether a click keeps a spot; `say()` announces it to screen readers. */
function listenToSpots({ boxOf, gridOf, keeps, say }) {
  const spotOf = (event) => {
    const box = boxOf(event).getBoundingClientRect();
    const inside = (value) => Math.min(0.999999, Math.max(0, value));
    return { x: inside((event.clientX - box.left) / box.width), y: inside((event.clientY - box.top) / box.height) };
  };
  stage.addEventListener("pointermove", (event) => { if (!state.kept && event.pointerType !== "touch") { state.spot = spotOf(event); drawSpot(); } });
  stage.addEventListener("pointerleave", () => { if (!state.kept && document.activeElement !== stage) { state.spot = null; drawSpot(); } });
  stage.addEventListener("click", (event) => {
    if (!keeps()) return;
    const spot = spotOf(event), old = state.spot;
    const near = state.kept && old && Math.hypot(spot.x - old.x, spot.y - old.y) < 0.02;
    state.kept = !near;
    state.spot = near && event.pointerType === "touch" ? null : spot;
    drawSpot();
  });
  stage.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key in moves) {
      const [rows, cols] = gridOf();
      const move = (at, by, many) => (Math.min(many - 1, Math.max(0, Math.floor(at * many) + by)) + 0.5) / many;
      const { x, y } = state.spot ?? { x: 0.5, y: 0.5 }, [right, down] = state.spot ? moves[event.key] : [0, 0];
      state.spot = { x: move(x, right, cols), y: move(y, down, rows) };
      state.kept = true;
    } else if (event.key === "Enter" || event.key === " ") state.kept = !state.kept && state.spot !== null;
    else if (event.key === "Escape") { state.spot = null; state.kept = false; }
    else return;
    event.preventDefault();
    drawSpot();
    say();
  });
  document.addEventListener("keydown", ({ key, target }) => { // lists and sliders use Escape themselves
    if (key !== "Escape" || target === stage || target.matches?.("select, input")) return;
    [state.spot, state.kept] = [null, false];
    unpin();
  });
  touch.addEventListener("change", drawSpot);
}
