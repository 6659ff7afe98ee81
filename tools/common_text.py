"""Writes the text that the common table of n-grams is counted from: answers of the demo's model.

    python tools/common_text.py write answers.jsonl --seconds 3600 --seed 8   # appends
    python tools/common_text.py pack answers.jsonl ...                        # into the package

The questions are of our own shapes and topics, and the model is SmolLM2-135M-Instruct (Apache-2.0),
so that anyone may use the counts.
"""

from __future__ import annotations

import argparse
import bz2
import json
import random
import time
from pathlib import Path
from typing import Any

PACKED = Path(__file__).parents[1] / "python/fastdraft/memory/common.jsonl.bz2"
AT_ONCE = 48
NEW_TOKENS = 220

TOPICS = """
airports, algebra, allergies, antibiotics, apples, architecture, astronomy, banks, basketball,
batteries, bees, bicycles, binary search, birthdays, black holes, blood pressure, bones, bread,
bridges, budgeting, buses, calculus, cameras, camping, carbon dioxide, castles, cats, cheese, chess,
chocolate, clocks, cloud computing, coffee, compilers, contracts, coral reefs, cotton, currencies,
customer complaints, dance, databases, deserts, diabetes, dinosaurs, dogs, earthquakes, elections,
electric cars, email, encryption, error handling, ethics, exercise, farming, fermentation, ferries,
fonts, football, forests, fractions, friendship, garbage collection, gardening, geography, glaciers,
glass, grammar, gravity, grief, habits, happiness, hash tables, hiking, history of writing,
hospitals, hotels, HTTP caching, inflation, insects, insomnia, insurance, invoices, jazz,
job interviews, journalism, kayaks, knitting, leadership, libraries, linked lists, logging,
logistics, maps, marathon training, markets, Mars, meditation, memory, mortgages, museums, music,
mushrooms, negotiation, neural networks, noise, novels, nutrition, oceans, opera, ovens, owls,
painting, paper, parenting, passwords, pasta, penguins, pensions, phones, photography,
photosynthesis, piano, planets, plastic, plumbing, poetry, prime numbers, probability,
public speaking, pyramids, Python decorators, rain, recursion, recycling, regular expressions,
remote work, resumes, rice, rivers, rockets, roofs, running shoes, salt, school lunches, sewing,
shipping, sleep, soil, solar panels, sorting algorithms, soup, spices, spreadsheets, SQL joins,
stars, startups, statistics, steam engines, steel, stocks, swimming, taxes, tea, teamwork,
the French Revolution, the moon landing, the Olympics, the printing press, the Roman Empire,
the Silk Road, threads, thunderstorms, tides, time management, toys, trains, triangles, trust,
unit conversion, unit tests, vaccines, version control, violins, volcanoes, warehouses,
weather forecasts, web servers, weddings, whales, wind turbines, wine, wolves, yoga
"""

SHAPES = """
Answer briefly: why do people care about {}?
Answer yes or no and explain: is {} important for {}?
Call a tool: give the name and the arguments, as JSON, of a search for {}.
Compare {} and {}.
Create a step-by-step plan about {}.
Discuss the history of {} and its effect on {}.
Explain {} to a beginner.
Give a definition of {} and three examples.
Give me five tips about {}.
How do I fix a problem with {}?
How does one get started with {}?
If three people share a cost of 48 dollars for {}, how much does each pay? Think step by step.
List ten questions and answers about {}.
Review a book about {}.
Solve a word problem about {} step by step.
Summarize the most important facts about {}.
Tell a story about {} and {}.
Translate into French: I would like to know more about {}.
What are the pros and cons of {}?
What could go wrong with {}, and how can it be prevented?
What is a common misconception about {}?
What is the capital city of a country that is famous for {}?
When and where did {} begin to matter?
Which is better for a beginner, {} or {}? Why?
Who discovered the most in the field of {}, and when?
Write a Bash script about {}.
Write a C++ class that models {}.
Write a JavaScript function related to {}.
Write a JSON object that describes {}.
Write a Python function related to {} and explain it.
Write a YAML configuration for a program about {}.
Write a dialogue between a teacher and a student about {}.
Write a formal letter about {}.
Write a news article about {}.
Write a paragraph about {} and {}.
Write a poem about {}.
Write a product description for something about {}.
Write a short email to a colleague about {}.
Write a table in Markdown about {} and {}.
Write a unit test in Python for a function about {}.
Write an HTML page about {}.
Write an SQL query about {} and explain each line.
Write an outline of an essay about {}.
Write in German about {}.
Write in Spanish about {}.
You are an expert in {}. What do you advise somebody who knows only {}?
"""


def write(path: Path, seconds: float, seed: int) -> None:
    """Appends lines with a question and its text, until the time is over."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fastdraft.demo import ensure_model

    folder = ensure_model()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    topics = " ".join(TOPICS.split()).split(", ")
    shapes = SHAPES.strip().splitlines()
    draw = random.Random(seed)
    torch.manual_seed(seed)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        questions = []
        for _ in range(AT_ONCE):
            shape = draw.choice(shapes)
            questions.append(shape.format(*draw.sample(topics, shape.count("{}"))))
        chats = [[{"role": "user", "content": question}] for question in questions]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        )
        with torch.inference_mode():
            rows = model.generate(
                **inputs, max_new_tokens=NEW_TOKENS, do_sample=True, temperature=0.7, top_p=0.95
            )
        rows = rows[:, inputs.input_ids.shape[1] :]
        texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
        with path.open("a", encoding="utf-8") as file:
            for question, text in zip(questions, texts, strict=True):
                file.write(json.dumps({"question": question, "text": text}) + "\n")


def pack(paths: list[Path]) -> None:
    """Writes the package's file: one answer to each question."""
    answers: dict[str, str] = {}
    for path in paths:
        for line in path.read_text("utf-8").splitlines():
            answer = json.loads(line)
            answers.setdefault(answer["question"], answer["text"])
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in answers.values()]
    PACKED.write_bytes(bz2.compress("".join(lines).encode()))
    print(f"{PACKED}: {len(lines):,} texts, {PACKED.stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("path", type=Path)
    writing.add_argument("--seconds", type=float, default=600)
    writing.add_argument("--seed", type=int, default=0)
    packing = commands.add_parser("pack")
    packing.add_argument("paths", type=Path, nargs="+")
    asked = parser.parse_args()
    if asked.command == "write":
        write(asked.path, asked.seconds, asked.seed)
    else:
        pack(asked.paths)


if __name__ == "__main__":
    main()
