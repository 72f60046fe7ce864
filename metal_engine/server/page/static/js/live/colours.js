// A colour for each request: eight hues based on Okabe and Ito, so that eight requests that arrive together differ. Each has a
// contrast of 3:1 to the background in both themes.

const LIGHT = ["#0072b2", "#d55e00", "#00855f", "#a8507f", "#8f6400", "#1f95c9", "#5b5b66", "#4b2e83"];
const DARK = ["#56a8e0", "#f08a3c", "#2fc49a", "#e295bf", "#e6b422", "#9ad2f5", "#b8b8c4", "#8f7ae6"];
const dark = matchMedia("(prefers-color-scheme: dark)");

export const colour = (key) => (dark.matches ? DARK : LIGHT)[key % LIGHT.length];

/** Return a colour of the page's style by the name of its variable. */
export const styled = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Call `redraw` when the theme changes. */
export const onThemeChange = (redraw) => dark.addEventListener("change", redraw);
