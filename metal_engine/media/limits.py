"""Limits on the images of requests. Unless a comment says otherwise, a request beyond a limit gets status 400."""

from __future__ import annotations

# Maximum size of an image file in bytes, uploaded or downloaded.
MAX_FILE_BYTES = 20 << 20
# Maximum size of all image files of a request in bytes.
MAX_TOTAL_BYTES = 64 << 20
# Maximum number of pixels according to the header of a file: photos of 64 megapixels. Decoding takes 4 bytes for each.
MAX_PIXELS = 1 << 26
# Maximum ratio of the longer side to the shorter side.
MAX_ASPECT_RATIO = 200
# Images with more pixels are reduced by a whole factor while they are decoded, to limit time and memory.
REDUCED_PIXELS = 1 << 24
# Maximum number of images of a request.
MAX_IMAGES = 256
# Maximum size of the processed pixels of a request in bytes. The request holds these pixels until its end. An image of
# 1.3 megapixels takes up to 8 MB.
MAX_INPUT_BYTES = 1 << 29
# Size of the processed pixels of all requests in bytes from which on further requests with new images get 503.
MAX_LIVE_BYTES = 1 << 31
# CPU time for opening, decoding and processing an image, in seconds.
IMAGE_CPU_SECONDS = 8.0
# CPU time for all images of a request, in seconds. Two images are decoded at a time.
REQUEST_CPU_SECONDS = 30.0
# Maximum growth of the process that decodes the images of a request, in bytes.
MAX_GROWTH = 1 << 30
# Maximum number of tokens for an image with `detail` low, as far as the model's processor allows it.
LOW_DETAIL_TOKENS = 256
