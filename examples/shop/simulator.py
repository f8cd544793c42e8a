"""Simulate a shop: write its click log, and compute the best possible AUC.

The log is one Parquet file with the shop's own column names. The columns are 64-bit user ids, item
ids that are strings, prices with gaps, and lists of genres and of recently viewed items. A click
depends on the country's taste in genres, the item's quality and price, its similarity to the viewed
items, the device, and the position. `recommender.yaml` in this folder describes the log, and `make
demo EXAMPLE=shop` trains on it.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.random import Generator
from numpy.typing import NDArray

from demo.simulation.simulator import bias_for, sigmoid
from evergreen.statistics.metrics import roc_auc

COUNTRIES = ("at", "ch", "de", "fr", "it", "nl")
DEVICES = ("desktop", "phone", "tablet")
GENRES = (
    "art",
    "comedy",
    "cooking",
    "crime",
    "drama",
    "history",
    "music",
    "nature",
    "romance",
    "science",
    "sport",
    "war",
)
NUM_USERS, NUM_ITEMS = 3_000, 600
MAX_GENRES, MAX_VIEWED = 3, 8
SLOTS = 8
"""Number of items on a page."""
CLICK_RATE = 0.2
STRENGTH = 1.6
"""Factor of all effects, chosen so that the best AUC is about 0.8."""
_START, _SECONDS = 1_750_000_000, 7 * 86_400


@dataclass(frozen=True, eq=False)
class Shop:
    """Fixed properties of the shop: items, users and tastes."""

    genres: NDArray[np.bool_]
    """[items, genres]: whether the item has the genre."""
    quality: NDArray[np.float64]
    price: NDArray[np.float64]
    """[items]: price, equal for all users."""
    popularity: NDArray[np.float64]
    taste: NDArray[np.float64]
    """[countries, items]: the country's taste in the item's genres."""
    user_ids: NDArray[np.int64]
    user_country: NDArray[np.int64]
    activity: NDArray[np.float64]
    """[users]: share of the requests of each user."""

    @classmethod
    def open(cls, random: Generator) -> "Shop":
        """Create a shop with random items and users."""
        order = random.random((NUM_ITEMS, len(GENRES))).argsort(axis=1)
        genres = order < random.integers(1, MAX_GENRES + 1, (NUM_ITEMS, 1))
        taste = random.normal(size=(len(COUNTRIES), len(GENRES)))
        return cls(
            genres=genres,
            quality=random.normal(size=NUM_ITEMS),
            price=np.round(np.exp(random.normal(3.0, 0.8, NUM_ITEMS)), 2),
            popularity=_zipf(NUM_ITEMS, random),
            taste=taste @ genres.T / genres.sum(axis=1),
            user_ids=random.integers(1 << 40, 1 << 62, NUM_USERS),
            user_country=random.integers(0, len(COUNTRIES), NUM_USERS),
            activity=_zipf(NUM_USERS, random),
        )


def write_clicks(path: Path, *, rows: int, seed: int) -> dict[str, Any]:
    """Write a file of simulated clicks, and return its counts and the best possible AUC.

    The file has `rows` rows, or a few more to complete the last page of items.
    """
    table, probability = draw(rows, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    clicked = table["clicked"].to_numpy()
    return {
        "rows": len(clicked),
        "clicks": int(clicked.sum()),
        "best_auc": roc_auc(clicked, probability),
    }


def draw(rows: int, seed: int) -> tuple[Any, NDArray[np.float64]]:
    """Return the log as an Arrow table in time order, and each row's true click probability."""
    random = np.random.default_rng([seed, 11])
    shop = Shop.open(random)
    requests = -(-rows // SLOTS)
    user = random.choice(NUM_USERS, requests, p=shop.activity)
    country = shop.user_country[user]
    device = random.choice(len(DEVICES), requests, p=(0.3, 0.6, 0.1))
    viewed = [_viewed_items(random) for _ in range(requests)]
    page = np.repeat(np.arange(requests), SLOTS)
    item = random.choice(NUM_ITEMS, len(page), p=shop.popularity)
    slot = np.tile(np.arange(SLOTS), requests)
    similarity = _similarity(shop, viewed)[page, item]
    effects = (
        0.9 * shop.taste[country[page], item]
        + 0.7 * shop.quality[item]
        + 1.2 * similarity
        - 0.4 * np.log(shop.price[item] / 20.0)
        + np.array([0.2, -0.1, 0.0])[device[page]]
        - 0.1 * slot
    )
    logit = STRENGTH * (effects - effects.mean()) / effects.std()
    probability = sigmoid(logit + bias_for(logit, CLICK_RATE))
    clicked = random.random(len(page)) < probability
    words = np.array([f"sku-{number:04d}" for number in range(NUM_ITEMS)])
    known_price = np.where(random.random(len(page)) < 0.05, np.nan, shop.price[item])
    of_item = [[GENRES[genre] for genre in np.flatnonzero(row)] for row in shop.genres]
    times = _START + np.sort(random.random(requests)) * _SECONDS
    table = pa.table(
        {
            "impression_id": pa.array([f"page-{number:07d}" for number in range(requests)]).take(
                page
            ),
            "slot": pa.array(slot, pa.int32()),
            "ts": pa.array((times[page] * 1e6).astype(np.int64), pa.timestamp("us", tz="UTC")),
            "clicked": pa.array(clicked),
            "price": pa.array(known_price, pa.float32(), from_pandas=True),
            "user_id": pa.array(shop.user_ids[user[page]]),
            "item_id": pa.array(words[item]),
            "country": pa.array(COUNTRIES).take(country[page]),
            "device": pa.array(DEVICES).take(device[page]),
            "page_position": pa.array(slot + 1),
            "genres": pa.array(of_item).take(item),
            "last_items": pa.array([words[items].tolist() for items in viewed]).take(page),
        }
    )
    return table, probability


def _zipf(count: int, random: Generator) -> NDArray[np.float64]:
    weights = random.permutation(1.0 / (np.arange(count) + 10.0))
    return weights / weights.sum()


def _viewed_items(random: Generator) -> NDArray[np.int64]:
    """Draw the items that a user viewed, the newest last. One user in ten viewed no item."""
    count = 0 if random.random() < 0.1 else int(random.integers(1, MAX_VIEWED + 1))
    return random.integers(0, NUM_ITEMS, count)


def _similarity(shop: Shop, viewed: list[NDArray[np.int64]]) -> NDArray[np.float64]:
    """Return the similarity of each item to the viewed items, as [pages, items].

    The similarity is the mean share of the item's genres in the viewed items, or 0 without viewed
    items.
    """
    seen = np.stack(
        [
            shop.genres[items].mean(axis=0) if len(items) else np.zeros(len(GENRES))
            for items in viewed
        ]
    )
    return seen @ shop.genres.T / shop.genres.sum(axis=1)


def main() -> None:
    """Write a log, and print its numbers as JSON."""
    parser = argparse.ArgumentParser(description="Write a shop's click log.")
    parser.add_argument("--output", type=Path, required=True, help="Parquet file")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    print(json.dumps(write_clicks(options.output, rows=options.rows, seed=options.seed)))


if __name__ == "__main__":
    main()
