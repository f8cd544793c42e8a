"""Prints the promotion journal: which model was live when, and why."""

from __future__ import annotations

from pathlib import Path

from components.contracts.promotion_journal import read_journal


def print_models(store: Path) -> None:
    """One line per promotion, newest last; the live version is marked."""
    promotions = read_journal(store)
    if not promotions:
        print(f"nothing was ever live in {store}")
    for number, promotion in enumerate(promotions, start=1):
        mark = "*" if number == len(promotions) else " "
        print(
            f"{mark} {promotion.time}  {promotion.action:<8}  version {promotion.version:<4} {promotion.model_id}  "
            f"{promotion.reason}"
        )
