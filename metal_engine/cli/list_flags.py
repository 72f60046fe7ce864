"""Support for several values after one flag, as in vLLM's command: ``--served-model-name a b``."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def with_flags_repeated(
    given: Iterable[str], lists: Collection[str], switches: Collection[str], num_arguments: int
) -> list[str]:
    """Return a command line in which a flag is repeated before each of its values.

    With one positional argument, ``demo --served-model-name a b`` becomes
    ``demo --served-model-name a --served-model-name b``. A word is another value of a flag only if all
    ``num_arguments`` positional arguments come before the flag. Other words stay unchanged, and the parser rejects
    surplus words.

    Args:
        given: words after the command's name.
        lists: flags that may be repeated.
        switches: flags without a value.
        num_arguments: number of the command's positional arguments.
    """
    result: list[str] = []
    words = iter(given)
    flag: str | None = None
    for word in words:
        if word == "--":
            return [*result, word, *words]
        if word.startswith("-") and word != "-":
            name, has_value, _ = word.partition("=")
            result.append(word)
            if not has_value and name not in switches:
                result += [value for value in [next(words, None)] if value is not None]
            flag = name if name in lists else None
            continue
        if num_arguments:
            num_arguments -= 1
            flag = None
        elif flag is not None:
            result.append(flag)
        result.append(word)
    return result
