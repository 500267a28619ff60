/* The button that plays the steps of a run once, from noise to image, and then shows their mean again. */
{
  const MILLISECONDS = 200, HOLD = 1500, slider = $("step"), button = $("play-steps");
  let next = null;
  const show = (step) => {
    slider.value = step;
    slider.dispatchEvent(new Event("input"));
  };
  const stop = () => {
    clearTimeout(next);
    next = null;
    button.textContent = "▶ Play the steps";
  };
  const play = (step) => {
    show(step);
    const last = step === Number(slider.max);
    next = setTimeout(() => { if (last) { stop(); show(0); } else play(step + 1); }, last ? HOLD : MILLISECONDS);
  };
  button.addEventListener("click", () => {
    if (next !== null) { stop(); return; }
    button.textContent = "■ Stop";
    play(1);
  });
  slider.addEventListener("pointerdown", stop);
}
