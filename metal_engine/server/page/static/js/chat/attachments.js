// Images of the next message: taken from files, the clipboard, and files that are dropped on the page.

import { byId } from "../dom.js";
import { newId } from "./conversation.js";
import { imageView } from "./image_list.js";
import { makeThumbnail } from "./images.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_FILE_BYTES = 20 << 20; // as in the server
const MAX_IMAGES = 256;

export class Attachments {
  /** `refusal()` returns the reason why the model takes no images; null if it takes them. */
  constructor(refusal) {
    this.refusal = refusal;
    this.images = []; // {id, name, file, thumbnail}
    this.list = byId("attached");
    const picker = byId("image-files");
    byId("image-add").addEventListener("click", () => {
      if (this.isAllowed()) picker.click();
    });
    picker.addEventListener("change", () => {
      this.add(picker.files);
      picker.value = ""; // so that the same file can be chosen again
    });
    document.addEventListener("paste", (event) => {
      const { files, types } = event.clipboardData;
      if (!files.length || types.includes("text/plain")) return; // programs add a picture of the text
      event.preventDefault();
      this.add(files);
    });
    // Elsewhere on the page, a dropped file would replace the page.
    for (const kind of ["dragover", "drop"]) {
      document.addEventListener(kind, (event) => {
        if (!event.dataTransfer.types.includes("Files")) return;
        event.preventDefault();
        if (kind === "drop") this.add(event.dataTransfer.files);
      });
    }
  }

  add(files) {
    if (!files.length || !this.isAllowed()) return;
    for (const file of files) {
      const name = file.name || "image";
      if (!TYPES.includes(file.type)) this.note(`${name} is not a PNG, JPEG, WebP or GIF image.`);
      else if (file.size > MAX_FILE_BYTES) this.note(`${name} has more than ${MAX_FILE_BYTES >> 20} MiB.`);
      else if (this.images.length >= MAX_IMAGES) this.note(`A message can have ${MAX_IMAGES} images.`);
      else this.images.push({ id: newId(), name, file, thumbnail: makeThumbnail(file) });
    }
    this.show();
    byId("prompt").focus();
  }

  /** Return true if the model takes images. Otherwise, show the reason. */
  isAllowed() {
    const refusal = this.refusal();
    this.note(refusal === null ? "" : `Images cannot be sent: ${refusal}.`);
    return refusal === null;
  }

  /** Return the images, and remove them from the next message. */
  take() {
    const taken = this.images;
    this.images = [];
    this.note("");
    this.show();
    return taken;
  }

  show() {
    this.list.hidden = !this.images.length;
    const views = this.images.map((image) => imageView(image.name, image.thumbnail, () => this.remove(image)));
    this.list.replaceChildren(...views);
  }

  remove(image) {
    this.images = this.images.filter((one) => one !== image);
    this.show();
    byId("prompt").focus();
  }

  note(text) {
    byId("image-note").hidden = !text;
    byId("image-note").textContent = text;
  }
}
