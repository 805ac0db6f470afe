"""Dataclasses of which many are made in every step.

A type checker takes them for frozen ones. At run time they are not: a frozen dataclass sets each of its fields by a
call, so that making one takes three times as long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:
    import dataclasses

    def record(*, frozen: bool, slots: bool):
        """Make a class a dataclass that can be hashed as a frozen one can."""
        assert frozen
        return dataclasses.dataclass(slots=slots, unsafe_hash=True)


__all__ = ["record"]
