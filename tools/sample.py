"""Writes the sample that `fastdraft replay --sample` replays: python tools/sample.py

All prompts are made up here, and answered by the demo model, greedily. So small a model makes no
tool calls: these are written by hand, and their names say so. A file is a family. `pieces.json`
has the text of every token, so that no tokenizer is needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastdraft import hf
from fastdraft.demo import Target, load_target
from fastdraft.demo.comparison import greedy_options

FOLDER = Path(__file__).parents[1] / "python" / "fastdraft" / "replay" / "sample"
NEW_TOKENS = 160
EDIT_TOKENS = 400

STOCK = '''\
"""Stock levels of a small shop."""

import csv
from pathlib import Path


class Stock:
    """Counts of items by name."""

    def __init__(self, path):
        self.path = Path(path)
        self.counts = {}
        self.load()

    def load(self):
        """Reads the counts from the file, if there is one."""
        if not self.path.exists():
            return
        with self.path.open(newline="") as file:
            for name, count in csv.reader(file):
                self.counts[name] = int(count)

    def save(self):
        """Writes the counts to the file, by name."""
        with self.path.open("w", newline="") as file:
            writer = csv.writer(file)
            for name in sorted(self.counts):
                writer.writerow([name, self.counts[name]])

    def add(self, name, count=1):
        """Adds items that were delivered."""
        self.counts[name] = self.counts.get(name, 0) + count

    def take(self, name, count=1):
        """Takes items that were sold."""
        if self.counts.get(name, 0) < count:
            raise ValueError(f"only {self.counts.get(name, 0)} of {name} left")
        self.counts[name] -= count

    def missing(self, least=5):
        """The names of items of which fewer than `least` are left."""
        return [name for name, count in self.counts.items() if count < least]
'''

# What is asked for, and how the answer begins: an editor has the cursor behind that.
START = "```python\n" + STOCK[: STOCK.index("class")]
EDITS = [
    (
        "Rename `counts` to `levels` everywhere. Answer with the whole file.",
        f'''{START}class Stock:
    """Levels of items by name."""

    def __init__(self, path):
        self.path = Path(path)
        self.levels = {{}}''',
    ),
    (
        "Now rename the class `Stock` to `Inventory`. Answer with the whole file.",
        f"{START}class Inventory:",
    ),
    (
        "Now rename `missing` to `scarce` and `least` to `minimum`. Answer with the whole file.",
        f"{START}class Inventory:",
    ),
]

TOOLS = """\
You control a heating system. Answer with one JSON object that calls a tool, and nothing else.

{"name": "set_temperature", "parameters": {"room": "string", "celsius": "number", \
"until": "HH:MM or null"}}
{"name": "read_sensor", "parameters": {"room": "string", "kind": "temperature or humidity"}}
{"name": "set_schedule", "parameters": {"room": "string", "entries": [{"from": "HH:MM", \
"to": "HH:MM", "celsius": "number"}]}}

"""
CALLS: list[tuple[str, dict[str, Any]]] = [
    (
        "Make the living room 21 degrees until half past ten tonight.",
        {
            "name": "set_temperature",
            "parameters": {"room": "living room", "celsius": 21, "until": "22:30"},
        },
    ),
    (
        "And the bathroom 23, please, until eight in the morning.",
        {
            "name": "set_temperature",
            "parameters": {"room": "bathroom", "celsius": 23, "until": "08:00"},
        },
    ),
    (
        "How damp is it in the cellar?",
        {"name": "read_sensor", "parameters": {"room": "cellar", "kind": "humidity"}},
    ),
    (
        "Heat the office to 20 from eight to twelve and from one to five, 16 in between.",
        {
            "name": "set_schedule",
            "parameters": {
                "room": "office",
                "entries": [
                    {"from": "08:00", "to": "12:00", "celsius": 20},
                    {"from": "12:00", "to": "13:00", "celsius": 16},
                    {"from": "13:00", "to": "17:00", "celsius": 20},
                ],
            },
        },
    ),
    (
        "The same for the workshop, but at 18 degrees.",
        {
            "name": "set_schedule",
            "parameters": {
                "room": "workshop",
                "entries": [
                    {"from": "08:00", "to": "12:00", "celsius": 18},
                    {"from": "12:00", "to": "13:00", "celsius": 16},
                    {"from": "13:00", "to": "17:00", "celsius": 18},
                ],
            },
        },
    ),
]

LOGS = [
    (
        """\
Rewrite this log as a Markdown list.

2032-05-11 21:14:02 INFO  ferry    left the north pier with 41 passengers
2032-05-11 21:14:09 INFO  ferry    speed is 11 knots, wind from the west
2032-05-11 21:31:47 WARN  engine   oil temperature is 96 degrees, limit is 95 degrees
2032-05-11 21:33:20 INFO  engine   oil temperature is 91 degrees
2032-05-11 21:40:05 INFO  ferry    reached the south pier after 26 minutes
2032-05-11 21:52:30 ERROR ramp     hydraulic pressure is low, the ramp stays closed""",
        "* 2032-05-11 21:14:02 ferry: left the north pier with 41 passengers",
    ),
    (
        """\
Rewrite this log as a Markdown list.

