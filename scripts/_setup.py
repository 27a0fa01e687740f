"""Set up what the scripts run in: a virtual environment with the package and its C extension.

Called by ``_run``. Prints the environment's interpreter on standard output and everything else on
standard error. Does nothing when nothing changed: a stamp per extra and one for the extension hold a
hash of the files they were made from.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BUILD = ROOT / "build"
NATIVE_STAMP = BUILD / f"native-{sys.implementation.cache_tag}.stamp"
SETUPTOOLS = "setuptools>=77"
# Builds with any setuptools: one too old for pyproject.toml has no need to read it for this.
BUILD_EXTENSION = """
import runpy, sys
from setuptools.dist import Distribution
Distribution.parse_config_files = lambda *args, **kwargs: None
sys.argv = ["setup.py", "-q", "build_ext", "--inplace", "--force"]
runpy.run_path("setup.py", run_name="__main__")
"""


def say(text: str) -> None:
    print(f"set-up: {text}", file=sys.stderr, flush=True)


def finds(compiler: str, header: str) -> bool:
    """Whether the compiler finds a header."""
    command = [compiler, "-E", f"-I{sysconfig.get_path('include')}", "-o", os.devnull, "-"]
    return not subprocess.run(command, input=f"#include <{header}>\n", text=True, capture_output=True).returncode


def missing_packages(with_venv: bool = True) -> list[str]:
    """Return the Debian packages that have to be installed first."""
    python = f"python3.{sys.version_info.minor}"
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "gcc").split()[0]
    there = shutil.which(compiler) is not None
    lacks = {
        "gcc": not there,
        "libc6-dev": not (finds(compiler, "stdio.h") if there else Path("/usr/include/stdio.h").exists()),
        f"{python}-dev": not Path(sysconfig.get_path("include"), "Python.h").exists(),
        f"{python}-venv": with_venv and not all(map(importlib.util.find_spec, ("venv", "ensurepip"))),
    }
    return [package for package, lacking in lacks.items() if lacking]


def require(with_venv: bool) -> None:
    """End with the command to type if the system lacks something."""
    if missing := missing_packages(with_venv):
        sys.exit(f"set-up: something is missing; on Debian and Ubuntu: apt-get install {' '.join(missing)}")


def digest(paths: Iterable[Path]) -> str:
    state = hashlib.sha256()
    for path in sorted(paths):
        state.update(path.name.encode() + path.read_bytes())
    return state.hexdigest()


def native_digest() -> str:
    native = ROOT / "aiooffload" / "_native"
    return digest([ROOT / "setup.py", *native.glob("*.c"), *native.glob("*.h")])


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Let one set-up at a time touch this tree."""
    BUILD.mkdir(exist_ok=True)
    with open(BUILD / "setup.lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def run(*command: str | Path) -> None:
    # Standard output is kept free for the interpreter's path.
    result = subprocess.run([str(part) for part in command], cwd=ROOT, stdout=sys.stderr.fileno(), check=False)
    if result.returncode:
        sys.exit(f"set-up: failed with exit code {result.returncode}: {' '.join(map(str, command))}")


def build_extension(python: str | Path) -> None:
    """Build the C extension into the source tree unless the one there is current."""
    wanted = native_digest()
    built = ROOT / "aiooffload" / "_native" / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    if built.exists() and NATIVE_STAMP.exists() and NATIVE_STAMP.read_text() == wanted:
        return
    require(with_venv=False)
    if not importlib.util.find_spec("setuptools") and python == sys.executable:
        sys.exit(f"set-up: {python} needs setuptools to build the C extension")
    say("building the C extension")
    run(python, "-W", "ignore", "-c", BUILD_EXTENSION)
    NATIVE_STAMP.write_text(wanted)


def create_environment() -> Path:
    """Return the interpreter of .venv, making it anew if it belongs to another Python."""
    python, stamp = VENV / "bin" / "python", VENV / "python.stamp"
    identity = f"{sys.version}\n{sys.base_prefix}\n"
    if python.exists() and stamp.exists() and stamp.read_text() == identity:
        return python
    require(with_venv=True)
    say(f"creating {VENV.name} with Python {sys.version.split()[0]}")
    run(sys.executable, "-m", "venv", "--clear", VENV)
    run(python, "-m", "pip", "install", "-qq", SETUPTOOLS)
    stamp.write_text(identity)
    return python


def install(python: Path, extras: list[str]) -> None:
    """Install the package, editable, with those of ``extras`` that are not there yet."""
    wanted = digest([ROOT / "pyproject.toml"])
    stamps = VENV / "stamps.json"
    have = json.loads(stamps.read_text()) if stamps.exists() else {}
    outdated = [extra for extra in ["", *extras] if have.get(extra) != wanted]
    if not outdated:
        return
    names = ",".join(filter(None, outdated))
    require(with_venv=False)
    say("installing the package" + (f" with {names}" if names else ""))
    target, native = f".[{names}]" if names else ".", native_digest()
    run(python, "-m", "pip", "install", "-qq", "--no-build-isolation", "--editable", target)
    # pip has just built the extension from the same sources.
    NATIVE_STAMP.write_text(native)
    stamps.write_text(json.dumps(have | dict.fromkeys(outdated, wanted)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="?", default="-", help="names of extras, separated by commas; - for none")
    parser.add_argument("--in-place", action="store_true", help="only build the extension, with this Python")
    parser.add_argument("--missing", action="store_true", help="print the Debian packages that are missing, and end")
    options = parser.parse_args()
    if options.missing:
        print(*missing_packages())
        return
    os.environ["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    with locked():
        if options.in_place:
            build_extension(sys.executable)
            return
        python = create_environment()
        install(python, [extra for extra in options.extras.split(",") if extra != "-"])
        build_extension(python)
        print(python)


if __name__ == "__main__":
    main()
