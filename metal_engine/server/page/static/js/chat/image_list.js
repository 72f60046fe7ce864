// Small views of images: those of a message, and those that the next message will have.

import { el } from "../dom.js";

/**
 * Create an element for an image. `thumbnail` is a promise of a Blob, or of null: then the name is shown. It rejects if the
 * image is no longer stored. With a function `remove`, the element has a button that calls it.
 */
export function imageView(name, thumbnail, remove = null) {
  const label = el("span", { className: "small quiet", textContent: name });
  const shown = el("span", { className: "image", title: name }, label);
  const show = (blob) => {
    if (!blob) return;
    const image = el("img", { alt: name, src: URL.createObjectURL(blob), draggable: false });
    image.onload = image.onerror = () => URL.revokeObjectURL(image.src);
    label.replaceWith(image);
  };
  thumbnail.then(show, () => (label.textContent = `${name}: no longer stored`));
  if (remove) {
    const button = el("button", { type: "button", textContent: "×", title: "Remove", "aria-label": `Remove ${name}` });
    button.addEventListener("click", remove);
    shown.append(button);
  }
  return shown;
}
