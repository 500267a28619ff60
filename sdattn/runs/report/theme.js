"use strict";
/* Shared by all pages: a short name for elements, and the light or dark theme, which the browser
   remembers if it lets pages on disk store anything. */

const $ = (id) => document.getElementById(id);
{
  const themes = ["auto", "light", "dark"], key = "sdattn-theme";
  const show = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    $("theme").textContent = `Theme: ${theme}`;
  };
  let theme = "auto";
  try {
    const kept = localStorage.getItem(key);
    if (themes.includes(kept)) theme = kept;
  } catch {
    // storage is not available
  }
  show(theme);
  $("theme").addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    show(theme);
    try {
      localStorage.setItem(key, theme);
    } catch {
      // the choice lasts as long as the page
    }
  });
}
if (parent !== window) { // in a frame, which may follow the page's height, and say what it scrolled
  const root = document.documentElement, height = () => Math.ceil(root.getBoundingClientRect().height);
  const lacks = document.querySelector(".arrived.drawn") !== null; // a word, and can be drawn again
  const tell = () => parent.postMessage({ sdattnHeight: height(), sdattnLacks: lacks }, "*");
  root.classList.add("framed");
  // 1vh would grow with the frame, and a frame without layout has height 0
  root.style.setProperty("--screen", `${Math.min(820, screen.availHeight || 820)}px`);
  addEventListener("load", tell); // observers wait until the frame is visible
  new ResizeObserver(tell).observe(root);
  addEventListener("message", ({ source, data }) => {
    if (source === parent && data?.sdattnAbove >= 0) root.style.setProperty("--above", `${data.sdattnAbove}px`);
  });
}
