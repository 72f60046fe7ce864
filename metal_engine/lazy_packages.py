"""Packages whose ``__init__`` runs only when code needs a name that is neither a submodule nor in ``_PACKAGES``.

The ``__init__`` of transformers reads its 2,800 files, which takes a second and 6 MiB of memory in each process. The
``__init__`` of gguf imports a writer of files, uvicorn imports a command line, and mlx-lm loads MLX.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import ModuleType
from typing import Any

# Package -> names that its ``__init__`` offers, and the submodules that define them. Parent packages come first.
_PACKAGES: dict[str, dict[str, str]] = {
    "gguf": {},
    "mlx_lm": {},
    "transformers": {
        "AutoConfig": "models.auto.configuration_auto",
        "AutoTokenizer": "models.auto.tokenization_auto",
        "PreTrainedTokenizer": "tokenization_python",
        "PreTrainedTokenizerBase": "tokenization_utils_base",
        "PreTrainedTokenizerFast": "tokenization_utils_tokenizers",
    },
    "transformers.models": {},
    "uvicorn": {},
}


class LazyPackage(ModuleType):
    """Package whose submodules can be imported before its ``__init__`` has run.

    Args:
        spec: specification of the package.
        names: name that the ``__init__`` offers -> submodule that defines it. A lookup of any other name that is not a
            submodule runs the ``__init__``.
    """

    def __init__(self, spec: ModuleSpec, names: Mapping[str, str]) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__loader__, self.__file__, self.__package__ = spec, spec.loader, spec.origin, spec.name
        self.__path__ = list(spec.submodule_search_locations or ())
        self._names = names
        self._lock = threading.RLock()
        self._is_complete = False

    def __getattr__(self, name: str) -> Any:
        if (submodule := self._names.get(name)) is not None:
            with suppress(ImportError, AttributeError):  # other versions may define it elsewhere
                return getattr(importlib.import_module(f"{self.__name__}.{submodule}"), name)
        if name == "__version__":
            return version(self.__name__)
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if not self._is_complete and importlib.util.find_spec(f"{self.__name__}.{name}") is not None:
            return importlib.import_module(f"{self.__name__}.{name}")
        self._complete()
        complete = sys.modules[self.__name__]
        if complete is not self:  # the ``__init__`` of transformers replaces the package
            return getattr(complete, name)
        return super().__getattribute__(name)

    def _complete(self) -> None:
        """Run the package's ``__init__``, unless it has run or is running."""
        with self._lock:
            if not self._is_complete:
                self._is_complete = True
                assert self.__spec__ is not None and self.__spec__.loader is not None
                try:
                    self.__spec__.loader.exec_module(self)
                except BaseException:
                    self._is_complete = False  # the next use raises the same error
                    raise


def make_packages_lazy() -> None:
    """Make the packages of ``_PACKAGES`` lazy, except packages that are already imported or not installed.

    Changes ``sys.modules``. Call it at the start of a process.
    """
    for package, names in _PACKAGES.items():
        if package not in sys.modules and (spec := importlib.util.find_spec(package)) is not None:
            sys.modules[package] = LazyPackage(spec, names)
