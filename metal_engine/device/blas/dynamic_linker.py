"""What the dynamic linker knows about this process: which libraries are loaded, and who provides a symbol."""

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
    """The head of ``struct dl_phdr_info`` of link.h; the rest is not needed."""

    _fields_ = (("dlpi_addr", ctypes.c_void_p), ("dlpi_name", ctypes.c_char_p))


def symbol_address(library: ctypes.CDLL, symbol: str) -> int | None:
    """The address of ``symbol`` as seen from ``library``; ``ctypes.CDLL(None)`` is the global scope."""
    try:
        function = getattr(library, symbol)
    except AttributeError:
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


def library_at(address: int) -> str | None:
    """The path of the loaded library that ``address`` belongs to."""
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = (ctypes.c_void_p, ctypes.POINTER(_DlInfo))
    info = _DlInfo()
    if not dladdr(address, ctypes.byref(info)) or not info.dli_fname:
        return None
    return os.fsdecode(info.dli_fname)


def loaded_libraries() -> list[str]:
    """Paths of the loaded libraries, in the order in which they were loaded (Linux)."""
    paths: list[str] = []
    callback_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_DlPhdrInfo), ctypes.c_size_t, ctypes.c_void_p)

    def visit(info: ctypes._Pointer[_DlPhdrInfo], size: int, data: int | None) -> int:
        paths.append(os.fsdecode(info.contents.dlpi_name or b""))
        return 0  # go on

    ctypes.CDLL(None).dl_iterate_phdr(callback_type(visit), None)
    return paths
