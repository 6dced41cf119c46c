"""A picture of a report, or of any page that needs nothing beside it, as a browser draws it. Needs
Chromium.

    python benchmarks/picture.py out/concurrency-.../report.html docs/report.png [--width 1180]
    [--height 2000] [--dark]

`--width 390` is a phone's. The last line of stdout is one JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NARROWEST = 500  # pixels: no window is narrower, so a phone's page is drawn in a frame


def draw(page: Path, picture: Path, size: tuple[int, int], is_dark: bool) -> None:
    """Write the picture. Ends the program without a browser."""
    browser = next(
        (
            path
            for name in ("chromium", "chromium-browser", "google-chrome")
            if (path := shutil.which(name))
        ),
        None,
    )
    if browser is None:
        sys.exit(
            "error: no Chromium is installed here\n  -> install chromium, or take the picture by "
            "hand"
        )
    width, height = size
    with tempfile.TemporaryDirectory() as scratch:
        frame = Path(scratch) / "frame.html"
        style = f"width:{width}px;height:{height}px;border:0"
        frame.write_text(
            f"<body style='margin:0'><iframe src='{page.resolve().as_uri()}' "
            f"style='{style}'></iframe>"
        )
        command = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--allow-file-access-from-files",
        ]
        command += [
            f"--user-data-dir={scratch}/profile",
            f"--blink-settings=preferredColorScheme={0 if is_dark else 1}",
        ]
        command += [
            f"--window-size={width},{height}",
            "--virtual-time-budget=2000",
            f"--screenshot={picture.resolve()}",
        ]
        address = frame if width < NARROWEST else page.resolve()
        subprocess.run([*command, address.as_uri()], check=True, capture_output=True, timeout=300)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1180)
    parser.add_argument("--height", type=int, default=2000)
    parser.add_argument("--dark", action="store_true")
    args = parser.parse_args()
    draw(args.page, args.picture, (args.width, args.height), args.dark)
    print(json.dumps({"picture": str(args.picture), "bytes": args.picture.stat().st_size}))


if __name__ == "__main__":
    main()
