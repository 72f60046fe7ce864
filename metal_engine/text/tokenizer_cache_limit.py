"""The words that a tokenizer remembers, with their tokens: few enough to fit into memory whatever clients send."""

from __future__ import annotations

from tokenizers import models

# A word has up to 255 bytes, and its tokens up to 8 KiB. `tokenizers` remembers the first 10,000, for each thread that
# encodes: 80 MB each, which one request can fill, and which stay for as long as the thread lives. So many take 8 MiB,
# and texts are encoded at 92 % of the speed (76 % with none).
_MAX_WORDS = 1 << 10


def limit_word_cache(model: models.Model) -> None:
    """Let a tokenizer's model remember ``_MAX_WORDS`` words at most. Other tokenizers with this model do, too."""
    if isinstance(model, models.BPE | models.Unigram):  # others remember none
        model._resize_cache(_MAX_WORDS)
