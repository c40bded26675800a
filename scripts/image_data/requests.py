"""Pictures of the documents of an evaluation task, for parka prepare-eval: their pixels in one file beside the requests, and what
the requests say of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from text_data.common import InputError, file_behind, open_staging, sync_folder

from .files import PixelsWriter
from .pictures import Fitting, PictureError, pixels_of


@dataclass(frozen=True)
class ImageRules:
    """What a model makes of pictures."""

    token: int  # the id of their slots
    slots: int  # of each
    fitting: Fitting
    folder: Path  # where their names begin

    def header(self) -> dict:
        return {"token": self.token, "slots": self.slots, "size": self.fitting.size}


class TaskImages:
    """The file of pixels of all pictures of a task, each once, which appears whole or not at all."""

    def __init__(self, rules: ImageRules, path: Path):
        self.rules, self._path = rules, file_behind(path)
        if self._path is None:
            raise InputError(f"{path}: is no file that can be replaced; give --out another name")
        self._known: dict[str, dict] = {}
        self._file = open_staging(self._path)
        self._staging = Path(self._file.name)
        self._writer = PixelsWriter(self._file, rules.fitting.size)

    def __len__(self) -> int:
        return len(self._known)

    def add(self, name: str, where: str) -> dict:
        """What a request says of the picture. Raises InputError, with `where`, for one that cannot be used."""
        if name not in self._known:
            try:
                place, checksum = self._writer.write(pixels_of(self.rules.folder / name, self.rules.fitting))
            except PictureError as error:
                raise InputError(f"{where}: {self.rules.folder / name}: {error}; fix it or leave the document out")
            self._known[name] = {"image": place, "checksum": f"{checksum:016x}"}
        return self._known[name]

    def publish(self) -> None:
        self._writer.finish()
        self._file.close()
        self._staging.rename(self._path)
        sync_folder(self._path.parent)

    def remove(self) -> None:
        """What was not published."""
        self._file.close()
        self._staging.unlink(missing_ok=True)
