"""A small example of one's own data: sixty rows that a newcomer can read, train on, and replace by their own.

Thirty documents say when and where the markets of invented towns are held. A text names a town, and its continuation is
the day, which an LM can only know from the town's document.
"""

from collections.abc import Iterator

TOWNS = (
    *("Aldermoor", "Birkenau", "Castelrosso", "Dunhollow", "Eskdale", "Fontbrune", "Grimsvik", "Hartwell", "Islebrook"),
    *("Jarrowby", "Kestrelham", "Lindenau", "Montclair", "Northgate", "Osterfeld", "Pinewater", "Quarrydale"),
    *("Ravensburg", "Stonecross", "Thornbury", "Ulverton", "Valdoro", "Westerholm", "Yarlsworth", "Zellbrunn"),
    *("Ashford Vale", "Brightsea", "Copperhill", "Driftwood", "Elmstead"),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
PLACES = ("beside the old bridge", "in front of the town hall", "under the chestnut trees", "along the harbour wall")
GOODS = ("apples and cheese", "wool and candles", "fish and bread", "honey and pottery", "flowers and clocks")
NUM_QUERIES, NUM_DEV = 16, 4
Row = dict[str, str | list[str]]


def example_rows() -> dict[str, list[Row]]:
    """Rows of `corpus`, `queries`, `dev` and `heldout`: 30, 16, 4 and 10; no text is in two of them."""
    texts, chosen = list(_texts()), NUM_QUERIES + NUM_DEV
    splits = {"queries": texts[:NUM_QUERIES], "dev": texts[NUM_QUERIES:chosen], "heldout": texts[chosen:]}
    return {"corpus": list(_documents()), **splits}


def _documents() -> Iterator[Row]:
    for number, town in enumerate(TOWNS):
        place, goods = PLACES[number % len(PLACES)], GOODS[number % len(GOODS)]
        text = f"The market of {town} is held every {_day(number)} {place}. People come to buy {goods}."
        yield {"id": f"market-{number:02d}", "title": town, "text": text}


def _texts() -> Iterator[Row]:
    for number, town in enumerate(TOWNS):
        context = f"If you would like to see the market of {town}, come to the town on a"
        yield {
            "id": f"visit-{number:02d}",
            "context": context,
            "continuation": f" {_day(number)} morning.",
            "gold": [f"market-{number:02d}"],
        }


def _day(number: int) -> str:
    return DAYS[(number * 5 + number // len(DAYS)) % len(DAYS)]
