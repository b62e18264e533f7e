"""Files that exist whole or not at all.

Writers of states, checkpoints, tables and results use this, so that a crash leaves the former file or the new one, never a piece.
Knows nothing of what is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; when the block ends well, the content is on the disk and has its name.

    Raises:
        OSError: the folder is missing or the disk full; `path` is as it was.
    """
    part = path.with_name(path.name + ".part")
    yield part
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
