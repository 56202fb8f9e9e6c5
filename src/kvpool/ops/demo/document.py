"""The text that the demo reads: a lighthouse log of some 3,000 tokens, made by rule so that every run reads the same words."""

from __future__ import annotations

WINDS = ("north", "north-east", "east", "south-east", "south", "south-west", "west", "north-west")
SKIES = ("clear", "hazy", "overcast", "broken cloud", "thick fog", "light rain", "sleet")
SHIPS = (
    "the collier Anna",
    "a herring boat",
    "the mail packet",
    "two schooners",
    "a grain barge",
    "the pilot cutter",
    "no ship at all",
)
WORKS = (
    "oiled the gears of the clockwork",
    "trimmed the wick and filled the lamp",
    "washed salt from the lantern panes",
    "patched the roof of the coal shed",
    "wound the spare rope on a new drum",
    "painted the seaward rail",
    "counted the stores and ordered flour",
)
VISITORS = ("the doctor", "a boy with letters", "the harbour master", "nobody", "a surveyor", "the baker's cart")

QUESTION = "Who is the keeper of the lighthouse, and on which island does it stand?"


def text(days: int = 48) -> str:
    """The log: a heading with the facts, then one entry a day."""
    opening = (
        "Log of the lighthouse on Skarv Island. The keeper of the lighthouse is Marta Lindqvist. "
        "She has kept the lamp for eleven years. "
        "The tower stands on the western cliff of Skarv Island and its light is seen for eighteen miles.\n"
    )
    return opening + "\n".join(_entry(day) for day in range(1, days + 1))


def _entry(day: int) -> str:
    def pick(choices: tuple[str, ...], step: int) -> str:
        return choices[(day * step + day // 7) % len(choices)]

    return (
        f"Day {day}. Wind from the {pick(WINDS, 3)}, force {1 + day * 5 % 8}; sky: {pick(SKIES, 5)}. At dusk the lamp was lit at "
        f"{4 + day % 3}:{day * 7 % 60:02d}. Passing: {pick(SHIPS, 4)}. In the forenoon the keeper {pick(WORKS, 2)}. "
        f"Visitors: {pick(VISITORS, 5)}."
    )
