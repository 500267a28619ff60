/* A run's page in the frame of the live page: a word that was clicked is told, and while a bar for it
   is open a box can be dragged on the image, in fractions of it: left, top, right, bottom. */
if (parent !== window) {
  const tell = (message) => parent.postMessage(message, "*");
  for (const button of document.querySelectorAll("#prompt .word"))
    button.addEventListener("click", () => tell({ sdattnWord: button.textContent }));
  const box = Object.assign(document.createElement("span"), { id: "box", hidden: true });
  let from = null, image = null;
  addEventListener("message", ({ source, data }) => {
    if (source === parent && "sdattnBoxing" in Object(data)) stage.classList.toggle("boxing", data.sdattnBoxing === true);
  });
  const placeOf = ({ clientX, clientY }) => {
    const { left, top, width, height } = image.getBoundingClientRect(), inside = (part) => Math.min(1, Math.max(0, part));
    return [inside((clientX - left) / width), inside((clientY - top) / height)];
  };
  const sidesTo = (event) => {
    const to = placeOf(event);
    return [0, 1].map((i) => Math.min(from[i], to[i])).concat([0, 1].map((i) => Math.max(from[i], to[i])));
  };
  stage.addEventListener("pointerdown", (event) => {
    image = event.target.closest("figure");
    if (!image || !stage.classList.contains("boxing")) return;
    from = placeOf(event);
    stage.setPointerCapture(event.pointerId);
    image.append(box);
    event.preventDefault();
  });
  stage.addEventListener("pointermove", (event) => {
    if (!from) return;
    const [left, top, right, bottom] = sidesTo(event);
    box.hidden = right - left < 0.05 && bottom - top < 0.05;
    const sides = { left, top, width: right - left, height: bottom - top };
    for (const side in sides) box.style[side] = `${100 * sides[side]}%`;
  });
  stage.addEventListener("pointerup", (event) => {
    if (!from) return;
    const sides = sidesTo(event);
    from = null;
    if (sides[2] - sides[0] < 0.05 || sides[3] - sides[1] < 0.05) return; // a click
    addEventListener("click", (click) => click.stopPropagation(), { capture: true, once: true }); // keeps no spot
    tell({ sdattnBox: sides });
  });
  stage.addEventListener("pointercancel", () => { [from, box.hidden] = [null, true]; });
}
