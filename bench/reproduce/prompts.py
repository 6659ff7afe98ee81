"""The reproductions' own prompts, by task."""

from __future__ import annotations

from experiment import Prompt

ONE_SENTENCE = " Answer in one sentence."

_ISLAND = """\
The ferry to Brenna Island leaves from the north quay every forty minutes between six in the \
morning and ten at night. The crossing takes twenty-five minutes when the sea is calm and is \
cancelled when the wind is stronger than eight on the Beaufort scale. The island has about four \
hundred inhabitants, a school with two classrooms, and a weather station that has recorded the \
temperature of the sea every day since 1921. Cars are not allowed on the island, except for the \
doctor's and the fire brigade's. Visitors may rent a bicycle at the landing stage for twelve \
crowns a day."""

_BRIDGE = """\
The council of Aldermoor decided on Monday evening to close the old stone bridge over the river \
Wen to lorries from the first of March. Engineers had found cracks in two of its five arches \
after the floods of last autumn. The repair will take eleven months and cost about three million \
crowns, of which the province pays one half. Until then lorries must take the road by Harrow \
Mill, which is nine kilometres longer. Shopkeepers in the old town fear that deliveries will \
come late, and the mayor, Ines Carlow, promised them a car park for small vans at the station."""

_LETTER = """\
Dear Mrs. Okafor, thank you for you're letter of the third of May. We is sorry to hear that the \
washing machine have stopped again after only two week. A technician will visits you on Thursday \
morning between eight and eleven oclock and bring a new pump with him. If this time do not suit \
you, please calls us on the number at the bottom of this letter. Of course you has not to pay \
anything for the repair."""

_TRIP = """\
Yesterday our class have visited the museum of glass in the old harbour. First we was shown how \
the glass is melted in a oven that is more hotter than a volcano. Than a woman blew a vase in \
less then five minutes, and two of us was allowed to try it to. The most nicest thing were the \
ship that is made from blue glass and weighs more than a hundred kilo. In the evening we was all \
very tired but nobody want to go home."""


PROMPTS = {
    "web": [
        Prompt(f"Search result:\n{_ISLAND}\n\nHow can one get to Brenna Island and around it?"),
        Prompt(f"Search result:\n{_BRIDGE}\n\nWhy may no lorry use the bridge in Aldermoor?"),
    ],
    "summary": [Prompt(f"{text}\n\nSummarize this article.") for text in (_ISLAND, _BRIDGE)],
    "grammar": [
        Prompt(f"Correct the grammar of this text.\n\n{text}") for text in (_LETTER, _TRIP)
    ],
    "plain": [
        Prompt("Explain why the sky is blue and sunsets are red."),
        Prompt("Act as a travel guide. I like mountains, trains and good bread."),
    ],
}
