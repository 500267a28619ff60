// The result's frame is as high as its page, which reports that, see theme.js, and is told how much
// of it is above the window. Messages from other pages are ignored.
const frames = () => document.querySelectorAll("iframe[title=sdattn]");
addEventListener("message", ({ source, data }) => {
  for (const frame of frames()) {
    if (frame.contentWindow !== source) continue;
    if (data?.sdattnHeight > 0) frame.style.height = `${Math.min(data.sdattnHeight, 20000)}px`;
    if (typeof data?.sdattnLacks === "boolean")
      document.getElementById("remedy").classList.toggle("open", data.sdattnLacks);
    if (typeof data?.sdattnWord === "string") change(data.sdattnWord);
    if (Array.isArray(data?.sdattnBox)) {
      put("box", data.sdattnBox.map((side) => Number(side).toFixed(2)).join(" "));
      setTimeout(() => document.querySelector("#place- button").click(), 200); // the field is taken over first
    }
  }
});
addEventListener("scroll", () => {
  for (const frame of frames())
    frame.contentWindow.postMessage({ sdattnAbove: Math.max(0, -frame.getBoundingClientRect().top) }, "*");
}, { passive: true });

// A word of the result was tapped: it can be swapped, or dragged to a place in the image.
const input = (name) => document.querySelector(`#change [id$=-${name}] :is(input, textarea)`);
function put(name, text) {
  const field = input(name);
  field.value = text;
  field.dispatchEvent(new Event("input", { bubbles: true }));
}
const boxing = (may) => { for (const frame of frames()) frame.contentWindow.postMessage({ sdattnBoxing: may }, "*"); };
function change(word) {
  const bar = document.getElementById("change");
  if (!bar) return; // the model cannot edit
  bar.classList.add("open");
  document.getElementById("close").onclick = () => {
    bar.classList.remove("open");
    boxing(false);
  };
  put("word", word);
  boxing(true);
}

// A form was started: no error is left, and what is being done is in sight, also on a phone.
function begin() {
  tellError(null);
  const status = document.getElementById("status");
  if (status.getBoundingClientRect().top > innerHeight / 3) status.scrollIntoView();
  return [];
}

// Say an error or warnings, { form, field, text }, below their field, or below the button if they are about none.
function tellError(told) {
  document.getElementById("error")?.remove();
  for (const input of document.querySelectorAll("[aria-describedby=error]"))
    for (const name of ["aria-describedby", "aria-invalid"]) input.removeAttribute(name);
  if (!told?.text) return [];
  const field = document.getElementById(`${told.form}-${told.field}`) ?? document.getElementById(`${told.form}-`);
  const said = Object.assign(document.createElement("p"), { id: "error", role: "alert", textContent: told.text });
  said.classList.toggle("warning", told.is_warning === true);
  const input = field.querySelector("input, textarea");
  input?.setAttribute("aria-describedby", "error");
  input?.setAttribute("aria-invalid", "true");
  field.append(said);
  if (!field.checkVisibility()) document.querySelector(`#${told.form}-settings button`).click();
  if (!told.is_warning) // which leaves the result in sight
    setTimeout(() => said.scrollIntoView({ block: "nearest" }), 100); // the settings may open first
  return [];
}
