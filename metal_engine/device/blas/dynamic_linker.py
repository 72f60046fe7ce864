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


class _LinkMap(ctypes.Structure):
    """Public part of ``struct link_map`` of link.h, which describes a loaded library."""


_LinkMap._fields_ = (
    ("l_addr", ctypes.c_void_p),
    ("l_name", ctypes.c_char_p),
    ("l_ld", ctypes.c_void_p),
    ("l_next", ctypes.POINTER(_LinkMap)),
    ("l_prev", ctypes.POINTER(_LinkMap)),
)
_RTLD_DI_LINKMAP = 2


def symbol_address(library: ctypes.CDLL, symbol: str) -> int | None:
    """Return the address of ``symbol`` as seen from ``library``; None if the symbol is missing.

    To search the global scope, pass ``ctypes.CDLL(None)``.
    """
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
    """Return the paths of the loaded libraries, in load order (Linux).

    No library may be unloaded meanwhile, because the list is read without the linker's lock. ``dl_iterate_phdr`` takes
    the lock, but could deadlock: its callback waits for the GIL, while another thread that imports an extension module
    holds the GIL and waits for the lock.

    Raises:
        OSError: the dynamic linker does not provide the list.
    """
    program = ctypes.CDLL(None)
    program.dlinfo.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    entry = ctypes.POINTER(_LinkMap)()
    if program.dlinfo(program._handle, _RTLD_DI_LINKMAP, ctypes.byref(entry)):
        raise OSError("dlinfo does not list the loaded libraries")
    paths: list[str] = []
    while entry:
        paths.append(os.fsdecode(entry.contents.l_name or b""))
        entry = entry.contents.l_next
    return paths
