"""Where commands look for modules of the user."""

import sys
from pathlib import Path


def look_in_current_folder() -> None:
    """Make `module:Class` find modules in the current folder, as `python -m` does; an installed command does not by itself."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
