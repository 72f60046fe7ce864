// Stores the images of conversations in this browser. Files and thumbnails are in IndexedDB: localStorage is too small.

const THUMBNAIL = 320; // longest side in pixels
const MAX_UNSAVED_BYTES = 64 << 20;

// Images that are not in IndexedDB, by id: their saving is in progress, or failed. They last until the page is closed.
const unsaved = new Map();
const deleted = new Set(); // ids of conversations
let database = null;

/** Resolve to the object store, in a new transaction. Rejects if the browser has no IndexedDB, or does not allow it. */
async function images(mode = "readonly") {
  if (!database) {
    const opening = indexedDB.open("metal-engine", 1);
    opening.onupgradeneeded = () => {
      const store = opening.result.createObjectStore("images", { keyPath: "id" });
      store.createIndex("conversation", "conversation");
    };
    database = done(opening);
    database.catch(() => (database = null));
  }
  return (await database).transaction("images", mode).objectStore("images");
}

/** Resolve to the result of a request to IndexedDB. */
function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/**
 * Store images of a conversation: {id, file, thumbnail}, with a promise of the thumbnail. They can be read at once. If the
 * browser cannot store them, they last until the page is closed.
 */
export async function storeImages(conversation, added) {
  for (const { id, file, thumbnail } of added) unsaved.set(id, { id, conversation, file, thumbnail });
  for (const { id } of added) {
    const image = unsaved.get(id);
    if (image && (await save({ ...image, thumbnail: await image.thumbnail }))) unsaved.delete(id);
  }
  let numBytes = 0;
  for (const { id, file } of [...unsaved.values()].reverse()) {
    numBytes += file.size;
    if (numBytes > MAX_UNSAVED_BYTES) unsaved.delete(id);
  }
}

/** Save an image, deleting the oldest images of other conversations if there is no space. Return true if it was saved. */
async function save(image) {
  try {
    if (deleted.has(image.conversation)) return true;
    let problem = await put(image);
    if (problem?.name === "QuotaExceededError" && (await free(image))) {
      // Browsers may release the space of deleted images some time later.
      for (let tries = 0; problem && tries < 5; tries++) {
        if (tries) await new Promise((resolve) => setTimeout(resolve, 500));
        problem = await put(image);
      }
    }
    return !problem;
  } catch {
    return false; // there is no IndexedDB
  }
}

/** Write an image. Resolves to null, or to the error. */
async function put(image) {
  const store = await images("readwrite");
  return new Promise((resolve) => {
    store.transaction.oncomplete = () => resolve(null);
    store.transaction.onabort = () => resolve(store.transaction.error);
    store.put(image);
  });
}

/** Delete the oldest images of other conversations, as many as `image` needs. Ids begin with the time. Return true if enough. */
async function free({ conversation, file }) {
  const store = await images("readwrite");
  let numBytes = 0;
  for (const id of await done(store.getAllKeys())) {
    if (numBytes >= file.size) break;
    const other = await done(store.get(id));
    if (other.conversation === conversation) continue;
    numBytes += other.file.size;
    store.delete(id);
  }
  return numBytes >= file.size;
}

/** Return a stored image as {file, thumbnail}; null if it is no longer stored. */
async function load(id) {
  if (unsaved.has(id)) return unsaved.get(id);
  try {
    return (await done((await images()).get(id))) ?? null;
  } catch {
    return null;
  }
}

/** Return the thumbnail of a stored image as a Blob; null if the browser cannot decode it. Rejects if it is not stored. */
export async function loadThumbnail(id) {
  const image = await load(id);
  if (!image) throw new Error("this image is no longer stored");
  return image.thumbnail;
}

/** Return the content part of a stored image: a data URL, or a note if it is no longer stored. */
export async function imagePart({ id, name }) {
  const image = await load(id);
  if (!image) return { type: "text", text: "(This image is no longer available.)" };
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${name} cannot be read`));
    reader.readAsDataURL(image.file);
  });
  return { type: "image_url", image_url: { url } };
}

/** Delete the images of a conversation. */
export async function deleteImages(conversation) {
  deleted.add(conversation);
  for (const [id, image] of unsaved) if (image.conversation === conversation) unsaved.delete(id);
  try {
    const store = await images("readwrite");
    for (const id of await done(store.index("conversation").getAllKeys(conversation))) store.delete(id);
  } catch {
    // without IndexedDB, there are no others
  }
}

let decoding = Promise.resolve();

/** Return a small version of an image file as a Blob; null if the browser cannot decode the file. Decodes one at a time. */
export function makeThumbnail(file) {
  const made = decoding.then(async () => {
    try {
      const whole = await createImageBitmap(file);
      const scale = Math.min(1, THUMBNAIL / Math.max(whole.width, whole.height));
      const canvas = document.createElement("canvas");
      canvas.width = Math.max(1, Math.round(scale * whole.width));
      canvas.height = Math.max(1, Math.round(scale * whole.height));
      canvas.getContext("2d").drawImage(whole, 0, 0, canvas.width, canvas.height);
      whole.close();
      return await new Promise((resolve) => canvas.toBlob(resolve, "image/webp"));
    } catch {
      return null;
    }
  });
  decoding = made;
  return made;
}