2032-05-12 06:02:11 INFO  ferry    left the south pier with 17 passengers
2032-05-12 06:02:19 INFO  ferry    speed is 12 knots, wind from the south
2032-05-12 06:20:44 INFO  ferry    reached the north pier after 18 minutes
2032-05-12 06:25:00 INFO  ramp     hydraulic pressure is normal
2032-05-12 06:41:30 WARN  engine   oil temperature is 97 degrees, limit is 95 degrees""",
        "* 2032-05-12 06:02:11 ferry: left the south pier with 17 passengers",
    ),
]

BEES = """\
Document:
The town's bee garden was laid out in 2009 on the site of a former gravel pit. Eleven hives stand \
along its southern wall, where they are sheltered from the wind. In spring the bees visit the \
willows by the stream, in June the lime trees of the avenue, and from August on the heather that \
was planted on the old spoil heap. Each hive yields between 15 and 20 kilograms of honey a year. \
The honey is sold at the gate on Saturdays from ten to noon, and the money pays for seeds and \
tools. School classes may visit from May to September; a beekeeper shows them around and lends \
them veils."""
QUESTIONS = [
    "Where do the hives stand, and what do the bees visit during the year?",
    "When is the honey sold, and what does the money pay for?",
    "When may school classes visit, and who shows them around?",
]

STORY = "Write a short story about a lighthouse keeper who learns to play the trumpet."

MINUTES = """\
Summarise these minutes in three sentences.

The meeting was opened at seven by Ms. Achterberg. Mr. Okoye reported that the repair of the \
footbridge will take until October, since the oak for the planks has to dry for another two \
months. The board agreed to put up a sign at both ends of the bridge and to ask the rowing club \
whether its boat can carry people across on market days. Ms. Silva presented the accounts: the \
summer fair brought in 2,140 euros, of which 600 euros are set aside for new benches. Mr. Lund \
asked that the benches be placed in the shade. The next meeting is on the first Thursday of \
November."""


def record(
    target: Target, name: str, prompt: str, output: str | None = None, **more: Any
) -> dict[str, Any]:
    """A record of a prompt and its answer, by hand or by the model."""
    before, start = more.pop("before", ()), more.pop("answer_start", "")
    most = more.pop("most", NEW_TOKENS)
    reference = more.pop("reference", None)
    inputs = target.encode(prompt, start, before=before, max_new_tokens=most)
    ids = inputs["input_ids"][0].tolist()
    if output is None:
        options = {**greedy_options(target.model), "max_new_tokens": most}
        made = hf.generate(target.model, **inputs, **options).sequences[0, len(ids) :].tolist()
        answered_by = target.name
    else:
        made = target.encode_prediction(output)
        answered_by = "hand"
    if made[-1] == target.tokenizer.eos_token_id:
        del made[-1]
    found = {"id": name, "answered_by": answered_by, **more}
    if reference is not None:
        found["reference_ids"] = target.encode_prediction(reference)
    return {**found, "prompt_ids": ids, "output_ids": made}


def families(target: Target) -> dict[str, list[dict[str, Any]]]:
    """The records of each family."""
    edits: list[dict[str, Any]] = []
    said: list[str] = []
    text = STOCK
    for number, (wish, start) in enumerate(EDITS, 1):
        prompt = f"{wish}\n\n```python\n{text}```" if not said else wish
        edit = record(
            target,
            f"edit-{number}",
            prompt,
            before=said,
            answer_start=start,
            most=EDIT_TOKENS,
            reference=text,
            session="1",
        )
        edits.append(edit)
        answer = start + target.decode(edit["output_ids"])
        text = answer.removeprefix("```python\n").removesuffix("```")
        said = [*said, prompt, answer]
    return {
        "code_edit": edits,
        "log_to_list": [
            record(target, f"log-{number}", prompt, answer_start=start)
            for number, (prompt, start) in enumerate(LOGS, 1)
        ],
        "rag_answer": [
            record(
                target,
                f"question-{number}",
                "Answer the question from the document, in full sentences and with the document's "
                f"own words where you can.\n\n{BEES}\n\nQuestion: {question}",
            )
            for number, question in enumerate(QUESTIONS, 1)
        ],
        "story": [record(target, "story", STORY)],
        "summary": [record(target, "minutes", MINUTES)],
        "tool_call": [
            record(target, f"call-{number}-by-hand", TOOLS + wish, json.dumps(call))
            for number, (wish, call) in enumerate(CALLS, 1)
        ],
    }


def piece(target: Target, token: int) -> str | list[int]:
    """The text of a token; its bytes where they are no whole characters."""
    name = target.tokenizer.convert_ids_to_tokens(token)
    if token in target.tokenizer.all_special_ids:
        return str(name)
    content = bytes(BYTES[letter] for letter in name)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return list(content)


def byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(256 + place): byte for place, byte in enumerate(hidden)}


BYTES = byte_letters()


def main() -> None:
    """Writes the folder, and prints the answers to look at."""
    import torch

    torch.set_num_threads(1)
    target = load_target(None, device="cpu", dtype="auto")
    FOLDER.mkdir(exist_ok=True)
    used: set[int] = set()
    for name, records in families(target).items():
        lines = [json.dumps(each, separators=(",", ":")) for each in records]
        (FOLDER / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
        for each in records:
            for kind in ("prompt_ids", "output_ids", "reference_ids"):
                used |= set(each.get(kind, ()))
            print(f"--- {name} {each['id']}\n{target.decode(each['output_ids'])}")
    pieces = {str(token): piece(target, token) for token in sorted(used)}
    content = {"tokenizer": target.name, "pieces": pieces}
    (FOLDER / "pieces.json").write_text(json.dumps(content, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
