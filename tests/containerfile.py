"""A Containerfile's steps, run below a folder and without a container engine: COPY, RUN, ENV, ARG,
WORKDIR, ENTRYPOINT.

Absolute paths of the image are paths below the folder. What only root or a network can do
(`apt-get`, `useradd`, `chown`) is noted, not done; pip installs without dependencies and from no
index, and what is imported besides, pip itself among it, comes from the running environment.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

# Of pip: nothing but the package itself, out of its sources, built by what is there.
PIP = dict.fromkeys(
    ("PIP_NO_DEPS", "PIP_NO_INDEX", "PIP_NO_COMPILE", "PIP_DISABLE_PIP_VERSION_CHECK"), "1"
)
PIP["PIP_NO_BUILD_ISOLATION"] = "0"  # which means without, in pip's words
NOTED = ("apt-get", "useradd", "chown")
_IMAGE_PATH = re.compile(r"(?<![\w./:])/(?=[a-z])")
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Containerfile in order, with what follows each; comments out, broken
    lines joined.
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\s*\n\s*", "", "\n".join(lines))
    found = [line.strip().partition(" ") for line in joined.splitlines() if line.strip()]
    return [(name.upper(), rest.strip()) for name, _, rest in found]


@dataclass
class Image:
    """What the steps make of a folder."""

    root: Path
    context: Path
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0"
    entrypoint: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    bases: list[str] = field(default_factory=list)
    noted: list[str] = field(default_factory=list)
    _args: dict[str, str] = field(default_factory=dict)

    def build(self, text: str) -> Image:
        """Do every instruction. AssertionError for one that is not known here, CalledProcessError
        for one that fails.
        """
        shims = self.root / "shims"
        shims.mkdir(parents=True)
        for name in NOTED:
            (shims / name).write_text(f'#!/bin/sh\necho "{name} $*" >> "{self.root}/noted"\n')
        # The base image's Python: this one, without what is installed beside it. A venv takes
        # seconds with a pip of its own.
        bare = '[ "$1 $2" = "-m venv" ] && shift 2 && set -- -m venv --without-pip "$@"'
        (shims / "python").write_text(f'#!/bin/sh\n{bare}\nexec "{sys.executable}" "$@"\n')
        for shim in shims.iterdir():
            shim.chmod(0o755)
        for name, rest in instructions(text):
            assert hasattr(self, f"_{name.lower()}"), f"{name} is not known here"
            getattr(self, f"_{name.lower()}")(rest)
        self.noted = (self.root / "noted").read_text().splitlines()
        return self

    def path(self, of_image: str) -> Path:
        """Where a path of the image is."""
        return self.root / os.path.join(self.workdir, of_image).lstrip("/")

    def environment(self) -> dict[str, str]:
        """Of a process in the image: nothing of ours but where libraries lie."""
        mapped = {name: _IMAGE_PATH.sub(f"{self.root}/", value) for name, value in self.env.items()}
        path = mapped.pop("PATH", "$PATH").replace(
            "$PATH", f"{self.root}/shims:{os.environ['PATH']}"
        )
        libraries = sysconfig.get_paths()["purelib"]
        return {
            "HOME": str(self.root / "home"),
            "LANG": "C.UTF-8",
            **mapped,
            "PATH": path,
            "PYTHONPATH": libraries,
        }

    def command(self, *arguments: str) -> list[str]:
        """The entry point with arguments, its program found on the image's PATH."""
        program = shutil.which(self.entrypoint[0], path=self.environment()["PATH"])
        assert program is not None, f"{self.entrypoint[0]} is not in the image"
        return [program, *self.entrypoint[1:], *arguments]

    # Instructions

    def _from(self, rest: str) -> None:
        self.bases.append(rest)

    def _arg(self, rest: str) -> None:
        name, _, value = rest.partition("=")
        self._args[name] = shlex.split(value)[0] if value else ""

    def _env(self, rest: str) -> None:
        for assignment in shlex.split(rest):
            name, _, value = assignment.partition("=")
            self.env[name] = value

    def _workdir(self, rest: str) -> None:
        self.workdir = os.path.join(self.workdir, rest)
        self.path(".").mkdir(parents=True, exist_ok=True)

    def _copy(self, rest: str) -> None:
        *sources, target = shlex.split(rest)
        assert not any(one.startswith("-") for one in sources), (
            "COPY with options is not known here"
        )
        for source in sources:
            place = self.path(target)
            if (self.context / source).is_dir():
                shutil.copytree(
                    self.context / source,
                    place,
                    # packing the weights takes ten seconds, and no step looks at them
                    ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"),
                    dirs_exist_ok=True,
                )
            else:
                place = place / source if target.endswith("/") else place
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.context / source, place)

    def _run(self, rest: str) -> None:
        command = _IMAGE_PATH.sub(f"{self.root}/", rest)
        outside = [
            one
            for one in re.findall(r"(?<![\w.:-])/[\w/.*-]+", command)
            if not one.startswith(f"{self.root}/")
        ]
        assert not outside, f"{outside} would be outside of {self.root}"
        environment = {
            **self.environment(),
            **PIP,
            **{name: value for name, value in self._args.items() if value},
        }
        done = subprocess.run(
            ["sh", "-euc", command],
            cwd=self.path("."),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"RUN {rest}\n{done.stdout}\n{done.stderr}"

    def _user(self, rest: str) -> None:
        self.user = rest

    def _expose(self, rest: str) -> None:
        self.ports.append(int(rest))

    def _entrypoint(self, rest: str) -> None:
        self.entrypoint = json.loads(rest)
