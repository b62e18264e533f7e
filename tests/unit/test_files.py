"""A file is the former one or the new one, whatever happens while it is written."""

from pathlib import Path

import pytest

from triblade.files import written_whole


def test_the_new_content_replaces_the_former(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for content in ("former", "new"):
        with written_whole(path) as part:
            part.write_text(content)
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_writer_that_fails_leaves_the_former_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("former")

    def half_written() -> None:
        with written_whole(path) as part:
            part.write_text("ne")
            raise ValueError("not writable")

    with pytest.raises(ValueError, match="not writable"):
        half_written()
    assert path.read_text() == "former"


def test_a_missing_folder_is_the_writers_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), written_whole(tmp_path / "absent" / "state.json") as part:
        part.write_text("new")
