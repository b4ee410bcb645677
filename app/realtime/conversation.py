"""The items of one session, in order, and how many and how large they may be. [P]"""

from __future__ import annotations

from typing import Final

from app.openai.realtime_events import RealtimeProblem
from app.openai.realtime_items import Item

MAX_ITEMS: Final = 1024
FIRST: Final = "root"
"""As ``previous_item_id``: before all others."""


class Conversation:
    def __init__(self, conversation_id: str, *, max_bytes: int) -> None:
        self.id = conversation_id
        self.items: list[Item] = []
        self._known: dict[str, Item] = {}
        self._sizes: dict[str, int] = {}
        self._bytes = 0
        self._max_bytes = max_bytes

    def has(self, item_id: str) -> bool:
        return item_id in self._known

    @property
    def room(self) -> int:
        """Bytes that may still be added; negative once answers have gone beyond."""
        return self._max_bytes - self._bytes

    def check_room(self, size: int = 0) -> None:
        """Raises:
        RealtimeProblem: no further item, or none of this size, is taken.
        """
        if len(self.items) >= MAX_ITEMS or self.room < size or self.room <= 0:
            raise RealtimeProblem(
                "conversation_too_large",
                f"A conversation holds at most {MAX_ITEMS} items and {self._max_bytes} bytes of text here; delete "
                "items first.",
            )

    def insert(self, item: Item, after: str | None) -> str | None:
        """Add an item of the client's; returns the id of the one before it.

        Raises:
            RealtimeProblem: no room, the id is taken, or there is nothing to add it after.
        """
        if item.id in self._known or item.id == FIRST:
            raise RealtimeProblem("item_exists", f"There is an item {item.id!r} already.", param="item.id")
        self.check_room(item.size)
        if after is None:
            return self.append(item)
        place = 0 if after == FIRST else self.items.index(self.find(after, "previous_item_id")) + 1
        before = self.items[place - 1].id if place else None
        self.items.insert(place, item)
        self._keep(item)
        return before

    def append(self, item: Item) -> str | None:
        """Add an item at the end, whatever its size; returns the id of the one before it."""
        before = self.items[-1].id if self.items else None
        self.items.append(item)
        self._keep(item)
        return before

    def grown(self, item: Item) -> None:
        """Count an item again, if it is still there: it has its text now."""
        if self._known.get(item.id) is item:
            self._keep(item)

    def find(self, item_id: str, param: str) -> Item:
        """Raises:
        RealtimeProblem: there is no such item.
        """
        item = self._known.get(item_id)
        if item is None:
            raise RealtimeProblem("item_not_found", f"There is no item {item_id[:200]!r}.", param=param)
        return item

    def before(self, item: Item) -> str | None:
        place = self.items.index(item)
        return self.items[place - 1].id if place else None

    def delete(self, item_id: str) -> None:
        """Raises:
        RealtimeProblem: there is no such item, or it is still being generated.
        """
        item = self.find(item_id, "item_id")
        if item.status == "in_progress":
            raise RealtimeProblem(
                "item_in_progress", "This item is still being generated; cancel its response first.", param="item_id"
            )
        self.items.remove(item)
        del self._known[item_id]
        self._bytes -= self._sizes.pop(item_id)

    def _keep(self, item: Item) -> None:
        size = item.size
        self._bytes += size - self._sizes.get(item.id, 0)
        self._sizes[item.id] = size
        self._known[item.id] = item
