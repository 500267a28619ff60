/* "Save" on a run's page: the view as a card of 1200 x 630, as sdattn/runs/card.py draws it: the image,
   the heat, the prompt with its words in their colours, their peaks, and how the image was made. */

const CARD = { width: 1200, height: 630, edge: 28, side: 230, foot: 34, font: "system-ui, 'DejaVu Sans', sans-serif" };
const LETTERS = [[46, 130], [38, 130], [30, 130], [24, 150], [19, 170], [16, 220], [13, 300], [10, 380]]; // sizes, and heights that the prompt may take

/* Return the prompt in pieces that may begin a line, in the colours of their words. */
function pieces(tintOf) {
  return [...$("prompt").childNodes].flatMap((node) => {
    const word = node.dataset?.word, tint = word === undefined ? null : tintOf(Number(word));
    return (node.textContent.match(/\s+|\S+/g) ?? []).map((text) => ({ text, tint }));
  });
}

/* Return the prompt's lines in letters of a size; a piece longer than a line is cut into letters. */
function wrapped(brush, some, size, wide) {
  const lines = [[]], wideOf = (text) => brush.measureText(text).width;
  brush.font = `${size}px ${CARD.font}`;
  let at = 0;
  for (const { text, tint } of some.flatMap((piece) => (wideOf(piece.text) > wide ? [...piece.text].map((text) => ({ ...piece, text })) : [piece]))) {
    const length = wideOf(text);
    if (at + length > wide && lines.at(-1).length) { lines.push([]); at = 0; }
    if (!lines.at(-1).length && !text.trim()) continue;
    lines.at(-1).push({ text, tint, at, length });
    at += length;
  }
  return lines;
}

/* Write a line in at most `wide` pixels: smaller, and then cut. */
function writeLine(brush, text, left, middle, size, wide, ink) {
  do brush.font = `${size}px ${CARD.font}`; while (brush.measureText(text).width > wide && --size >= 8);
  while (text.length > 1 && brush.measureText(text).width > wide) text = `${text.slice(0, -2)}…`;
  brush.fillStyle = ink;
  brush.fillText(text, left, middle);
}

function box(brush, left, top, width, height, round, tint) {
  brush.fillStyle = `rgb(${tint})`;
  brush.beginPath();
  brush.roundRect(left, top, width, height, round);
  brush.fill();
}

/* Return a card of `rows`, { label, note, tint }, one for each map shown; `told` is its last line. */
function card(image, maps, rows, told, tintOf, spot) {
  const { width, height, edge, side, foot } = CARD, sheet = Object.assign(document.createElement("canvas"), { width, height }), brush = sheet.getContext("2d");
  const ink = "#ebebeb", faint = "#aaaaaa", wide = width - 2 * edge, some = pieces(tintOf);
  brush.fillStyle = "#141414";
  brush.fillRect(0, 0, width, height);
  brush.textBaseline = "middle";
  const [size, most] = LETTERS.find(([size, most]) => 1.5 * size * wrapped(brush, some, size, wide).length <= most) ?? LETTERS.at(-1);
  const lines = wrapped(brush, some, size, wide).slice(0, Math.floor(most / 1.5 / size));
  for (const [row, line] of lines.entries())
    for (const { text, tint, at, length } of line) {
      const top = edge + 1.5 * size * row;
      if (tint) box(brush, edge + at - 0.1 * size, top, length + 0.2 * size, 1.35 * size, size / 6, tint);
      brush.fillStyle = tint ? inkOn(tint) : ink;
      brush.fillText(text, edge + at, top + 0.7 * size);
    }
  const top = Math.round(edge + 1.5 * size * lines.length + 16), room = [wide - side - edge, height - top - foot - edge], [high, across] = [page.size[1], page.size[0]];
  const factor = Math.min((room[0] - edge / 2) / 2 / across, room[1] / high), tile = [Math.max(1, Math.round(across * factor)), Math.max(1, Math.round(high * factor))];
  brush.drawImage(image, edge, top, ...tile);
  const heat = Object.assign(document.createElement("canvas"), { width: tile[0], height: tile[1] });
  if (maps.length) paint(heat, maps, image);
  else heat.getContext("2d").drawImage(image, 0, 0, ...tile);
  if (spot) drawRing(heat.getContext("2d"), heat, spot);
  brush.drawImage(heat, edge * 1.5 + tile[0], top);
  const left = 2.5 * edge + 2 * tile[0], pitch = Math.min(62, room[1] / Math.max(1, rows.length)), breadth = width - edge - left - 22;
  for (const [row, { label, note, tint }] of rows.entries()) {
    const at = top + pitch * row;
    if (tint) box(brush, left, at + 2, 10, pitch - 8, 4, tint);
    writeLine(brush, label, left + 22, at + 0.28 * pitch, Math.round(0.42 * pitch), breadth, ink);
    writeLine(brush, note, left + 22, at + 0.68 * pitch, Math.round(0.32 * pitch), breadth, faint);
  }
  writeLine(brush, told, edge, height - edge - 8, 20, wide - 110, faint);
  brush.textAlign = "right";
  writeLine(brush, "sdattn", width - edge, height - edge - 8, 22, 100, ink);
  return sheet;
}

$("save").addEventListener("click", () => {
  const some = state.looked === null ? shown() : [], { spot, when } = state, [width, height] = page.size;
  const tintOf = (word) => (some.includes(word) ? pinColours[some.indexOf(word)] : null);
  const own = { number: state.looked, range: page.maps[state.looked]?.slice(2), ends: page.maps[state.looked]?.slice(2), tint: null };
  const maps = state.looked === null ? mapsOf(some).map((map, i) => ({ ...map, tint: tintOf(some[i]) })) : [own];
  const rows = some.map((word) => ({ label: words[word].label, note: `peak ${told(peakOf(word))}`, tint: tintOf(word) }));
  if (state.looked !== null) rows.push({ label: LOOKED, note: `peak ${told(own.range[1])}`, tint: null });
  const look = [state.head || state.group ? groupName() : "", state.step && !state.head ? stepName() : ""];
  const names = rows.map(({ label }) => label), where = spot ? [`at ${Math.floor(spot.x * width)} ${Math.floor(spot.y * height)}`] : [];
  const made = [page.made, when, ...(some.length ? look : []), ...where].filter(Boolean).join(" · ");
  const about = [rows.length ? "heatmap" : "image", when, ...names, look[0], look[1].split(",")[0], ...where, `in ${page.prompt}`];
  download(card($("image"), maps, rows, made, tintOf, spot), about);
});
