// A framed page reports its height, see theme.js; messages from other pages are ignored.
addEventListener("message", ({ source, data }) => {
  if (!(data?.sdattnHeight > 0)) return;
  for (const frame of document.querySelectorAll("iframe[title=sdattn]"))
    if (frame.contentWindow === source)
      frame.style.height = `${Math.min(data.sdattnHeight, 20000)}px`;
});

// Say an error, { field, text }, below its field, or below the buttons if it is about none.
function tellError(told) {
  document.getElementById("error")?.remove();
  for (const input of document.querySelectorAll("[aria-describedby=error]"))
    for (const name of ["aria-describedby", "aria-invalid"]) input.removeAttribute(name);
  if (!told?.text) return [];
  const field = document.getElementById(`field-${told.field}`) ?? document.getElementById("field-");
  const said = Object.assign(document.createElement("p"), { id: "error", role: "alert", textContent: told.text });
  const input = field.querySelector("input, textarea");
  input?.setAttribute("aria-describedby", "error");
  input?.setAttribute("aria-invalid", "true");
  field.append(said);
  if (!field.checkVisibility()) document.querySelector("#settings button").click();
  setTimeout(() => said.scrollIntoView({ block: "nearest" }), 100); // the settings may open first
  return [];
}
