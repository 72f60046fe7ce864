"""Queries to the dynamic linker: the loaded libraries, and the library that provides a symbol."""

from __future__ import annotations

import ctypes
import os


class _DlInfo(ctypes.Structure):
    """``Dl_info`` of dlfcn.h."""

    _fields_ = (
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    )


class _DlPhdrInfo(ctypes.Structure):
    """Beginning of ``struct dl_phdr_info`` of link.h. The other fields are not needed."""

    _fields_ = (("dlpi_addr", ctypes.c_void_p), ("dlpi_name", ctypes.c_char_p))


def symbol_address(library: ctypes.CDLL, symbol: str) -> int | None:
    """Return the address of ``symbol`` as seen from ``library``. ``ctypes.CDLL(None)`` is the global scope."""
    try:
        function = getattr(library, symbol)
    except AttributeError:
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


def library_at(address: int) -> str | None:
    """Return the path of the loaded library that contains ``address``; None if no library does."""
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = (ctypes.c_void_p, ctypes.POINTER(_DlInfo))
    info = _DlInfo()
    if not dladdr(address, ctypes.byref(info)) or not info.dli_fname:
        return None
    return os.fsdecode(info.dli_fname)


def loaded_libraries() -> list[str]:
    """Return the paths of the loaded libraries, in load order (Linux)."""
    paths: list[str] = []
    callback_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_DlPhdrInfo), ctypes.c_size_t, ctypes.c_void_p)

    def visit(info: ctypes._Pointer[_DlPhdrInfo], size: int, data: int | None) -> int:
        paths.append(os.fsdecode(info.contents.dlpi_name or b""))
        return 0  # continue the iteration

    ctypes.CDLL(None).dl_iterate_phdr(callback_type(visit), None)
    return paths
