"""How a draft that was made for another model is refused: with the names of both, wherever that is noticed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.errors import InvalidArgument
from services.model.checkpoint_files import model_name


@dataclass(frozen=True, slots=True)
class DraftAndTarget:
    """A draft and the target that it is given for, each by its path, or by the address of its worker."""

    draft: str
    target: str

    def refusal(self, why: str) -> str:
        """Return what is said of a draft that was made for another target. why: what tells that, as a sentence about
        the draft."""
        draft, target = (model_name(Path(path)) for path in (self.draft, self.target))
        return f"draft {draft} was made for another model than {target}: {why}: name a draft made for this target"

    def refused(self, why: str) -> InvalidArgument:
        """Return `refusal` as the error that it is where --draft is read."""
        return InvalidArgument(self.refusal(why), field="--draft")
