"""The variants of the native library in the wheel: see eyas/model/variants.py. All else about the
package stands in pyproject.toml.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

LIBRARIES = "eyas/model/libraries"


def module(path: Path) -> ModuleType:
    """A file of the package by itself: what the package imports is not installed yet."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


variants = module(Path(__file__).parent / "eyas" / "model" / "variants.py")
COMPILER = variants.find_compiler()


class Package(Distribution):
    def has_ext_modules(self) -> bool:
        """Whether the package is of this platform only."""
        return COMPILER is not None and bool(variants.of_machine())


class BuildLibraries(build_py):
    """Puts all variants for this kind of machine into the wheel; an editable install builds the one
    that it needs when it is first used.
    """

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        if COMPILER is None:
            self.warn("there is no C++ compiler: the wheel carries no native library")
            return
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self.add, variants.of_machine()))

    def add(self, variant: variants.Variant) -> None:
        folder = Path(os.environ.get("EYAS_CACHE") or "build") / "native"
        try:
            library = variants.built(variant, COMPILER, folder)
        except subprocess.CalledProcessError as error:
            self.warn(f"no {variant.name}, which {COMPILER} cannot build: {error.stderr[-2000:]}")
            return
        to = Path(self.build_lib, LIBRARIES, variants.shipped(variant).name)
        self.mkpath(str(to.parent))
        self.copy_file(str(library), str(to))


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """Of any Python 3; of the glibc that its libraries need, if they need one."""
        platform = super().get_tag()[2]
        libraries = Path(self.bdist_dir).glob(f"**/{LIBRARIES}/*.so")
        needed = [re.findall(rb"GLIBC_(\d+)\.(\d+)", one.read_bytes()) for one in libraries]
        versions = [tuple(map(int, version)) for found in needed for version in found]
        if versions:
            major, minor = max(versions)
            platform = platform.replace("linux_", f"manylinux_{major}_{minor}_")
        return "py3", "none", platform


setup(
    distclass=Package,
    cmdclass={"build_py": BuildLibraries, "bdist_wheel": PlatformWheel},
)
