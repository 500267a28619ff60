"use strict";
/* What both pages share: a short name for elements, and the choice of light or dark, which a
   browser keeps from page to page where it lets pages of a disk keep anything. */

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
    // nothing is kept
  }
  show(theme);
  $("theme").addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    show(theme);
    try {
      localStorage.setItem(key, theme);
    } catch {
      // it lasts as long as the page
    }
  });
}
if (parent !== window) { // in a frame, whose height may follow the page's
  const root = document.documentElement, height = () => Math.ceil(root.getBoundingClientRect().height);
  const tell = () => parent.postMessage({ sdattnHeight: height() }, "*");
  // 1vh would grow with the frame, and a frame that is not laid out yet is 0 high
  root.style.setProperty("--screen", `${Math.min(820, screen.availHeight || 820)}px`);
  addEventListener("load", tell); // observers wait until the frame is in view
  new ResizeObserver(tell).observe(root);
}
